"""Loops over tiles and rows that several schedules have."""

from __future__ import annotations

from attngen.emit.loops import Loop, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.parts.mma import MmaPlan
from attngen.spec.attention import AttentionSpec


def tile_loop(plan: Plan, role: str, memory: str, *inner: Loop) -> Loop:
    return Loop("keys", tiles_visited(plan), role, memory, "while (tile < tile_end)", inner)


def softmax_loop(plan: Plan, rows: int, memory: str = "S: registers") -> tuple[Loop, ...]:
    """The loop over a thread's rows in which weights are computed, where these are a softmax."""
    loop = Loop("softmax, rows", str(rows), "thread", memory, "r < ROWS; ++r) {")
    return (loop,) if plan.facts.spec.normalize == "softmax" else ()


def mma_products(plan: Plan, rows: int) -> tuple[Loop, ...]:
    """The products of a tile by mma.sync, fp32 as split operands; `rows` of a thread have weights."""
    own = MmaPlan.of_plan(plan)
    qk, pv = "K: shared, to registers; S: registers", f"V: shared, to registers; P, {own.v_width} columns of O: registers"
    keys, steps = (own.summed, "part < BLOCK_KV / 16 / SUMMED") if own.split else (1, "step < BLOCK_KV / 16")
    wide, line = 16, "step < K_STEPS; ++step) {"
    if plan.facts.spec.k_dtype is not None and not plan.converted:  # keys of 8 bits: ldmatrix reads two steps at once
        wide, line = 32, "two < K_STEPS / 2; ++two) {"
    return (
        Loop(f"S = Q K^T, {wide} d a step", str(own.qk_width // wide), "warp", qk, line),
        *softmax_loop(plan, rows),
        Loop(f"O += P V, {16 * keys} keys a step", str(plan.block_kv // 16 // keys), "warp", pv, steps),
    )


def qk_by_wgmma(spec: AttentionSpec, q_in_registers: bool = False, line: str = "step < K_STEPS; ++step)") -> Loop:
    q = "Q: registers" if q_in_registers else "Q: shared"
    steps = str(-(-spec.head_dim // 16))
    return Loop("S = Q K^T, 16 d a step", steps, "warpgroup", f"{q}; K: shared; S: registers", line)


def pv_by_wgmma(plan: Plan) -> Loop:
    steps = str(plan.block_kv // 16)
    what = "P: registers; V: shared; O: registers"
    return Loop("O += P V, 16 keys a step", steps, "warpgroup", what, "step < BLOCK_KV / 16; ++step)")
