"""The loops of the fused_simt schedule, as pages show them."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.fused_simt import plan as fused_simt
from attngen.schedules.parts.loops import softmax_loop, tile_loop
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    rows, terms = plan.block_q // fused_simt.ROW_THREADS, fused_simt.FusedSimtPlan.of_plan(plan).slice
    keys, dims = plan.block_kv // fused_simt.COLUMN_THREADS, spec.head_dim_v // fused_simt.COLUMN_THREADS
    slices, fours = f"{spec.head_dim} / {terms} = {spec.head_dim // terms}", f"{plan.block_kv} / 4 = {plan.block_kv // 4}"
    qk, pv = f"Q, K: shared; {rows} x {keys} of S: registers", f"P, V: shared; {rows} x {dims} of O: registers"
    products = (
        Loop("S = Q K^T, d", slices, "thread", qk, "begin < HEAD_DIM; begin += SLICE"),
        *softmax_loop(plan, rows, "S: registers; P: shared"),
        Loop("O += P V, k", fours, "thread", pv, "k < BLOCK_KV; k += 4"),
    )
    tiles = tile_loop(plan, "block", "K, V: global to shared", *products)
    return {"fused": kernel(f"Q: global to shared, {plan.block_q} rows", tiles)}
