"""`flex_attention`: torch's FlexAttention by attngen's kernels, forward and backward, of masks and scores as they are."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from attngen.device.arrays import ArgumentError
from attngen.diagnostics import DiagnosticError
from attngen.language.block import completed
from attngen.spec.attention import AttentionSpec, Input, Param, S
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Apply, Const, Expr, Type, constant, gather, inputs_in, name, names_in
from attngen.spec.gradient import differentiable
from attngen.spec.obligations import ObligationError, check_obligations
from attngen.spec.operator import TRUE, both, either, floordiv, negation
from attngen.torch.aten import Context
from attngen.torch.aten import cast as converted
from attngen.torch.block_mask import BlockMask, tables_of
from attngen.torch.closures import Closure
from attngen.torch.description import dtype_name, fixed_text
from attngen.torch.eager import EagerCalls
from attngen.torch.importer import ImportRefusal, Inputs, as_read, expression, numbers_on
from attngen.torch.layout import follow_autocast, readable
from attngen.torch.max_scores import max_scores_of

Tensor = Any
B, H, Q, K = (name(n, Type.INT) for n in "bhqk")
MAX_REMEMBERED = 1024


@dataclass(frozen=True)
class Prepared:
    """A call's mask and score as a spec: its text, and where each argument of the operator comes from."""

    spec: AttentionSpec
    text: str
    sources: tuple[tuple[Input, int | str | Tensor], ...]  # a position in the closure, a name of `tables`, or a tensor
    ints: tuple[int, ...]
    differentiable: frozenset[str]

    def inputs(self, closure: Closure, tables: Mapping[str, Tensor], device: Any) -> list[Tensor]:
        found = []
        for declared, source in self.sources:
            tensor = (
                closure.tensors[source][1] if isinstance(source, int) else tables[source] if isinstance(source, str) else source
            )
            tensor = as_read(tensor, declared.dtype, device)
            if tensor.device != device:
                raise ArgumentError(f"`{declared.name}` is on {tensor.device} and q on {device}; move it there")
            found.append(tensor if declared.name in self.differentiable else tensor.detach())
        return found


_prepared: dict[Hashable, Prepared] = {}


def prepare(
    score_mod: Any,
    mask_mod: Any,
    closure: Closure,
    key: Hashable,
    described: tuple[Any, ...],
    tables: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    device: Any,
) -> Prepared:
    """The spec of a call. `described` is (dtype, head sizes, scale, whether lse is wanted, block sizes
    of the lists, schedule)."""
    known = (key, described, tuple((n, t.shape) for n, t in tables.items()), device.type)
    for guarded in (False, True):
        found = _prepared.get((known, guarded))
        if found is None:
            found = _imported(score_mod, mask_mod, closure, described, tables, device, guarded)
            if closure.opaque is None:
                while len(_prepared) >= MAX_REMEMBERED:
                    _prepared.pop(next(iter(_prepared)))
                _prepared[known, guarded] = found
        try:
            check_obligations(found.spec, _all_sizes(found, closure, tables, sizes), _params(found))
            return found
        except ObligationError:
            if guarded:
                raise
    raise AssertionError


def _params(prepared: Prepared) -> dict[str, int]:
    return {p.name: value for p, value in zip(prepared.spec.params, prepared.ints, strict=True)}


def _all_sizes(prepared: Prepared, closure: Closure, tables: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, int]:
    found = dict(sizes)
    for declared, source in prepared.sources:
        tensor = (
            closure.tensors[source][1] if isinstance(source, int) else tables[source] if isinstance(source, str) else source
        )
        for dim, size in zip(declared.dims, tensor.shape, strict=True):
            if isinstance(dim, str):
                found.setdefault(dim, size)
    return found


def _imported(
    score_mod: Any,
    mask_mod: Any,
    closure: Closure,
    described: tuple[Any, ...],
    tables: Mapping[str, Tensor],
    device: Any,
    guarded: bool,
) -> Prepared:
    for narrow in (False, True):
        try:
            return _once(score_mod, mask_mod, closure, described, tables, device, guarded, narrow)
        except DiagnosticError as error:
            if narrow or not any(type(d).__name__ == "MightOverflow" for d in error.diagnostics):
                raise ImportRefusal(str(error)) from error
    raise AssertionError


