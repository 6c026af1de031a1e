"""What pages show of this schedule: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.fused_mma.plan import FusedMmaPlan
from attngen.schedules.parts.loops import mma_products, tile_loop
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    moved = "K, V: global to shared, in the background"
    if FusedMmaPlan.of_plan(plan).warps_have == "columns":
        tiles = tile_loop(plan, f"pipeline stage, 1 of {plan.stages}", moved, *mma_products(plan, 2))
        shared = Loop(
            "warps", str(plan.warps), "warp", "Q, P: shared; O, maximum and sum: registers", "const int own_row =", (tiles,)
        )
        return {"fused": kernel(f"Q: global to shared, {plan.block_q} rows", shared)}
    rows = plan.block_q // plan.warps
    tiles = tile_loop(plan, f"pipeline stage, 1 of {plan.stages}", moved, *mma_products(plan, rows // 8))
    held = f"Q: {'registers' if plan.own.q_in_registers else 'shared'}; O, maximum and sum: registers"
    warps = Loop("rows", f"{plan.warps} x {rows}", "warp", held, "const int warp_row =", (tiles,))
    return {"fused": kernel(f"Q: global to shared, {plan.block_q} rows", warps)}
