"""What pages show of this schedule: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.hopper.choices import HopperPlan
from attngen.schedules.parts.loops import pv_by_wgmma, qk_by_wgmma
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    choices = HopperPlan.of_plan(plan)
    stages, visited = f"pipeline stage, 1 of {plan.stages}", tiles_visited(plan)
    own = f"{visited}, of its own {plan.tile_rows} rows" if plan.tile_rows < plan.block_q else visited
    each, replaced = f"{plan.block_kv // 2} of a thread", "S: registers, P in their place"
    weights = Loop("the weights of S", each, "thread, unrolled", replaced, "void score_tile() {")
    products = (qk_by_wgmma(spec, choices.q_in_registers), weights, pv_by_wgmma(plan))
    moved = "K, and V by another warp: global to shared by TMA"
    copied = Loop("keys", visited, stages, moved, "load_key_tile(tile")
    multiplied = Loop("keys", own, stages, "K, V: shared", "step<false>()", products)

    def role(name: str, who: str, moved: str, line: str, keys: Loop) -> Loop:
        return Loop(f"{name}: work tiles", "from a counter", who, moved, line, (keys,))

    def loader(moved: str) -> Loop:
        copied = Loop("keys", visited, "warp", moved, "void load_pair_tile(")
        return role("elements of pairs", "two warps", moved, "void load_pairs(int first) {", copied)

    rows = f"Q: {plan.block_q} rows, global to shared by TMA"
    warpgroups, stored = f"{choices.consumers} warpgroups", "O: 64 rows a warpgroup, registers to shared to global"
    producer = role("producer", "one warp", rows, "for (int next = blockIdx.x; next < works;", copied)
    return {
        "hopper": kernel(
            "one for each SM",
            producer,
            *(loader(f"{e.input}: global to shared by cp.async") for e in plan.staged.pairs),
            role("consumers", warpgroups, stored, "while (q_block != END)", multiplied),
        )
    }
