"""What pages show of the Hopper backward: its loops."""

from __future__ import annotations

from dataclasses import replace

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.hopper_backward.plan import HopperBackwardPlan
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import gradient_argument


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    own = HopperBackwardPlan.of_plan(plan)
    stages = f"pipeline stage, 1 of {plan.stages}"
    visited = f"tiles of {plan.block_q}, {'not empty' if plan.bounds.per_tile else 'begin to end'}"

    def role(name: str, who: str, moved: str, start: str, tiles: Loop) -> Loop:
        return Loop(f"{name}: work tiles", "from a counter", who, moved, start, (tiles,))

    def follower(who: str, moved: str) -> Loop:
        tiles = Loop("tiles", visited, who, moved, "for (; !is_end; tile_at.advance(STAGES)) {")
        return role("followers", who, moved, "void visit_tiles(const Tile& tile) {", tiles)

    followers = (
        *(follower("one warp", f"{e.input}: global to shared by cp.async") for e in plan.staged.pairs),
        *(follower("two warps", f"dS: shared to global, {gradient_argument(n)}") for n in plan.written_pairs),
    )

    def of(held: str, seen: str, sums: str, products: dict[str, str]) -> Loop:
        copied = Loop("tiles", visited, stages, f"{seen}: global to shared by TMA", "for (bool first = true;; first = false) {")
        pairs = f"64 x {plan.block_kv // 2 if own.by_halves else 64} pairs"
        inner = tuple(Loop(p, pairs, "warpgroup", "S, dP: registers", line) for p, line in products.items())
        multiplied = Loop("tiles", visited, stages, f"{seen}: shared", "while (!is_last(visit))", inner)
        producer = role("producer", "one warp", f"{held}: global to shared by TMA", "while (next < work_tiles())", copied)
        stored = f"{sums}: registers to shared to global"
        consumers = role("consumers", f"{own.consumers} warpgroups", stored, "void compute() {", multiplied)
        return kernel("one for each SM", producer, consumers, *(followers if held == "K, V" else ()))

    adds = own.dq == "additions"
    of_one = {f"S^T, dP^T; dV += P^T dO, dK += dS^T Q{', dQ = dS K of the tile before' * adds}": "void step("}
    of_two = {"S^T; dV += P^T dO": "void issue_dv() {", "dP^T; dK += dS^T Q": "void issue_dk() {"}
    if own.by_halves:
        of_values = "S, dP; dV^T += dO^T P, dQ = dS K of the tile before"
        of_two = {of_values: "void issue_dv() {", "S, dP; dK^T += Q^T dS": "void issue_dk() {"}
    rows = Loop("rows", str(own.held), "lanes of a row", "O, dO: global", "r < DELTA_ROWS")
    every = {
        "delta": kernel("O, dO: global", rows),
        "special_rows": kernel("Q, dO: global", replace(rows, memory="Q, dO: global", anchor="row < BLOCK_ROWS")),
        "dk_dv": of("K, V", "Q, dO", "dK, dV", of_two if own.split_products or own.by_halves else of_one),
        "add_parts": kernel(
            "partial dK, dV: global", Loop("parts", "parts", "thread", "dK, dV: registers to shared to global", "part < parts")
        ),
        "dq": of("Q, dO", "K, V", "dQ", {"S, dP; dQ += dS K": "void step("}),
        "convert_dq": kernel(
            "sums of dQ: global",
            Loop(
                "sums",
                f"{own.dq_columns // 2 if own.by_halves else own.dq_registers} of a part",
                "thread",
                "dQ: registers to shared to global",
                "void add_registers(",
            ),
        ),
    }
    return {name: every[name] for name in own.kernels}
