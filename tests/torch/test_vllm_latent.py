"""Latent attention for vLLM, against stand-ins of vLLM's interfaces: sequences that decode, by the emulated device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import tiers  # noqa: E402
from tests.torch import vllm_interfaces as vllm  # noqa: E402
from tests.torch.test_transformers import DEEPSEEK, TOKENS, WIDTH  # noqa: E402

PAGE, PAGES, ROOM = 16, 40, 3  # rows of a page, pages of the pool and of a sequence
SIZES = {"q_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_b_proj": None}


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that vLLM imports."""
    for name, module in vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm, "OVERRIDES", {})
    names = ("attngen.vllm.backend", "attngen.vllm.latent")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module("attngen.vllm.latent")
    for name in names:
        sys.modules.pop(name, None)


def made(latent: Any, heads: int, rank: int, rope: int, **changed: Any) -> Any:
    """The attention of a layer."""
    given = {"kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": vllm.AttentionType.DECODER, **changed}
    named = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_head_dim": 16 + rope, **SIZES}
    window = given.pop("sliding_window", None)
    return latent.AttngenLatentBackend.get_impl_cls()(
        heads, rank + rope, changed.pop("scale", 0.3), 1, None, window, given["kv_cache_dtype"], given["logits_soft_cap"],
        given["attn_type"], None, **named,
    )  # fmt: skip


def step_of(latent: Any, rows: list[int], lengths: list[int], table: Any, graph: bool = False) -> Any:
    """The metadata of a step in which each sequence has so many rows, and so many keys with them."""
    begins = torch.tensor([0, *rows]).cumsum(0).int()
    common = vllm.CommonAttentionMetadata(
        begins, begins, torch.tensor(lengths, dtype=torch.int32), len(rows), sum(rows), max(rows), max(lengths), table,
        torch.arange(sum(rows)),
    )  # fmt: skip
    builder = latent.AttngenLatentBackend.get_builder_cls()(
        SimpleNamespace(block_size=PAGE), ["layer"], None, torch.device("cpu")
    )
    return builder.build_for_cudagraph_capture(common) if graph else builder.build(0, common)


CASES = [(torch.float16, 8, 64, 16), (torch.bfloat16, 4, 48, 8), (torch.float16, 20, 512, 64)]