def _once(
    score_mod: Any,
    mask_mod: Any,
    closure: Closure,
    described: tuple[Any, ...],
    tables: Mapping[str, Tensor],
    device: Any,
    guarded: bool,
    narrow: bool,
) -> Prepared:
    dtype, head_dim, head_dim_v, scale, lse, block_size, mode = described
    context = Context(guarded=guarded)
    inputs = Inputs(closure, context, narrow=narrow)
    context.numbers = {value: inputs.unused_name(given, "number") for value, given in closure.numbers.items()}
    score: Expr = S
    if score_mod is not None:
        examples = numbers_on(device, torch.float32 if dtype.itemsize < 4 else dtype)
        score = converted(expression(score_mod, examples, (S, B, H, Q, K), inputs), Type.FLOAT)
    mask: Expr = TRUE
    if mask_mod is not None:
        mask = converted(expression(mask_mod, numbers_on(device), (B, H, Q, K), inputs), Type.BOOL)
    score, seen = _without_excluded(score)
    if tables:
        place = (floordiv(Q, constant(block_size[0])), floordiv(K, constant(block_size[1])))
        listed = {}
        for which, table in tables.items():
            declared = inputs.add(which, table, ("batch", "q_heads", f"{which}_rows", f"{which}_keys"), which)
            listed[which] = gather(declared.name, Type.BOOL, (B, H, *place))
        mask = both(listed["partial_blocks"], mask)
        if "full_blocks" in listed:
            mask = either(listed["full_blocks"], mask)
    mask = both(mask, seen)
    written = {"mask": None if mask is TRUE else mask, "score": score, "scale": constant(scale), "sink": None}
    used = inputs_in(*(e for e in (mask, score)))
    named = names_in(mask, score)
    params = [(n, v) for n, v in context.params.items() if n in named]
    spec = AttentionSpec(
        name="flex_attention",
        dtype=DTYPES[dtype_name(dtype)],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        inputs=tuple(i for i in inputs.declared.values() if i.name in used),
        params=tuple(Param(n, Type.INT) for n, _ in params),
        **completed(written, head_dim),
        lse=lse,
    )
    check(spec)
    sources = tuple((i, inputs.sources[i.name]) for i in spec.inputs)
    return Prepared(spec, fixed_text(spec, mode), sources, tuple(v for _, v in params), frozenset(differentiable(spec)))


def _without_excluded(score: Expr) -> tuple[Expr, Expr]:
    """(score, mask) of a score that is -inf for some pairs: those take no part."""
    seen: Expr = TRUE
    while isinstance(score, Apply) and score.op == "where":
        condition, a, b = score.args
        if _is_minus_infinity(b):
            seen, score = both(seen, condition), a
        elif _is_minus_infinity(a):
            seen, score = both(seen, negation(condition)), b
        else:
            break
    return score, seen


