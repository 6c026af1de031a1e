"""The schedule for few rows on the GPU: variants, CUDA graphs, the same bits in any batch."""

from __future__ import annotations

import pytest

import attngen
from attngen.reference.problems import Shape
from tests.device.test_decode import BOTTOM, BY_HEAD, DOCUMENTS, INVARIANT, PLAIN
from tests.gpu.test_specs_on_gpu import check

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

SPECS = {"plain": PLAIN, "bottom": BOTTOM, "heads": BY_HEAD, "ids": DOCUMENTS}
SHAPES = (Shape(1, 32, 8, 1, 8192), Shape(3, 8, 2, 5, 1000), Shape(64, 4, 1, 1, 700), Shape(1, 40, 1, 17, 257))
WIDE = [("bf16", 128, 128), ("bf16", 256, 256), ("fp16", 80, 24), ("fp32", 64, 64), ("fp32", 128, 128), ("fp32", 256, 256)]


@pytest.mark.parametrize("name", SPECS)
def test_variants(name: str) -> None:
    kernel = attngen.compile(SPECS[name], kernel="decode", device="cuda")
    for seed, shape in enumerate(SHAPES):
        check(SPECS[name], [kernel], shape, seed)


@pytest.mark.parametrize(("dtype", "head_dim", "head_dim_v"), WIDE)
def test_head_sizes_and_types(dtype: str, head_dim: int, head_dim_v: int) -> None:
    spec = attngen.define(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, score="softcap(20)")
    kernel = attngen.compile(spec, kernel="decode", device="cuda")
    for seed, shape in enumerate(SHAPES[:2]):
        check(spec, [kernel], shape, seed)


def test_a_graph_replays_what_auto_chooses() -> None:
    q, k, v = (torch.randn(2, h, n, 64, device="cuda").bfloat16() for h, n in ((8, 1), (2, 5000), (2, 5000)))
    kernel = attngen.compile(attngen.define(dtype="bf16", head_dim=64), device="cuda")
    expected = kernel(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(q, k, v)
    for _ in range(3):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    q, k, v = (torch.randn(9, h, n, 64, device="cuda").bfloat16() for h, n in ((8, 1), (2, 5000), (2, 5000)))
    kernel = attngen.compile(INVARIANT, device="cuda")
    together = kernel(q, k, v)
    for b in range(9):
        for whole, alone in zip(together, kernel(q[b : b + 1], k[b : b + 1], v[b : b + 1]), strict=True):
            assert torch.equal(whole[b : b + 1], alone)
