"""attngen in the place of torch's scaled_dot_product_attention, for models that call it.

torch's function is one attribute of `torch.nn.functional`, which torch's own layers and most models look up at each call. What
was imported by name before (`from torch.nn.functional import scaled_dot_product_attention`) stays torch's. In torch 2.11 and
later, attngen is also torch's implementation of flash attention: see `attngen.torch.registry`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from attngen.plan.plan import WIDEST_HEAD
from attngen.torch import registry
from attngen.torch.functional import attention
from attngen.torch.layout import all_tensors, plain_mask
from attngen.torch.private import flash_operator, torchs_attention

Function = Callable[..., Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class NotReplacedWarning(UserWarning):
    """A call that torch's own attention has answered, as attngen cannot. Given once for each reason."""


def activate(*, emulated: bool = False) -> None:
    """From now on `torch.nn.functional.scaled_dot_product_attention` is `attngen.torch.attention`, forward and backward, until
    `restore()`. To be called before torch.compile compiles the model.

    Tensors on a GPU are attngen's. With `emulated`, so are those on the CPU: the emulated device runs them, slowly, for tests.
    Dropout of all weights, fp64, nested tensors, more than 4 dimensions, head sizes that no kernel has, and q, k and v that are
    broadcast over batch or heads stay torch's: NotReplacedWarning gives the reason once. Mistakes raise ArgumentError. Calling
    this again changes `emulated` alone.

    With torch 2.11 or later attngen is also torch's implementation of flash attention, which `varlen_attn`, distributed tensors
    and context parallelism call. A backward of these must run before `restore()` too.
    """
    current = torch.nn.functional.scaled_dot_product_attention
    implementation = getattr(current, "implementation", registry.current())
    replacement = _replacement(getattr(current, "replaces", current), ("cuda", "cpu") if emulated else ("cuda",))
    replacement.implementation = implementation  # type: ignore[attr-defined]
    torch.nn.functional.scaled_dot_product_attention = replacement
    if registry.EXISTS:
        registry.activate("attngen emulated" if emulated else "attngen")


def restore() -> None:
    """Undoes `activate`; nothing without it. Raises RuntimeError if somebody else has replaced torch's function since."""
    current: Any = torch.nn.functional.scaled_dot_product_attention
    if hasattr(current, "replaces"):
        _set(current.replaces, current.implementation)
    elif current is not torchs_attention:
        raise RuntimeError(
            "torch.nn.functional.scaled_dot_product_attention was replaced by another library after attngen; undo that first"
        )


@contextmanager
def activated(*, emulated: bool = False) -> Iterator[None]:
    """`activate` within a `with` statement; afterwards everything is what it was before."""
    before = torch.nn.functional.scaled_dot_product_attention, registry.current()
    activate(emulated=emulated)
    try:
        yield
    finally:
        _set(*before)


def _set(function: Function, implementation: str | None) -> None:
    """Makes these torch's; the implementation only if nobody else has replaced attngen's since."""
    torch.nn.functional.scaled_dot_product_attention = function
    if registry.current() in registry.NAMES:
        registry.activate(implementation)


def _replacement(original: Function, devices: tuple[str, ...]) -> Function:
    @wraps(original)
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tensors = (query, key, value)
        if not all_tensors(*tensors) and has_torch_function(tensors):  # what stands for a tensor, as in torch.fx
            given = (*tensors, attn_mask, dropout_p, is_causal)
            named: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return handle_torch_function(scaled_dot_product_attention, tensors, *given, **named)
        if hasattr(query, "device_mesh"):  # a DTensor: torch divides the flash operator's work among devices
            is_flash = attn_mask is None and (enable_gqa or query.shape[1] == key.shape[1])
            if is_flash and registry.current() in registry.NAMES and (not is_causal or query.shape[2] == key.shape[2]):
                return flash_operator(*tensors, dropout_p, is_causal, scale=scale)[0]
            return original(*tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if not all_tensors(*tensors):
            return attention(*tensors)  # refuses them
        attn_mask, is_causal = plain_mask(attn_mask, is_causal, query)
        reason = _cannot(*tensors, dropout_p, enable_gqa)
        if query.device.type in devices and not reason:
            return attention(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa, copy=True)
        if query.device.type in devices and not torch.compiler.is_compiling():
            warnings.warn(f"torch's own attention is used: {reason}", NotReplacedWarning, stacklevel=2)
        return original(*tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    scaled_dot_product_attention.__module__ = "torch.nn.functional"  # by which torch.fx writes a call of whatever is there then
    scaled_dot_product_attention.replaces = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _cannot(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, enable_gqa: bool) -> str:
    """Why attngen has no kernel for a call; "" if it may have one. By what torch.compile knows too."""
    if dropout_p == 1.0:
        return "dropout_p is 1: nothing is kept"
    if query.dtype not in DTYPES:
        return f"q has elements of {query.dtype}"
    if query.is_nested or key.is_nested or value.is_nested:
        return "q, k or v is a nested tensor"
    if query.dim() > 4:
        return f"q has {query.dim()} dimensions"
    for size in (query.shape[-1], value.shape[-1]):
        if not 1 <= size <= WIDEST_HEAD:  # a range would have to know it: to torch.compile it may be a symbol
            return f"the head size is {size}"
    if _is_broadcast(query, key, value, enable_gqa):
        return "q, k and v are broadcast to one shape"
    return ""


def _is_broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether torch would repeat q, k or v over batch or heads, other than K and V of batch 1, which kernels read."""
    wanted, *others = (tuple(t.shape[:-2]) for t in (query, key, value))
    have_same_heads = others[0][-1:] == others[1][-1:]
    if enable_gqa and wanted:
        others = [(*own[:-1], wanted[-1]) if own and own[-1] and not wanted[-1] % own[-1] else own for own in others]
    if have_same_heads and all(own == wanted or (len(wanted) == 2 and own == (1, wanted[1])) for own in others):
        return False
    try:
        torch.broadcast_shapes(wanted, *others)
    except RuntimeError:  # a mistake, which attngen names
        return False
    return True
