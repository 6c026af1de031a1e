"""Caches of 8 bits: new rows are divided by scales, rounded and limited, and read beside queries of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.torch import Attention, append, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, rotary_tables  # noqa: E402
from attngen.torch.append import Scales, appended  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.tensors import randn  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
KV8 = {"q": "bf16", "k": "fp8_e4m3", "v": "fp8_e4m3"}


def as_stored(rows: Any, scale: Any, dtype: Any) -> Any:
    """By torch: to nearest, ties to even."""
    return (rows.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def same(found: Any, expected: Any) -> bool:
    """Bit for bit, but for the bits of NaN."""
    nans = expected.float().isnan()
    return found.float().isnan().equal(nans) and found.view(torch.uint8)[~nans].equal(expected.view(torch.uint8)[~nans])


@pytest.mark.parametrize(
    ("dtype", "arch"),
    tiers.cases([(t, a) for t in LARGEST for a in ("sm_80", "sm_89")], quick=[(E4M3, "sm_80"), (E5M2, "sm_89")]),
)
def test_every_number_and_all_between_them(dtype: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the instruction and without it: numbers that the type has, the middles, neighbours of both, and what it has not."""
    make = append.append_program
    monkeypatch.setattr(append, "append_program", lambda what, _: make(what, arch))
    append._runtime.cache_clear()
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    beyond = 2 * finite[-1] - finite[-2]
    others = torch.tensor(
        [float("inf"), -float("inf"), float("nan"), 3e38, -1e6, 1e-38, -0.0, beyond, (beyond + finite[-1]) / 2]
    )
    near = [torch.nextafter(x, torch.tensor(end)) for x in (finite, middles) for end in (3e38, -3e38)]
    given = torch.cat([codes, middles, *near, others])
    given = torch.nn.functional.pad(given, (0, -len(given) % 16))
    scales = (None, 1.0, 0.3, -2.0, 0.0, 1e30, float("inf"))
    for type_of_rows in (torch.float32, torch.bfloat16, torch.float16):
        rows = given.to(type_of_rows).view(1, -1, 1, 16)
        for scale in scales:
            caches = [torch.zeros(1, rows.shape[1] + 2, 1, 16).to(dtype) for _ in range(2)]
            of_k = None if scale is None else torch.full((1, 1, 1), scale)
            appended(
                rows, rows, rows, *caches, torch.tensor([1], dtype=torch.int32), scales=Scales(of_k, torch.full((1, 1, 1), 2.0))
            )
            for cache, used in zip(caches, (1.0 if scale is None else scale, 2.0), strict=True):
                assert same(cache[:, 1:-1], as_stored(rows, used, dtype)), (type_of_rows, scale)
                assert not cache[:, [0, -1]].float().any()
    append._runtime.cache_clear()


