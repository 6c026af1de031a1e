"""Conversion between the caller's layout and the operator's, [batch, heads, length, size], without copies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.diagnostics import counted
from attngen.sdpa import ALL_AXES, check_ranks, mask_axes
from attngen.spec.dtypes import NUMPY_BFLOAT16
from attngen.torch.observed import is_observed

AXES = {"bhsd": "[batch, heads, length, size]", "bshd": "[batch, length, heads, size]"}


def check_layout(layout: str) -> None:
    """Raises ArgumentError for an unknown layout."""
    if layout not in tuple(AXES):
        raise ArgumentError(
            f"layout is {layout!r}; expected {' or '.join(f'{name} for {axes}' for name, axes in AXES.items())}"
        )


def heads_first(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v as [batch, heads, length, size]. K and V of batch 1 are expanded. Raises ArgumentError."""
    if not (layout == "bhsd" and all_tensors(q, k, v) and q.dim() == k.dim() == v.dim() == 4):  # the usual case
        check_layout(layout)
        named = {"q": q, "k": k, "v": v}
        check_tensors(**named)
        q, k, v = (_one(tensor, name, layout) for name, tensor in named.items())
        check_ranks({name: tensor.dim() for name, tensor in named.items()})
    else:
        check_tensors(q=q, k=k, v=v)
    if k.shape[0] == 1 and q.shape[0] != 1:
        k = k.expand(q.shape[0], -1, -1, -1)
    if v.shape[0] == 1 and q.shape[0] != 1:
        v = v.expand(q.shape[0], -1, -1, -1)
    return q, k, v


def follow_autocast(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's type, if it is on for their device; unchanged if the spec states another type, `dtype`. Captured
    tensors keep theirs: what a table adds to a score is not a product that 16 bits would speed up."""
    kind = q.device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return q, k, v
    wanted = torch.get_autocast_dtype(kind)
    if dtype is not None and dtype is not wanted:
        return q, k, v
    q, k, v = (t.to(wanted) if t.dtype in _AUTOCAST else t for t in (q, k, v))
    return q, k, v


_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)  # as for torch's own attention: fp64 does not follow


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast is off."""
    if torch.amp.is_autocast_available(device_type):  # not for tensors without memory, on meta
        return torch.amp.autocast(device_type, enabled=False)
    return nullcontext()


def check_tensors(**named: object) -> None:
    """Raises ArgumentTypeError for what is no dense tensor."""
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"`{name}` is {no_tensor(tensor)}; expected a tensor")
        if tensor.is_nested:
            raise ArgumentTypeError(
                f"`{name}` is a nested tensor; expected a dense one. Sequences of several lengths are packed for "
                f"flash_attn_varlen_func: {name}.values(), with {name}.offsets().int() as their beginnings"
            )
        if tensor.layout is not torch.strided:
            raise ArgumentTypeError(f"`{name}` is a sparse tensor; expected a dense one")


def no_tensor(value: object) -> str:
    """What a value is that is no tensor, in words."""
    if isinstance(value, torch.fx.Proxy):
        return "a Proxy of torch.fx.symbolic_trace, which has no sizes (torch.export and torch.compile trace attngen)"
    return f"a {type(value).__name__}"


def all_tensors(q: object, k: object, v: object) -> bool:
    """Whether q, k and v are tensors of torch."""
    return isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)


def _one(tensor: Tensor, name: str, layout: str) -> Tensor:
    least = 2 if layout == "bhsd" else 3
    if not least <= tensor.dim() <= 4:
        axes = AXES[layout]
        raise ArgumentError(f"`{name}` has {counted(tensor.dim(), 'dimension')}; expected {least} to 4, of {axes}")
    whole = tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor
    return whole.transpose(1, 2) if layout == "bshd" else whole


