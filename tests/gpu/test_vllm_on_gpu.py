"""The backend for vLLM on a GPU, against stand-ins of vLLM's interfaces: steps of an engine, some by a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.torch import vllm_interfaces as vllm  # noqa: E402
from tests.torch.test_vllm import EVERYTHING, PLAIN, ROOM, Engine, backend  # noqa: E402, F401

pytestmark = pytest.mark.gpu


class WithGraph(Engine):
    """Steps of one row for each of four sequences are replayed by a graph."""

    graph: Any = None

    def forward(self, q: Any, k: Any, v: Any, common: Any) -> Any:
        if common.max_query_len > 1:
            return super().forward(q, k, v, common)
        if self.graph is None:
            self.capture(q, k, v, common)
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        given = (q, k, v, *(getattr(common, name) for name in names))
        for mine, one in zip((*self.rows, *(getattr(self.common, name) for name in names)), given, strict=True):
            mine.copy_(one)
        self.builder.build(0, self.common)  # in each step, as vLLM does
        self.output.fill_(7.0)
        self.graph.replay()
        return self.output.clone()

    def capture(self, q: Any, k: Any, v: Any, common: Any) -> None:
        """With other lengths and pages than any step will have."""
        self.rows = [torch.zeros_like(t) for t in (q, k, v)]
        self.output = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        sequences = common.num_reqs
        begins = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
        ones = torch.ones(sequences, device="cuda", dtype=torch.int32)
        table = torch.zeros(sequences, ROOM, device="cuda", dtype=torch.int32)
        slots = torch.full((sequences,), -1, device="cuda")
        self.common = vllm.CommonAttentionMetadata(begins, begins.cpu(), ones, sequences, sequences, 1, 1, table, slots)

        def run() -> None:
            metadata = self.builder.build_for_cudagraph_capture(self.common)
            self.impl.forward(None, *self.rows, self.cache, metadata, self.output)

        run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()


@pytest.mark.parametrize("layer", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_steps_by_a_graph(backend: Any, layer: dict[str, Any]) -> None:  # noqa: F811
    on_gpu = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in layer.items()}
    engine = WithGraph(backend, torch.bfloat16, "cuda", **on_gpu)
    engine.add(4)
    engine.step([20, 1, 3, 16])
    for _ in range(3):
        engine.step([1, 1, 1, 1])
    for _ in range(4):
        engine.step([1, 60, 1, 1])
    engine.step([1, 1, 1, 1])
