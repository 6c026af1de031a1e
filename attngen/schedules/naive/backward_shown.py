"""What pages show of the naive backward: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import gradient_argument


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    dims = Loop("d", str(spec.head_dim), "thread", "Q, K: global", "d < min(begin + SLICE, HEAD_DIM)")
    dims_v = Loop("d", str(spec.head_dim_v), "thread", "dO, V: global", "d < min(begin + SLICE, HEAD_DIM_V)")
    keys = Loop("k", "kv_len", "thread", "S, dP: global", "k < min(begin + SLICE, kv_len)")
    rows = Loop("q", "q_len", "thread", "dS, P, Q, dO: global", "q < min(begin + SLICE, q_len)")
    group = Loop("h", "group_size", "thread", "dK, dV: registers", "h < (kv_h_idx + 1) * group_size", (rows,))

    def pairs(moved: str, *inner: Loop) -> Loop:
        return kernel(moved, Loop("keys", f"{plan.threads}, one pair each", "thread", moved, "threadIdx.x", inner))

    def of_rows(moved: str, *inner: Loop) -> Loop:
        return kernel(moved, Loop("rows", f"{plan.threads}, one row each", "thread", moved, "threadIdx.x", inner))

    def product(result: str, count: int, inner: Loop) -> Loop:
        moved = f"{result}: registers, then global"
        return kernel(moved, Loop("dimensions", f"{count}, one each", "thread", moved, "threadIdx.x", (inner,)))

    every = {
        "scores": pairs("S: registers, then global", dims),
        "weights": of_rows("S: global, in place", *((keys,) if spec.normalize == "softmax" else ())),
        "weight_gradients": pairs("dP: registers, then global", dims_v),
        "delta": of_rows("delta: registers, then global", keys),
        "score_gradients": pairs("dS: global, in place"),
        "dropout": pairs("P: global, in place"),
        "dq": product("dQ", spec.head_dim, keys),
        "dk": product("dK", spec.head_dim, group),
        "dv": product("dV", spec.head_dim_v, group),
    }
    read = Loop("k", "kv_len", "thread", "dS: global", "kv_idx = k_begin")
    for captured in plan.facts.captured_gradients:
        of_pairs = any(c.source != "sink" for c in captured.contributions)
        rows_read = Loop("q", "q_len", "thread", "dS, or delta: global", "q_idx = q_begin", (read,) if of_pairs else ())
        element = Loop("elements", f"{plan.threads}, one each", "thread", "sum: registers", "threadIdx.x", (rows_read,))
        every[gradient_argument(captured.name)] = kernel(f"{gradient_argument(captured.name)}: global", element)
    return {spec.normalize if name == "weights" else name: every[name] for name in plan.own.kernels}
