"""What pages show of this schedule for wide heads: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import pv_by_wgmma, qk_by_wgmma
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    visited, stages = tiles_visited(plan), f"pipeline stage, 1 of {plan.stages}, in parts"
    each, replaced = f"{plan.block_kv // 2} of a thread", "S: registers, P in their place"
    weights = Loop("the weights of S", each, "thread, unrolled", replaced, "void score_tile() {")
    copied = Loop("keys", visited, stages, "K, and V by another warp: global to shared by TMA", "load_key_tile(tile")
    inner = (qk_by_wgmma(spec, line="K_STEPS); ++step)"), weights, pv_by_wgmma(plan))
    scored = Loop("keys", visited, stages, "K, V: shared; P: to shared", "step<false>()", inner)
    followed = Loop("keys", visited, stages, "P, V: shared; the other columns of O: registers", "while (take_notice())")

    def role(name: str, who: str, moved: str, line: str, keys: Loop) -> Loop:
        return Loop(f"{name}: work tiles", "from a counter", who, moved, line, (keys,))

    stored = "half of O's columns, registers to shared to global"
    rows = f"Q: {plan.block_q} rows, global to shared by TMA"
    return {
        "hopper": kernel(
            "one for each SM",
            role("producer", "one warp", rows, "for (int next = blockIdx.x; next < works;", copied),
            role("first consumer", "one warpgroup", stored, "while (q_block != END)", scored),
            role("second consumer", "one warpgroup", stored, "if (at.q_block == END) break;", followed),
        )
    }
