"""What a problem costs: operations, bytes, and what the roofline of an architecture allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngen.plan import Plan
from attngen.plan.fused_mma_needs import operands
from attngen.plan.tile_map import EMPTY, classify_tiles, staggered_steps, upper_ends
from attngen.plan.tiled import BLOCK_DV
from attngen.reference.definition import Problem, allowed_rows, block_rows
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage

Array = np.ndarray[Any, Any]
SCORE_BYTES = 4  # scores in memory are fp32
PRODUCTS_FOR_ONE = 3  # of split operands


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of global memory that the instructions of one query head ask for, before any cache; of Q, K, V, S and O, not of
    captured tensors and lse."""

    read: dict[str, int]
    written: dict[str, int]


def tile_kinds(
    spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float], b: int = 0, h: int = 0, rows: int = 0
) -> Array | None:
    """The kind of every tile of one head: [q block, kv tile]; None on the naive rung, which has none. `names` are sizes and
    params; a tile has the rows of a block, or `rows`."""
    if plan.rung == "naive":
        return None
    inputs = {n: from_storage(a) for n, a in problem.inputs.items()}
    of_block = rows in (0, plan.block_q)
    missing = plan.missing_rows(int(names["q_len"])) if of_block else 0
    return classify_tiles(plan.bounds, rows or plan.block_q, plan.block_kv, {**names, "b": b, "h": h}, inputs, missing)


def loaded_tiles(
    spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float], b: int = 0, h: int = 0
) -> Array | None:
    """Whether each tile of one head is loaded: [q block, kv tile]; None on the naive rung, which has none. Those that are not
    empty; a block whose halves have tiles of their own loads the tile after the upper half's last one too."""
    if plan.staggered:
        return _in_steps(plan, problem, {**names, "b": b, "h": h}, 1)
    kinds = tile_kinds(spec, plan, problem, names, b, h)
    return None if kinds is None else kinds != EMPTY


