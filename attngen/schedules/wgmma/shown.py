"""What pages show of this schedule: its loops, its tiles in shared memory, its timeline."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import pv_by_wgmma, qk_by_wgmma, softmax_loop, tile_loop
from attngen.schedules.timeline import PRODUCT, SOFTMAX, TILES, Timeline, copies_of, of_a_tile
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    products = (qk_by_wgmma(spec), *softmax_loop(plan, 2), pv_by_wgmma(plan))
    moved = "K, V: global to shared by TMA, in the background"
    tiles = tile_loop(plan, f"pipeline stage, 1 of {plan.stages}", moved, *products)
    held, warpgroups = "O, maximum and sum: registers", f"{plan.warps // 4} x 64"
    rows = Loop("rows", warpgroups, "warpgroup", held, "const int warp_row =", (tiles,))
    return {"wgmma": kernel(f"Q: global to shared by TMA, {plan.block_q} rows", rows)}


def timeline(plan: Plan, weights: str) -> Timeline:
    """As fused with two stages; a product is in the background, but its warpgroup waits for it."""
    work = [bar for n in range(TILES) for bar in of_a_tile(1 + 3 * n, n, weights)]
    products = tuple(bar for bar in work if bar.kind == PRODUCT)
    between = tuple(bar for bar in work if bar.kind == SOFTMAX)
    lanes = {"TMA": copies_of(plan.stages), "wgmma": products, f"{weights}, the same warps": between}
    says = (
        "TMA copies the next K and V into the other stage while this one is used. Tensor cores and threads take turns: each "
        "waits for the other."
    )
    return Timeline(lanes, says)
