"""Sample problems of a spec: randn Q, K and V, and sensible values of captured tensors, as storage arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from attngen.spec.attention import SIZES, AttentionSpec, Input
from attngen.spec.dtypes import DType, round_to_storage, within_range
from attngen.spec.expr import Apply, Expr, Gather, Name, inputs_in, walk
from attngen.spec.rotary import Rotary

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a problem. Numbers of heads that the spec states take precedence."""

    batch: int = 2
    q_heads: int = 2
    kv_heads: int = 1
    q_len: int = 128
    kv_len: int = 128
    free: dict[str, int] = field(default_factory=dict, hash=False)

    def sizes(self, spec: AttentionSpec) -> dict[str, int]:
        sizes = {n: int(getattr(self, n)) for n in SIZES}
        if spec.q_heads is not None and spec.kv_heads is not None:
            sizes |= {"q_heads": spec.q_heads, "kv_heads": spec.kv_heads}
        tables = spec.rotary.tables if spec.rotary is not None else ()
        usual = {str(spec.input(table).dims[0]): max(self.q_len, self.kv_len) for table in tables}  # a position for each row
        return sizes | {d: self.free.get(d, usual.get(d, 64)) for d in spec.free_dims}


@dataclass(frozen=True, slots=True)
class Sample:
    """One problem: storage arrays q, k, v as compiled attention takes them, and captured tensors by name."""

    q: Array
    k: Array
    v: Array
    inputs: dict[str, Array]

    def arrays(self, spec: AttentionSpec) -> dict[str, Array]:
        """What a call of `spec` is given, by name: v only if it is a tensor of its own."""
        own = {} if spec.values is not None else {"v": self.v}
        return {"q": self.q, "k": self.k, **own, **self.inputs}


Scores = Literal["huge", "negative", "positive", "mixed", "falling", "rising", "equal"]


@dataclass(frozen=True, slots=True)
class Draw:
    """The distribution of a problem's values."""

    magnitude: float = 1.0  # multiplies Q, and so the scores
    # Along a sequence: sorted identifiers of documents, of two documents or of one, or positions in any order. With "least" all
    # integers are 0, 1 and the number of keys in turn; with "largest" they begin with the number of keys.
    integers: Literal["documents", "two documents", "one document", "positions", "least", "largest", "beyond"] = "documents"
    # Booleans over keys are true for this tile (rows, keys) and false for the keys after it, so that tiles of every class occur
    tile: tuple[int, int] | None = None
    hides_rows: bool = False  # they are false for a tile's rows after the first ones, and for each third row
    # Others than random ones are exact, and far from each other. "huge" ones of every second row, but of rows 64 to 95 of each
    # 256, are of the order of 2^28 or more, and negative in each eighth row. "negative" and "positive" ones are all so, and of
    # "mixed" ones those of a row, each second eight rows: the largest of a row may be anywhere. "falling" and "rising" ones are
    # negative, and fall or rise from key to key. "equal" ones are those of three neighbouring keys, of the order of 2^22.
    scores: Literal["random", Scores] = "random"
    # Integers along a sequence are the numbers of blocks of so many elements, the first one of so many fewer; they fall if the
    # length is negative
    blocks: tuple[int, int] | None = None
    broadcast: bool = False  # captured tensors have one element along batch and heads
    # Of a tensor's sinks, the first is NaN if there are keys, the second -inf, and the third near the largest number
    spoils_sinks: bool = False


USUAL = Draw()
AFTER_KEYS = 200  # by so much a number of keys exceeds kv_len
LARGEST = 3e38  # a sink near the largest number of fp32 and bf16
REMEMBERED = 2**21  # elements of Q, K and V that are kept for the next problem

# Factors of scores, exact in each element type. Keys have factors from 5 to 255: a row's scores are no smaller than 5 * MIDDLE
MIDDLE, LEVEL, HUGE, SMALL, HUGE_KEY = 2.0**9, 2.0**13, 2.0**15, 2.0**-14, 2.0**8


