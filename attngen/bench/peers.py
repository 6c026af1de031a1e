"""The alternatives to attngen for a spec: torch's backends and FlashAttention's packages, if they support it, and
FlexAttention."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, name, names_in
from attngen.spec.operator import TABLE, apply

CAUSAL = apply("ge", name("q", Type.INT), name("k", Type.INT))

BACKENDS = {
    "torch math": SDPBackend.MATH,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
}

FLASH_PACKAGES = {  # the module that has `flash_attn_func`, and the distribution that brings it
    "FlashAttention-3": ("flash_attn_interface", "flash_attn_3"),
    "FlashAttention-4": ("flash_attn.cute", "flash-attn-4"),
}

Call = Callable[..., torch.Tensor]
Environment = Mapping[str, torch.Tensor]


def torch_peers(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, only: Collection[str] = tuple(BACKENDS)
) -> dict[str, Call]:
    """The backends in `only` that support these tensors; none unless the spec is plain or causal attention."""
    scale = _plain_scale(spec)
    if scale is None:
        return {}
    causal = spec.mask is CAUSAL
    grouped = q.shape[1] != k.shape[1]

    def call(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    return those_that_run({title: partial(call, BACKENDS[title]) for title in only})


def flash_peers(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """The installed FLASH_PACKAGES that support these tensors; none unless the spec is plain or causal attention. Causal
    attention requires as many queries as keys, because their mask is aligned to the last query."""
    scale = _plain_scale(spec)
    if scale is None or (spec.mask is CAUSAL and q.shape[2] != k.shape[2]):
        return {}
    causal = spec.mask is CAUSAL
    return those_that_run(
        {title: partial(function, q, k, v, scale=scale, is_causal=causal) for title, function in flash_functions().items()}
    )


def flash_functions() -> dict[str, Call]:
    """The attention of each installed package of FLASH_PACKAGES, of torch's q, k and v, with `scale` and `is_causal`."""

    def call(
        attention: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *qkv: torch.Tensor, scale: float, is_causal: bool
    ) -> torch.Tensor:
        by_length = (t.transpose(1, 2) for t in qkv)  # [batch, length, heads, size]
        result = attention(*by_length, softmax_scale=scale, causal=is_causal)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    found: dict[str, Call] = {}
    for title, (module, _) in FLASH_PACKAGES.items():
        try:
            found[title] = partial(call, import_module(module).flash_attn_func)
        except (ImportError, AttributeError):
            continue  # not installed
    return found


def flash_versions(names: Collection[str]) -> str:
    """`, FlashAttention-4 4.0.0b36`, for those of FLASH_PACKAGES that `names` has."""
    return "".join(f", {title} {_version(FLASH_PACKAGES[title][1])}" for title in FLASH_PACKAGES if title in names)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a module without the data of its distribution
        return "of an unknown version"


def _plain_scale(spec: AttentionSpec) -> float | None:
    """The scale of plain or causal softmax attention, without dropout and rotation; None for any other spec."""
    softmax = spec.normalize == "softmax" and spec.sink is None and spec.dropout is None and spec.rotary is None
    softmax = softmax and spec.v_scale is None
    plain = spec.score is S and softmax and spec.mask in (None, CAUSAL)
    return float(spec.scale.value) if plain and isinstance(spec.scale, Const) else None


def those_that_run(calls: Mapping[str, Call]) -> dict[str, Call]:
    """The calls without those that raise an error."""
    usable = {}
    for title, call in calls.items():
        try:
            call()
        except Exception:  # whatever these libraries raise for an element type, size or mask that they do not support
            continue
        usable[title] = call
    return usable


def flex_peer(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    params: Mapping[str, int | float],
    progress: Callable[[str], None],
) -> dict[str, Call]:
    """FlexAttention, compiled, with the spec's own mask and score; its block mask is built beforehand and not timed.

    Empty if FlexAttention cannot express the spec or cannot compile it; `progress` receives the reason.
    """
    left = (spec.sink, spec.dropout, spec.rotary, spec.v_scale)  # what FlexAttention has no word for
    if spec.normalize != "softmax" or any(one is not None for one in left) or not isinstance(spec.scale, Const):
        return {}
    sizes = {"batch": q.shape[0], "q_heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2], "kv_len": k.shape[2]}
    for declared in spec.inputs:
        sizes |= {d: n for d, n in zip(declared.dims, inputs[declared.name].shape, strict=True) if isinstance(d, str)}
    numbers = {**sizes, **{p.name: p.default for p in spec.params if p.default is not None}, **params}
    block_mask = None
    if spec.mask is not None:
        allowed = as_function(spec.mask, numbers, inputs)
        used = names_in(spec.mask)
        block_mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: allowed({"b": b, "h": h, "q": q_idx, "k": kv_idx}),
            q.shape[0] if "b" in used else None,
            q.shape[1] if "h" in used else None,
            q.shape[2],
            k.shape[2],
            device=str(q.device),
        )
    score_mod = None
    if spec.score is not S:
        score = as_function(spec.score, numbers, inputs)

        def score_mod(
            s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
        ) -> torch.Tensor:
            return score({"s": s, "b": b, "h": h, "q": q_idx, "k": kv_idx})

    torch._dynamo.reset()  # compilations of earlier cases count against dynamo's limit
    compiled = torch.compile(flex_attention, dynamic=False)
    scale, grouped = float(spec.scale.value), q.shape[1] != k.shape[1]

    def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
        result: torch.Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=grouped)
        return result

    try:
        call()
    except Exception as error:  # whatever torch.compile may raise
        progress(f"FlexAttention cannot take this: {first_line(error)}")
        return {}
    return {"FlexAttention": call}


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def as_function(expr: Expr, numbers: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Callable[[Environment], Any]:
    """`expr` as a function of its indices: plain closures, which torch.compile traces like a user's function."""
    if isinstance(expr, Const):
        value = expr.value
        return lambda env: value
    if isinstance(expr, Name):
        title = expr.name
        if title in ("s", "b", "h", "q", "k"):
            return lambda env: env[title]
        number = numbers[title]
        return lambda env: number
    operands = [as_function(a, numbers, inputs) for a in expr.args]
    if isinstance(expr, Gather):
        tensor = inputs[expr.input]
        where = tuple(operands)
        return lambda env: tensor[tuple(at(env) for at in where)]
    assert isinstance(expr, Apply)
    array = TABLE[expr.op].array
    return lambda env: array(NAMESPACE, *[operand(env) for operand in operands])


def _extreme(both: Callable[[Any, Any], Any], bound: str, a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return both(a, b)
    tensor, number = (a, b) if isinstance(a, torch.Tensor) else (b, a)
    return torch.clamp(tensor, **{bound: number})


# torch's functions, for operands that may be Python's numbers; expressions are computed in fp32, as kernels compute them.
NAMESPACE = SimpleNamespace(
    **{name: getattr(torch, name) for name in (
        "exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor", "ceil", "abs", "pow", "where", "logical_not",
        "clip", "ones_like",
    )},
    float64=torch.float32, int64=torch.int32, divide=operator.truediv, floor_divide=operator.floordiv, remainder=operator.mod,
    logical_and=operator.and_, logical_or=operator.or_,
    fmin=partial(_extreme, torch.minimum, "max"), fmax=partial(_extreme, torch.maximum, "min"),
)  # fmt: skip
