"""What pages show of the backward on tensor cores: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.fused_mma.backward_needs import FusedMmaBackwardPlan
from attngen.spec.attention import AttentionSpec

# What each kernel that visits tiles adds up by products.
SUMS = {
    "dk_dv": "dV += P^T dO, dK += dS^T Q",
    "dv": "dV += P^T dO",
    "dk": "dK += dS^T Q",
    "dq": "dQ += dS K",
}


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    own = FusedMmaBackwardPlan.of_plan(plan)
    which = "not empty" if plan.bounds.per_tile else "begin to end"
    own_rows = plan.block_q // own.shares  # rows of a tile per warp

    def part(scores: str, sums: str) -> Loop:
        products = Loop(f"{scores}; {sums}", "16 d, then 16 columns, a step", "warp", "registers", "multiply_rows<")
        return Loop(
            "part", f"{own_rows // own.part} x {own.part} columns", "warp", "S, dP: registers", "part += PART", (products,)
        )

    def tiles(streamed: str, *inner: Loop) -> Loop:
        stages = f"pipeline stage, 1 of {plan.stages}"
        moved = f"{streamed}: global to shared, in the background"
        return Loop("tiles", f"tiles of {plan.block_q}, {which}", stages, moved, "while (tile < tile_end)", inner)

    def of_keys(*inner: Loop) -> Loop:
        group = Loop("h", "group_size", "block", "Q, dO", "++h_idx) {", (tiles("Q, dO", *inner),))
        keys = plan.block_kv * own.shares // plan.warps
        warps = f"{plan.warps // own.shares} x {keys}"
        who = "warp" if own.shares == 1 else f"{own.shares} warps"
        held = Loop("keys", warps, who, "K, V: shared; dK, dV: registers", "const KeyBlock key_block =", (group,))
        return kernel(f"K, V: global to shared, {plan.block_kv} keys", held)

    rows = plan.block_q // plan.warps
    sums_of_keys = {name: of_keys(part("S^T, dP^T", SUMS[name])) for name in ("dk_dv", "dv", "dk")}
    if own.dq == "additions":
        late = Loop("dQ = dS K", f"{plan.block_kv // 16} steps of 16 keys", "warp", "dS^T: shared", "multiply_stored<")
        sums_of_keys["dk_dv"] = of_keys(part("S^T, dP^T", SUMS["dk_dv"]), late)
    if own.adding == "all_rows":
        pairs = Loop("S^T, dP^T", "16 d a step", "warp", "S, dP: registers", "multiply_rows<")
        steps = f"{plan.block_q // 16} steps of 16 rows"
        sums_of_keys["dk_dv"] = of_keys(
            pairs, Loop(SUMS["dk_dv"], steps, "warp", "P^T, dS^T: shared", "multiply_stored<"), late
        )

    def of_rows(held: str, sums: str) -> Loop:
        visited = (tiles("K, V", part("S, dP", sums)),)
        own = Loop("rows", f"{plan.warps} x {rows}", "warp", held, "const int warp_row =", visited)
        return kernel(f"Q, dO: global to shared, {plan.block_q} rows", own)

    lanes = Loop("d", str(spec.head_dim_v), "lanes that share a row", "O, dO: global", "column < HEAD_DIM_V")
    delta = kernel("O, dO: global", lanes)
    if own.delta == "sums over keys":
        delta = of_rows("Q, dO: shared; delta: registers", "delta += P dP")
    chunks = Loop(
        "chunks", str(own.dq_part.chunks if own.dq_part else 1), "warp", "dQ: registers to shared to global", "++chunk)"
    )
    every = {
        **sums_of_keys,
        "delta": delta,
        "dq": of_rows("Q, dO: shared; dQ: registers", SUMS["dq"]),
        "convert_dq": kernel("sums of dQ: global", chunks),
    }
    return {name: every[name] for name in own.kernels}
