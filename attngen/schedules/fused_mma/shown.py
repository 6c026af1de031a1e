"""What pages show of this schedule: its loops, its tiles in shared memory, its timeline."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.tile_loops import softmax_loop, tile_loop
from attngen.schedules.timeline import TILES, Timeline, copies_of, of_a_tile
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    split = plan.own.split
    rows, per_product = plan.block_q // plan.warps, plan.own.summed if split else 1
    qk, pv = "K: shared, to registers; S: registers", f"V: shared, to registers; P, {plan.own.v_width} columns of O: registers"
    steps = "part < BLOCK_KV / 16 / SUMMED" if split else "step < BLOCK_KV / 16"
    keys = str(plan.block_kv // 16 // per_product)
    products = (
        Loop("S = Q K^T, 16 d a step", str(plan.own.qk_width // 16), "warp", qk, "step < K_STEPS; ++step) {"),
        *softmax_loop(plan, rows // 8),
        Loop(f"O += P V, {16 * per_product} keys a step", keys, "warp", pv, steps),
    )
    tiles = tile_loop(plan, f"pipeline stage, 1 of {plan.stages}", "K, V: global to shared, in the background", *products)
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
