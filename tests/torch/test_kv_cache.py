"""flash-attention's function of a cache: its meaning along the axes of its own tests, and by the kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import attngen  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.torch import Attention, flash_attn_func, flash_attn_with_kvcache  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.cache import CacheCase, appending_cases, dense_cases, placed_cases  # noqa: E402
from tests.torch.flash import Case, check  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OF_KERNELS = Case(causal=True, window_size=(40, 3), softcap=20.0, slopes=1)


def test_the_meaning_of_every_argument() -> None:
    """By torch's operations in float64: exact, so that a pair too many or too few shows, whatever it weighs."""
    for case in (*dense_cases(), *(case for case in placed_cases() if not case.new_len)):
        call = case.call(torch.float64)
        (found, lse), *_ = call.run(flash_attn_with_kvcache, return_softmax_lse=True, mode="math")
        expected, expected_lse, *_ = call.expected()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda said, at=case: f"{at}: {said}")
        torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


APPENDING = (*appending_cases(), *(case for case in placed_cases() if case.new_len))


@pytest.mark.parametrize("case", tiers.cases(APPENDING, quick=APPENDING[1:3]))
def test_rows_are_appended_and_rotated(case: CacheCase) -> None:
    """By the emulated kernel, and torch's operations for the attention."""
    call = case.call(torch.float32)
    found, keys, values = call.run(flash_attn_with_kvcache, mode="math")
    expected, _, keys_expected, values_expected = call.expected()
    torch.testing.assert_close(keys, keys_expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(values, values_expected)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", tiers.cases(("naive", "tiled", "fused", "hopper", "decode"), quick=["decode"]))
def test_kernels(mode: str) -> None:
    """With a cache for each sequence, or, if the schedule has them, pages and caches by their numbers."""
    cases = [CacheCase(q_len, n, size=32, of=OF_KERNELS, has_leftpad=True) for q_len, n in ((1, 300), (5, 90))]
    if mode != "hopper":
        cases += [replace(cases[0], has_batch_idx=True), replace(cases[1], page_size=16, new_len=2)]
    for case in cases:
        call = case.call(torch.float16)
        found, *_ = call.run(flash_attn_with_kvcache, mode=mode)
        check([found], [call.expected()[0]], [call.expected(torch.float16)[0]])


def test_rows_of_a_head_size_that_is_no_multiple_of_8() -> None:
    """Read and appended by copies of the pages."""
    call = CacheCase(2, 40, (2, 1), 27, OF_KERNELS, new_len=2, rotary_dim=16, page_size=16).call(torch.float16)
    found, keys, values = call.run(flash_attn_with_kvcache, mode="naive")
    expected, _, keys_expected, values_expected = call.expected()
    check([found], [expected], [call.expected(torch.float16)[0]])
    torch.testing.assert_close(keys, keys_expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(values, values_expected)


def test_new_rows_may_begin_anywhere() -> None:
    """They are appended 16 bytes at a time."""
    rows = torch.arange(33.0)[1:].view(1, 1, 2, 16)
    caches = torch.zeros(2, 1, 4, 2, 16)
    flash_attn_with_kvcache(rows, *caches, rows, rows, cache_seqlens=1, mode="naive")
    for cache in caches:
        assert torch.equal(cache[:, 1:2], rows)


def test_a_length_for_all_and_none_at_all() -> None:
    q, keys = randn(2, 3, 2, 16, dtype=torch.float64), randn(2, 10, 2, 16, dtype=torch.float64)
    whole = flash_attn_with_kvcache(q, keys, keys, causal=True, mode="math")
    assert torch.equal(whole, flash_attn_func(q, keys, keys, causal=True, mode="math"))
    some = flash_attn_with_kvcache(q, keys, keys, cache_seqlens=7, causal=True, mode="math")
    torch.testing.assert_close(some, flash_attn_func(q, keys[:, :7], keys[:, :7], causal=True, mode="math"))


@pytest.mark.long
def test_compiled_by_torch_without_a_break() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(q, k, k, cache_seqlens=used, causal=True, mode="naive")

    compiled = torch.compile(attend, fullgraph=True, backend=BACKEND)
    q, k = randn(2, 3, 2, 16), randn(2, 13, 2, 16)
    for used in ([3, 13], [0, 7]):
        lengths = torch.tensor(used, dtype=torch.int32)
        assert torch.equal(compiled(q, k, lengths), attend(q, k, lengths))


@pytest.mark.long
def test_appending_is_traced_as_a_mutation() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return (
            flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=used, causal=True, mode="naive") + cache.sum()
        )

    q, k, used = randn(2, 3, 2, 16), randn(2, 3, 2, 16), torch.tensor([4, 0], dtype=torch.int32)
    eager, traced = (randn(2, 13, 2, 16) for _ in range(2))
    expected = attend(q, k, eager, used)
    assert torch.equal(torch.compile(attend, fullgraph=True, backend=BACKEND)(q, k, traced, used), expected)
    assert torch.equal(traced, eager)
    assert torch.equal(traced[0, 4:7], k[0])


def test_appending_is_traced_by_make_fx_with_symbols_as_sizes() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=used, causal=True, mode="naive")

    def tensors(batch: int) -> list[torch.Tensor]:
        lengths = torch.arange(batch, dtype=torch.int32)
        return [*(randn(batch, rows, 2, 16) for rows in (3, 3, 13)), lengths]

    traced = make_fx(attend, tracing_mode="symbolic")(*tensors(2))
    given = tensors(5)
    found = traced(*given)
    assert torch.equal(given[2][4, 4:7], given[1][4])
    assert torch.equal(found, attend(*given))


