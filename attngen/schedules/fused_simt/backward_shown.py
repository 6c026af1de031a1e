"""The loops of the fused_simt backward, as pages show them."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.schedules.fused_simt.backward_plan import FusedSimtBackwardPlan
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    own = FusedSimtBackwardPlan.of_plan(plan)
    rows, columns = plan.block_q // own.row_threads, plan.block_kv // own.column_threads

    def dots(name: str, dims: int, terms: int, operands: str, anchor: str) -> Loop:
        held = f"{operands}: shared; {rows} x {columns}: registers"
        return Loop(name, f"{dims} / {terms} = {dims // terms}", "thread", held, anchor)

    def sums(name: str, dims: int, operands: str, anchor: str) -> Loop:
        held = f"{operands}: shared; {rows} x {dims // own.column_threads}: registers"
        return Loop(name, f"{plan.block_q} / 4 = {plan.block_q // 4}", "thread", held, anchor)

    scores = dots("S = Q K^T, d", spec.head_dim, own.slice_qk, "Q, K", "dot_products<HEAD_DIM,")
    weights = dots("dP = dO V^T, d", spec.head_dim_v, own.slice_v, "dO, V", "dot_products<HEAD_DIM_V,")
    of_scores = (weights,) if plan.wants("k") else ()
    of_v = (sums("dV += P^T dO, q", spec.head_dim_v, "P, dO", "add_product<V_DIMS"),) if plan.wants("v") else ()
    of_k = (sums("dK += ds^T Q, q", spec.head_dim, "ds, Q", "add_product<QK_DIMS"),) if plan.wants("k") else ()
    rows_loop = Loop(
        "rows",
        f"tiles of {plan.block_q}",
        "block",
        "Q, dO: global to shared",
        "while (tile < tile_end)",
        (scores, *of_scores, *of_v, *of_k),
    )

    def of_rows(*more: Loop) -> Loop:
        tiles = f"tiles of {plan.block_kv}"
        visited = Loop("keys", tiles, "block", "K, V: global to shared", "while (tile < tile_end)", (scores, weights, *more))
        return kernel(f"Q, dO: global to shared, {plan.block_q} rows", visited)

    heads = Loop("query heads", "group_size", "block", "", "++h_idx", (rows_loop,))
    dims = Loop("d", str(spec.head_dim_v), "thread", "a row each: registers", "begin < HEAD_DIM_V; begin += V_SLICE")
    every = {
        "delta": of_rows() if own.delta == "sums over keys" else kernel("O, dO: global", dims),
        "dk_dv": kernel(f"K, V: global to shared, {plan.block_kv} keys", heads),
        "dq": of_rows(sums("dQ += ds K, k", spec.head_dim, "ds, K", "add_product<QK_DIMS")),
    }
    return {name: every[name] for name in own.kernels}
