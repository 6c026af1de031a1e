"""What pages show of the Hopper backward for wide heads: its loops."""

from __future__ import annotations

from dataclasses import replace

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.hopper_backward.wide_plan import HELD, KEPT, WideBackwardPlan
from attngen.spec.attention import AttentionSpec

MATRICES = {"dv": ("dO", "Q"), **KEPT}  # the matrix of the visited tiles that is kept, and the streamed one


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    own = WideBackwardPlan.of_plan(plan)
    visited = f"tiles of {plan.block_q}, {'not empty' if plan.bounds.per_tile else 'begin to end'}"

    def role(name: str, who: str, moved: str, start: str, tiles: Loop) -> Loop:
        return Loop(f"{name}: work tiles", "from a counter", who, moved, start, (tiles,))

    def of(name: str, sum_: str, products: dict[str, str]) -> Loop:
        held, (kept, streamed) = ", ".join(m for m in HELD[name] if m), MATRICES[name]
        moved = f"{kept} in parts, {streamed} in slabs: global to shared by TMA"
        copied = Loop("tiles", visited, "one tile", moved, "for (bool first = true;; first = false) {")
        inner = tuple(Loop(p, "64 x 64 pairs", "half for each warpgroup", "registers", line) for p, line in products.items())
        multiplied = Loop("tiles", visited, "one tile", f"{kept}, {streamed}: shared", "while (!is_last(visit))", inner)
        producer = role("producer", "one warp", f"{held}: global to shared by TMA", "while (next < work_tiles())", copied)
        stored = f"{sum_}: registers to shared to global"
        who = f"{own.consumers} warpgroups, half of the columns each"
        return kernel("one for each SM", producer, role("consumers", who, stored, "void compute() {", multiplied))

    rows = Loop("rows", str(own.held), "lanes of a row", "O, dO: global", "r < DELTA_ROWS")
    every = {
        "delta": kernel("O, dO: global", rows),
        "special_rows": kernel("Q, dO: global", replace(rows, memory="Q, dO: global", anchor="row < BLOCK_ROWS")),
        "add_parts": kernel(
            "partial dK, dV: global", Loop("parts", "parts", "thread", "dK, dV: registers to shared to global", "part < parts")
        ),
        "dv": of("dv", "dV", {"S^T": "void multiply_pairs() {", "dV += P^T dO": "void issue_sum() {"}),
        "dk": of("dk", "dK", {"dP^T, S^T": "void multiply_pairs() {", "dK += dS^T Q": "void issue_sum() {"}),
        "dq": of("dq", "dQ", {"dP, S": "void multiply_pairs() {", "dQ += dS K": "void issue_sum() {"}),
    }
    return {name: every[name] for name in own.kernels}
