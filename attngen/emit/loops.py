"""The loop nest of each schedule as data: what every loop runs over, who runs it, and where its operands lie.

A loop names the line of the emitted file that it stands for by a piece of that line, its `anchor`. `loop_nest` finds the lines,
and fails where one is not there: a nest that no longer describes the file cannot be shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.emit.kernel_source import KernelSource
from attngen.plan import fused_mma_needs, fused_simt, tiled
from attngen.plan.plan import Plan
from attngen.plan.tiling import Tile
from attngen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Loop:
    """One level of a nest. `role`: who runs its iterations, or what they are; `memory`: what it moves or reads, and where."""

    name: str
    range: str
    role: str
    memory: str
    anchor: str
    inner: tuple[Loop, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedLoop:
    """A loop, how deep it lies, and its line of the emitted file, counted from 1."""

    loop: Loop
    depth: int
    line: int


def loop_nest(spec: AttentionSpec, plan: Plan, source: KernelSource) -> tuple[PlacedLoop, ...]:
    """The nests of all kernels of `source`, in the order of their launches, the pre-pass left out."""
    nests = NESTS[plan.schedule](spec, plan)
    placed: list[PlacedLoop] = []
    for entry in source.entry_points:
        suffix = entry.name.removeprefix(f"{spec.name}_")
        if suffix in nests:
            blocks = Loop("blocks", str(entry.grid[0]), "block", nests[suffix].memory, f"{entry.name}(", nests[suffix].inner)
            placed += _placed(blocks, source.text.splitlines(), f"{entry.name}(")
    return tuple(placed)


def _placed(nest: Loop, lines: list[str], kernel: str) -> Iterator[PlacedLoop]:
    start = lines.index(kernel)
    end = next((i for i in range(start, len(lines)) if lines[i] == "}"), len(lines))

    def walk(loop: Loop, depth: int, after: int) -> Iterator[PlacedLoop]:
        """A loop stands below the one around it, or, in a function of the kernel's own, above."""
        order = (*range(after, end), *range(start, after))
        at = next((i for i in order if loop.anchor in lines[i]), None)
        assert at is not None, f"no line of {kernel} has {loop.anchor!r}"
        yield PlacedLoop(loop, depth, at + 1)
        for inner in loop.inner:
            yield from walk(inner, depth + 1, at + 1)

    return walk(nest, 0, start)


def _tiles(plan: Plan) -> str:
    """How a loop over tiles of keys is bounded, in words."""
    asked = "not empty" if plan.bounds.per_tile else "kv_begin to kv_end"
    return f"tiles of {plan.block_kv}, {asked}"


