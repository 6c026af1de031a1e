"""Keys in pages: flash-attention's and torch's functions of packed queries, and compiled specs, by the emulated device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.varlen import AuxRequest  # noqa: E402

import attngen  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.diagnostics import DiagnosticError  # noqa: E402
from attngen.torch import flash_attn_varlen_func, runtime, varlen_attn, varlen_attn_out  # noqa: E402
from tests.torch.flash import Batch  # noqa: E402

BATCH = Batch(((3, 40), (0, 4), (7, 90), (5, 0), (1, 17)))
PAGE = 16


def in_pages(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[total, heads, size] in a pool [pages, page, heads, size] of NaN otherwise."""
    pool = packed.new_full((int(table.max()) + 3, PAGE, *packed.shape[1:]), float("nan"))
    for pages, keys in zip(table, packed.split([n for _, n in BATCH.lengths]), strict=True):
        for i, key in enumerate(keys):
            pool[pages[i // PAGE], i % PAGE] = key
    return pool


def tables() -> torch.Tensor:
    """A page table with rubbish after the pages of each sequence."""
    table = torch.full((len(BATCH.lengths), 6), -7, dtype=torch.int32)
    pages = iter(torch.randperm(30))
    for b, (_, keys) in enumerate(BATCH.lengths):
        table[b, : -(-keys // PAGE)] = torch.tensor([next(pages) for _ in range(-(-keys // PAGE))])
    return table


def test_packed_queries_and_keys_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as if keys were packed; nothing is read on the host."""
    q, k, v = (t.detach() for t in BATCH.tensors(4, 2, 16, torch.float16))
    table, named = tables(), BATCH.named()
    pools = in_pages(k, table), in_pages(v, table)
    options = {"causal": True, "window_size": (60, 0), "softcap": 20.0, "return_attn_probs": True, "mode": "naive"}
    out, lse, _ = flash_attn_varlen_func(q, k, v, **named, **options)
    begins = named["cu_seqlens_q"], named["cu_seqlens_k"], named["max_seqlen_q"], named["max_seqlen_k"]
    usual = varlen_attn(q, k, v, *begins, return_aux=AuxRequest(lse=True), enable_gqa=True, mode="naive")
    used = named["cu_seqlens_k"].diff()
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    found = flash_attn_varlen_func(q, *pools, **named, **options, block_table=table)
    assert torch.equal(found[0], out)
    assert torch.equal(found[1], lse)
    more = {"block_table": table, "seqused_k": used, "enable_gqa": True, "mode": "naive"}
    found = varlen_attn(q, *pools, begins[0], None, *begins[2:], return_aux=AuxRequest(lse=True), **more)
    assert torch.equal(found[0], usual[0])
    assert torch.equal(found[1], usual[1])
    out = torch.empty_like(usual[0])
    written, lse = varlen_attn_out(out, q, *pools, begins[0], None, *begins[2:], return_aux=AuxRequest(lse=True), **more)
    assert written is out
    assert torch.equal(out, usual[0])
    assert torch.equal(lse, usual[1])
    with pytest.raises(ArgumentError, match=r"`out` is .* of torch.float32 on cpu; expected .* of torch.float16"):
        varlen_attn_out(out.float(), q, *pools, begins[0], None, *begins[2:], **more)


def test_a_part_of_the_keys_of_packed_sequences() -> None:
    """`seqused_k` without pages: room after a sequence's keys is never read, in eager mode and under torch.compile."""
    q, k, v = (t.detach() for t in BATCH.tensors(4, 2, 16, torch.float16))
    named, options = BATCH.named(), {"enable_gqa": True, "window_size": (-1, 0), "mode": "naive"}
    begins, longest = (named["cu_seqlens_q"], named["cu_seqlens_k"]), (named["max_seqlen_q"], named["max_seqlen_k"])
    wanted = varlen_attn(q, k, v, *begins, *longest, **options)
    used = begins[1].diff()
    room = torch.arange(len(begins[1]), dtype=torch.int32) * 5
    roomy = [torch.full((len(t) + int(room[-1]), *t.shape[1:]), torch.nan, dtype=t.dtype) for t in (k, v)]
    for b, (first, count) in enumerate(zip(begins[1].tolist(), used.tolist(), strict=False)):
        for wide, tight in zip(roomy, (k, v), strict=True):
            wide[first + 5 * b :][:count] = tight[first:][:count]
    for call in (varlen_attn, torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")):
        found = call(q, *roomy, begins[0], begins[1] + room, longest[0], longest[1] + 5, seqused_k=used, **options)
        assert torch.equal(found, wanted)
    found = flash_attn_varlen_func(q, *roomy, begins[0], begins[1] + room, *longest, seqused_k=used, causal=True, mode="fused")
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)


def test_a_sink_is_one_more_logit() -> None:
    """The output has the share exp(lse) / (exp(lse) + exp(sink)) of the one without it; of packed keys, and of pages."""
    q, k, v = (t.detach() for t in BATCH.tensors(4, 2, 16, torch.float16))
    table, named = tables(), BATCH.named()
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -1.0])
    options = {"causal": True, "return_attn_probs": True, "mode": "naive"}
    plain, lse, _ = flash_attn_varlen_func(q, k, v, **named, **options)
    shares = (1 / (1 + (sinks[:, None] - lse).exp())).nan_to_num(0.0).T[..., None]  # 0 for rows without keys
    paged = {**named, "cu_seqlens_k": None, "seqused_k": named["cu_seqlens_k"].diff(), "block_table": table}
    for keys, values, where in ((k, v, named), (in_pages(k, table), in_pages(v, table), paged)):
        out, with_sinks, _ = flash_attn_varlen_func(q, keys, values, **where, **options, sinks=sinks)
        torch.testing.assert_close(out.float(), plain.float() * shares, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(with_sinks, torch.logaddexp(lse, sinks[:, None].expand_as(lse)))


def test_other_tables_compile_nothing_and_pages_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    usual = runtime.Runtime.__init__
    monkeypatch.setattr(
        runtime.Runtime, "__init__", lambda self, made, *rest: (compiled.append(made), usual(self, made, *rest))[1]
    )
    decode = attngen.compile(attngen.define(dtype="fp16", head_dim=16), kernel="naive", storage="paged", device="emulated")
    pool = torch.randn(20, 2, PAGE, 16).half()
    for batch in (1, 2, 5):
        table, used = torch.randint(0, 20, (batch, 4), dtype=torch.int32), torch.randint(0, 65, (batch,), dtype=torch.int32)
        q = torch.randn(batch, 4, 1, 16).half()
        o = decode(q, pool, pool, page_table=table, seqused=used)
        for b in range(batch):
            keys = pool[table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, : used[b]]
            exact = torch.nn.functional.scaled_dot_product_attention(q[b : b + 1], keys, keys, enable_gqa=True)
            torch.testing.assert_close(o[b : b + 1], exact, atol=4e-3, rtol=0)
    assert len(compiled) <= 2
    found = decode(q.requires_grad_(), pool, pool, page_table=table, seqused=used)  # as when nobody turned gradients off
    assert torch.equal(found, o)
    with pytest.raises(DiagnosticError, match="no gradients"):
        found.sum().backward()


def test_padded_keys_have_no_gradients() -> None:
    """A call need not turn gradients off: only its backward is refused."""
    spec = attngen.define(dtype="fp16", head_dim=16, mask="causal_bottom_right")
    kernel = attngen.compile(spec, kernel="naive", storage="padded", device="emulated")
    q, k, v = torch.randn(3, 2, 4, 7, 16).half()
    used = torch.tensor([7, 9], dtype=torch.int32)  # kv_len is 7
    o = kernel(q.requires_grad_(), k, v, seqused=used)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, exact, atol=4e-3, rtol=0)
    short = kernel(q, k, v, seqused=used, max_kv_len=5)
    torch.testing.assert_close(short, kernel(q, k[:, :, :5], v[:, :, :5], seqused=used), atol=0, rtol=0)
    with pytest.raises(DiagnosticError, match="no gradients"):
        o.sum().backward()
    for wrong in ({"seqused": used[:1]}, {"seqused": used.long()}, {}, {"seqused": used, "max_kv_len": -1}):
        with pytest.raises(attngen.ArgumentError, match=r"seqused|max_kv_len"):
            kernel(q, k, v, **wrong)
