"""The spec of a flex_attention call: its score, its mask and its lists of blocks as expressions, and where each argument of the
operator comes from."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.device.params import number_names
from attngen.diagnostics import DiagnosticError
from attngen.language.block import completed
from attngen.language.functions import cast
from attngen.spec.attention import AttentionSpec, Input, Param, S
from attngen.spec.check import check
from attngen.spec.dropout import RNG_STATE, with_state
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import MAX_FLOAT, Apply, Const, Expr, Type, constant, gather, inputs_in, name, names_in
from attngen.spec.gradient import differentiable
from attngen.spec.obligations import ObligationError, check_obligations
from attngen.spec.operator import TRUE, both, either, floordiv, negation
from attngen.spec.scales import SOFTMAX_SCALE
from attngen.torch.aten import Context
from attngen.torch.block_mask import Function
from attngen.torch.captured import Inputs, as_read
from attngen.torch.captured_floats import OfParams, of_params, with_constants
from attngen.torch.closures import Closure
from attngen.torch.description import Mode, dtype_name, fixed_text, schedule_of, stated_dtype
from attngen.torch.graphs import ImportRefusal, numbers_on, stand_in
from attngen.torch.importer import expression
from attngen.torch.prepared import Remembered
from attngen.torch.private import is_of_transform, outside_of_transforms

B, H, Q, K = (name(n, Type.INT) for n in "bhqk")
LIMITS_OF_ELEMENTS = (64, 60, 32)  # bits of int64 elements: those of the second fit sums, of the third products
LISTS = ("partial_blocks", "full_blocks")  # names of tables; `sinks` and that of RNG_STATE are tensors of a call too


@dataclass(frozen=True)
class Described:
    """What a call's spec has beside its functions. `block_size` is that of the tables of blocks, None without tables."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    lse: bool
    block_size: tuple[int, int] | None
    mode: Mode
    dropout: float


@dataclass(frozen=True)
class Functions:
    """A score and a mask, either of which may be None, what they close over, and the key under which they are remembered."""

    score: Function | None
    mask: Function | None
    closure: Closure
    key: Hashable


