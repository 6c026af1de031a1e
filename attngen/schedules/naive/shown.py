"""What pages show of this schedule: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    def of_block(memory: str, name: str, each: str, moved: str, *inner: Loop) -> Loop:
        return kernel(memory, Loop(name, each, "thread", moved, "threadIdx.x", inner))

    def terms(index: str, count: str, moved: str, end: str) -> Loop:
        return Loop(index, count, "thread", moved, f"{index} < min(begin + SLICE, {end})")

    rows = [terms("k", "kv_len", "S: global", "kv_len")] if spec.normalize == "softmax" else []
    dims = terms("d", str(spec.head_dim), "Q, K: global", "HEAD_DIM")
    keys, out = terms("k", "kv_len", "P, V: global", "kv_len"), "O: registers, then global"
    scores, each_row = f"{plan.threads}, one score each", f"{plan.threads}, one row each"
    drops = {"dropout": of_block("P: global, in place", "keys", f"{plan.threads}, one weight each", "")}
    return {
        "scores": of_block("Q, K: global", "keys", scores, "S: registers, then global", dims),
        spec.normalize: of_block("S: global, in place", "rows", each_row, "maximum and sum: registers", *rows),
        **(drops if spec.dropout is not None else {}),
        "weighted_sum": of_block("P, V: global", "dimensions", f"{spec.head_dim_v}, one each", out, keys),
    }
