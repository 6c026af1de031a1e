"""What pages show of this schedule: its loops, its tiles in shared memory, its timeline."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import mma_products, tile_loop
from attngen.schedules.timeline import TILES, Timeline, copies_of, of_a_tile
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    rows, moved = plan.block_q // plan.warps, "K, V: global to shared, in the background"
    tiles = tile_loop(plan, f"pipeline stage, 1 of {plan.stages}", moved, *mma_products(plan, rows // 8))
    held = f"Q: {'registers' if plan.own.q_in_registers else 'shared'}; O, maximum and sum: registers"
    warps = Loop("rows", f"{plan.warps} x {rows}", "warp", held, "const int warp_row =", (tiles,))
    return {"fused": kernel(f"Q: global to shared, {plan.block_q} rows", warps)}


def timeline(plan: Plan, weights: str) -> Timeline:
    work = [bar for n in range(TILES) for bar in of_a_tile(1 + 3 * n, n, weights)]
    lanes = {"cp.async": copies_of(plan.stages), "warps": tuple(work)}
    says = (
        f"V is copied during Q K^T, the next K during the {weights} and P V: one buffer for each."
        if plan.stages == 1
        else "The next K and V are copied into the other stage while this one is used."
    )
    return Timeline(lanes, says)
