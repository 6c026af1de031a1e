"""What pages show of this schedule: its loops, its tiles in shared memory, its timeline."""

from __future__ import annotations

from attngen.diagnostics import counted
from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import mma_products
from attngen.schedules.timeline import COPY, STORE, TILES, Bar, Timeline, of_a_tile
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


def timeline(plan: Plan, weights: str) -> Timeline:
    ahead = plan.stages - 1
    copies = [Bar(0.5 * n, 2.5, f"K{n}, V{n}", COPY) for n in range(ahead)]
    work: list[Bar] = []
    for n in range(TILES):
        start = 3.0 + 3 * n
        if n + ahead < TILES:
            copies.append(Bar(start, 2.5, f"K{n + ahead}, V{n + ahead}", COPY))
        work += of_a_tile(start, n, weights)
    work.append(Bar(3.0 + 3 * TILES, 1, "sums", STORE))
    copied = counted(ahead, "tile")
    says = f"One warp: copies of {copied} are under way while one is multiplied. Other warps have other tiles."
    return Timeline({"TMA" if plan.own.copies == "tma" else "cp.async": tuple(copies), "warp": tuple(work)}, says)
