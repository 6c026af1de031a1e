"""Attention as `AttentionSpec` defines it, on arrays of numpy or torch. Both oracles use this definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias, TypeVar

import numpy as np

from attngen.reference.problems import Array
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.dropout import RNG_STATE, bytes_of_pairs, dropped_of, kept_factor
from attngen.spec.dtypes import FP8_DTYPES, FP8_E4M3, FP16, FP32, from_storage, round_to_storage, unit_roundoff
from attngen.spec.evaluate import evaluate

T = TypeVar("T")
XpArray: TypeAlias = Any  # an array of numpy or of torch: this definition is computed by both
ROW_BUDGET = 2**25  # scores in memory at once


TERM = 6.0 * unit_roundoff(FP32)
# Of a product of two numbers that are each the sum of two of bf16, without small by small: 2.4 standard deviations, which are
# 1.2 * 2^-18 of the product, for randn numbers and for weights
SPLIT_TERM = 2.4 * 1.2 * 2.0**-18
# Of a sum over the head size of products of 8 bits on Hopper, which keeps some 14 bits: of the root of the sum of squares. In
# lse of rows with one key, it was 2^-11.2 at head size 128 on an H200
TERM_OF_BYTES = 2.0**-11
# Of a weight as a number of e4m3, 256 times as large: half of its last place, where it is not less than 2^-6, and of 2^-9 below
WEIGHT_OF_BYTES, LEAST_WEIGHT_OF_BYTES = unit_roundoff(FP8_E4M3), 2.0**-18


@dataclass(frozen=True, slots=True)
class Rounding:
    """Errors of matrix products."""

    seed: int  # a seed of their signs
    term: float = TERM  # relative error of each term of a sum over rows or keys, beside SPLIT_TERM if the precision allows it
    of_bytes: bool = False  # products are of numbers of 8 bits, and weights are numbers of e4m3 (`Schedule.multiplies_bytes`)
    # what other seeds need too for the same problem; None: nothing is kept
    shared: dict[Hashable, Any] | None = field(default=None, repr=False, compare=False)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, or of that for another seed."""
        if self.shared is None:
            return make()
        if key not in self.shared:
            self.shared[key] = make()
        found: T = self.shared[key]
        return found


@dataclass(frozen=True, slots=True)
class Problem:
    """Arrays of one call, all of the namespace `xp`, numpy or a TorchNamespace: floats in the precision of the computation,
    integers as int64."""

    spec: AttentionSpec
    q: XpArray  # [batch, q_heads, q_len, head_dim]
    k: XpArray  # [batch, kv_heads, kv_len, head_dim]
    v: XpArray  # [batch, kv_heads, kv_len, head_dim_v]
    inputs: Mapping[str, XpArray]
    params: Mapping[str, int | float]
    xp: Any
    read: Callable[[Problem, str, tuple[XpArray, ...]], XpArray] | None = None  # in place of `read_input`
    rounding: Rounding | None = None  # for each `matrix_product` (numpy only)

    @property
    def sizes(self) -> dict[str, int]:
        batch, q_heads, q_len, _ = self.q.shape
        _, kv_heads, kv_len, _ = self.k.shape
        sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
        return sizes | self.spec.own_sizes({name: tuple(map(int, array.shape)) for name, array in self.inputs.items()})


def allowed_rows(problem: Problem, b: int, h: int, rows: slice, keys: XpArray = None) -> XpArray:
    """The mask of one head, for a block of query rows, of all keys or `keys`: [rows, keys], or what broadcasts to it."""
    assert problem.spec.mask is not None
    return evaluate(problem.spec.mask, *surroundings(problem, b, h, rows, keys))


def surroundings(problem: Problem, b: int, h: int, rows: slice, keys: XpArray = None) -> tuple[dict[str, Any], Any, Any, Any]:
    """The arguments of `evaluate` for a block of rows and all keys, or `keys`: names, reader of inputs, namespace, literals."""
    sizes = problem.sizes
    numbers = {**sizes, **problem.params, "b": b, "h": h}
    names: dict[str, Any] = {name: _number(problem, value) for name, value in numbers.items()}
    names["q"] = _arange(problem, rows.start, rows.stop)[:, None]
    names["k"] = (_arange(problem, 0, sizes["kv_len"]) if keys is None else keys)[None, :]
    read = problem.read or read_input
    literal = problem.xp.literal if _place(problem) else lambda value: value
    return names, lambda name, at: read(problem, name, at), problem.xp, literal


