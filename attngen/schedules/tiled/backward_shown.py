"""The loops of the tiled backward, as pages show them."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.tiled.backward_plan import TiledBackwardPlan
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    own = TiledBackwardPlan.of_plan(plan)

    def slices(terms: str, count: int, operands: str, condition: str) -> Loop:
        held = f"{own.rows} x {own.columns}: registers"
        one = Loop("products", f"{own.rows} x {own.columns}", "thread, unrolled", held, "part[r][")
        moved = f"{operands}: global, by way of registers, to shared"
        return Loop(
            f"slices, {terms}", f"{count} / {own.slice} = {-(-count // own.slice)}", "pipeline stage", moved, condition, (one,)
        )

    row = Loop("keys of a row", "four a thread at a time", "thread", "S, dP: global, in place", "k += THREADS * 4")
    keys = slices("k", plan.block_kv, "ds, K", "begin < BLOCK_KV; begin += SLICE")
    rows = slices("q", plan.block_q, "weights, rows", "begin < BLOCK_Q; begin += SLICE")
    of_keys = Loop(
        "query heads", "group_size", "block", "", "++h_idx", (Loop("rows", "tiles", "block", "", "++q_block", (rows,)),)
    )
    element = Loop("weights", f"{plan.block_q} x {plan.block_kv}", "thread", "P: global, in place", "i < BLOCK_Q * BLOCK_KV")
    every = {
        "scores": kernel("a tile of S", slices("d", spec.head_dim, "Q, K", "begin < HEAD_DIM; begin += SLICE")),
        "weights": kernel("a row of S", row),
        "weight_gradients": kernel("a tile of dP", slices("d", spec.head_dim_v, "dO, V", "begin < HEAD_DIM_V; begin += SLICE")),
        "delta": kernel("a row of P and dP", row),
        "score_gradients": kernel("a row of dP", row),
        "dropout": kernel("a tile of P", element),
        "dq": kernel("rows of dQ", Loop("keys", tiles_visited(plan), "block", "", "while (tile < tile_end)", (keys,))),
        "dk": kernel("keys of dK", of_keys),
        "dv": kernel("keys of dV", of_keys),
    }
    suffix = {"weights": spec.normalize}
    return {suffix.get(name, name): every[name] for name in own.kernels if name in every}
