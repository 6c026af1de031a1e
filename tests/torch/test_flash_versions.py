"""Arguments that FlashAttention-3 and -4 have, and their functions in the order of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attngen import ArgumentError  # noqa: E402
from attngen.torch import (  # noqa: E402
    flash_attn_3,
    flash_attn_4,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests import tiers  # noqa: E402
from tests.torch.flash import Batch, Case, check, reference, results  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
# The arguments of hopper/flash_attn_interface.py and flash_attn/cute/interface.py, in 2026; those without a default end at |
DESCALES = "q_descale=None k_descale=None v_descale=None"
TUNING = "num_splits=1 pack_gqa=None deterministic=False"
SECOND = "score_mod=None score_mod_bwd=None mask_mod=None"
PEERS = {
    flash_attn_3.flash_attn_func: f"q k v softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1) "
    f"attention_chunk=0 softcap=0.0 {TUNING} sm_margin=0 return_attn_probs=False",
    flash_attn_3.flash_attn_qkvpacked_func: f"qkv softmax_scale=None causal=False {DESCALES} window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    flash_attn_3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None "
    f"seqused_k=None softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    f"{TUNING} sm_margin=0 return_attn_probs=False",
    flash_attn_3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
    f"max_seqlen_q=None rotary_seqlens=None {DESCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 "
    "softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
    flash_attn_4.flash_attn_func: "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False "
    f"window_size=(None,None) learnable_sink=None softcap=0.0 {TUNING} {SECOND} aux_tensors=None aux_scalars=None "
    "block_sparse_tensors=None block_sparse_tensors_bwd=None return_lse=False",
    flash_attn_4.flash_attn_varlen_func: "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None "
    "max_seqlen_k=None min_seqlen_k=None seqused_q=None seqused_k=None gather_kv_indices=None page_table=None "
    f"softmax_scale=None causal=False window_size=(None,None) learnable_sink=None softcap=0.0 {TUNING} {SECOND} "
    "block_sparse_tensors=None aux_tensors=None aux_scalars=None return_lse=False scheduler_metadata=None "
    "seqlen_k_per_split=None disable_scheduler_metadata=False",
}


@pytest.mark.parametrize("function", PEERS, ids=lambda f: f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
def test_arguments_are_in_the_order_and_with_the_defaults_of_the_peer(function: Callable[..., Any]) -> None:
    found = inspect.signature(function).parameters.values()
    places = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    said = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in places]
    assert said == PEERS[function].split()


CASES = [
    Case(chunk=4),
    Case(causal=True, chunk=4),
    Case(causal=True, window_size=(2, -1), chunk=5, softcap=3.0),
    Case(window_size=(-1, 1), chunk=3),
]


def test_the_meaning_of_chunks_and_sinks() -> None:
    """Exact, in float64, of more keys than rows and of fewer, in both ways to compute it."""
    for case in CASES:
        for q_len, kv_len in ((9, 14), (14, 9)):
            q, k, v = (randn(2, n, h, 8, dtype=torch.float64) for n, h in ((q_len, 4), (kv_len, 2), (kv_len, 2)))
            for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)):
                expected = reference(q, k, v, case, None, sinks=sinks)
                named = case.named(4, 2) | {"return_lse": True, "mode": "math"}
                given = None if sinks is None else sinks.float()
                found = [flash_attn_func(q, k, v, **named, sinks=given)]
                if not case.softcap:
                    plain = named | {"score_mod": lambda s, b, h, row, key: s + 0.0}
                    found.append(flash_attn_func(q, k, v, **plain, learnable_sink=given))
                for one, of_other in zip(found, [found[0]] * 2, strict=False):
                    torch.testing.assert_close(one, of_other, rtol=1e-9, atol=1e-9)
                    torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9, msg=lambda said, at=case: f"{at}: {said}")


@pytest.mark.parametrize("mode", tiers.cases(("naive", "tiled", "fused", "hopper"), quick=["naive"]))
def test_chunks_and_sinks_by_kernels_with_gradients(mode: str) -> None:
    case, q, k, v = Case(causal=True, chunk=40), randn(2, 70, 4, 16), randn(2, 90, 2, 16), randn(2, 90, 2, 16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).half()
    tensors = (q, k, v) if mode == "hopper" else (q, k, v, sinks)  # hopper's backward computes no gradient of sinks
    named = case.named(4, 2)

    def attend(*t: Any) -> Any:
        return flash_attn_func(*t[:3], **named, learnable_sink=sinks if mode == "hopper" else t[3], mode=mode)

    def exactly(*t: Any, precision: Any) -> Any:
        return reference(*t[:3], case, None, precision, sinks if mode == "hopper" else t[3])[0]

    found = results(attend, tensors)
    exact, usual = (results(partial(exactly, precision=p), tensors, p) for p in (torch.float64, torch.float16))
    check(found, exact, usual)


def test_functions_in_the_place_of_arguments() -> None:
    q, k = randn(2, 6, 4, 8, dtype=torch.float64), randn(2, 9, 2, 8, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    by_name = flash_attn_func(q, k, k, causal=True, window_size=(3, 0), alibi_slopes=slopes, mode="math")

    def distance(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score - slopes[h] * (row + 3 - key)

    def near(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (row + 3 >= key) & (row + 3 - key <= 3)

    for named in ({"mask_mod": near}, {"causal": True, "window_size": (3, None)}):
        found, lse = flash_attn_4.flash_attn_func(q, k, k, score_mod=distance, **named, mode="math")
        assert lse is None
        torch.testing.assert_close(found, by_name, rtol=1e-6, atol=1e-6)
    _, lse, rest = flash_attn_func(q, k, k, mask_mod=near, softcap=2.0, return_attn_probs=True, mode="math")
    torch.testing.assert_close(lse, reference(q, k, k, Case(True, (3, 0), 2.0), None)[1], rtol=1e-6, atol=1e-6)
    assert not rest.numel()


def test_windows_without_ends() -> None:
    q, k = randn(1, 5, 2, 16), randn(1, 8, 2, 16)
    for none, numbers in (((None, None), (-1, -1)), ((2, None), (2, -1)), ((None, 0), (-1, 0))):
        expected = flash_attn_func(q, k, k, window_size=numbers, mode="math")
        assert torch.equal(flash_attn_func(q, k, k, window_size=none, mode="math"), expected)
        assert torch.equal(flash_attn_4.flash_attn_func(q, k, k, window_size=none, mode="math")[0], expected)
    everything = flash_attn_func(q, k, k, mode="math")
    assert torch.equal(flash_attn_4.flash_attn_func(q, k, k, window_size=(-1, -1), mode="math")[0], everything)
    with pytest.raises(ArgumentError, match=r"`window_size` is \(-1, 5\); expected numbers from 0 on, or None"):
        flash_attn_4.flash_attn_func(q, k, k, window_size=(-1, 5))  # keys after the next one, for FlashAttention-4


BATCH = Batch(((3, 5), (0, 4), (9, 12), (5, 0), (7, 7)))


def test_packed_rows_of_which_some_are_used() -> None:
    """As sequences of fewer rows, with gradients: other rows are NaN, and have O = 0, lse = -inf and no gradient."""
    used = torch.tensor([2, 0, 9, 3, 9], dtype=torch.int32)  # more than there are counts as all
    rows = [min(n, u) for (n, _), u in zip(BATCH.lengths, used.tolist(), strict=True)]
    fewer = Batch(tuple((n, m) for n, (_, m) in zip(rows, BATCH.lengths, strict=True)))
    q, k, v = BATCH.tensors(4, 2, 16, torch.float32)
    begins, kept = BATCH.begins(0).tolist(), torch.zeros(q.shape[0], dtype=torch.bool)
    for begin, n in zip(begins, rows, strict=False):
        kept[begin : begin + n] = True
    q[~kept] = torch.nan
    how = {"causal": True, "attention_chunk": 8, "sinks": torch.zeros(4), "mode": "naive"}
    found = results(lambda *t: flash_attn_varlen_func(*t, **BATCH.named(), seqused_q=used, **how), (q, k, v))
    expected = results(lambda *t: flash_attn_varlen_func(*t, **fewer.named(), **how), (q[kept], k, v))
    for one in found[:2]:
        assert not one[~kept].any()
    torch.testing.assert_close(found[0][kept], expected[0])
    lse = flash_attn_varlen_func(q, k, v, **BATCH.named(), seqused_q=used, **how, return_lse=True)[1]
    of_fewer = flash_attn_varlen_func(q[kept], k, v, **fewer.named(), **how, return_lse=True)[1]
    torch.testing.assert_close(lse[:, kept], of_fewer)
    assert (lse[:, ~kept] == -torch.inf).all()
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in (q[kept], k, v)]
    gradients = torch.autograd.grad((flash_attn_varlen_func(*leaves, **fewer.named(), **how) * weights[kept]).sum(), leaves)
    torch.testing.assert_close([found[1][kept], *found[2:]], list(gradients))
    with pytest.raises(ArgumentError, match=r"`seqused_q` is \[2\]; expected \[batch\], of which `cu_seqlens_q` has 5"):
        flash_attn_varlen_func(q, k, v, **BATCH.named(), seqused_q=used[:2])


def test_packed_rows_and_a_cache_by_other_names() -> None:
    """`page_table`, chunks and sinks, of versions 3 and 4: as by the names of version 2, and as each sequence by itself."""
    case, sinks = Case(causal=True, chunk=8), torch.tensor([0.5, -1.0, 2.0, 0.0])
    q, pool = randn(2, 3, 4, 16, dtype=torch.float32), randn(6, 8, 2, 16, dtype=torch.float32)
    table, used = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32), torch.tensor([17, 9], dtype=torch.int32)
    how = {"causal": True, "attention_chunk": 8, "mode": "naive"}
    whole = pool[table.long()].flatten(1, 2)
    expected = torch.cat(
        [reference(q[i : i + 1], *2 * [whole[i : i + 1, :n]], case, None, sinks=sinks)[0] for i, n in enumerate(used.tolist())]
    ).float()
    names = {"page_table": table, "learnable_sink": sinks}
    found = flash_attn_3.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=used, **names, **how)
    torch.testing.assert_close(found, expected)
    found = flash_attn_with_kvcache(q, whole, whole, cache_seqlens=used, sinks=sinks, **how)
    torch.testing.assert_close(found, expected)
    begins = torch.tensor([0, 3, 6], dtype=torch.int32)
    found, lse = flash_attn_4.flash_attn_varlen_func(
        q.flatten(0, 1), pool, pool, cu_seqlens_q=begins, max_seqlen_q=3, seqused_k=used, **names, **how, return_lse=True
    )
    torch.testing.assert_close(found.view_as(expected), expected)
    assert lse.shape == (4, 6)
    for name in ("attention_chunk", "sinks"):  # a call without one is not taken for an earlier one with it
        plain = {**how, "sinks": sinks, name: 0 if name == "attention_chunk" else None}
        other = flash_attn_with_kvcache(q, whole, whole, cache_seqlens=used, **plain)
        assert not torch.allclose(other, expected, atol=1e-3)
    with pytest.raises(ArgumentError, match="`attention_chunk` and `cache_leftpad` cannot be given together"):
        flash_attn_with_kvcache(q, whole, whole, cache_seqlens=used, cache_leftpad=used - 9, **how)


def test_hints_have_no_effect() -> None:
    q = randn(1, 5, 2, 16)
    expected = flash_attn_func(q, q, q, mode="math")
    for hints in ({"num_splits": 1}, {"num_splits": 3, "pack_gqa": True}, {"sm_margin": 2, "pack_gqa": False}):
        assert torch.equal(flash_attn_func(q, q, q, **hints, mode="math"), expected)
    assert torch.equal(flash_attn_func(q, q, q, q_descale=None, scheduler_metadata=object(), mode="math"), expected)
    out, lse = flash_attn_3.flash_attn_func(q, q, q, 0.25, False, return_attn_probs=True, mode="math")
    assert torch.equal(out, expected)
    assert lse.shape == (1, 2, 5)
    qkv = torch.stack([q, q, q], 2)
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(qkv, mode="math"), expected)


@pytest.mark.long
def test_compiled_by_torch_without_a_break() -> None:
    q, k, sinks = randn(2, 6, 4, 16), randn(2, 9, 2, 16), torch.zeros(4)
    used, begins = torch.tensor([6, 2], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
    by_lengths = {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "max_seqlen_q": 6, "max_seqlen_k": 6}

    def near(b: Any, h: Any, row: Any, key: Any) -> Any:
        return row - key <= 3

    for attend in (
        lambda: flash_attn_func(q, k, k, attention_chunk=4, sinks=sinks, window_size=(None, 0), num_splits=1, mode="naive"),
        lambda: flash_attn_3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True, mode="naive")[0],
        lambda: flash_attn_4.flash_attn_func(q, k, k, mask_mod=near, learnable_sink=sinks, mode="naive")[0],
        lambda: flash_attn_4.flash_attn_varlen_func(
            *3 * [q.flatten(0, 1)], **by_lengths, seqused_q=used, causal=True, return_lse=True, mode="naive"
        )[0],
    ):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(attend, fullgraph=True, backend=BACKEND)(), attend())


def of_cute(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    return score


def test_what_is_refused_says_what_to_use() -> None:
    q = randn(1, 5, 2, 16)
    rows, begins = q[0], torch.tensor([0, 5], dtype=torch.int32)
    mask = {"mask_mod": lambda b, h, row, key: row >= key}
    for call, said in (
        (lambda: flash_attn_func(q, q, q, q_descale=torch.ones(1, 1)), "`q_descale` is of queries of 8 bits, and `q` has"),
        (lambda: flash_attn_3.flash_attn_func(q, q, q, qv=q), "`qv` is not supported: .* concatenate `q` with `qv`"),
        (
            lambda: flash_attn_func(q, q, q, score_mod=of_cute),
            "`score_mod` is no function of .score, batch, head, q_idx, kv_idx",
        ),
        (lambda: flash_attn_func(q, q, q, mask_mod=1), "`mask_mod` is no function of .batch, head, q_idx, kv_idx"),
        (lambda: flash_attn_func(q, q, q, **mask, causal=True), "`mask_mod` and causal=True, .* say all in `mask_mod`"),
        (lambda: flash_attn_func(q, q, q, score_mod=lambda s, *_: s, softcap=2.0), "`softcap` and `score_mod` cannot be given"),
        (lambda: flash_attn_func(q, q, q, **mask, deterministic=True), "call torch.use_deterministic_algorithms"),
        (lambda: flash_attn_func(q, q, q, **mask, alibi_slopes=torch.ones(2)), "say it in `score_mod`"),
        (lambda: flash_attn_func(q, q, q, attention_chunk=-1), "`attention_chunk` is -1; expected a number of keys, or 0"),
        (lambda: flash_attn_func(q, q, q, attention_chunk=1.5), "`attention_chunk` is a float; expected an int"),
        (lambda: flash_attn_func(q, q, q, num_splits=1.5), "`num_splits` is a float; expected an int or None"),
        (lambda: flash_attn_func(q, q, q, pack_gqa=1), "`pack_gqa` is a int; expected a bool or None"),
        (lambda: flash_attn_func(q, q, q, sinks=q, learnable_sink=q), "two names of one argument; pass one"),
        (lambda: flash_attn_4.flash_attn_func(q, q, q, aux_tensors=[q]), "refers to tensors by their names"),
        (lambda: flash_attn_4.flash_attn_varlen_func(q, q, q), "call flash_attn_with_kvcache"),
        (
            lambda: flash_attn_varlen_func(rows, rows, rows, begins, begins, 5, 5, **mask),
            "is not supported for packed sequences",
        ),
        (lambda: flash_attn_3.flash_attn_with_kvcache(q, q, q, cu_seqlens_q=begins), "call flash_attn_varlen_func"),
        (lambda: flash_attn_3.flash_attn_qkvpacked_func(q, num_heads_q=2), "`num_heads_q` is not supported; split `qkv`"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()
    for function in (flash_attn_func, flash_attn_with_kvcache, flash_attn_3.flash_attn_func):
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'softmax_scales'"):
            function(q, q, q, softmax_scales=1.0)