def score_rows(problem: Problem, b: int, h: int, rows: slice) -> XpArray:
    """The scores of one head before the mask, for a block of query rows: [rows, kv_len]."""
    names, *rest = surroundings(problem, b, h, rows)
    q, k = query_rows(problem, b, h, rows), key_rows(problem, b, h)
    names["s"] = matrix_product(problem, q, k.T, "s", (b, h, rows.start)) * evaluate(problem.spec.scale, names, *rest)
    return _like(evaluate(problem.spec.score, names, *rest) + 0.0 * names["s"], q)


def query_rows(problem: Problem, b: int, h: int, rows: slice) -> XpArray:
    """Rows of Q of one head as scores have them: rotated, if the spec rotates them."""
    q, rotary = problem.q[b, h, rows], problem.spec.rotary
    return q if rotary is None else _rotated(problem, q, *angles(problem, b, rows))


def key_rows(problem: Problem, b: int, h: int) -> XpArray:
    """All rows of K of one head, as `query_rows`."""
    k, rotary = problem.k[b, kv_head(problem, h)], problem.spec.rotary
    return k if rotary is None else _rotated(problem, k, *angles(problem, b))


def angles(problem: Problem, b: int, rows: slice | None = None) -> tuple[XpArray, XpArray]:
    """The cosines and sines [length, rotary_dim / 2] of query rows, or of all keys; outside its table, of the nearest row."""
    rotary = problem.spec.rotary
    assert rotary is not None
    names, *rest = surroundings(problem, b, 0, rows or slice(0, 1))
    position, index = (rotary.k, "k") if rows is None else (rotary.q, "q")
    at = (evaluate(position, names, *rest) + 0 * names[index]).reshape(-1)
    cosines, sines = (problem.inputs[table] for table in rotary.tables)
    at_cosines, at_sines = (problem.xp.clip(at, 0, table.shape[0] - 1) for table in (cosines, sines))
    return cosines[at_cosines], sines[at_sines]


def _rotated(problem: Problem, rows: XpArray, cosines: XpArray, sines: XpArray) -> XpArray:
    """Rows [length, head_dim] rotated, as numbers of the spec's element type."""
    return _in_storage(turned(problem, rows, cosines, sines), problem.spec)


def turned(problem: Problem, rows: XpArray, cosines: XpArray, sines: XpArray) -> XpArray:
    """Rows [length, head_dim] whose pairs are turned by angles with these cosines and sines; by -sines, turned back."""
    rotary, xp = problem.spec.rotary, problem.xp
    assert rotary is not None
    pairs, rest = rows[:, : rotary.dim], rows[:, rotary.dim :]
    half = rotary.dim // 2
    x, y = (pairs[:, :half], pairs[:, half:]) if rotary.pairs == "halves" else (pairs[:, 0::2], pairs[:, 1::2])
    cosines, sines = _like(cosines, rows), _like(sines, rows)
    both = (x * cosines - y * sines, x * sines + y * cosines)
    pairs = xp.concatenate(both, -1) if rotary.pairs == "halves" else xp.stack(both, -1).reshape(pairs.shape)
    return xp.concatenate((pairs, rest), -1)


def _in_storage(rows: XpArray, spec: AttentionSpec) -> XpArray:
    """Rows rounded to the spec's element type, in the precision that they have. The rounding has the derivative 1."""
    if hasattr(rows, "astype"):
        return from_storage(round_to_storage(rows.astype(np.float32), spec.dtype)).astype(rows.dtype)
    import torch

    return rows + (rows.detach().to(getattr(torch, spec.dtype.torch)).to(rows.dtype) - rows.detach())