@pytest.mark.parametrize(("dtype", "heads", "rank", "rope"), tiers.cases(CASES, quick=CASES[1:2]))
@pytest.mark.parametrize("parts", [False, True])
def test_rows_that_decode(latent: Any, dtype: Any, heads: int, rank: int, rope: int, parts: bool) -> None:
    """Of sequences of several lengths, in pages of any order; what belongs to none is NaN. The last one is a prompt, which vLLM
    computes otherwise."""
    random = torch.Generator().manual_seed(0)
    rows, lengths = [1, 3, 2, 17], [20, 3, ROOM * PAGE, 17]
    pool = torch.full((PAGES, PAGE, rank + rope), float("nan"), dtype=dtype)
    order = torch.randperm(PAGES, generator=random).tolist()
    table = torch.full((len(rows), ROOM), -(2**31), dtype=torch.int32)
    caches = []
    for b, length in enumerate(lengths):
        used = -(-length // PAGE)
        pages = [order.pop() for _ in range(used)]
        table[b, :used] = torch.tensor(pages, dtype=torch.int32)
        caches.append(torch.randn(length, rank + rope, generator=random).to(dtype))
        for i, row in enumerate(caches[-1]):
            pool[pages[i // PAGE], i % PAGE] = row
    step = step_of(latent, rows, lengths, table)
    assert step.num_decodes == 3
    q = torch.randn(sum(rows[:3]), heads, rank + rope, generator=random).to(dtype)
    impl = made(latent, heads, rank, rope)
    impl.need_to_return_lse_for_decode = parts
    given = q.split([rank, rope], dim=-1) if parts else q
    out, lse = impl.forward_mqa(given, pool, step, None)
    assert (lse is None) is not parts
    begin = 0
    for count, length, cache in zip(rows[:3], lengths, caches, strict=False):
        mine, begin = slice(begin, begin + count), begin + count
        scores = 0.3 * torch.einsum("rhd,kd->hrk", q[mine].double(), cache.double())
        seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
        exact = torch.einsum("hrk,kd->rhd", scores.softmax(-1), cache[:, :rank].double())
        atol = 4e-3 if dtype is torch.float16 else 3e-2
        torch.testing.assert_close(out[mine].double(), exact, atol=atol, rtol=0)
        if lse is not None:
            torch.testing.assert_close(lse[mine].double(), scores.logsumexp(-1).T, atol=1e-3, rtol=0)


@pytest.mark.long
def test_tokens_of_a_model(latent: Any) -> None:
    """DeepSeek-V3's layers in the absorbed form, row by row from pages: the tokens are those of "eager"."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    tokens = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    found = {}
    for name in ("eager", "latent"):
        torch.manual_seed(1)
        config = transformers.DeepseekV3Config(**TOKENS, **WIDTH, **DEEPSEEK)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        if name == "latent":
            transformers.AttentionInterface.register("latent", absorbed(latent))
            model.config._attn_implementation = "latent"
            for layer in model.model.layers:
                keep_latents(layer.self_attn)
        found[name] = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
    assert torch.equal(found["latent"].sequences, found["eager"].sequences)
    for right, scores in zip(found["eager"].scores, found["latent"].scores, strict=True):
        assert (scores - right).abs().max() <= 1e-4 * right.abs().max()


def keep_latents(layer: Any) -> None:
    """The rows of the cache of the last call become `layer.latents`."""
    expand = layer.expand_kv

    def expand_kv(latents: Any, rotary: Any) -> Any:
        layer.latents = torch.cat([latents, rotary], dim=-1)[:, 0]
        return expand(latents, rotary)

    layer.expand_kv = expand_kv


def absorbed(latent: Any) -> Any:
    """An attention of transformers that multiplies queries by the up-projection of keys, and O by that of values."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **others: Any) -> Any:
        batch, heads, rows, _ = query.shape
        rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
        of_keys, of_values = module.kv_b_proj.weight.view(heads, -1, rank).split([nope, module.v_head_dim], dim=1)
        first = torch.einsum("bhrn,hnl->brhl", query[..., :nope], of_keys)
        q = torch.cat([first, query[..., nope:].transpose(1, 2)], dim=-1).flatten(0, 1)
        length = module.latents.shape[1]
        pool = torch.full((batch * ROOM, PAGE, q.shape[-1]), float("nan"), dtype=q.dtype)
        pool.view(batch, ROOM * PAGE, -1)[:, :length] = module.latents
        table = torch.arange(batch * ROOM, dtype=torch.int32).view(batch, ROOM)
        impl = made(latent, heads, rank, module.qk_rope_head_dim, scale=scaling)
        step = step_of(latent, [rows] * batch, [length] * batch, table)
        out, _ = impl.forward_mqa(q, pool, step, None)
        return torch.einsum("brhl,hvl->brhv", out.unflatten(0, (batch, rows)), of_values), None

    return attention


def test_what_vllm_is_told(latent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import attngen.vllm

    backend, custom = latent.AttngenLatentBackend, vllm.AttentionBackendEnum.CUSTOM
    assert backend.is_mla()
    assert backend.get_name() == custom.name
    attngen.vllm.register_latent()
    assert custom not in vllm.OVERRIDES
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver,attngen_latent")
    attngen.vllm.register_latent()
    assert vllm.OVERRIDES[custom] == f"{backend.__module__}.{backend.__qualname__}"
    table = torch.zeros(2, ROOM, dtype=torch.int32)
    assert step_of(latent, [1, 1], [5, 9], table, graph=True).decode.max_kv_len == ROOM * PAGE
    assert step_of(latent, [1, 1], [5, 9], table).decode.max_kv_len == 256
    for wrong in ({"kv_cache_dtype": "fp8"}, {"sliding_window": 5}, {"attn_type": vllm.AttentionType.ENCODER_ONLY}):
        with pytest.raises(NotImplementedError, match=next(iter(wrong))):
            made(latent, 4, 16, 8, **wrong)
    step = step_of(latent, [1, 1], [5, 9], table)
    step.decode.dcp_tot_seq_lens = torch.tensor([5, 9])
    with pytest.raises(NotImplementedError, match="context parallelism"):
        made(latent, 4, 16, 8).forward_mqa(torch.ones(2, 4, 24), torch.ones(2, PAGE, 24), step, None)
