"""What pages show of this schedule: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import mma_products
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    of_warps = f"{tiles_visited(plan)}, every {plan.warps} * splits"
    role = f"pipeline stage, 1 of {plan.stages}"
    by_tma = plan.own.copies == "tma"
    moved = "K, V: global to shared by TMA" if by_tma else "K, V: global to shared, in the background"
    line = "mbarrier_wait(full_barriers + stage" if by_tma else "cp_async_wait<STAGES - 2>"
    tiles = Loop("keys", of_warps, role, moved, line, mma_products(plan, 2))
    held = f"Q: {'registers' if plan.own.q_in_registers else 'shared'}; O, maximum and sum: registers"
    warps = Loop("warps", str(plan.warps), "warp", held, "const int warp =", (tiles,))
    joined = Loop("splits", "splits", "thread", "partial O: global to registers", "i < splits; i += GROUPS")
    return {
        "split": kernel(f"Q: global to shared, {plan.block_q} rows of the heads that share keys", warps),
        "join": kernel("O: registers to global, one row", joined),
    }