def kv_head(problem: Problem, h: int) -> int:
    return int(h // (problem.q.shape[1] // problem.k.shape[1]))


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a block of query rows and what they follow from. The last two are None if rows are not a softmax."""

    allowed: XpArray  # per pair; None: every pair
    weights: XpArray  # P [rows, kv_len]
    lse: XpArray | None  # [rows]
    sink_weight: XpArray | None  # [rows, 1], the weight of the sink; also None without one


def weight_rows(problem: Problem, b: int, h: int, rows: slice) -> Weights:
    """The weights of one head, for a block of query rows."""
    spec, xp = problem.spec, problem.xp
    scores = score_rows(problem, b, h, rows)
    allowed = None
    if spec.mask is not None:
        allowed = allowed_rows(problem, b, h, rows)
        forbidden = 0.0 if spec.normalize == "none" else -math.inf
        scores = xp.where(allowed, scores, xp.full_like(scores, forbidden))
    if spec.normalize == "none":
        return Weights(allowed, scores, None, None)
    if spec.normalize == "sigmoid":
        return Weights(allowed, 1.0 / (1.0 + xp.exp(-scores)), None, None)
    sink = None
    if spec.sink is not None:
        names, *rest = surroundings(problem, b, h, rows)
        sink = evaluate(spec.sink, names, *rest)
    return Weights(allowed, *_softmax(problem, scores, sink, (b, h, rows.start)))


def attention_rows(problem: Problem, b: int, h: int, rows: slice) -> tuple[XpArray, XpArray | None]:
    """O [rows, head_dim_v] and lse [rows] of one head, for a block of query rows."""
    found = weight_rows(problem, b, h, rows)
    factors = dropout_rows(problem, b, h, rows)
    weights = _in_bytes(problem, _in_fp16(problem, found.weights, (b, h, rows.start)), (b, h, rows.start))
    weights = weights if factors is None else dropped(problem, weights, factors)
    if problem.spec.v_scale is not None:
        names, *rest = surroundings(problem, b, h, rows)
        weights = weights * _like(evaluate(problem.spec.v_scale, names, *rest) + 0.0 * names["k"], weights)
    return matrix_product(problem, weights, problem.v[b, kv_head(problem, h)], "o", (b, h, rows.start)), found.lse


def _in_fp16(problem: Problem, weights: Array, at: tuple[int, ...]) -> Array:
    """Weights with what fp16 takes from small ones, if the problem has rounding: as a factor of V, a weight is a multiple of
    2^-24 of its row's largest one (of 1, without a softmax) where it is less than 2^-14 of it. Where weights are larger, the
    rounding of the output is as large as theirs. The sink is no factor of V."""
    if problem.rounding is None or not (problem.spec.dtype is FP16 or problem.spec.dtypes["v"] in FP8_DTYPES):
        return weights
    unit = weights.max(-1, keepdims=True, initial=0.0) if problem.spec.normalize == "softmax" else 1.0
    size = np.where(np.abs(weights) < 2.0**-14 * unit, 2.0**-25 * unit, 0.0)
    found: Array = weights + _error(problem.rounding, np.where(weights == 0.0, 0.0, size), "weight", at)
    return found


def _in_bytes(problem: Problem, weights: Array, at: tuple[int, ...]) -> Array:
    """Weights with the errors of numbers of e4m3, if the problem has rounding of such products. The largest weight of a row has
    none: it is a power of 2."""
    if problem.rounding is None or not problem.rounding.of_bytes:
        return weights
    largest = weights.max(-1, keepdims=True, initial=0.0)
    size = np.maximum(WEIGHT_OF_BYTES * weights, np.where(weights == 0.0, 0.0, LEAST_WEIGHT_OF_BYTES * largest))
    found: Array = weights + _error(problem.rounding, np.where(weights == largest, 0.0, size), "weight of bytes", at)
    return found


def dropout_rows(problem: Problem, b: int, h: int, rows: slice) -> XpArray | None:
    """What dropout multiplies the weights of one head with, for a block of query rows: [rows, kv_len]; None without dropout."""
    if problem.spec.dropout is None:
        return None
    names, *rest = surroundings(problem, b, h, rows)
    dropped = dropped_of(float(evaluate(problem.spec.dropout, names, *rest)))
    state = problem.inputs[RNG_STATE.name]
    random = bytes_of_pairs(state[0:1], state[1:2], b + 0 * names["k"], h, names["q"], names["k"])
    return _like(random >= dropped, problem.q) * kept_factor(dropped)


def dropped(problem: Problem, weights: XpArray, factors: XpArray) -> XpArray:
    """Weights times what dropout multiplies them with: a dropped weight is 0, an infinite one too."""
    return problem.xp.where(factors == 0.0, problem.xp.full_like(weights, 0.0), weights * factors)


def is_split(spec: AttentionSpec) -> bool:
    """Whether products may be those of numbers that are each the sum of two of bf16, as `precision high` allows."""
    return spec.dtype is FP32 and spec.precision == "high"


SUMS_OVER_HEAD_DIM = ("s", "dp")


def matrix_product(problem: Problem, a: XpArray, b: XpArray, result: str, at: tuple[int, ...]) -> XpArray:
    """`a @ b`; if the problem has rounding, with errors as fp32 may have them on any machine, the same each time.

    The error of a sum of n terms x is u sqrt(n + 36) |x|: 2.4 standard deviations of independent roundings, u sqrt(n / 6) |x|
    of n additions (Higham and Mary 2019) and 2.4 u |x| of terms of which each is three products of tf32. Sums over rows and
    keys, which are long and added in parts, have the error of their terms alone.

    A quarter of the elements has an error, so that sums of many errors are as large as usual, and of two heavy keys one has
    one. Each element has an error in one of four consecutive seeds: every fourth for the first four seeds, random ones for
    others. Scores that fp32 holds exactly, if they are `s` alone, have the error of their scale.
    """
    rounding = problem.rounding
    if rounding is None:
        return a @ b
    over_head_dim = math.sqrt(a.shape[-1] + 36.0) * unit_roundoff(FP32)
    unit = over_head_dim if result in SUMS_OVER_HEAD_DIM else rounding.term
    unit = math.hypot(unit, SPLIT_TERM if is_split(problem.spec) else 0.0)
    of_bytes = result == "s" and rounding.of_bytes
    unit = TERM_OF_BYTES if of_bytes else unit

    def product() -> tuple[XpArray, XpArray]:
        found, size = a @ b, unit * np.sqrt((a * a) @ (b * b))
        if result == "s" and not of_bytes and problem.spec.score is S and (exact := _are_exact(a, b)).any():
            size = np.where(exact, 0.0 if is_power_of_2(problem) else unit_roundoff(FP32) * np.abs(found), size)
        return found, size

    exact, size = rounding.kept((result, *at), product) if result == "s" else product()  # Q and K have no errors
    return exact + _error(rounding, size, result, at)


EXACT_BITS = 22  # bits of a sum that tensor cores, which cut off what is smaller, still hold exactly


def _are_exact(a: Array, b: Array) -> Array:
    """Whether the terms of each element of `a @ b`, and all sums of some of them, are multiples of one power of 2, which
    numbers of EXACT_BITS bits can be."""
    (of_rows, is_short), (of_columns, are_short) = _units(a), _units(b.T)
    if not (is_short.any() and are_short.any()):  # usual numbers: the product below is for others
        return np.zeros((len(a), b.shape[1]), bool)
    found: Array = np.abs(a) @ np.abs(b) <= 2.0**EXACT_BITS * of_rows[:, None] * of_columns
    return found


def _units(rows: Array) -> tuple[Array, Array]:
    """The largest power of 2 of which all elements of a row are multiples, and whether they are integers of few bits times it;
    0 of a row with an element that is not finite, or that has more bits than fp32."""
    numbers = np.asarray(rows, np.float64)
    is_finite = np.isfinite(numbers)
    fractions, exponents = np.frexp(np.where(is_finite, numbers, 0.0))
    whole = (fractions * 2.0**24).astype(np.int64)
    units = np.ldexp((whole & -whole).astype(np.float64), exponents - 24)
    units = np.where(whole == fractions * 2.0**24, units, 0.0)
    least = np.where(is_finite, np.where(numbers == 0.0, np.inf, units), 0.0).min(-1, initial=np.inf)
    least = np.where(np.isfinite(least), least, 1.0)
    largest = np.where(is_finite, np.abs(numbers), np.inf).max(-1, initial=0.0)
    return least, largest <= 2.0 ** (EXACT_BITS // 2) * least


def is_power_of_2(problem: Problem) -> bool:
    """Whether the scale is a power of 2, so that a product with it is exact."""
    names = {**problem.sizes, **problem.params}
    scale = evaluate(problem.spec.scale, names, lambda name, at: read_input(problem, name, at), problem.xp, lambda value: value)
    return np.ndim(scale) == 0 and math.frexp(abs(float(scale)))[0] == 0.5


def _error(rounding: Rounding, size: Array, result: str, at: tuple[int, ...]) -> Array:
    """`size` [rows, columns] with random signs, at a quarter of the elements; 0 elsewhere, and where it is not finite.

    Four consecutive seeds share one sign per element, as only one of them uses it.
    """
    division, part = divmod(rounding.seed, 4)
    key = (division, *result.encode(), *at)
    codes = rounding.kept(key, lambda: _codes(key, size.shape))
    signs = (codes == 2 * part).view(np.int8) - (codes == 2 * part + 1).view(np.int8)
    found: Array = signs * (size if np.isfinite(size).all() else np.where(np.isfinite(size), size, 0.0))
    return found


def _codes(key: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Random numbers for the errors of four consecutive seeds: twice the element's seed of the four, plus its sign."""
    codes = np.random.default_rng(key).integers(0, 8, shape, dtype=np.int8)
    if key[0]:
        return codes
    row, column = ((np.arange(length) & 3).astype(np.int8) for length in shape)  # the first seeds: every fourth element
    found: Array = 2 * (row[:, None] + column & 3) + (codes & 1)
    return found


def _softmax(
    problem: Problem, scores: XpArray, sink: XpArray | None, at: tuple[int, ...]
) -> tuple[XpArray, XpArray, XpArray | None]:
    """P, lse and the sink's weight. A row without keys has P = 0; its lse is the sink, or -inf without one.

    If the problem has rounding, exponents have the error of fp32: a score and its row's maximum are each rounded before they
    are subtracted, unless they are equal.
    """
    xp = problem.xp
    column = xp.full_like(scores.sum(-1)[:, None], -math.inf)
    floor = column if sink is None else xp.full_like(column, 0.0) + sink
    row_max = xp.maximum(xp.amax(scores, -1)[:, None], floor) if scores.shape[1] else floor
    shift = xp.where(row_max == -math.inf, xp.full_like(row_max, 0.0), row_max)
    exponents = scores - shift
    if problem.rounding is not None:
        finite = np.where(np.isfinite(scores), scores, 0.0)
        size = np.sqrt(finite * finite + shift * shift) * unit_roundoff(FP32)  # np.hypot takes ten times as long
        exponents = np.where(
            exponents < 0.0, np.minimum(exponents + _error(problem.rounding, size, "exponent", at), 0.0), exponents
        )
    weights = xp.exp(exponents)
    total = weights.sum(-1)[:, None]
    if sink is not None:
        total = total + xp.exp(floor - shift)
    empty = total == 0.0
    divisor = xp.where(empty, xp.full_like(total, 1.0), total)
    lse = xp.where(empty, xp.full_like(total, -math.inf), shift + xp.log(divisor))
    return weights / divisor, lse[:, 0], None if sink is None else xp.exp(floor - shift) / divisor


def _like(array: XpArray, example: XpArray) -> XpArray:
    """`array` in the precision of `example`."""
    return array.astype(example.dtype) if hasattr(array, "astype") else array.to(example.dtype)


def _arange(problem: Problem, start: int, stop: int) -> XpArray:
    return problem.xp.arange(start, stop, dtype=problem.xp.int64, **_place(problem))


def _number(problem: Problem, value: object) -> XpArray:
    """A number for an expression: torch's functions require tensors; numpy's are faster with Python's numbers. A param that is
    a tensor stays one, so that it has a gradient."""
    return problem.xp.number(value) if _place(problem) and isinstance(value, (int, float)) else value


def _place(problem: Problem) -> dict[str, object]:
    return {"device": problem.q.device} if problem.xp.__name__ == "torch" else {}


def read_input(problem: Problem, name: str, indices: tuple[XpArray, ...]) -> XpArray:
    """`input[indices]`. A dimension of size 1 is broadcast: it is read at 0 for every index. Without elements, which no pair
    reads, it is 0."""
    array = problem.inputs[name]
    if 0 in array.shape:
        return problem.xp.zeros(np.broadcast_shapes(*(np.shape(i) for i in indices)), dtype=array.dtype)
    declared = problem.spec.input(name)
    at = tuple(
        (i * 0 if size == 1 and isinstance(dim, str) else i)
        for i, size, dim in zip(indices, array.shape, declared.dims, strict=True)
    )
    return array[at]


def attention(problem: Problem, output: XpArray, lse: XpArray) -> tuple[XpArray, XpArray | None]:
    """O and lse of all heads, written to `output` and `lse`; None instead of lse if rows are not a softmax."""
    for b, h, rows in product(range(problem.q.shape[0]), range(problem.q.shape[1]), blocks_of_rows(problem)):
        output[b, h, rows], row_lse = attention_rows(problem, b, h, rows)
        if row_lse is not None:
            lse[b, h, rows] = row_lse
    return output, lse if problem.spec.normalize == "softmax" else None


def count_allowed(problem: Problem, batches: int, heads: int) -> int:
    """The number of pairs of a query and a key that the mask allows in the first `batches` and `heads`."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    if problem.spec.mask is None:
        return int(batches * heads * q_len * kv_len)
    total = 0
    for b, h, rows in product(range(batches), range(heads), blocks_of_rows(problem)):
        allowed = allowed_rows(problem, b, h, rows)
        total += int(problem.xp.broadcast_to(allowed, (rows.stop - rows.start, kv_len)).sum())
    return total


def blocks_of_rows(problem: Problem) -> list[slice]:
    """The query rows, as many at once as ROW_BUDGET allows."""
    q_len, step = problem.q.shape[2], max(1, ROW_BUDGET // max(1, int(problem.k.shape[2])))
    return [slice(start, min(start + step, q_len)) for start in range(0, q_len, step)]