def test_what_has_no_place_is_left_out() -> None:
    """Rows past the end of a cache, and before its beginning, are not written anywhere."""
    cache, k = torch.zeros(3, 5, 1, 16).half(), torch.ones(3, 2, 1, 16).half()
    used = torch.tensor([4, 9, -1], dtype=torch.int32)
    flash_attn_with_kvcache(k, cache, cache.clone(), k, k, cache_seqlens=used, mode="math")
    written = cache[..., 0, 0].nonzero().tolist()
    assert written == [[0, 4], [2, 0]]


@pytest.mark.long
def test_rubbish_in_unused_places_leaves_no_trace() -> None:
    """NaN in rows that no sequence has, any numbers in unused entries of the page table, and a sequence without a key."""
    q, new = randn(3, 1, 2, 32), randn(3, 1, 2, 32)
    used = torch.tensor([20, 0, 15], dtype=torch.int32)
    table = torch.tensor([[4, 0, -7], [3, 10**6, 2**31 - 1], [6, -1, 5]], dtype=torch.int32)  # pages of 16 rows
    pool = torch.full((7, 16, 2, 32), float("nan")).half()
    pool[4], pool[0, :4], pool[6, :15] = randn(16, 2, 32), randn(4, 2, 32), randn(15, 2, 32)
    sequences = [torch.cat([pool[4], pool[0, :4], new[0]]), new[1], torch.cat([pool[6, :15], new[2]])]
    keys, values = pool.clone(), pool.clone()
    found = flash_attn_with_kvcache(
        q, keys, values, new, new, cache_seqlens=used, block_table=table, causal=True, mode="decode"
    )
    for b, rows in enumerate(sequences):
        expected = flash_attn_func(q[b : b + 1].double(), rows[None].double(), rows[None].double(), causal=True, mode="math")
        torch.testing.assert_close(found[b : b + 1].double(), expected, rtol=4e-3, atol=4e-3)
    assert int(keys.isnan().sum()) == int(pool.isnan().sum()) - new.numel()
    none = flash_attn_with_kvcache(q, keys, values, cache_seqlens=used, block_table=table, mode="decode")
    assert not none[1].any()
    assert not none.isnan().any()


def test_lengths_past_the_end_are_those_of_the_whole_cache() -> None:
    """Of dense caches, of pages, and where rows are appended; a negative length is none."""
    q, cache, new = randn(3, 2, 2, 16), randn(3, 32, 1, 16), randn(3, 2, 1, 16)
    pool, table = cache.view(12, 8, 1, 16), torch.arange(12, dtype=torch.int32).view(3, 4)
    for used, appends in (([1000, 32, -3], False), ([31, 1000, -5], True)):
        given = {"cache_seqlens": torch.tensor(used, dtype=torch.int32), "causal": True}
        filled = cache.clone()
        if appends:
            given |= {"k": new, "v": new}
            filled[0, 31] = new[0, 0]
        whole = flash_attn_func(q.double(), filled.double(), filled.double(), causal=True, mode="math")
        whole[2] = 0.0
        for mode, where in (("math", {}), ("naive", {"block_table": table})):
            keys, values = ((pool if where else cache).clone() for _ in "kv")
            found = flash_attn_with_kvcache(q, keys, values, **given, **where, mode=mode)
            torch.testing.assert_close(found.double(), whole, rtol=4e-3, atol=4e-3)
            assert torch.equal(keys.view(3, 32, 1, 16), filled)