@pytest.mark.parametrize("mode", tiers.cases(("auto", "tiled", "math"), quick=["auto"]))
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_with_scales_of_heads(mode: str, paged: bool) -> None:
    """Rows that are rotated and appended, over edges of pages; rows behind the last key are NaN."""
    q, new = randn(2, 5, 4, 64, dtype=torch.bfloat16), randn(2, 5, 2, 64, dtype=torch.bfloat16)
    of_k, of_v = torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[3.0, 0.5], [1.0, 2.0]])
    used, nan = torch.tensor([13, 30], dtype=torch.int32), torch.full((2, 48, 2, 64), float("nan")).to(E4M3)
    keys, values, where = nan.clone(), nan.clone(), {}
    for cache in (keys, values):
        for b, n in enumerate(used):
            cache[b, :n] = randn(int(n), 2, 64).to(E4M3)
    stored = keys, values
    if paged:
        table = torch.tensor([[4, 0, 5], [1, 3, 2]], dtype=torch.int32)
        stored = torch.empty(6, 16, 2, 64).to(E4M3), torch.empty(6, 16, 2, 64).to(E4M3)
        for pool, rows in zip(stored, (keys, values), strict=True):
            pool[table.long()] = rows.view(2, 3, 16, 2, 64)
        where = {"block_table": table}
    named = {"cache_seqlens": used, "k_descale": of_k, "v_descale": of_v, "causal": True, "mode": mode, **where}
    rotary = torch.rand(2, 60, 16).bfloat16()
    found = flash_attn_with_kvcache(q, *stored, new, new, *rotary, **named)
    wide = torch.randn(2, 48, 2, 64).bfloat16(), torch.randn(2, 48, 2, 64).bfloat16()
    for cache, rows, of in zip(wide, (keys, values), (of_k, of_v), strict=True):
        cache.copy_((rows.float() * of[:, None, :, None]).nan_to_num(0.0))
    plain = {"cache_seqlens": used, "causal": True, "mode": "math"}
    expected = flash_attn_with_kvcache(q, *wide, new, new, *rotary, **plain)  # new rows without rounding to 8 bits
    assert (found - expected).abs().max() < 0.15 * expected.abs().max()
    if paged:
        stored = tuple(pool[table.long()].flatten(1, 2) for pool in stored)
    for b, n in enumerate(used.tolist()):
        turned = wide[0][b, n : n + 5]
        assert same(stored[0][b, n : n + 5], as_stored(turned, of_k[b][:, None], E4M3))
        assert same(stored[1][b, n : n + 5], as_stored(new[b], of_v[b][:, None], E4M3))
        for rows, cache, of in zip(wide, stored, (of_k, of_v), strict=True):
            rows[b, n : n + 5] = (cache[b, n : n + 5].float() * of[b][:, None]).bfloat16()
            assert cache[b, n + 5 :].float().isnan().all()
    again = flash_attn_with_kvcache(q, *wide, cache_seqlens=used + 5, causal=True, mode="math")
    if not paged and mode != "math":  # q without a rotation, which the first call did
        named["cache_seqlens"] = used + 5
        torch.testing.assert_close(flash_attn_with_kvcache(q, *stored, **named), again, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mode", ["auto", "math"])
def test_a_rotary_spec_decodes_with_a_cache_of_rotated_keys(mode: str) -> None:
    """Q is rotated, and new keys before they are rounded to 8 bits; keys that are there are not rotated again."""
    tables = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", 16)))
    settings = {"dtype": KV8, "head_dim": 32, "params": {"of_k": ("float", 0.5)}, "k_scale": "of_k"}
    spec = attngen.define(**settings, mask="causal", inputs=tables, rotary="32 halves by cosines, sines")
    cosines, sines = rotary_tables(60, 32)
    q, new = randn(1, 2, 3, 32, dtype=torch.bfloat16), randn(1, 2, 3, 32, dtype=torch.bfloat16)
    keys, values = randn(1, 2, 40, 32).to(E4M3), randn(1, 2, 40, 32).to(E4M3)
    before, used = keys.clone(), torch.tensor([20], dtype=torch.int32)

    def turned(rows: Any) -> Any:
        x, y = rows.double()[..., :16], rows.double()[..., 16:]
        c, s = cosines[20:23].double(), sines[20:23].double()
        return torch.cat((x * c - y * s, x * s + y * c), -1).to(torch.bfloat16)

    layer = Attention(spec, mode=mode)
    given = {"cache_seqlens": used, "append_scales": (0.5, 1.0), "cosines": cosines, "sines": sines}
    found = layer.decode(q, keys, values, new, new, **given)
    assert same(keys[:, :, 20:23], as_stored(turned(new), 0.5, E4M3))
    assert same(keys[:, :, :20], before[:, :, :20])
    allowed = torch.arange(23) <= torch.arange(20, 23)[:, None]
    scores = turned(q).double() @ (0.5 * keys[:, :, :23].double()).mT / 32**0.5
    expected = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ values[:, :, :23].double()
    assert (found.double() - expected).abs().max() < 2e-2
    says = r"(?s)`rotary`.*keys of 8 bits are those of a cache.*Attention\.decode takes the spec as it is"
    with pytest.raises(attngen.DiagnosticError, match=says):
        layer(q, before, values, cosines=cosines, sines=sines)


def test_scales_may_be_numbers_and_are_of_8_bits_alone() -> None:
    q, new, cache = randn(2, 1, 2, 16), randn(2, 1, 2, 16), torch.zeros(2, 9, 2, 16).to(E5M2)
    for scale in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.full((2, 2), 0.5)):
        keys, values = cache.clone(), cache.clone()
        flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=3, k_descale=scale)
        assert same(keys[:, 3], as_stored(new[:, 0], 0.5, E5M2))
        assert same(values[:, 3], as_stored(new[:, 0], 1.0, E5M2))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k_cache": cache.half(), "v_cache": cache.half(), "k_descale": 1.0}, "`k_descale` is of caches of 8 bits"),
        ({"k_descale": torch.ones(3, 2)}, "expected what broadcasts to"),
        ({"v_descale": torch.ones(2, 2).half()}, "elements of float16; expected float32"),
        ({"v_descale": "1"}, "is a str; expected a number or a tensor"),
        (
            {"v_cache": cache.float().to(E4M3)},
            "`v_cache` has elements of float8_e4m3fn; expected float8_e5m2, as `k_cache` has",
        ),
        ({"k": new.to(E5M2), "v": new.to(E5M2)}, "`k` has elements of float8_e5m2; expected float16, as `q` has"),
        ({"q_descale": torch.ones(2, 2)}, "`q_descale` is not supported"),
    ]
    for changed, says in wrong:
        given = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "k": new, "v": new, "cache_seqlens": 1} | changed
        with pytest.raises(ArgumentError, match=says):
            flash_attn_with_kvcache(**given)
    with pytest.raises(ArgumentError, match="has 8 bits and a head size of 12; expected a multiple of 8"):
        flash_attn_with_kvcache(q[..., :12], cache[..., :12], cache[..., :12], cache_seqlens=1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_layer_with_scales_of_blocks_of_keys(layout: str) -> None:
    """The spec reads a scale for each page; the caller passes those of the new rows."""
    inputs = dict.fromkeys(("ks", "vs"), ("fp32", ("batch", "blocks")))
    scales = {f"{t}_scale": f"{t}s[b, min(k // 8, blocks - 1)]" for t in "kv"}
    spec = attngen.define(dtype=KV8, head_dim=32, mask="causal", inputs=inputs, **scales)
    layer = Attention(spec, layout=layout)
    shape = (lambda n: (2, n, 2, 32)) if layout == "bshd" else (lambda n: (2, 2, n, 32))
    axis = 1 if layout == "bshd" else 2
    q, new = (torch.randn(shape(12)).bfloat16() for _ in range(2))
    of_blocks = {
        "ks": torch.tensor([[1.0, 0.5, 2.0], [0.25, 1.0, 3.0]]),
        "vs": torch.tensor([[2.0, 1.0, 0.5], [1.0, 1.5, 4.0]]),
    }
    rows = {name: one.repeat_interleave(8, 1)[:, 4:16] for name, one in of_blocks.items()}  # rows of keys 4 to 15
    by_row = [one.unsqueeze(2 if layout == "bshd" else 1) for one in rows.values()]
    caches = [torch.zeros(shape(24)).to(E4M3) for _ in range(2)]
    found = layer.decode(q, *caches, new, new, cache_seqlens=4, append_scales=tuple(by_row), **of_blocks)
    wide = []
    for cache, scale, of in zip(caches, by_row, of_blocks.values(), strict=True):
        assert same(cache.narrow(axis, 4, 12), as_stored(new, scale.unsqueeze(-1), E4M3))
        whole = of.repeat_interleave(8, 1)[:, :16]
        wide.append(
            cache.narrow(axis, 0, 16).double()
            * whole[(slice(None), *((slice(None), None) if axis == 1 else (None,)))][..., None]
        )
    plain = Attention(mask="causal", layout=layout, mode="math")
    expected = plain.decode(q.double(), *wide)
    assert (found.double() - expected).abs().max() < 2e-2 * expected.abs().max()
    with pytest.raises(ArgumentError, match="is of rows that are appended"):
        layer.decode(q, *caches, cache_seqlens=4, append_scales=(1.0, None), **of_blocks)


@pytest.mark.long
def test_traced_by_torch_compile() -> None:
    def attend(q: Any, new: Any, keys: Any, values: Any, used: Any, scale: Any) -> Any:
        return flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=used, k_descale=scale, v_descale=scale)

    q, new, scale = randn(2, 3, 2, 16), randn(2, 3, 2, 16), torch.full((2, 2), 0.5)
    eager, traced = ([torch.zeros(2, 13, 2, 16).to(E4M3) for _ in range(2)] for _ in range(2))
    used = torch.tensor([4, 0], dtype=torch.int32)
    expected = attend(q, new, *eager, used, scale)
    assert torch.equal(torch.compile(attend, backend="aot_eager")(q, new, *traced, used, scale), expected)
    assert all(same(one, other) for one, other in zip(traced, eager, strict=True))