def _in_steps(plan: Plan, problem: Sample, names: Mapping[str, int | float], more: int = 0) -> Array:
    """Of a block whose halves have tiles of their own: the upper half's, and `more` after them."""
    inputs = {n: from_storage(a) for n, a in problem.inputs.items()}
    tiles = np.arange(-(-int(names["kv_len"]) // plan.block_kv))
    steps = np.array(staggered_steps(plan.bounds, plan.block_q, plan.block_kv, names, inputs)).reshape(-1, 2)
    return (tiles >= steps[:, :1]) & (tiles < steps[:, 1:] + more)


def requested(spec: AttentionSpec, plan: Plan, q_len: int, kv_len: int, visited: Array | None) -> Traffic:
    """The closed formula of each rung; `visited`: the `loaded_tiles`. A pair of a row and a key is computed by

    naive: reading a row of Q, a row of K; writing its score, and reading and writing it in each pass of the normalization;
    reading it, and an element of V, for each dimension of O.
    tiled: as whole tiles: rows of Q and of K for each tile that is visited, scores written and read a tile at a time, P read
    again for every BLOCK_DV dimensions of O.
    fused, wgmma and hopper: Q once, and K and V of each tile that is visited; no scores.
    """
    e, d, dv = spec.dtype.bytes, spec.head_dim, spec.head_dim_v
    passes, rewritten = _passes(spec, plan)
    output = {"O": q_len * dv * e}
    if visited is None:
        pairs = q_len * kv_len
        scores = SCORE_BYTES * pairs
        read = {"Q": pairs * d * e, "K": pairs * d * e, "V": pairs * dv * e, "S": scores * (passes + dv)}
        return Traffic(read, {"S": scores * (1 + rewritten), **output})
    rows = _extents(q_len, plan.block_q)[: visited.shape[0]]
    keys = _extents(kv_len, plan.block_kv)[: visited.shape[1]]
    tile_rows, tile_keys = int(rows @ visited.sum(1)), int(visited.sum(0) @ keys)
    read = {"K": tile_keys * d * e, "V": tile_keys * dv * e}
    if plan.is_fused:
        return Traffic({"Q": q_len * d * e, **read}, output)
    scores = SCORE_BYTES * tile_rows * plan.block_kv
    read |= {"Q": tile_rows * d * e, "S": scores * (passes + -(-dv // BLOCK_DV))}
    return Traffic(read, {"S": scores * (1 + rewritten), **output})


def _passes(spec: AttentionSpec, plan: Plan) -> tuple[int, int]:
    """How often the normalization reads a score, and how often it writes it."""
    of_softmax = 3 if plan.rung == "naive" else 2  # maximum, sum and quotient; the tiled rung has maximum and sum in one
    return {"softmax": (of_softmax, 1), "sigmoid": (1, 1), "none": (0, 0)}[spec.normalize]


def _extents(length: int, block: int) -> Array:
    """How many rows each block has."""
    starts = np.arange(0, length, block)
    return np.minimum(starts + block, length) - starts


def allowed_pairs(spec: AttentionSpec, problem: Sample, params: Mapping[str, int | float]) -> int:
    """How many pairs of a query and a key the mask of batch 0 and head 0 allows."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    if spec.mask is None:
        return int(q_len * kv_len)
    inputs = {n: _integers(from_storage(a)) for n, a in problem.inputs.items()}
    whole = Problem(spec, problem.q, problem.k, problem.v, inputs, params, np)
    step = block_rows(whole)
    blocks = (slice(start, min(start + step, q_len)) for start in range(0, q_len, step))
    return sum(int(np.broadcast_to(allowed_rows(whole, 0, 0, rows), (rows.stop - rows.start, kv_len)).sum()) for rows in blocks)


def _integers(array: Array) -> Array:
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


@dataclass(frozen=True, slots=True)
class Work:
    """One call of one rung, batch 1, every head taken to be like head 0.

    `operations` are those of the two products over the pairs that the mask allows, `computed` over all pairs that are
    multiplied. `least_bytes` is what the launches move if each touches each of its tensors once.
    """

    allowed_pairs: int
    visited_pairs: int
    operations: int
    computed: int
    least_bytes: int
    read: int
    written: int

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.operations / max(self.least_bytes, 1)


def work(spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float]) -> Work:
    """What one call costs. `names` are all sizes and params."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    kinds = tile_kinds(spec, plan, problem, names)
    if plan.staggered:
        visited = int(
            _extents(q_len, plan.block_q)
            @ _in_steps(plan, problem, {**names, "b": 0, "h": 0})
            @ _extents(kv_len, plan.block_kv)
        )
    else:
        visited = _visited(plan, q_len, kv_len, tile_kinds(spec, plan, problem, names, rows=plan.tile_rows))
    if plan.half_tile and kinds is not None:
        visited -= _left_out(plan, problem, {**names, "b": 0, "h": 0}, kinds)
    allowed = allowed_pairs(spec, problem, {p.name: names[p.name] for p in spec.params})
    asked = requested(spec, plan, q_len, kv_len, loaded_tiles(spec, plan, problem, names))
    of_a_pair = 2 * (spec.head_dim + spec.head_dim_v)
    e = spec.dtype.bytes
    least = e * (heads * q_len + kv_heads * kv_len) * (spec.head_dim + spec.head_dim_v)
    least += sum(a.nbytes for a in problem.inputs.values())
    if not plan.is_fused:
        crossings = 2 if spec.normalize == "none" else 4  # written and read by each of the launches
        least += heads * SCORE_BYTES * crossings * _visited(plan, q_len, kv_len, kinds, whole=True)
    return Work(
        heads * allowed, heads * visited, heads * allowed * of_a_pair, heads * visited * of_a_pair, least,
        heads * sum(asked.read.values()), heads * sum(asked.written.values()),
    )  # fmt: skip


def _visited(plan: Plan, q_len: int, kv_len: int, kinds: Array | None, whole: bool = False) -> int:
    """Pairs of the tiles that are not empty, of a block's rows or of a consumer's; `whole`: keys past the end too."""
    if kinds is None:
        return q_len * kv_len
    visited = kinds != EMPTY
    keys = np.full(visited.shape[1], plan.block_kv) if whole else _extents(kv_len, plan.block_kv)
    return int(_extents(q_len, plan.tile_rows) @ visited @ keys)


def _left_out(plan: Plan, problem: Sample, names: Mapping[str, int | float], kinds: Array) -> int:
    """Pairs of the upper halves of rows with tiles that are multiplied for the lower halves alone."""
    inputs = {n: from_storage(a) for n, a in problem.inputs.items()}
    ends = np.array(upper_ends(plan.bounds, plan.block_q, plan.block_kv, names, inputs))
    alone = (kinds != EMPTY) & (np.arange(kinds.shape[1]) >= ends[:, None])
    rows = np.minimum(_extents(int(names["q_len"]), plan.block_q), plan.block_q // 2)
    return int(rows @ alone @ _extents(int(names["kv_len"]), plan.block_kv))


@dataclass(frozen=True, slots=True)
class Roofline:
    """The bounds of a GPU (Williams, Waterman and Patterson 2009): rates per second, and what a `Work` can reach under them."""

    units: str
    peak: float  # operations
    bandwidth: float  # bytes
    microseconds: float
    reachable: float  # operations per second
    by_memory: bool

    @property
    def ridge(self) -> float:
        """The intensity from which on arithmetic is the bound."""
        return self.peak / self.bandwidth


def roofline(spec: AttentionSpec, plan: Plan, cost: Work) -> Roofline:
    """Where `cost` lies under the roof of the plan's architecture, by the rates of its `gpu`."""
    units, peak = _peak(spec, plan)
    bandwidth = plan.arch.bandwidth_tb_s * 1e12
    seconds = max(cost.operations / peak, cost.least_bytes / bandwidth)
    by_memory = cost.intensity < peak / bandwidth
    reachable = min(peak, cost.intensity * bandwidth)
    return Roofline(units, peak, bandwidth, seconds * 1e6, reachable, by_memory)


def _peak(spec: AttentionSpec, plan: Plan) -> tuple[str, float]:
    """What computes, and its operations per second."""
    if not plan.on_tensor_cores:
        return "fp32 arithmetic", plan.arch.fp32_tflops * 1e12
    tensor = plan.arch.tensor_tflops * 1e12
    split = operands(spec)
    if not split.split:
        return "tensor cores", tensor
    rate = tensor / 2 if split.split == "tf32" else tensor  # numbers of 32 bits at half the rate of those of 16
    return f"tensor cores by {split.products}", rate / PRODUCTS_FOR_ONE
