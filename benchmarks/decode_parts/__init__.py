"""The parts of `benchmarks/decode.py`, a module each (see `parts.py`), and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import attngen
import attngen.torch  # compiled specs take tensors directly
from attngen.bench.measure import Rounds, calls_in, in_rounds
from attngen.bench.peers import flex_peer
from attngen.spec.attention import AttentionSpec

COLD_BYTES = 2**29  # caches of one graph: several times what any GPU's L2 holds
MOST_CALLS = 64  # per graph
BURST = 12.0  # milliseconds of replays
READ_BYTES = 2**31

Call = Callable[[], Any]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cache:
    """One call: `rows` query rows of each of `heads` heads, and the keys of `kv_heads`."""

    batch: int
    keys: int
    head_dim: int = 128
    dtype: str = "bf16"
    heads: int = 32
    kv_heads: int = 8
    rows: int = 1

    @property
    def title(self) -> str:
        rows = f", {self.rows} rows" if self.rows > 1 else ""
        return f"{self.dtype} D{self.head_dim} B{self.batch} S{self.keys // 1024}k{rows}"

    def bytes_of(self, keys: int) -> int:
        """Of K and V of so many keys."""
        return 2 * self.batch * self.kv_heads * keys * self.head_dim * (4 if self.dtype == "fp32" else 2)

    def tensors(self) -> list[Tensors]:
        """q, k, v of each call of a graph."""
        count = min(max(-(-COLD_BYTES // self.bytes_of(self.keys)), 1), MOST_CALLS)
        element = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        randn = partial(torch.randn, device="cuda", dtype=element)
        keys = (self.batch, self.kv_heads, self.keys, self.head_dim)
        return [(randn(self.batch, self.heads, self.rows, self.head_dim), randn(keys), randn(keys)) for _ in range(count)]


def attngen_calls(
    spec: AttentionSpec, tensors: Sequence[Tensors], inputs: Mapping[str, torch.Tensor], package: Any = attngen
) -> list[Call]:
    """The call of each of `tensors` by attngen, or by another version of it, as `auto` plans it."""
    compiled = package.compile(spec, device="cuda")
    return [partial(compiled, *one, **inputs) for one in tensors]


def in_graphs(sides: Mapping[str, Sequence[Call]], rounds: int) -> Rounds:
    """Milliseconds of a call of each side, replayed by graphs."""
    graphs = {name: captured(calls) for name, calls in sides.items()}
    replays = {name: calls_in(BURST, milliseconds(graph, 1)) for name, graph in graphs.items()}
    return in_rounds(graphs, rounds, lambda name: milliseconds(graphs[name], replays[name]) / len(sides[name]))


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of all calls, one after another."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Of a replay, `replays` of them queued at once."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / replays


def read_rate(rounds: int = 9) -> float:
    """TB/s at which a large tensor is read: the faster of a sum and a maximum."""
    data = torch.zeros(READ_BYTES // 4, device="cuda")
    found = in_graphs({"sum": [data.sum], "maximum": [data.amax]}, rounds).medians()
    return float(READ_BYTES / (min(found.values()) * 1e9))


def flex_calls(spec: AttentionSpec, tensors: Sequence[Tensors], inputs: Mapping[str, torch.Tensor]) -> list[Call]:
    """FlexAttention's call of each of `tensors`; none if it cannot express or compile the spec."""
    found = flex_peer(spec, *tensors[0], inputs, {}, partial(print, flush=True))
    return [partial(found["FlexAttention"], *one) for one in tensors] if found else []