@dataclass(frozen=True)
class Prepared:
    """A call's mask and score as a spec: its text, and where each argument of the operator comes from."""

    spec: AttentionSpec
    text: str
    sources: tuple[tuple[Input, int | str | Tensor], ...]  # a position in the closure, a name of `tables`, or a tensor
    ints: tuple[tuple[str, int], ...]  # ("", a number), or ("tensor", the position of a number in the closure)
    floats: tuple[float, ...]  # params of the score; in a call they follow the scale
    factor: float  # multiplies the scale
    differentiable: frozenset[str]
    reads: tuple[tuple[Expr, Expr], ...]  # (index, size) of each index that the kernel keeps inside

    def tensors(self, captured: Sequence[Tensor], tables: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensor of each input; `captured` are those of the closure."""
        return [
            captured[source] if isinstance(source, int) else tables[source] if isinstance(source, str) else source
            for _, source in self.sources
        ]

    def numbers(self, captured: Sequence[Any], scale: float) -> tuple[list[int], list[float]]:
        """The ints and the floats of a call."""
        factor = self.factor
        ints = [captured[value] if where else value for where, value in self.ints]
        return ints, [scale if factor == 1.0 else scale * factor, *self.floats]

    def int_params(self, captured: Sequence[Any]) -> dict[str, int]:
        """The value of each int param."""
        ints, _ = self.numbers(captured, 1.0)
        return dict(zip(number_names(self.spec, Type.INT), ints, strict=True))

    def inputs(
        self, captured: Sequence[Tensor], tables: Mapping[str, Tensor], device: torch.device, keeps_fp64: bool
    ) -> list[Tensor]:
        """The tensors as a kernel reads them, or those of fp64 as torch's operations do."""
        found = []
        for (declared, _), given in zip(self.sources, self.tensors(captured, tables), strict=True):
            tensor = as_read(given, None if keeps_fp64 and given.dtype is torch.float64 else declared.dtype, device)
            if tensor.device != device:
                raise ArgumentError(f"`{declared.name}` is on {tensor.device} and q on {device}; move it there")
            found.append(tensor if declared.name in self.differentiable else tensor.detach())
        return found


_prepared: Remembered[Prepared] = Remembered()


def prepare(
    functions: Functions, described: Described, tables: Mapping[str, Tensor], sizes: Mapping[str, int], device: torch.device
) -> Prepared:
    """The spec of a call. Indices that are proved inside for these sizes are not kept inside by the kernel. Raises
    ImportRefusal, ArgumentError."""
    closure = functions.closure
    remembers = closure.opaque is None and not closure.is_traced
    types = tuple((name, table.dtype) for name, table in tables.items())
    known = (functions.key, described, types, device.type)
    for guarded in (False, True):
        found = _prepared.get((known, guarded)) if remembers else None
        if found is None:
            found = _imported(functions, described, tables, device, guarded)
            if remembers and closure.opaque is None:
                _prepared[known, guarded] = found
        captured = [tensor for _, tensor in closure.tensors]
        try:
            params = {n: int(value) for n, value in found.int_params(captured).items()}
            inputs = zip(found.sources, found.tensors(captured, tables), strict=True)
            own = found.spec.own_sizes({declared.name: tensor.shape for (declared, _), tensor in inputs})
            check_obligations(found.spec, {**sizes, **own}, params)
            return found
        except ObligationError:
            if guarded:
                raise
    raise AssertionError


def _imported(
    functions: Functions, described: Described, tables: Mapping[str, Tensor], device: torch.device, guarded: bool
) -> Prepared:
    closure = functions.closure
    wrapped = [t for _, t in closure.tensors if is_of_transform(t)]
    for bits in LIMITS_OF_ELEMENTS:
        try:
            with outside_of_transforms():  # a transform that runs the call has no part in what is traced
                for tensor in wrapped:
                    closure.stand_for(tensor, stand_in(tensor))
                return _once(functions, described, tables, device, guarded, bits)
        except DiagnosticError as error:
            if bits == LIMITS_OF_ELEMENTS[-1] or not any(type(d).__name__ == "MightOverflow" for d in error.diagnostics):
                raise ImportRefusal(str(error)) from error
    raise AssertionError


def _once(
    functions: Functions, described: Described, tables: Mapping[str, Tensor], device: torch.device, guarded: bool, bits: int
) -> Prepared:
    closure, dtype = functions.closure, described.dtype
    context = Context(guarded=guarded)
    inputs = Inputs(closure, context, bits=bits)
    context.numbers = {value: inputs.unused_name(given, "number") for value, given in closure.numbers.items()}
    scale = inputs.unused_name(SOFTMAX_SCALE, "scale")
    found = OfParams(S, 1.0, {})
    if functions.score is not None:
        examples = numbers_on(device, torch.float32 if dtype.itemsize < 4 else dtype)
        floats = {v: n for v, n in closure.floats.items() if v not in (0.0, 1.0, -1.0) and abs(v) <= MAX_FLOAT}
        context.floats = {value: inputs.unused_name(given, "number") for value, given in floats.items()}
        score = cast(expression(functions.score, examples, (S, B, H, Q, K), inputs), Type.FLOAT)
        found = of_params(score, context.float_params, lambda n: inputs.unused_name(f"{n}_inverse", "number"))
        context.floats = {}
    score = found.score
    mask: Expr = TRUE
    if functions.mask is not None:
        mask = cast(expression(functions.mask, numbers_on(device), (B, H, Q, K), inputs), Type.BOOL)
    score, seen = _without_excluded(score)
    if described.block_size is not None:
        mask = _listed(mask, described.block_size, tables, inputs)
    mask = both(mask, seen)
    sink = None
    if "sinks" in tables:
        sink = gather(inputs.add("sinks", tables["sinks"], ("q_heads",), "sinks").name, Type.FLOAT, (H,))
    used, named = inputs_in(mask, score, *filter(None, (sink,))), names_in(mask, score)
    ints = [(n, ("", value)) for n, value in context.params.items() if n in named]
    ints += [(n, ("tensor", place)) for n, place in inputs.symbols.items() if n in named]
    written: dict[str, Expr | None] = {
        "mask": None if mask is TRUE else mask,
        "score": score,
        "scale": name(scale, Type.FLOAT),
        "sink": sink,
    }
    if described.dropout:
        written["dropout"] = constant(described.dropout)
    completes = completed(written, described.head_dim)
    read = [n for n in found.values if n in names_in(score)]
    spec = AttentionSpec(
        name="flex_attention",
        dtype=DTYPES[dtype_name(stated_dtype(dtype, described.mode))],
        head_dim=described.head_dim,
        head_dim_v=described.head_dim_v,
        inputs=with_state(tuple(i for i in inputs.declared.values() if i.name in used), completes["dropout"]),
        params=(*(Param(n, Type.INT) for n, _ in ints), *(Param(n, Type.FLOAT) for n in (scale, *read))),
        **completes,
        lse=described.lse,
    )
    check(spec)
    sources = tuple((i, RNG_STATE.name if i is RNG_STATE else inputs.sources[i.name]) for i in spec.inputs)
    text = fixed_text(spec, schedule_of(described.mode))
    values, smooth = tuple(value for _, value in ints), frozenset(differentiable(spec))
    known = context.float_params
    reads = tuple((with_constants(index, known), with_constants(size, known)) for index, size in context.reads)
    floats_read = tuple(found.values[n] for n in read)
    return Prepared(spec, text, sources, values, floats_read, found.factor, smooth, reads)


def _listed(mask: Expr, size: tuple[int, int], tables: Mapping[str, Tensor], inputs: Inputs) -> Expr:
    """A pair takes part if its block is full, or if it is partial and `mask` allows the pair."""
    place = (floordiv(Q, constant(size[0])), floordiv(K, constant(size[1])))
    listed = {}
    for which in (n for n in LISTS if n in tables):
        declared = inputs.add(which, tables[which], ("batch", "q_heads", f"{which}_rows", f"{which}_keys"), which)
        listed[which] = gather(declared.name, Type.BOOL, (B, H, *place))
    mask = both(listed["partial_blocks"], mask)
    return either(listed["full_blocks"], mask) if "full_blocks" in listed else mask


def _without_excluded(score: Expr) -> tuple[Expr, Expr]:
    """(score, mask) of a score that is -inf for some pairs by their indices alone: those take no part."""
    seen: Expr = TRUE
    while isinstance(score, Apply) and score.op == "where":
        condition, a, b = score.args
        if "s" in names_in(condition):
            break
        if _is_minus_infinity(b):
            seen, score = both(seen, condition), a
        elif _is_minus_infinity(a):
            seen, score = both(seen, negation(condition)), b
        else:
            break
    return score, seen


def _is_minus_infinity(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == -math.inf