@pytest.mark.parametrize("kind", ["dense", "packed", "paged"])
def test_scales_of_keys_and_values_without_a_cache(kind: str) -> None:
    """Prompts: two sequences of 40 and 24 rows, whose keys and values of 8 bits have scales of heads."""
    lengths, begins = (40, 24), torch.tensor([0, 40, 64], dtype=torch.int32)
    q = randn(64, 4, 64, dtype=torch.bfloat16)
    k, v = (randn(64, 2, 64).to(E4M3) for _ in range(2))
    of = {"k_descale": torch.tensor([[0.5, 2.0], [1.0, -0.25]]), "v_descale": torch.tensor([[3.0, 0.5], [1.0, 2.0]])}
    each = torch.tensor(lengths)
    wide = [(t.float() * s.repeat_interleave(each, 0)[..., None]).bfloat16() for t, s in zip((k, v), of.values(), strict=True)]
    packed = (begins, begins, 40, 40)
    expected = flash_attn_varlen_func(q, *wide, *packed, causal=True)
    if kind == "packed":
        found = flash_attn_varlen_func(q, k, v, *packed, causal=True, **of)
    elif kind == "paged":  # pages of 8 rows; the last is no one's
        table = torch.tensor([[7, 6, 5, 4, 3], [2, 1, 0, 8, 8]], dtype=torch.int32)
        pools = [torch.full((9, 8, 2, 64), float("nan")).to(E4M3) for _ in range(2)]
        for pool, rows in zip(pools, (k, v), strict=True):
            pool[:8] = rows.view(8, 8, 2, 64).flip(0)
        found = flash_attn_varlen_func(q, *pools, begins, begins, 40, 40, causal=True, block_table=table, **of)
    else:
        found = flash_attn_func(*(t[None, :40] for t in (q, k, v)), causal=True, **{n: s[:1] for n, s in of.items()})[0]
        expected = expected[:40]
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_scales_beside_16_bits_are_refused() -> None:
    q = randn(1, 8, 2, 16)
    with pytest.raises(ArgumentError, match="`k_descale` is of keys and values of 8 bits, and `k` has elements of float"):
        flash_attn_func(q, q, q, k_descale=0.5)
    narrow = q.to(E4M3)
    with pytest.raises(ArgumentError, match="`v_descale` and `score_mod` or `mask_mod` cannot be given together"):
        flash_attn_func(q, narrow, narrow, v_descale=0.5, mask_mod=lambda b, h, i, j: i >= j)
