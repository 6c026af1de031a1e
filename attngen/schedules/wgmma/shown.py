"""What pages show of this schedule: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import pv_by_wgmma, qk_by_wgmma, softmax_loop, tile_loop
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    products = (qk_by_wgmma(spec), *softmax_loop(plan, 2), pv_by_wgmma(plan))
    moved = "K, V: global to shared by TMA, in the background"
    tiles = tile_loop(plan, f"pipeline stage, 1 of {plan.stages}", moved, *products)
    held, warpgroups = "O, maximum and sum: registers", f"{plan.warps // 4} x 64"
    rows = Loop("rows", warpgroups, "warpgroup", held, "const int warp_row =", (tiles,))
    return {"wgmma": kernel(f"Q: global to shared by TMA, {plan.block_q} rows", rows)}
