"""Specs whose captured tensors have every class of access, with small tensors for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import attngen
from attngen.spec.attention import AttentionSpec

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 4, 2, 5, 7, 8
FP32 = "fp32"


@dataclass(frozen=True)
class Case:
    """`score` and the other statements of a spec; `shapes` are those of its float inputs."""

    statements: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    integers: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)

    def spec(self, dtype: str = FP32, **more: Any) -> AttentionSpec:
        return attngen.define(dtype=dtype, head_dim=HEAD_DIM, **{**self.statements, **more})

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """q, k, v and the float inputs, which require grad, then the integer inputs."""
        made = torch.Generator().manual_seed(0)
        shapes = {
            "q": (BATCH, HEADS, Q_LEN, HEAD_DIM),
            "k": (BATCH, KV_HEADS, KV_LEN, HEAD_DIM),
            "v": (BATCH, KV_HEADS, KV_LEN, HEAD_DIM),
            **self.shapes,
        }
        floats = {n: torch.randn(s, generator=made, dtype=torch.float64) / 2 for n, s in shapes.items()}
        tensors = {name: tensor.to(dtype).requires_grad_() for name, tensor in floats.items()}
        return tensors | {name: make() for name, make in self.integers.items()}


def inputs(**dims: tuple[Any, ...]) -> dict[str, tuple[str, tuple[Any, ...]]]:
    return {name: (FP32, shape) for name, shape in dims.items()}


PAIRS = ("batch", "heads", "q_len", "kv_len")
CASES = {
    "pair": Case(
        {"mask": "causal", "score": "s + bias[b, h, q, k]", "inputs": inputs(bias=PAIRS)}, {"bias": (1, HEADS, Q_LEN, KV_LEN)}
    ),
    "key": Case({"score": "s * keys[b, k]", "inputs": inputs(keys=("batch", "kv_len"))}, {"keys": (BATCH, KV_LEN)}),
    "row": Case({"score": "s + rows[h, q] * s", "inputs": inputs(rows=("heads", "q_len"))}, {"rows": (HEADS, Q_LEN)}),
    "head": Case(
        {"mask": "causal", "score": "softcap(2.0) + slopes[h] * (k - q)", "inputs": inputs(slopes=("heads",))},
        {"slopes": (HEADS,)},
    ),
    "number": Case({"score": "s * heat", "inputs": inputs(heat=()), "normalize": "sigmoid"}, {"heat": ()}),
    "distance": Case({"score": "relative_bias(table, 3)", "inputs": inputs(table=("heads", 7))}, {"table": (HEADS, 7)}),
    "data": Case(
        {"score": "s + table[kinds[k] % 3]", "inputs": {**inputs(table=(3,)), "kinds": ("int32", ("kv_len",))}},
        {"table": (3,)},
        {"kinds": lambda: torch.arange(KV_LEN, dtype=torch.int32)},
    ),
    "sink": Case(
        {"mask": "causal and q != 1", "sink": "sinks[h]", "inputs": inputs(sinks=("heads",)), "lse": True}, {"sinks": (HEADS,)}
    ),
    "lse, empty rows": Case({"mask": "k < q", "lse": True}),
    "no normalization": Case(
        {
            "mask": "causal",
            "normalize": "none",
            "score": "s * pow(abs(decay[h]) + 0.5, float(q - k))",
            "inputs": inputs(decay=("heads",)),
        },
        {"decay": (HEADS,)},
    ),
    "root behind the mask": Case(
        {"mask": "k < q", "score": "s + sqrt(slopes[h] * slopes[h] * (q - k))", "inputs": inputs(slopes=("heads",))},
        {"slopes": (HEADS,)},
    ),
}