def results(outputs: Sequence[Tensor], query: Tensor, layout: str, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """O, or (O, lse), of the operator's outputs: in the layout of the call's query, without the dimensions that it lacks."""
    output = outputs[0]
    if layout == "bshd":
        output = output.transpose(1, 2)
    missing = 4 - query.dim()
    if missing:
        output = output.flatten(0, missing)
    if not return_lse:
        return output
    return output, outputs[1].flatten(0, missing) if missing else outputs[1]


def plain_mask(mask: Tensor | None, is_causal: bool, query: Tensor) -> tuple[Tensor | None, bool]:
    """`mask` and `is_causal`, with a bias of `torch.nn.attention.bias` as what it means: it is a tensor of elements that nobody
    has written, and only torch's own function looks at its type. Raises ArgumentError for such a bias beside `is_causal`."""
    if mask is None or type(mask) is torch.Tensor:
        return mask, is_causal
    known = sys.modules.get("torch.nn.attention.bias")  # importing it loads torch._dynamo
    if known is None or not isinstance(mask, known.CausalBias):
        return mask, is_causal
    if is_causal:
        raise ArgumentError("`attn_mask` is a CausalBias, which is causal by itself; leave out `is_causal`")
    if mask.variant == known.CausalVariant.UPPER_LEFT or mask.seq_len_q == mask.seq_len_kv:
        return None, True
    return mask._materialize(query.device), False


def four_dimensions(mask: Tensor) -> Tensor:
    """A mask that broadcasts to [batch, heads, q_len, kv_len], with four dimensions. Raises ArgumentError."""
    check_tensors(attn_mask=mask)
    if mask.dim() > 4:
        raise ArgumentError(f"`attn_mask` has {mask.dim()} dimensions; expected at most 4, of [batch, heads, q_len, kv_len]")
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask


def without_broadcasts(mask: Tensor, kv_len: int) -> tuple[Tensor, str]:
    """A mask of four dimensions without those along which it is the same, and the axes that are left (`mask_axes`).

    Dimensions that `expand` made are such, unless each of their elements has a gradient, or a trace may be called with other
    strides, which only torch.compile checks. A size that a trace does not know is taken not to be 1.
    """
    is_compiling = torch.compiler.is_compiling()
    holds: Callable[[bool | torch.SymBool], bool] = bool
    if is_compiling or isinstance(mask.numel(), torch.SymInt):
        holds = torch.fx.experimental.symbolic_shapes.guard_or_false
    if not (mask.requires_grad or (torch.compiler.is_exporting() if is_compiling else is_observed())):
        for at, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
            if holds(stride == 0) and holds(size > 1):
                mask = mask.narrow(at, 0, 1)
    axes = mask_axes([holds(size == 1) for size in mask.shape], holds(kv_len == 1))
    if axes != ALL_AXES:
        mask = mask.squeeze([at for at, axis in enumerate(ALL_AXES) if axis not in axes])
    return mask, axes


def as_tensor(array: object) -> Tensor:
    """A captured array as a tensor that shares its memory, or as a copy if torch cannot share it: numpy arrays that are
    read-only, of bf16, or with negative strides."""
    if not isinstance(array, np.ndarray):
        return torch.as_tensor(array)
    if array.dtype.name == "bfloat16" or array.dtype == NUMPY_BFLOAT16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    shared = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shared else np.array(array))


def padding_of(head_size: int) -> int:
    """The number of elements that make a head size a multiple of 8."""
    return -head_size % 8


def padded(tensor: Tensor) -> Tensor:
    """With a head size that is a multiple of 8: zeros change no product."""
    missing = padding_of(tensor.shape[-1]) if tensor.dim() else 0
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def needs_padding(q: Tensor, v: Tensor) -> bool:
    """Whether a head size, the last one, is no multiple of 8."""
    return bool(q.shape[-1] % 8 or v.shape[-1] % 8)


def padded_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each `padded`: different head sizes of q and k could then be equal. Raises ArgumentError."""
    if q.dim() and k.dim() and q.shape[-1] != k.shape[-1]:
        raise ArgumentError(f"`k` has a head size of {k.shape[-1]}; expected that of q, {q.shape[-1]}")
    return padded(q), padded(k), padded(v)
