"""What pages show of the backward on tensor cores: its loops and its timeline."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.timeline import COPY, PRODUCT, SOFTMAX, TILES, Bar, Timeline
from attngen.spec.attention import AttentionSpec

# What each kernel that visits tiles adds up.
SUMS = {
    "dk_dv": "dV += P^T dO, dK += dS^T Q",
    "dv": "dV += P^T dO",
    "dk": "dK += dS^T Q",
    "dq": "dQ += dS K",
}


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    rows, own = plan.block_q // plan.warps, plan.own
    which = "not empty" if plan.bounds.per_tile else "begin to end"

    def part(sums: str) -> Loop:
        scores, grads = ("S^T, dP^T", sums) if "dQ" not in sums else ("S, dP", sums)
        products = Loop(f"{scores}; {grads}", "16 d, then 16 columns, a step", "warp", "registers", "multiply_rows<")
        return Loop(
            "part", f"{plan.block_q // own.part} x {own.part} columns", "warp", "S, dP: registers", "part += PART", (products,)
        )

    def tiles(streamed: str, sums: str) -> Loop:
        stages = f"pipeline stage, 1 of {plan.stages}"
        moved = f"{streamed}: global to shared, in the background"
        return Loop("tiles", f"tiles of {plan.block_q}, {which}", stages, moved, "while (tile < tile_end)", (part(sums),))

    def of_keys(sums: str) -> Loop:
        group = Loop("h", "group_size", "block", "Q, dO", "++h_idx) {", (tiles("Q, dO", sums),))
        own_keys = Loop(
            "keys", f"{plan.warps} x {rows}", "warp", "K, V: shared; dK, dV: registers", "const int warp_key =", (group,)
        )
        return kernel(f"K, V: global to shared, {plan.block_kv} keys", own_keys)

    by_query = Loop(
        "rows",
        f"{plan.warps} x {rows}",
        "warp",
        "Q, dO: shared; dQ: registers",
        "const int warp_row =",
        (tiles("K, V", SUMS["dq"]),),
    )
    lanes = Loop("d", str(spec.head_dim_v), "lanes that share a row", "O, dO: global", "column < HEAD_DIM_V")
    every = {
        "delta": kernel("O, dO: global", lanes),
        "dq": kernel(f"Q, dO: global to shared, {plan.block_q} rows", by_query),
    }
    return {name: every[name] if name in every else of_keys(SUMS[name]) for name in own.kernels}


def timeline(plan: Plan, weights: str) -> Timeline:
    visiting = [name for name in plan.own.kernels if name != "delta"]
    work, copies, start = [], [], 0.0
    if "delta" in plan.own.kernels:
        work.append(Bar(0, 1, "delta", SOFTMAX))
        start = 1.0
    for name in visiting:
        copies.append(Bar(start, 1, "tile 0", COPY))
        for n in range(TILES // 2):
            begin = start + 1 + 4 * n
            if n + 1 < TILES // 2:
                copies.append(Bar(begin if plan.stages == 2 else begin + 3, 1, f"tile {n + 1}", COPY))
            bars = (("S, dP", PRODUCT, 1.2), (weights, SOFTMAX, 0.6), (SUMS[name], PRODUCT, 1.2))
            for label, kind, length in bars:
                work.append(Bar(begin, length, label, kind))
                begin += length
        start = begin + 1
    says = "One kernel after the other. "
    says += (
        "The next tile is copied into the other stage while one is multiplied."
        if plan.stages == 2
        else "A block waits for each tile; another block on the same multiprocessor multiplies meanwhile."
    )
    return Timeline({"cp.async": tuple(copies), "warps": tuple(work)}, says)
