"""What pages show of decode by wgmma: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import pv_by_wgmma, qk_by_wgmma
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    visited, stages = f"{tiles_visited(plan)}, every splits-th", f"pipeline stage, 1 of {plan.stages}, in slabs"
    copied = Loop("keys", visited, stages, "K: global to shared by TMA", "for (int tile = first_tile; tile < tile_end")
    weights = Loop("the weights of S", f"{plan.block_kv // 2} of a thread", "thread, unrolled", "S: registers", "score")
    inner = (qk_by_wgmma(spec), weights, pv_by_wgmma(plan))
    scored = Loop("keys", visited, stages, "K, V: shared; P: registers and shared", "for (int i = CONSUMER; i < tiles", inner)
    roles = (
        Loop("producer", "1", "one warp", "K: global to shared", "if (warpgroup == CONSUMERS)", (copied,)),
        Loop("consumers", "2", "a warpgroup", "half of O's columns: registers", "const auto consume =", (scored,)),
    )
    joined = Loop("splits", "splits", "thread", "partial O: global to registers", "i < splits; i += GROUPS")
    return {
        "split": kernel(f"Q: global to shared, {plan.block_q} rows of the heads that share keys", *roles),
        "join": kernel("O: registers to global, one row", joined),
    }
