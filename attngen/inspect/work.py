"""The cost of a problem: operations, bytes, and the roofline of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attngen.diagnostics import ArgumentError
from attngen.inspect.launch_work import LaunchWork, launches
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY, FULL, PARTIAL, classify_tiles, exact_integers, extents, pairs_in, pairs_visited
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.products import operations_of_a_pair
from attngen.plan.terms import TERMS
from attngen.reference.definition import Problem, allowed_rows
from attngen.reference.problems import Array, Sample
from attngen.schedules.parts.mma import operands
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import BF16, from_storage

SCORE_BYTES = 4  # scores in memory are fp32
MOST_TILES = 2**28  # at most so many are classified one by one, in some seconds
OF_A_BLOCK = 2**13  # tiles that take as long as what is computed once for each block
MOST_PAIRS = 2**32  # for which a mask is evaluated, in less than a minute
LEAST_SIDE, MOST_BLOCKS = 64, 4096  # least side of the tiles in which pairs are counted, and most tiles along the rows
PRODUCTS_FOR_ONE = 3  # with split operands


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of global memory that the instructions of one query head request, before any cache: Q, K, V, S and O, without
    captured tensors, lse, the partial results of splits, and what rotates rows before."""

    read: dict[str, int]
    written: dict[str, int]


def tile_positions(plan: Plan, problem: Sample) -> int:
    """The positions of the rows of a block: fewer than its rows if these are of several heads."""
    if not plan.schedule.packs_heads:
        return plan.block_q
    return max(plan.block_q * int(problem.k.shape[1]) // int(problem.q.shape[1]), 1)


def tile_kinds(
    plan: Plan, problem: Sample, names: Mapping[str, int | float], b: int = 0, h: int = 0, rows: int = 0
) -> Array | None:
    """The kind of every tile of one head: [q block, kv tile]; None on the naive schedule, which has none. `names` are sizes and
    params; a tile has the rows of a block, or `rows`."""
    if not plan.schedule.is_tiled:
        return None
    inputs = {n: from_storage(a) for n, a in problem.inputs.items()}
    rows = rows or tile_positions(plan, problem)
    missing = plan.missing_rows(int(names["q_len"])) if rows == plan.block_q else 0
    of_ranges = plan.block_q if plan.schedule.packs_heads else 0
    return classify_tiles(plan.bounds, rows, plan.block_kv, {**names, "b": b, "h": h}, inputs, missing, of_ranges)


def check_countable(plan: Plan, problem: Sample) -> None:
    """Raises ArgumentError if classifying the tiles of one head would take minutes."""
    if not plan.schedule.is_tiled:
        return
    q_len, kv_len = int(problem.q.shape[2]), int(problem.k.shape[2])
    rows = min(tile_positions(plan, problem), plan.tile_rows)
    blocks, tiles = -(-q_len // rows), -(-kv_len // plan.block_kv)
    if blocks * (tiles + OF_A_BLOCK) > MOST_TILES:
        raise ArgumentError(
            f"q_len {q_len} and kv_len {kv_len} have {blocks} x {tiles} tiles of {plan.keyword}, too many to classify one by "
            "one; choose shorter lengths"
        )


def requested(spec: AttentionSpec, plan: Plan, q_len: int, kv_len: int, kinds: Array | None) -> Traffic:
    """The closed formula; `kinds` are those of `tile_kinds`. Fused schedules read Q once, and K and V of each visited tile, and
    no scores; those that pack heads read K and V for all query heads that share them. Others read, for each visited pair of a
    row and a key, a row of Q and of K, or for a tile its rows; they write the score, read and write it in each pass of the
    normalization, and read it again for the columns of O that each block computes.
    """
    d, dv = spec.head_dim, spec.head_dim_v
    of_q, of_k, of_v, of_o = (dtype.bytes for dtype in spec.dtypes.values())
    output = {"O": q_len * dv * of_o}
    visited = None if kinds is None else kinds != EMPTY
    keys = q_len * kv_len if visited is None else int(visited.sum(0) @ extents(kv_len, plan.block_kv)[: visited.shape[1]])
    read = {"K": keys * d * of_k, "V": keys * dv * of_v}
    if plan.schedule.is_fused:
        return Traffic({"Q": q_len * d * of_q, **read}, output)
    rows = keys if visited is None else int(extents(q_len, plan.block_q)[: visited.shape[0]] @ visited.sum(1))
    scores, (passes, rewritten) = SCORE_BYTES * rows * (1 if visited is None else plan.block_kv), _passes(spec, plan)
    read |= {"Q": rows * d * of_q, "S": scores * (passes + -(-dv // plan.schedule.output_columns))}
    return Traffic(read, {"S": scores * (1 + rewritten), **output})


def _passes(spec: AttentionSpec, plan: Plan) -> tuple[int, int]:
    """The numbers of reads and writes of a score by the normalization."""
    of_softmax = 2 if plan.schedule.is_tiled else 3  # maximum, sum and quotient; tiled has maximum and sum in one
    return {"softmax": (of_softmax, 1), "sigmoid": (1, 1), "none": (0, 0)}[spec.normalize]


def allowed_pairs(spec: AttentionSpec, problem: Sample, params: Mapping[str, int | float]) -> int:
    """The number of pairs of a query and a key that the mask allows in batch 0 and head 0: all of full tiles, and those of
    partial tiles for which the mask is true. Raises ArgumentError if those have more than MOST_PAIRS pairs."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    if spec.mask is None:
        return int(q_len * kv_len)
    inputs = {n: exact_integers(from_storage(a)) for n, a in problem.inputs.items()}
    known = Problem(spec, problem.q, problem.k, problem.v, inputs, params, np)
    side = max(LEAST_SIDE, -(-q_len // MOST_BLOCKS))
    names = {**known.sizes, **params, "b": 0, "h": 0}
    kinds = classify_tiles(mask_bounds(spec), side, side, names, inputs)
    rows, keys = extents(q_len, side), extents(kv_len, side)
    tested = pairs_in(kinds == PARTIAL, rows, keys)
    if tested > MOST_PAIRS:
        raise ArgumentError(
            f"at q_len {q_len} and kv_len {kv_len} the mask would have to be evaluated for {tested} pairs, which no bounds of "
            "tiles decide; choose shorter lengths"
        )
    allowed = pairs_in(kinds == FULL, rows, keys)
    for block, of_block in enumerate(kinds == PARTIAL):
        unknown = (np.flatnonzero(of_block)[:, None] * side + np.arange(side)).ravel()
        unknown = unknown[unknown < kv_len]
        own = slice(block * side, block * side + int(rows[block]))
        found = allowed_rows(known, 0, 0, own, unknown)
        allowed += int(np.broadcast_to(found, (rows[block], len(unknown))).sum())
    return allowed


@dataclass(frozen=True, slots=True)
class Work:
    """One call of one schedule, batch 1, every head taken to be like head 0."""

    allowed_pairs: int
    visited_pairs: int  # pairs of the launch that multiplies the most
    operations: int  # those of the products that count (`attngen.plan.products`), over the pairs that the mask allows
    computed: int  # those of all products, over all pairs that are multiplied
    least_bytes: int  # if launches touch each of their tensors once; of K and V, only tiles that some row visits
    read: int | None  # by the instructions, before any cache; None of a backward
    written: int | None
    launches: tuple[LaunchWork, ...] = ()  # backward only

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.operations / max(self.least_bytes, 1)


def work(spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float]) -> Work:
    """The work of one call. `names` are all sizes and params."""
    if plan.direction == "backward":
        return _backward_work(spec, plan, problem, names)
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    kinds = tile_kinds(plan, problem, names)
    rows = tile_positions(plan, problem) if plan.schedule.packs_heads else plan.tile_rows
    visited = _visited(plan, q_len, kv_len, tile_kinds(plan, problem, names, rows=rows), rows)
    allowed = _allowed(spec, problem, names)
    traffic = requested(spec, plan, q_len, kv_len, kinds)
    of_a_pair = operations_of_a_pair(spec)
    of_q, of_k, of_v, of_o = (dtype.bytes for dtype in spec.dtypes.values())
    keys = kv_len if kinds is None else int((kinds != EMPTY).any(0) @ extents(kv_len, plan.block_kv))
    least = heads * q_len * (spec.head_dim * of_q + spec.head_dim_v * of_o)
    own_v = spec.head_dim_v if spec.values is None else 0
    least += kv_heads * keys * (spec.head_dim * of_k + own_v * of_v)
    least += sum(a.nbytes for a in problem.inputs.values())
    if plan.rotated:  # copies of Q and K are written and read
        least += 2 * of_q * (heads * q_len + kv_heads * kv_len) * spec.head_dim
    if plan.converted:  # and of K and V
        least += 2 * of_q * kv_heads * kv_len * (spec.head_dim + spec.head_dim_v)
    if plan.transposed:  # and of V
        least += 2 * of_v * kv_heads * kv_len * spec.head_dim_v
    if plan.in_terms:  # and the terms of all three
        in_terms = heads * q_len * spec.head_dim + kv_heads * kv_len * (spec.head_dim + spec.head_dim_v)
        least += 2 * TERMS * BF16.bytes * in_terms
    if not plan.schedule.is_fused:
        crossings = 2 if spec.normalize == "none" else 4  # written and read by each of the launches
        least += heads * SCORE_BYTES * crossings * _visited(plan, q_len, kv_len, kinds, rows, whole=True)
    readers = kv_heads * -(-heads // kv_heads // plan.block_q) if plan.schedule.packs_heads else heads  # how many read K and V
    read = sum((readers if tensor in ("K", "V") else heads) * n for tensor, n in traffic.read.items())
    return Work(
        heads * allowed, heads * visited, heads * allowed * of_a_pair, heads * visited * of_a_pair, least,
        read, heads * sum(traffic.written.values()),
    )  # fmt: skip


def _backward_work(spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float]) -> Work:
    found = tuple(launches(spec, plan, problem, names))
    allowed = problem.q.shape[1] * _allowed(spec, problem, names)
    return Work(
        allowed,
        max(one.visited_pairs for one in found),
        allowed * operations_of_a_pair(spec, plan.wanted),
        sum(one.computed for one in found),
        sum(one.bytes for one in found),
        None,
        None,
        found,
    )


def _allowed(spec: AttentionSpec, problem: Sample, names: Mapping[str, int | float]) -> int:
    return allowed_pairs(spec, problem, {p.name: names[p.name] for p in spec.params})


def _visited(plan: Plan, q_len: int, kv_len: int, kinds: Array | None, rows: int, whole: bool = False) -> int:
    """Pairs of the tiles of `rows` that are not empty; `whole`: keys past the end too."""
    return q_len * kv_len if kinds is None else pairs_visited(kinds, (q_len, kv_len), (rows, plan.block_kv), whole)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The limits of a GPU (Williams, Waterman and Patterson 2009): rates per second, and the time and rate of a `Work`."""

    units: str
    peak: float  # operations
    bandwidth: float  # bytes
    microseconds: float
    reachable: float  # operations per second
    by_memory: bool

    @property
    def ridge(self) -> float:
        """The intensity from which on arithmetic is the limit."""
        return self.peak / self.bandwidth


def roofline(spec: AttentionSpec, plan: Plan, cost: Work | LaunchWork) -> Roofline:
    """The roofline of a call, by the rates of the architecture's GPU; of a launch of a backward, for all that it computes."""
    operations, least_bytes = (cost.operations, cost.least_bytes) if isinstance(cost, Work) else (cost.computed, cost.bytes)
    units, peak = _peak(spec, plan)
    bandwidth, intensity = plan.arch.bandwidth_tb_s * 1e12, operations / max(least_bytes, 1)
    seconds = max(operations / peak, least_bytes / bandwidth)
    return Roofline(units, peak, bandwidth, seconds * 1e6, min(peak, intensity * bandwidth), intensity < peak / bandwidth)


def _peak(spec: AttentionSpec, plan: Plan) -> tuple[str, float]:
    """The unit of the products, and its operations per second."""
    if not plan.schedule.on_tensor_cores:
        return "fp32 arithmetic", plan.arch.fp32_tflops * 1e12
    tensor = plan.arch.tensor_tflops * 1e12
    split = operands(spec)
    if not split.split:
        return "tensor cores", tensor
    rate = tensor / 2 if split.split == "tf32" else tensor  # TF32 has half the rate of 16-bit types
    return f"tensor cores by {split.products}", rate / PRODUCTS_FOR_ONE
