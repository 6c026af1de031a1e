"""Keys in pages on a GPU: every schedule that reads them, and CUDA graphs that replay with other lengths and tables."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
import attngen.torch  # noqa: E402
from attngen.spec.attention import ScheduleName  # noqa: E402

pytestmark = pytest.mark.gpu
BATCH, KEYS, SIZE = 5, 700, 128
ON_HOPPER = ("wgmma", "hopper")
ROWS = [("decode", 3), ("fused", 200), ("wgmma", 200), ("hopper", 200)]


def tables(page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages in random order with rubbish after the last of each sequence, and lengths from 0 on."""
    used = torch.tensor([KEYS, 0, 1, page, 333], dtype=torch.int32)
    count = -(-KEYS // page)
    table = torch.randperm(BATCH * count).int().view(BATCH, count)
    for b in range(BATCH):
        table[b, -(-int(used[b]) // page) :] = -(2**31)
    return table.cuda(), used.cuda()


def expected(q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Causal attention of each sequence alone, the last row at its last key."""
    out = torch.zeros_like(q)
    for b, n in enumerate(used.tolist()):
        keys = pool[table[b, : -(-n // pool.shape[1])].long()].flatten(0, 1)[:n].transpose(0, 1)[None]
        rows = q.shape[2]
        mask = torch.arange(n, device="cuda") <= torch.arange(rows, device="cuda")[:, None] + n - rows
        alone = torch.nn.functional.scaled_dot_product_attention(q[b : b + 1], keys, keys, mask, enable_gqa=True)
        out[b] = alone.where(mask.any(-1, keepdim=True), 0.0)  # torch's backends differ in rows without keys
    return out


@pytest.mark.parametrize(("schedule", "rows"), ROWS)
def test_a_graph_replays_with_other_lengths(schedule: ScheduleName, rows: int) -> None:
    """Padded keys, with NaN after the last one of each sequence."""
    if schedule in ON_HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA and wgmma are on Hopper")
    spec = attngen.define(dtype="bf16", head_dim=SIZE, mask="causal_bottom_right", kernel=schedule, storage="padded")
    kernel = attngen.compile(spec, device="cuda")
    q = torch.randn(BATCH, 8, rows, SIZE, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(BATCH, KEYS, 2, SIZE, device="cuda", dtype=torch.bfloat16)
    whole, table = cache.clone(), torch.arange(BATCH, device="cuda")[:, None]
    _, used = tables(KEYS)
    views = cache.transpose(1, 2), cache.transpose(1, 2)

    def without_unused() -> None:
        cache.copy_(whole)
        for b, n in enumerate(used.tolist()):
            cache[b, n:] = float("nan")

    without_unused()
    torch.testing.assert_close(kernel(q, *views, seqused=used), expected(q, whole, table, used), rtol=2e-2, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, *views, seqused=used)
    used.copy_(used.flip(0))
    without_unused()
    graph.replay()
    torch.testing.assert_close(out, expected(q, whole, table, used), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize(("schedule", "rows"), ROWS)
def test_a_graph_replays_with_other_tables(schedule: ScheduleName, rows: int, page: int) -> None:
    if schedule in ON_HOPPER and (page < 8 or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("TMA copies pages of 8 rows and more, on Hopper")
    stated = {"page_size": page} if schedule in ON_HOPPER else {}
    spec = attngen.define(dtype="bf16", head_dim=SIZE, mask="causal_bottom_right", kernel=schedule, storage="paged", **stated)
    kernel = attngen.compile(spec, device="cuda")
    q = torch.randn(BATCH, 8, rows, SIZE, device="cuda", dtype=torch.bfloat16)
    pool = torch.randn(BATCH * -(-KEYS // page) + 1, page, 2, SIZE, device="cuda", dtype=torch.bfloat16)
    table, used = tables(page)
    for b, n in enumerate(used.tolist()):
        if n % page:
            pool[table[b, n // page].item(), n % page :] = float("nan")
    views = pool.transpose(1, 2), pool.transpose(1, 2)
    out = kernel(q, *views, page_table=table, seqused=used)
    torch.testing.assert_close(out, expected(q, pool, table, used), rtol=2e-2, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, *views, page_table=table, seqused=used)
    pool.normal_()
    other, lengths = tables(page)
    table.copy_(other)
    used.copy_(lengths.flip(0).minimum(lengths))
    graph.replay()
    torch.testing.assert_close(out, expected(q, pool, table, used), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("schedule", "rows", "page"),
    [("decode", 1, 16), ("decode", 3, 64), ("fused", 200, 16), ("wgmma", 200, 64), ("hopper", 200, 64)],
)
def test_a_long_sequence_beside_short_ones(schedule: ScheduleName, rows: int, page: int) -> None:
    """131,072 keys beside few or none, in a pool of more than 2^31 elements of which the unused ones are NaN."""
    if schedule in ON_HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA and wgmma are on Hopper")
    stated = {"page_size": page} if schedule in ON_HOPPER else {}
    spec = attngen.define(dtype="bf16", head_dim=SIZE, mask="causal_bottom_right", kernel=schedule, storage="paged", **stated)
    kernel = attngen.compile(spec, device="cuda")
    pool = torch.full((2**23 // page + 100, page, 2, SIZE), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert pool.numel() > 2**31
    used = torch.tensor([1, 131_072, 0, 17, *(range(100, 900, 20))], dtype=torch.int32, device="cuda")
    table = torch.full((len(used), 131_072 // page), -(2**31), dtype=torch.int32, device="cuda")
    pages = [-(-n // page) for n in used.tolist()]
    free = torch.randperm(len(pool), device="cuda").int()[: sum(pages)]
    free[0] = len(pool) - 1  # the last page, of the first sequence
    for b, (n, own) in enumerate(zip(used.tolist(), free.split(pages), strict=True)):
        table[b, : len(own)] = own
        for row in range(0, n, page):
            pool[own[row // page].long(), : min(page, n - row)].normal_()
    views = pool.transpose(1, 2), pool.transpose(1, 2)
    q = 3 * torch.randn(len(used), 8, rows, SIZE, device="cuda", dtype=torch.bfloat16)  # few keys have most of the weight
    out = kernel(q, *views, page_table=table, seqused=used)
    torch.testing.assert_close(out, expected(q, pool, table, used), rtol=2e-2, atol=1e-2)


def test_packed_queries_of_a_graph_have_other_rows() -> None:
    """By `auto`, which splits keys for few rows: the graph replays with other numbers of rows, none among them."""
    page, kv_len = 64, 4096
    spec = attngen.define(dtype="bf16", head_dim=SIZE, mask="causal_bottom_right", storage="packed_paged", page_size=page)
    kernel = attngen.compile(spec, device="cuda")
    lengths = torch.tensor([kv_len, 0, 1, 700, 65], dtype=torch.int32, device="cuda")
    table = torch.randperm(BATCH * kv_len // page).int().view(BATCH, -1).cuda()
    pool = torch.randn(table.numel(), page, 2, SIZE, device="cuda", dtype=torch.bfloat16)
    views = pool.transpose(1, 2), pool.transpose(1, 2)
    q = torch.randn(16, 8, SIZE, device="cuda", dtype=torch.bfloat16)
    begins = torch.tensor([0, 5, 7, 7, 8, 16], dtype=torch.int32, device="cuda")
    where = {"cu_seqlens_q": begins, "max_q_len": 9, "page_table": table, "seqused": lengths}
    kernel(q, *views, **where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, *views, **where)
    for rows in ([5, 2, 0, 1, 8], [1, 1, 1, 1, 1], [0, 0, 9, 0, 7]):
        begins.copy_(torch.tensor([0, *rows]).cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        for b, n in enumerate(rows):
            one = q[begins[b] : begins[b + 1]].transpose(0, 1)[None]
            alone = expected(one, pool, table[b : b + 1], lengths[b : b + 1])
            found = out[begins[b] : begins[b + 1]].transpose(0, 1)[None]
            torch.testing.assert_close(found, alone, rtol=2e-2, atol=1e-2, msg=lambda said, at=(b, n): f"{at}: {said}")
        assert out[begins[-1] :].isnan().all()  # rows of no sequence
