"""Packed sequences on the GPU: forward and backward, rows of no sequence, CUDA graphs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import flash_attn_varlen_func  # noqa: E402
from tests.torch.flash import HEADS, Batch, Case, check, results  # noqa: E402

BATCHES = (
    Batch(((3, 5), (0, 4), (700, 900), (5, 0), (0, 0), (333, 170), (128, 128), (129, 127))),
    Batch(((1, 1300), (640, 640), (65, 63), (2, 1))),
    Batch(((1024, 1024),) * 3),
)
CASES = (
    Case(),
    Case(causal=True),
    Case(causal=True, window_size=(100, 0), slopes=1),
    Case(window_size=(40, 60), softcap=20.0, slopes=2),
)


@pytest.mark.parametrize(
    ("mode", "size"), [("auto", 64), ("auto", 111), ("auto", 128), ("auto", 256), ("fused", 64), ("wgmma", 128), ("tiled", 64)]
)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: Case, mode: str, size: int) -> None:
    """The last rows and keys belong to no sequence, and are NaN."""
    for batch, (q_heads, kv_heads) in zip(BATCHES, HEADS, strict=True):
        tensors = batch.tensors(q_heads, kv_heads, size, torch.bfloat16, "cuda", rest=200)
        named = case.named(q_heads, len(batch.lengths), "cuda")
        slopes = named.get("alibi_slopes")
        rows, keys = (sum(pair[i] for pair in batch.lengths) for i in (0, 1))

        def attend(*t, batch=batch, named=named, rows=rows):
            return flash_attn_varlen_func(*t, **batch.named("cuda"), **named, mode=mode)[:rows]

        real = [t[:n] for t, n in zip(tensors, (rows, keys, keys), strict=True)]
        exact, usual = (
            results(lambda *t, b=batch, p=p, s=slopes: b.reference(*t, case, s, p), real, p)
            for p in (torch.float64, torch.bfloat16)
        )
        if mode == "wgmma":  # it has no backward
            found, exact, usual = [attend(*tensors)], exact[:1], usual[:1]
        else:
            found = results(attend, tensors)
            found = [one[:n] for one, n in zip(found, (rows, rows, keys, keys), strict=True)]
        check(found, exact, usual)


@pytest.mark.parametrize("mode", ["hopper", "wgmma", "fused", "tiled", "naive"])
@pytest.mark.parametrize(("rows", "keys"), [(0, 70), (70, 0), (0, 0)])
def test_a_batch_without_rows_or_keys(mode: str, rows: int, keys: int) -> None:
    """Tensors without elements have no address. The longest sequence may be longer than those at hand."""
    q, k, v = (
        torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=mode != "wgmma") for n in (rows, keys, keys)
    )
    begins_q, begins_k = (torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (rows, keys))
    out = flash_attn_varlen_func(q, k, v, begins_q, begins_k, 100, 100, mode=mode)
    torch.cuda.synchronize()
    assert not out.any()
    if mode != "wgmma":
        out.sum().backward()
        torch.cuda.synchronize()
        assert all(t.grad.shape == t.shape and not t.grad.any() for t in (q, k, v))


def test_one_graph_serves_every_batch() -> None:
    """Lengths are data: a graph that was captured for some computes others."""
    q, k, v = torch.randn(3, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    begins = torch.tensor([0, 100, 200, 300], device="cuda", dtype=torch.int32)

    def attend():
        return flash_attn_varlen_func(q, k, v, begins, begins, 300, 300, causal=True)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for ends in ([0, 0, 299, 300], [0, 300, 300, 300], [0, 128, 129, 300]):
        begins.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, attend())
