"""One measured problem: its spec, tensors, kernel, and the calls that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import attngen
from attngen.bench.measure import Rounds, calls_in
from attngen.bench.peers import FLASH_PACKAGES, flash_peers, torch_peers
from attngen.reference.torch_oracle import allowed_pairs
from attngen.spec.attention import AttentionSpec

TOKENS = 16384
WIDTH = 2048  # heads times head size
CUDNN = "torch cuDNN"
WARMING, LASTING = 250.0, 500.0  # milliseconds of calls back to back

Row = dict[str, Any]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cell:
    """One call. `kv_heads` and `head_dim_v` are `heads` and `head_dim` where they are None; `score` reads no input."""

    dtype: str
    head_dim: int
    mask: str | None
    batch: int
    heads: int
    q_len: int
    kv_len: int
    kv_heads: int | None = None
    head_dim_v: int | None = None
    score: str | None = None

    @property
    def sizes(self) -> str:
        """`D64`, or `D192/128`."""
        return f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")

    @property
    def title(self) -> str:
        heads = f" B{self.batch} H{self.heads} over {self.kv_heads}" if self.kv_heads else ""
        lengths = f"S{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        score = f" {self.score}" if self.score else ""
        return f"{self.dtype} {self.sizes} {self.mask or 'full'}{score}{heads} {lengths}"

    @property
    def spec(self) -> AttentionSpec:
        return attngen.define(
            dtype=self.dtype, head_dim=self.head_dim, head_dim_v=self.head_dim_v, mask=self.mask, score=self.score
        )

    def randn(self) -> Tensors:
        """q, k, v."""
        element = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        kv_heads = self.kv_heads or self.heads
        return (
            torch.randn(self.batch, self.heads, self.q_len, self.head_dim, device="cuda").to(element),
            torch.randn(self.batch, kv_heads, self.kv_len, self.head_dim, device="cuda").to(element),
            torch.randn(self.batch, kv_heads, self.kv_len, self.head_dim_v or self.head_dim, device="cuda").to(element),
        )

    def operations(self, tensors: Tensors) -> int:
        """Of a call: 2 (head_dim + head_dim_v) for each pair that the mask keeps."""
        return 2 * (self.head_dim + (self.head_dim_v or self.head_dim)) * allowed_pairs(self.spec, *tensors[:2], {})


def square(dtype: str, head_dim: int, mask: str | None, length: int, head_dim_v: int | None = None) -> Cell:
    """16384 tokens, 2048 // head_dim heads, as many queries as keys."""
    heads = WIDTH // head_dim
    return Cell(dtype, head_dim, mask, TOKENS // length, heads, length, length, head_dim_v=head_dim_v)


def kernel(cell: Cell, tensors: Tensors) -> Call:
    """The call of attngen's kernel, compiled."""
    return partial(attngen.compile(cell.spec, kernel="hopper", device="cuda"), *tensors)


def beside_cudnn(cell: Cell, tensors: Tensors) -> dict[str, Call]:
    """attngen's kernel, and torch's cuDNN backend and the installed packages of FlashAttention where they take this."""
    peers = torch_peers(cell.spec, *tensors, only=[CUDNN]) | flash_peers(cell.spec, *tensors)
    return {"attngen": kernel(cell, tensors), **peers}


def flash_ratios(found: Rounds) -> dict[str, float]:
    """How many times as fast as each package of FlashAttention attngen is: those that were measured."""
    return {name: found.ratio("attngen", name) for name in FLASH_PACKAGES if name in found.each[0]}


def rates(operations: float, milliseconds: dict[str, float]) -> dict[str, float]:
    """TFLOP/s."""
    return {name: operations / (ms * 1e9) for name, ms in milliseconds.items()}


def sustained(call: Callable[[], object]) -> float:
    """Milliseconds of a call among LASTING of them back to back, after WARMING of the same; no flush."""
    call()
    one = _together(call, 5)
    for _ in range(calls_in(WARMING, one)):
        call()
    return _together(call, calls_in(LASTING, one))


def _together(call: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls
