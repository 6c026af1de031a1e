"""flash-attention's function of a cache on the GPU: along the axes of its own tests, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import flash_attn_with_kvcache  # noqa: E402
from tests.torch.cache import CacheCase, appending_cases, dense_cases, placed_cases  # noqa: E402
from tests.torch.flash import check  # noqa: E402


def checked(cases: Iterable[CacheCase], dtype: object) -> None:
    """Fails if an output, or a cache afterwards, is not what flash-attention's tests expect."""
    for seed, case in enumerate(cases):
        call = case.call(dtype, "cuda", seed)
        found, keys, values = call.run(flash_attn_with_kvcache)
        exact, _, keys_expected, values_expected = call.expected()
        check([found], [exact], [call.expected(dtype)[0]])
        torch.testing.assert_close(keys, keys_expected, rtol=1e-2, atol=1e-3)
        assert torch.equal(values, values_expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dense_caches(dtype: str) -> None:
    checked(dense_cases(), getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_appended_and_rotated(dtype: str) -> None:
    checked(appending_cases(), getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pages_and_caches_by_their_numbers(dtype: str) -> None:
    checked(placed_cases(), getattr(torch, dtype))


def test_a_graph_replays_with_other_lengths() -> None:
    q, keys, values = (torch.randn(2, n, h, 64, device="cuda").bfloat16() for n, h in ((1, 8), (3000, 2), (3000, 2)))
    used = torch.tensor([3000, 17], dtype=torch.int32, device="cuda")

    def attend() -> torch.Tensor:
        return flash_attn_with_kvcache(q, keys, values, cache_seqlens=used, causal=True)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for lengths in ([1, 2000], [0, 3000]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, attend())
        for b, n in enumerate(lengths):
            alone = flash_attn_with_kvcache(q[b : b + 1], keys[b : b + 1, :n], values[b : b + 1, :n], causal=True)
            torch.testing.assert_close(found[b : b + 1], alone if n else torch.zeros_like(alone), rtol=2e-2, atol=2e-3)