def _naive(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    keys = Loop("k", "kv_len", "thread", "S: global", "k < min(begin + SLICE, kv_len)")
    return {
        "scores": _kernel(
            "Q, K: global",
            Loop(
                "keys",
                f"{plan.threads}, one score each",
                "thread",
                "S: registers, then global",
                "threadIdx.x",
                (Loop("d", str(spec.head_dim), "thread", "Q, K: global", "d < min(begin + SLICE, HEAD_DIM)"),),
            ),
        ),
        spec.normalize: _kernel(
            "S: global, in place",
            Loop(
                "rows",
                f"{plan.threads}, one row each",
                "thread",
                "maximum and sum: registers",
                "threadIdx.x",
                (keys,) if spec.normalize == "softmax" else (),
            ),
        ),
        "weighted_sum": _kernel(
            "P, V: global",
            Loop(
                "dimensions",
                f"{spec.head_dim_v}, one each",
                "thread",
                "O: registers, then global",
                "threadIdx.x",
                (Loop("k", "kv_len", "thread", "P, V: global", "k < min(begin + SLICE, kv_len)"),),
            ),
        ),
    }


def _kernel(memory: str, *inner: Loop) -> Loop:
    """What a block does; its name, range and line are those of its entry point."""
    return Loop("", "", "block", memory, "", inner)


def _tiled(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    rows, columns = tiled.thread_grid(plan.warps)
    own_rows, own_keys = plan.block_q // rows, plan.block_kv // columns
    slices = tiled.slice_of(spec)

    def product(terms: str, count: int, operands: str, result: str, own: int, condition: str) -> Loop:
        products = Loop("products", f"{own_rows} x {own}", "thread, unrolled", f"{result}: registers", "part[r][")
        moved = f"{operands}: shared, to registers"
        one_slice = Loop(terms, str(slices), "thread", moved, f"int {terms} = 0; {terms} < SLICE", (products,))
        moved = f"{operands}: global, by way of registers, to shared"
        return Loop("slices", f"{count} / {slices} = {count // slices}", "pipeline stage", moved, condition, (one_slice,))

    dims = tiled.BLOCK_DV // columns
    row = Loop("keys of a row", "four a thread at a time", "thread", "S: global, in place", "k += THREADS * 4")
    return {
        "scores": _kernel(
            "a tile of S",
            product("d", spec.head_dim, "Q, K", "S", own_keys, "begin < HEAD_DIM; begin += SLICE"),
        ),
        spec.normalize: _kernel("a row of S", row),
        "weighted_sum": _kernel(
            f"{plan.block_q} rows of O",
            Loop(
                "keys",
                _tiles(plan),
                "block",
                "P: global",
                "while (tile < tile_end)",
                (product("k", plan.block_kv, "P, V", "O", dims, "begin < BLOCK_KV; begin += SLICE"),),
            ),
        ),
    }


def _fused_simt(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    rows, terms = plan.block_q // fused_simt.ROW_THREADS, fused_simt.slice_of(spec)
    keys, dims = plan.block_kv // fused_simt.COLUMN_THREADS, spec.head_dim_v // fused_simt.COLUMN_THREADS
    return {
        "fused": _kernel(
            f"Q: global to shared, {plan.block_q} rows",
            Loop(
                "keys",
                _tiles(plan),
                "block",
                "K, V: global to shared",
                "while (tile < tile_end)",
                (
                    Loop(
                        "S = Q K^T, d",
                        f"{spec.head_dim} / {terms} = {spec.head_dim // terms}",
                        "thread",
                        f"Q, K: shared; {rows} x {keys} of S: registers",
                        "begin < HEAD_DIM; begin += SLICE",
                    ),
                    *(
                        [Loop("softmax, rows", str(rows), "thread", "S: registers; P: shared", "r < ROWS; ++r) {")]
                        if spec.normalize == "softmax"
                        else []
                    ),
                    Loop(
                        "O += P V, k",
                        f"{plan.block_kv} / 4 = {plan.block_kv // 4}",
                        "thread",
                        f"P, V: shared; {rows} x {dims} of O: registers",
                        "k < BLOCK_KV; k += 4",
                    ),
                ),
            ),
        )
    }


def _fused_mma(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    operands = fused_mma_needs.operands(spec)
    rows = plan.block_q // plan.warps
    steps, keys = fused_mma_needs.padded_head_dim(spec) // 16, plan.block_kv // 16
    wide = fused_mma_needs.width_of_v(spec)
    q = "Q: registers" if plan.q_in_registers else "Q: shared"
    pv = "part < BLOCK_KV / 16 / SUMMED" if operands.split else "step < BLOCK_KV / 16"
    per_product = fused_mma_needs.summed(_tile(plan)) if operands.split else 1
    return {
        "fused": _kernel(
            f"Q: global to shared, {plan.block_q} rows",
            Loop(
                "rows",
                f"{plan.warps} x {rows}",
                "warp",
                f"{q}; O, maximum and sum: registers",
                "const int warp_row =",
                (
                    Loop(
                        "keys",
                        _tiles(plan),
                        f"pipeline stage, 1 of {plan.stages}",
                        "K, V: global to shared, in the background",
                        "const auto visit ="
                        if plan.half_tile
                        else "while (tile < tile_end)",  # what the loop does is above it then
                        (
                            Loop(
                                "S = Q K^T, 16 d a step",
                                str(steps),
                                "warp",
                                "K: shared, to registers; S: registers",
                                "step < K_STEPS; ++step) {",
                            ),
                            *(
                                [Loop("softmax, rows", str(rows // 8), "thread", "S: registers", "r < ROWS; ++r) {")]
                                if spec.normalize == "softmax"
                                else []
                            ),
                            Loop(
                                f"O += P V, {16 * per_product} keys a step",
                                str(keys // per_product),
                                "warp",
                                f"V: shared, to registers; P, {wide} columns of O: registers",
                                pv,
                            ),
                        ),
                    ),
                ),
            ),
        )
    }


def _tile(plan: Plan) -> Tile:
    return Tile(plan.block_q, plan.block_kv, plan.stages, plan.warps)


def _wgmma(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    return {
        "wgmma": _kernel(
            f"Q: global to shared by TMA, {plan.block_q} rows",
            Loop(
                "rows",
                f"{plan.warps // 4} x 64",
                "warpgroup",
                "O, maximum and sum: registers",
                "const int warp_row =",
                (
                    Loop(
                        "keys",
                        _tiles(plan),
                        f"pipeline stage, 1 of {plan.stages}",
                        "K, V: global to shared by TMA, in the background",
                        "while (tile < tile_end)",
                        (
                            _qk_by_wgmma(spec, plan),
                            *(
                                [Loop("softmax, rows", "2", "thread", "S: registers", "r < ROWS; ++r) {")]
                                if spec.normalize == "softmax"
                                else []
                            ),
                            _pv_by_wgmma(plan),
                        ),
                    ),
                ),
            ),
        )
    }


def _qk_by_wgmma(spec: AttentionSpec, plan: Plan) -> Loop:
    q = "Q: registers" if plan.q_in_registers else "Q: shared"
    steps = str(-(-spec.head_dim // 16))
    return Loop("S = Q K^T, 16 d a step", steps, "warpgroup", f"{q}; K: shared; S: registers", "step < K_STEPS; ++step)")


def _pv_by_wgmma(plan: Plan) -> Loop:
    steps = str(plan.block_kv // 16)
    what = "P: registers; V: shared; O: registers"
    return Loop("O += P V, 16 keys a step", steps, "warpgroup", what, "step < BLOCK_KV / 16; ++step)")


def _hopper(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    assert plan.roles is not None
    consumers = plan.roles.consumers
    stages = f"pipeline stage, 1 of {plan.stages}"
    products = (
        _qk_by_wgmma(spec, plan),
        Loop(
            "the weights of S",
            f"{plan.block_kv // 2} of a thread",
            "thread, unrolled",
            "S: registers, P in their place",
            "const auto weigh =",
        ),
        _pv_by_wgmma(plan),
    )
    visited = _tiles(plan)
    own = f"{visited}, of its own {plan.tile_rows} rows" if plan.tile_rows < plan.block_q else visited
    work = "from a counter"
    rows = f"Q: {plan.block_q} rows"
    return {
        "hopper": _kernel(
            "one for each SM",
            Loop(
                "producer: pieces of work",
                work,
                "one warp",
                f"{rows}, global to shared by TMA",
                "while (work < works)",
                (Loop("keys", visited, stages, "K, and V by another warp: global to shared by TMA", "load_keys(tile"),),
            ),
            Loop(
                "consumers: pieces of work",
                work,
                f"{consumers} warpgroups",
                "O: 64 rows a warpgroup, registers to shared to global",
                "while (q_block != END)",
                (Loop("keys", own, stages, "K, V: shared", "step(tile, false", products),),
            ),
        )
    }


NESTS = {
    "naive": _naive,
    "tiled": _tiled,
    "fused_simt": _fused_simt,
    "fused_mma": _fused_mma,
    "wgmma": _wgmma,
    "hopper": _hopper,
}