def _far_apart(spec: AttentionSpec, scores: Scores, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Q and K [batch, heads, length, head_dim] of which a row has one column that is not 0, another than the rows around it; if
    its scores are huge, it has all. A rotation leaves the last column almost as it is."""
    q, k = np.zeros(q_shape, np.float32), np.zeros(k_shape, np.float32)
    rows, keys = np.arange(q.shape[2]), np.arange(k.shape[2])[:, None]
    columns = np.arange(spec.head_dim) if spec.rotary is None else np.array([spec.head_dim - 1])
    steps = keys * 250 // max(len(keys) // 2, 250) // 2  # from 0 to 250, one more for two keys or more
    order = {"falling": steps, "equal": keys // 3 % 251, "rising": 250 - steps, "huge": (100 + 37 * keys) % 251}
    k[..., columns] = 5.0 + order.get(scores, (100 + 37 * (keys + columns)) % 251)
    if scores == "huge":
        k *= HUGE_KEY
        signs = np.where(rows % 8 == 6, -1.0, 1.0)
        q[..., columns] = np.where((rows % 2 == 0) & (rows % 256 // 32 != 2), signs * HUGE, SMALL)[:, None]
    elif scores == "equal":
        q[..., columns] = LEVEL
    else:
        is_positive = (rows + 8) // 16 % 2 == 0 if scores == "mixed" else np.full(rows.shape, scores == "positive")
        q[..., rows, columns[rows % len(columns)]] = np.where(is_positive, MIDDLE, -MIDDLE)
    return q, k


Shapes = tuple[tuple[int, ...], ...]


def _normal(
    dtypes: tuple[DType, ...], seed: int, shapes: Shapes, magnitude: float
) -> tuple[tuple[Array, ...], dict[str, object]]:
    """Random arrays of Q times `magnitude`, K and V, and the state of the generator after them."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    arrays[0] *= np.float32(magnitude)
    return tuple(map(round_to_storage, map(within_range, arrays, dtypes), dtypes)), dict(rng.bit_generator.state)


_remembered = lru_cache(16)(_normal)  # a search for problems asks for the same arrays beside other captured tensors


def sample(spec: AttentionSpec, shape: Shape, seed: int = 0, draw: Draw = USUAL) -> Sample:
    """Random arrays for `spec`. Captured integers are valid indices or counts; see `_values`."""
    sizes = shape.sizes(spec)
    each = (("q_heads", "q_len", spec.head_dim), ("kv_heads", "kv_len", spec.head_dim), ("kv_heads", "kv_len", spec.head_dim_v))
    shapes = tuple((sizes["batch"], sizes[heads], sizes[length], dim) for heads, length, dim in each)
    is_small = sum(map(math.prod, shapes)) <= REMEMBERED
    dtypes = tuple(spec.dtypes[name] for name in "qkv")
    stored, state = (_remembered if is_small else _normal)(dtypes, seed, shapes, draw.magnitude)
    q, k, v = (array.copy() for array in stored)  # callers may write to theirs
    if draw.scores != "random":
        q, k = _far_apart(spec, draw.scores, q.shape, k.shape)
        numbers = map(within_range, (q * np.float32(draw.magnitude), k), dtypes)
        q, k = map(round_to_storage, numbers, dtypes)
    v = v if spec.values is None else spec.values_of(k, None)
    rng = np.random.default_rng()
    rng.bit_generator.state = state
    return Sample(q, k, v, _inputs(spec, sizes, rng, draw))


def without_values(spec: AttentionSpec, shape: Shape) -> Sample:
    """The captured tensors of `sample_inputs`, with Q, K and V that have a shape and take no memory: for what reads no more."""
    sizes = shape.sizes(spec)

    def zeros(tensor: str, heads: str, length: str, head_dim: int) -> Array:
        zero = round_to_storage(np.zeros(()), spec.dtypes[tensor])
        return np.broadcast_to(zero, (sizes["batch"], sizes[heads], sizes[length], head_dim))

    k, v = (zeros(tensor, "kv_heads", "kv_len", d) for tensor, d in (("k", spec.head_dim), ("v", spec.head_dim_v)))
    return Sample(zeros("q", "q_heads", "q_len", spec.head_dim), k, v, sample_inputs(spec, shape))


def sample_inputs(spec: AttentionSpec, shape: Shape) -> dict[str, Array]:
    """The captured tensors of a problem, without Q, K and V; other values than in `sample`."""
    return _inputs(spec, shape.sizes(spec), np.random.default_rng(0), USUAL)


def _inputs(spec: AttentionSpec, sizes: dict[str, int], rng: np.random.Generator, draw: Draw) -> dict[str, Array]:
    found = {i.name: _values(spec, i, sizes, rng, draw) for i in spec.inputs}
    for name in captured_sinks(spec) if draw.spoils_sinks else ():
        spoiled = np.array([np.nan if sizes["kv_len"] else -np.inf, -np.inf, LARGEST], np.float32)
        sinks = found[name].reshape(-1)
        sinks[: len(spoiled)] = round_to_storage(spoiled[: sinks.size], spec.input(name).dtype)
    if not draw.broadcast:
        return found
    free = broadcast_dims(spec)
    one = {i.name: tuple(slice(1) if dim in free else slice(None) for dim in i.dims) for i in spec.inputs}
    return {name: array[one[name]] for name, array in found.items()}


def captured_sinks(spec: AttentionSpec) -> tuple[str, ...]:
    """The tensors of floats that the sink reads."""
    read = () if spec.sink is None else inputs_in(spec.sink)
    return tuple(i.name for i in spec.inputs if i.name in read and i.dtype.kind == "float")


def broadcast_dims(spec: AttentionSpec) -> tuple[str, ...]:
    """The dimensions of batch and heads, if the spec leaves them open, along which captured tensors may have one element."""
    return ("batch", "q_heads", "kv_heads") if spec.q_heads is None else ("batch",)


def _values(spec: AttentionSpec, declared: Input, sizes: dict[str, int], rng: np.random.Generator, draw: Draw) -> Array:
    """Booleans: most are true. Integers along a sequence: sorted identifiers of documents; others: lengths up to kv_len.
    Tables of a rotation: cosines and sines. Other floats: randn; if they multiply positions (ALiBi's slopes), small values that
    fall with the head."""
    shape = tuple(d if isinstance(d, int) else sizes[d] for d in declared.dims)
    if spec.rotary is not None and declared.name in spec.rotary.tables:
        return round_to_storage(_table(spec.rotary, declared.name, shape), declared.dtype)
    if declared.dtype.kind == "bool":
        return _booleans(declared, rng.random(shape) < 0.8, draw)
    if declared.dtype.kind == "int":
        if draw.integers in ("least", "largest", "beyond"):
            most = sizes["kv_len"] + (AFTER_KEYS if draw.integers == "beyond" else 0)
            return np.resize([0, 1, most] if draw.integers == "least" else [most, 0, 1], shape).astype(declared.dtype.numpy)
        if shape and declared.dims[-1] in ("q_len", "kv_len"):
            return _along_sequence(shape, sizes["kv_len"], rng, draw).astype(declared.dtype.numpy)
        return rng.integers(0, sizes["kv_len"] + 1, shape).astype(declared.dtype.numpy)
    if _products(spec, declared.name):
        heads = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
        return round_to_storage(np.exp2(-8.0 * heads / heads.size) * np.float32(_sign(spec, declared.name)), declared.dtype)
    return round_to_storage(rng.standard_normal(shape, dtype=np.float32), declared.dtype)


def _table(rotary: Rotary, name: str, shape: tuple[int, ...]) -> Array:
    """Cosines or sines of the usual angles: position / 10000^(2 pair / rotary_dim)."""
    positions, pairs = shape
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
    return (np.cos if name == rotary.cosines else np.sin)(angles).astype(np.float32)


def _along_sequence(shape: tuple[int, ...], kv_len: int, rng: np.random.Generator, draw: Draw) -> Array:
    if draw.blocks is not None:
        length, missing = draw.blocks
        numbers = (np.arange(shape[-1]) + missing) // abs(length)
        return np.broadcast_to(numbers if length > 0 else numbers.max(initial=0) - numbers, shape)
    if draw.integers == "one document":
        return np.zeros(shape, np.int64)
    if draw.integers == "positions":
        return rng.integers(0, kv_len + 1, shape)
    if draw.integers == "two documents":
        return (np.arange(shape[-1]) >= rng.integers(1, max(shape[-1], 2), (*shape[:-1], 1))).astype(np.int64)
    documents = max(1, shape[-1] // 48)
    return np.sort(rng.integers(0, documents + 1, shape), axis=-1)


def _booleans(declared: Input, values: Array, draw: Draw) -> Array:
    """`values` with one tile that is true and a tile beside it that is false."""
    if draw.tile is None or "kv_len" not in declared.dims:
        return values
    rows, keys = draw.tile
    for begin, value in ((0, True), (keys, False)):
        ends = {"q_len": slice(0, rows), "kv_len": slice(begin, begin + keys)}
        values[tuple(ends.get(str(d), slice(None)) for d in declared.dims)] = value
    if draw.hides_rows and "q_len" in declared.dims:
        for hidden in (slice(rows, 2 * rows), slice(2, None, 3)):
            values[tuple(hidden if d == "q_len" else slice(None) for d in declared.dims)] = False
    return values


def _products(spec: AttentionSpec, name: str) -> list[Apply]:
    return [
        node
        for node in walk(spec.score)
        if isinstance(node, Apply)
        and node.op == "mul"
        and any(isinstance(a, Gather) and a.input == name for a in node.args)
        and any(_is_position(a) for a in node.args)
    ]


def _is_position(node: Expr) -> bool:
    return not inputs_in(node) and any(isinstance(n, Name) and n.name in ("q", "k") for n in walk(node))


def _sign(spec: AttentionSpec, name: str) -> float:
    """-1 if the product is an exponent, so that it decays."""
    exponents = (n for n in walk(spec.score) if isinstance(n, Apply) and n.op in ("exp", "exp2"))
    return -1.0 if any(p in walk(n) for n in exponents for p in _products(spec, name)) else 1.0