def test_no_row_is_appended() -> None:
    q, cache, none = randn(2, 3, 2, 16), randn(2, 20, 2, 16), randn(2, 0, 2, 16)
    used = torch.tensor([20, 9, 9, 20], dtype=torch.int32)[::2]  # with a stride
    found = flash_attn_with_kvcache(q, cache, cache.clone(), none, none, cache_seqlens=used, causal=True, mode="math")
    assert torch.equal(found, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, causal=True, mode="math"))


def test_autocast_appends_in_the_type_of_the_cache() -> None:
    q, new, cache = randn(2, 1, 2, 16, dtype=torch.float32), randn(2, 1, 2, 16, dtype=torch.float32), randn(2, 20, 2, 16)
    keys, values = cache.clone(), cache.clone()
    with torch.autocast("cpu", torch.float16):
        found = flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=7, mode="math")
    exact = flash_attn_func(q.double(), keys[:, :8].double(), values[:, :8].double(), mode="math")
    torch.testing.assert_close(found.double(), exact, rtol=4e-3, atol=4e-3)
    assert torch.equal(keys[:, 7], new[:, 0].half())


LENGTHS, TABLE = torch.tensor([3, 5], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
OTHER_BATCH = r"`k` is \[1, 1, 2, 16\] .* expected \[2, 1, 2, 16\], to be appended to `k_cache`"
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"q": [1]}, "`q` is a list; expected a tensor"),
    ({"k_cache": None}, "`k_cache` is a NoneType"),
    ({"q": randn(2, 1, 4, 16).to_sparse()}, "`q` is a sparse"),
    ({"q": randn(1, 4, 16)}, "`q` has 3 dimensions; expected 4"),
    ({"q": randn(2, 1, 3, 16)}, "3 query heads of `q` cannot share 2 key/value heads of `k_cache`"),
    ({"q": randn(5, 1, 4, 16), "cache_seqlens": 3}, "`k_cache` has room for 2 sequences; `q` has 5"),
    ({"k_cache": randn(2, 20, 2, 24)}, "`k_cache` has a head size of 24; expected 16"),
    ({"v_cache": randn(2, 19, 2, 16)}, r"`v_cache` is \[2, 19, 2, 16\]"),
    ({"v_cache": randn(2, 20, 2, 16).bfloat16()}, "`v_cache` has elements of bfloat16; expected float16"),
    ({"k_cache": randn(2, 20, 2, 16).to("meta")}, "`k_cache` is on meta and `q` on cpu"),
    ({"cache_seqlens": LENGTHS.long()}, "`cache_seqlens` has elements of int64; expected int32"),
    ({"cache_seqlens": LENGTHS[:1]}, r"`cache_seqlens` is \[1\]; expected \[batch\], and `q` has a batch of 2"),
    ({"cache_seqlens": 5.5}, "`cache_seqlens` is a float; expected an int or a tensor"),
    ({"cache_seqlens": True}, "`cache_seqlens` is a bool; expected an int or a tensor"),
    ({"cache_seqlens": 21}, "`cache_seqlens` is 21; a cache has room for 20 keys"),
    ({"cache_seqlens": LENGTHS.to("meta")}, "`cache_seqlens` is on meta"),
    ({"cache_batch_idx": [0, 1]}, "`cache_batch_idx` is a list"),
    ({"cache_batch_idx": LENGTHS, "block_table": TABLE}, "`block_table` and `cache_batch_idx` were both given"),
    ({"cache_leftpad": LENGTHS.long()}, "`cache_leftpad` has elements of int64"),
    ({"block_table": TABLE[0]}, r"`block_table` is \[1\]; expected \[batch, max_pages\]"),
    ({"alibi_slopes": torch.ones(3)}, r"`alibi_slopes` is \[3\]"),
    ({"window_size": (1, 2, 3)}, r"`window_size` is \(1, 2, 3\); expected two ints"),
    ({"softmax_scale": torch.tensor(0.5)}, "`softmax_scale` is a Tensor; expected a number"),
    ({"softcap": float("nan")}, "`softcap` is nan; expected a finite number"),
    ({"k": randn(2, 1, 2, 16)}, "appending needs `k`, `v` and `cache_seqlens`"),
    (dict.fromkeys("kv", randn(1, 1, 2, 16)), OTHER_BATCH),
    ({"k": randn(2, 1, 2, 16), "v": randn(2, 2, 2, 16)}, r"`v` is \[2, 2, 2, 16\] .* expected \[2, 1, 2, 16\]"),
    (dict.fromkeys("kv", randn(2, 1, 2, 16).to("meta")), "`k` is on meta"),
    (dict.fromkeys(("rotary_cos", "rotary_sin"), randn(20, 8)), "`rotary_cos` rotates rows that are appended"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_that_are_refused(changed: dict[str, object], message: str) -> None:
    """Before anything is written."""
    given = {"q": randn(2, 1, 4, 16), "k_cache": randn(2, 20, 2, 16), "v_cache": randn(2, 20, 2, 16), "cache_seqlens": LENGTHS}
    with pytest.raises(ArgumentError, match=message):
        flash_attn_with_kvcache(**{**given, **changed})


def test_tables_and_rows_that_are_refused() -> None:
    """The cache stays as it is."""
    q, cache = randn(2, 1, 2, 16), randn(2, 20, 2, 16)
    before = cache.clone()

    def call(cos: object, sin: object, k: object = q, keys: object = cache) -> None:
        flash_attn_with_kvcache(q, keys, cache.clone(), k, q, cos, sin, cache_seqlens=3, mode="math")

    for cos, sin, message in (
        (randn(20, 8), randn(19, 8), r"`rotary_sin` is \[19, 8\]; expected \[20, 8\]"),
        (randn(20, 8), randn(20, 8).float(), "`rotary_sin` has elements of torch.float32"),
        (randn(20, 8).long(), randn(20, 8).long(), "`rotary_cos` has elements of int64"),
        (randn(20, 0), randn(20, 0), "expected .positions, rotary_dim / 2."),
        (randn(0, 8), randn(0, 8), "`rotary_cos` has no row"),
        (1.0, randn(20, 8), "`rotary_cos` is a float"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(cos, sin)
    with pytest.raises(ArgumentError, match="`k_cache` and `k` share memory"):
        call(None, None, cache[:, 5:6])
    with pytest.raises(ArgumentError, match="elements of `k_cache` share memory"):
        call(None, None, keys=cache[:1].expand(2, -1, -1, -1))
    with pytest.raises(ArgumentError, match=r"torch\.vmap"):
        torch.vmap(lambda k: call(None, None, k))(randn(3, 2, 1, 2, 16))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("table", [None, TABLE])
def test_what_the_attention_refuses_is_not_appended(table: torch.Tensor | None) -> None:
    """Neither by the function nor by a layer, in a kernel or by torch's operations, and not after a call that fits."""
    q, new, cache = randn(2, 1, 4, 16), randn(2, 1, 2, 16), randn(2, 20, 2, 16)
    place = {"cache_seqlens": LENGTHS, "block_table": table}
    before = cache.clone()

    def refused(function: Callable[..., object], message: str, **named: object) -> None:
        with pytest.raises(ValueError, match=message):
            function(q, cache, cache.clone(), new, new, **place, **named)
        assert torch.equal(cache, before)

    for mode in ("naive", "math"):
        flash_attn_with_kvcache(q, before.clone(), before.clone(), new, new, **place, alibi_slopes=torch.ones(4), mode=mode)
        for named, message in (
            ({"alibi_slopes": torch.ones(3)}, r"`alibi_slopes` is \[3\]"),
            ({"window_size": (1,)}, r"`window_size` is \(1,\)"),
            ({"softcap": float("inf")}, "`softcap` is inf"),
        ):
            refused(flash_attn_with_kvcache, message, **named, mode=mode)
        layer = Attention(score="s + x[h]", inputs={"x": ("fp32", ("heads",))}, enable_gqa=True, layout="bshd", mode=mode)
        layer.decode(q, before.clone(), before.clone(), new, new, **place, x=torch.ones(4))
        refused(layer.decode, r"`x` is \[3\]: dimension 0 is 3, expected q_heads = 4", x=torch.ones(3))
        of_8 = Attention(attngen.define(head_dim=8), layout="bshd", mode=mode)
        refused(of_8.decode, "dimension 3 is 16, expected head_dim = 8")
    refused(flash_attn_with_kvcache, "mode is 'fast'", mode="fast")
    place = {name: None if one is None else one.to("meta") for name, one in place.items()}
    shapes = [t.to("meta") for t in (q, cache, cache, new, new)]
    assert flash_attn_with_kvcache(*shapes, **place).shape == q.shape


def test_a_call_that_an_earlier_one_says_nothing_of_is_not_appended() -> None:
    """It differs from one that fits in an address, or in the argument for which a tensor is given; or that one was of tensors
    without memory, of which torch warns if their addresses are read."""
    q, new, numbers = randn(2, 1, 4, 16), randn(2, 1, 2, 16), torch.arange(2, dtype=torch.int32)
    odd = torch.frombuffer(bytearray(2 * q.numel() + 2), dtype=torch.float16, offset=2).view(q.shape)
    assert odd.data_ptr() % 16
    assert odd.stride() == q.stride()
    hopper, fused = (Attention(is_causal=True, enable_gqa=True, layout="bshd", mode=mode) for mode in ("hopper", "fused"))
    function = partial(flash_attn_with_kvcache, causal=True, mode="hopper")
    leftpad, batch_idx = {"cache_leftpad": numbers}, {"cache_batch_idx": numbers}
    for call, fits, changed, message in (
        (function, leftpad, batch_idx, "TMA copies keys by pages"),
        (hopper.decode, leftpad, batch_idx, "TMA copies keys by pages"),
        (fused.decode, {}, {"q": odd}, "`q` starts at an address that is not a multiple of 16"),
    ):
        keys, values = randn(2, 20, 2, 16), randn(2, 20, 2, 16)
        given = {"q": q, "k_cache": keys, "v_cache": values, "k": new, "v": new, "cache_seqlens": LENGTHS}
        call(**{**given, **fits})
        with FakeTensorMode() as mode, warnings.catch_warnings(action="error"):
            call(**{name: mode.from_tensor(one) for name, one in {**given, **changed}.items()})
        before = keys.clone(), values.clone()
        with pytest.raises(ValueError, match=message):
            call(**{**given, **changed, "k": new + 1, "v": new + 1})
        assert torch.equal(keys, before[0])
        assert torch.equal(values, before[1])


def test_messages_name_the_cache_that_is_read() -> None:
    q, new = randn(2, 1, 4, 16), randn(2, 1, 2, 16)
    keys = randn(2, 20, 16, 2).mT  # rows that are not contiguous
    with pytest.raises(ArgumentError, match="`k_cache` has stride 2 in its last dimension"):
        flash_attn_with_kvcache(q, keys, keys, new, new, cache_seqlens=LENGTHS, cache_batch_idx=LENGTHS - 3, mode="fused")


def test_a_window_without_ends_is_none() -> None:
    """Whatever negative numbers say so: rows are rotated at the position of the first of them."""
    q, new, cache = randn(1, 3, 2, 16), randn(1, 1, 2, 16), randn(1, 20, 2, 16)
    tables = torch.randn(2, 20, 8)

    def call(window: object) -> torch.Tensor:
        return flash_attn_with_kvcache(q, cache, cache.clone(), new, new, *tables, 7, window_size=window, mode="math")

    assert torch.equal(call((-2, -3)), call((-1, -1)))
    assert torch.equal(call(torch.tensor([-1, -1])), call((-1, -1)))
    with pytest.raises(ArgumentError, match="`window_size` is None; expected two ints"):
        call(None)


def test_what_is_refused() -> None:
    q = randn(1, 5, 2, 16)
    with pytest.raises(ArgumentError, match=r"appending needs `k`, `v` and `cache_seqlens`"):
        flash_attn_with_kvcache(q, q, q, q, q)
    with pytest.raises(ArgumentError, match=r"`rotary_cos` is \[5, 4\]; expected \[positions, rotary_dim / 2\]"):
        flash_attn_with_kvcache(q, q, q, q, q, q[0, :, 0, :4], q[0, :, 0, :4], cache_seqlens=0)
