"""What a user would pick instead, made from the spec itself: torch's backends and FlashAttention's packages where they support
it, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
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

FLASH_PACKAGES = {  # the module that has `flash_attn_func`
    "FlashAttention-3": "flash_attn_interface",
    "FlashAttention-4": "flash_attn.cute",
}

Call = Callable[[], torch.Tensor]
Environment = Mapping[str, Any]


def torch_peers(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, only: Collection[str] = tuple(BACKENDS)
) -> dict[str, Call]:
    """Each backend of scaled_dot_product_attention, of those named in `only`, that supports these tensors; none if the spec
    is not plain or causal attention."""
    scale = _plain_scale(spec)
    if scale is None:
        return {}
    causal = spec.mask is CAUSAL
    grouped = q.shape[1] != k.shape[1]

    def call(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    return _those_that_run({title: partial(call, BACKENDS[title]) for title in only})


def flash_peers(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """Each of FLASH_PACKAGES that is installed and supports these tensors; none if the spec is not plain or causal attention,
    or has another number of queries than of keys (theirs is aligned to the last query)."""
    scale = _plain_scale(spec)
    if scale is None or (spec.mask is CAUSAL and q.shape[2] != k.shape[2]):
        return {}
    arguments = [t.transpose(1, 2) for t in (q, k, v)]  # [batch, length, heads, size]

    def call(attention: Callable[..., Any]) -> torch.Tensor:
        result = attention(*arguments, softmax_scale=scale, causal=spec.mask is CAUSAL)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    found: dict[str, Call] = {}
    for title, module in FLASH_PACKAGES.items():
        try:
            found[title] = partial(call, import_module(module).flash_attn_func)
        except (ImportError, AttributeError):
            continue  # not installed
    return _those_that_run(found)


def _plain_scale(spec: AttentionSpec) -> float | None:
    """The scale of plain or causal softmax attention; None for any other spec."""
    plain = spec.score is S and spec.normalize == "softmax" and spec.sink is None and spec.mask in (None, CAUSAL)
    return float(spec.scale.value) if plain and isinstance(spec.scale, Const) else None


def _those_that_run(calls: dict[str, Call]) -> dict[str, Call]:
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

    Nothing where FlexAttention has no word for the spec, or cannot compile it, which `progress` is told.
    """
    if spec.normalize != "softmax" or spec.sink is not None or not isinstance(spec.scale, Const):
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

        def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score({"s": s, "b": b, "h": h, "q": q_idx, "k": kv_idx})

    torch._dynamo.reset()  # each case is one of its own: what was compiled for others would count against dynamo's limit
    compiled = torch.compile(flex_attention, dynamic=False)
    scale, grouped = float(spec.scale.value), q.shape[1] != k.shape[1]

    def call() -> torch.Tensor:
        result: torch.Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=grouped)
        return result

    try:
        call()
    except Exception as error:  # whatever torch.compile may raise
        progress(f"FlexAttention cannot take this: {str(error).strip().splitlines()[0]}")
        return {}
    return {"FlexAttention": call}


def as_function(expr: Expr, numbers: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Callable[[Environment], Any]:
    """`expr` as a function of its indices, made of plain closures, which torch.compile reads as it reads the user's own."""
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
    if len(operands) == 1:
        (only,) = operands
        return lambda env: array(NAMESPACE, only(env))
    if len(operands) == 2:
        first, second = operands
        return lambda env: array(NAMESPACE, first(env), second(env))
    first, second, third = operands
    return lambda env: array(NAMESPACE, first(env), second(env), third(env))


class _Namespace:
    """torch's functions, where Python's numbers may stand for tensors."""

    float64 = torch.float32  # what expressions are computed in: as kernels do
    int64 = torch.int32
    exp, exp2, log, log2, sqrt, tanh = torch.exp, torch.exp2, torch.log, torch.log2, torch.sqrt, torch.tanh
    sin, cos, floor, ceil, abs, pow, where = torch.sin, torch.cos, torch.floor, torch.ceil, torch.abs, torch.pow, torch.where
    logical_not, clip, ones_like = torch.logical_not, torch.clip, torch.ones_like

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return _extreme(a, b, torch.minimum, "max")

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return _extreme(a, b, torch.maximum, "min")

    @staticmethod
    def divide(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_divide(a: Any, b: Any) -> Any:
        return a // b

    @staticmethod
    def remainder(a: Any, b: Any) -> Any:
        return a % b

    @staticmethod
    def logical_and(a: Any, b: Any) -> Any:
        return a & b

    @staticmethod
    def logical_or(a: Any, b: Any) -> Any:
        return a | b


def _extreme(a: Any, b: Any, both: Callable[[Any, Any], Any], bound: str) -> Any:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return both(a, b)
    tensor, number = (a, b) if isinstance(a, torch.Tensor) else (b, a)
    return torch.clamp(tensor, **{bound: number})


NAMESPACE = _Namespace
