"""The loops, and the tiles in shared memory, of the tiled schedule, as pages show them."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.plan.shared_memory import ROW, Layout
from attngen.schedules.parts.loops import tile_loop
from attngen.schedules.tiled import plan as tiled
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    own = tiled.TiledPlan.of_plan(plan)
    rows, columns = own.row_threads, own.column_threads
    own_rows, own_keys = plan.block_q // rows, plan.block_kv // columns
    slices = own.slice

    def product(terms: str, count: int, operands: str, result: str, own: int, condition: str) -> Loop:
        products = Loop("products", f"{own_rows} x {own}", "thread, unrolled", f"{result}: registers", "part[r][")
        moved = f"{operands}: shared, to registers"
        one_slice = Loop(terms, str(slices), "thread", moved, f"int {terms} = 0; {terms} < SLICE", (products,))
        moved = f"{operands}: global, by way of registers, to shared"
        return Loop("slices", f"{count} / {slices} = {count // slices}", "pipeline stage", moved, condition, (one_slice,))

    dims = tiled.BLOCK_DV // columns
    row = Loop("keys of a row", "four a thread at a time", "thread", "S: global, in place", "k += THREADS * 4")
    pv = product("k", plan.block_kv, "P, V", "O", dims, "begin < BLOCK_KV; begin += SLICE")
    element = Loop("weights", f"{plan.block_q} x {plan.block_kv}", "thread", "P: global, in place", "i < BLOCK_Q * BLOCK_KV")
    drops = {"dropout": kernel("a tile of P", element)}
    return {
        "scores": kernel("a tile of S", product("d", spec.head_dim, "Q, K", "S", own_keys, "begin < HEAD_DIM; begin += SLICE")),
        spec.normalize: kernel("a row of S", row),
        **(drops if spec.dropout is not None else {}),
        "weighted_sum": kernel(f"{plan.block_q} rows of O", tile_loop(plan, "block", "P: global", pv)),
    }


def layouts(spec: AttentionSpec, plan: Plan) -> tuple[Layout, ...]:
    """The layouts of slices of SLICE terms. All but V are transposed, so that a row has what a warp reads in one step."""
    own = tiled.TiledPlan.of_plan(plan)
    terms, gap = own.slice, (tiled.ROWS_PER_PAD, 4 * own.pad)
    widths = {"Q": plan.block_q, "K": plan.block_kv, "P": plan.block_q}
    padded = [Layout(f"{name}, transposed", terms, 4 * width, 4 * width, ROW, gap=gap) for name, width in widths.items()]
    return (*padded, Layout("V", terms, 4 * tiled.BLOCK_DV, 4 * tiled.BLOCK_DV, ROW))