def _is_minus_infinity(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == -math.inf


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """softmax(score_mod(scale * q k^T) where block_mask allows) v, with the arguments of torch's flex_attention.

    query [batch, q_heads, q_len, E], key [batch, kv_heads, kv_len, E], value [batch, kv_heads, kv_len, Ev], of fp16, bf16 or
    fp32, on a GPU (or on the CPU, where the emulated device runs them, slowly). Every tensor that requires grad has a gradient,
    those that `score_mod` captures too. Masks have none. torch's own `kernel_options` have no effect; "mode" names a schedule
    of attngen's.

    Returns the output, with the strides that torch's has; with `return_aux` also an AuxOutput, of which lse is differentiable;
    with `return_lse` also lse. Raises ImportRefusal for a mask or score that cannot be an expression, which names the operator
    and its place, ArgumentError or ValueError for arguments. It never computes all pairs by torch instead.
    """
    if return_lse and return_aux is not None:
        raise ValueError(
            "Cannot specify both return_lse and return_aux. return_lse is deprecated, please use "
            "return_aux=AuxRequest(lse=True) instead."
        )
    _check(query, key, value, block_mask, enable_gqa)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_max = return_aux is not None and return_aux.max_scores
    q, k, v = follow_autocast(query, key, value)
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else float(scale)
    head_dim_v = v.size(-1)
    q, k, v = (_prepared_tensor(t, q.size(0)) for t in (q, k, v))
    tables, mask_mod, block_size = _mask(block_mask, q, k)
    closure = Closure()
    found = closure.key_of(score_mod, mask_mod)
    sizes = {"batch": q.size(0), "q_heads": q.size(1), "kv_heads": k.size(1), "q_len": q.size(2), "kv_len": k.size(2)}
    described = (q.dtype, q.size(3), v.size(3), scale, wants_lse, block_size, (kernel_options or {}).get("mode"))
    prepared = prepare(score_mod, mask_mod, closure, found, described, tables, sizes, q.device)
    inputs = prepared.inputs(closure, tables, q.device)
    lists: tuple[Any, ...] = (inputs or None, list(prepared.ints) or None)
    output, lse = _calls.make((q, k, v, *inputs), None, (q, k, v, prepared.text, *lists))
    maxima = max_scores_of(prepared.spec, q, k, inputs, _params(prepared)) if wants_max else None
    output = _as_torch(output[..., :head_dim_v], query)
    lse = lse if wants_lse else None
    if return_aux is not None:
        return output, AuxOutput(lse=lse, max_scores=maxima)
    return (output, lse) if return_lse else output


def _prepared_tensor(tensor: Tensor, batch: int) -> Tensor:
    """`tensor` as a kernel reads it: of a head size that is a multiple of 8, copied if it cannot be read in place."""
    missing = -tensor.size(-1) % 8
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, missing))
    elif not readable(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.expand(batch, -1, -1, -1) if tensor.size(0) == 1 != batch else tensor


def _as_torch(output: Tensor, query: Tensor) -> Tensor:
    """`output` with its dimensions in the order of the query's memory, the last one innermost."""
    strides = query.stride()
    order = sorted(range(3), key=lambda d: (strides[d], d))
    wanted, step = [0, 0, 0, 1], output.size(3)
    for dim in sorted(order, key=lambda d: strides[d]):
        wanted[dim] = step
        step *= output.size(dim)
    if all(a == b or n == 1 for a, b, n in zip(output.stride(), wanted, output.shape, strict=True)):
        return output
    return torch.empty_strided(output.shape, wanted, dtype=output.dtype, device=output.device).copy_(output)


def _mask(block_mask: Any, q: Tensor, k: Tensor) -> tuple[dict[str, Tensor], Any, tuple[int, int] | None]:
    """(tables of the lists, the function, block sizes) of a mask. Raises ValueError, ArgumentError."""
    if block_mask is None:
        return {}, None, None
    if getattr(block_mask, "mask_mod", None) is theirs._sliced_mask_mod_error:
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    size = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    mask_mod = None if block_mask.mask_mod is theirs.noop_mask else block_mask.mask_mod
    if size == (theirs._LARGE_SPARSE_BLOCK_SIZE,) * 2:
        return {}, mask_mod, None
    _check_lengths(block_mask, q.size(2), k.size(2))
    if isinstance(block_mask, BlockMask) and block_mask.is_function:
        return {}, mask_mod, None
    partial, full = tables_of(block_mask)
    tables = {"partial_blocks": partial} | ({} if full is None else {"full_blocks": full})
    for which, table in tables.items():
        if table.device != q.device:
            raise RuntimeError(f"Expect q/k/v and block_mask to be on the same device but got {q.device} and {table.device}.")
        for dim, wanted in ((0, q.size(0)), (1, q.size(1))):
            if table.size(dim) not in (1, wanted):
                raise ValueError(f"block_mask has {which} [{table.size(dim)}] in dimension {dim}; expected 1 or {wanted}")
    return tables, mask_mod, size


def _check_lengths(block_mask: Any, q_len: int, kv_len: int) -> None:
    rows, keys = block_mask.seq_lengths
    if (q_len, kv_len) == (rows, keys):
        return
    smaller = q_len > rows or kv_len > keys
    advice = (
        "As the block mask was created for a smaller length than you're using it for, you likely need to create a new block "
        "mask."
        if smaller
        else "As the block mask was created for a larger length than you're using it for, you can either 1. create a new block "
        "mask with the correct length, or 2. 'adjust' the existing block mask to the correct length by calling "
        "block_mask._adjust(q_len, kv_len)."
    )
    raise ValueError(
        f"block_mask was created for block_mask.shape={block_mask.shape} but got q_len={q_len} and kv_len={kv_len}. {advice}"
    )


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raises as torch's flex_attention does."""
    if any(t.is_nested for t in (query, key, value)):
        raise NotImplementedError("flex_attention does not support NestedTensor inputs; convert them to dense tensors")
    theirs._validate_sdpa_input(query, key, value, allow_lowp_kv=True)
    theirs._validate_embed_dim(query, key, value)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    q_heads, kv_heads = query.size(-3), key.size(-3)
    if not enable_gqa and q_heads != kv_heads:
        raise ValueError(
            f"Expect query and key/value to have the same number of heads but got Hq={q_heads} and Hkv={kv_heads}. "
            "Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and (kv_heads == 0 or q_heads % kv_heads):
        raise ValueError(
            f"Expect number of query heads to be a multiple of kv heads for GQA but got Hq={q_heads} and Hkv={kv_heads}."
        )
    if query.size(0) != key.size(0) and (block_mask is None or key.size(0) != 1):
        raise ValueError(
            "Expect query and key/value to have the same batch size, or non-none block_mask, "
            f"but got block_mask={block_mask}, Bq={query.size(0)}, and Bkv={key.size(0)}."
        )


_calls = EagerCalls()
