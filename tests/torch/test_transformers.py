"""Models of transformers with attn_implementation="attngen": logits, gradients and generated tokens are those of "eager"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from torch._dynamo.utils import counters  # noqa: E402
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function  # noqa: E402

import attngen.transformers  # noqa: E402  # registers "attngen"
from attngen.device.arrays import ArgumentError  # noqa: E402
from attngen.spec.evaluate import evaluate  # noqa: E402
from attngen.spec.expr import Gather, walk  # noqa: E402
from attngen.torch import flash_attn_varlen_func  # noqa: E402

pytestmark = pytest.mark.long
NAIVE = {"kernel_options": {"mode": "naive"}}  # quick to compile
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTH = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TOKENS, **WIDTH, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
BERT = {**TOKENS, **WIDTH, "embedding_dropout": 0.0, "attention_dropout": 0.0, "mlp_dropout": 0.0, "local_attention": 6}
GPT2 = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GEMMA4 = {**DECODER, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
GEMMA4 |= {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 99}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
}
DEEPSEEK |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
T5 = {**TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", GPT2),
    "Llama": ("LlamaConfig", DECODER),
    "Mistral": ("MistralConfig", {**DECODER, "sliding_window": 5}),
    "Gemma 2": ("Gemma2Config", {**DECODER, "sliding_window": 5}),
    "Gemma 3": ("Gemma3TextConfig", {**DECODER, "sliding_window": 5}),
    "Gemma 4": ("Gemma4TextConfig", GEMMA4),  # heads of its full layers are wider than of those with a window
    "DeepSeek-V3": ("DeepseekV3Config", {**TOKENS, **WIDTH, **DEEPSEEK}),  # Q, K wider than V
    "Qwen 3": ("Qwen3Config", DECODER),
    "gpt-oss": ("GptOssConfig", {**DECODER, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "ModernBERT": ("ModernBertConfig", {**BERT, "cls_token_id": 1, "sep_token_id": 2}),
    "T5": ("T5Config", {**T5, "decoder_start_token_id": 0}),
}
LENGTH = 13


def model(name: str, implementation: str) -> Any:
    config, sizes = CONFIGS[name]
    torch.manual_seed(1)
    kind = {"ModernBERT": "AutoModelForMaskedLM", "T5": "AutoModelForSeq2SeqLM"}.get(name, "AutoModelForCausalLM")
    return getattr(transformers, kind).from_config(getattr(transformers, config)(**sizes), attn_implementation=implementation)


def logits_and_gradients(name: str, implementation: str, call: dict[str, Any], kept: Any) -> dict[str, Any]:
    made = model(name, implementation)
    logits = made(**call, **(NAIVE if implementation == "attngen" and name != "T5" else {})).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    if kept.shape == logits.shape[:2]:
        logits = logits * kept[..., None]
    (logits * direction).sum().backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in made.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(("name", "padding"), [(n, p) for n in CONFIGS for p in ("", "left")] + [("Llama", "right")])
def test_logits_and_gradients(name: str, padding: str) -> None:
    tokens = torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    kept = torch.ones_like(tokens)
    if padding:
        kept[0, slice(0, 4) if padding == "left" else slice(-4, None)] = 0
    call = {"input_ids": tokens, "attention_mask": kept if padding else None}
    if name == "T5":
        call["labels"] = tokens[:, :7].contiguous()
    expected = logits_and_gradients(name, "eager", call, kept)
    found = logits_and_gradients(name, "attngen", call, kept)
    assert found.keys() == expected.keys()
    for part, right in expected.items():
        assert (found[part] - right).abs().max() <= 1e-5 * right.abs().max(), part


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Gemma 3", "Gemma 4", "DeepSeek-V3", "gpt-oss"])
def test_generated_tokens(name: str, cache: str) -> None:
    tokens = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    kept = torch.ones_like(tokens)
    kept[0, :2] = 0
    how = {"attention_mask": kept, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    how |= {"disable_compile": True, "return_dict_in_generate": True, "output_scores": True}
    results = [model(name, one).eval().generate(tokens, **how) for one in ("eager", "attngen")]
    assert torch.equal(results[0].sequences, results[1].sequences)
    for right, found in zip(results[0].scores, results[1].scores, strict=True):
        assert (found - right).abs().max() <= 1e-5 * right.abs().max()


def test_caches_that_count_their_tokens_in_place() -> None:
    """A mask is read after the cache has counted the tokens of the step: a static cache, without a mask of padding that would
    hide keys to come, and a sliding one that took back tokens, as in prompt lookup."""
    tokens = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(0))
    logits: dict[str, list[Any]] = {"eager": [], "attngen": []}
    for name, found in logits.items():
        llama = model("Llama", name).eval()
        cache = transformers.StaticCache(config=llama.config, max_cache_len=16)
        with torch.no_grad():
            found += [llama(part, past_key_values=cache).logits for part in tokens.split([5, 1, 3], 1)]
    for right, of_step in zip(*logits.values(), strict=True):
        assert (of_step - right).abs().max() <= 1e-5 * right.abs().max()
    repeated = torch.cat([tokens, tokens[:, :4]], 1)
    how = {"attention_mask": torch.ones_like(repeated), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    mistral = model("Mistral", "attngen").eval()
    expected = mistral.generate(repeated, **how)
    assert torch.equal(mistral.generate(repeated, prompt_lookup_num_tokens=3, **how), expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_tokens_of_a_compiled_static_cache() -> None:
    """No token compiles anything: one graph, and another one where windows are full, as torch's own attention has them."""
    name = "Gemma 2"
    tokens = torch.randint(3, 99, (2, 4), generator=torch.Generator().manual_seed(0))
    kept = torch.ones_like(tokens)
    kept[0, :2] = 0
    how = {"attention_mask": kept, "max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    right = model(name, "eager").eval().generate(tokens, disable_compile=True, **how)
    compiled = transformers.CompileConfig(backend="eager", mode="default", fullgraph=True)
    compiled._compile_all_devices = True
    counters.clear()
    assert torch.equal(model(name, "attngen").eval().generate(tokens, compile_config=compiled, **how), right)
    assert counters["stats"]["unique_graphs"] == 2


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], list(range(3, 25)), [50]]


TAKES_FLASH = hasattr(transformers.ContinuousBatchingConfig(), "auto_switch_to_flash")  # later versions


def of_copies(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
    """A layer of later versions, whose code updates the cache: attention gets copies of all keys, and what is of its layer."""
    group, _ = named["cache"].layer_index_to_group_indices[module.layer_idx]
    kind = "full_attention" if named["cache"].sliding_windows[module.layer_idx] == 1 else "sliding_attention"
    begins, most = (n[kind] if isinstance(n, Mapping) else n for n in (named.pop("cu_seq_lens_k"), named.pop("max_seqlen_k")))
    assert group < len(named["read_index"])
    key, value = named["cache"].update(key, value, module.layer_idx, named.pop("read_index"), named.pop("write_index"))
    key, value = (one.transpose(0, 1)[None] if one.dim() == 3 else one for one in (key, value))
    named |= {"cu_seq_lens_k": begins, "max_length_k": most, "max_length_q": named.pop("max_seqlen_q")}
    window = getattr(module, "sliding_window", None)
    return attngen.transformers.attention(module, query, key, value, mask, **named | {"sliding_window": window})


@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss"])
@pytest.mark.parametrize("way", ["copies"] if TAKES_FLASH else ["pages", "copies"])
def test_continuous_batching(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces beside sequences that grow: tokens are eager's for each prompt alone. Layers without a window read
    pages in place, in versions that let them."""
    calls = []

    def attend(*arguments: Any, **named: Any) -> Any:
        calls.append((named["window_size"], "block_table" in named))
        return flash_attn_varlen_func(*arguments, **named | {"mode": "naive"})

    monkeypatch.setattr(attngen.transformers, "flash_attn_varlen_func", attend)
    memory = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
    monkeypatch.setattr(memory, lambda *_: (torch.device("cpu"), 2**30, 0, 0))
    eager = model(name, "eager").eval()
    right = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        found = eager.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False)
        right.append(found[0, len(prompt) :].tolist())
    transformers.AttentionInterface.register("paged|attngen_copies", of_copies)
    if way == "pages" or not TAKES_FLASH:
        batched = model(name, "paged|attngen" if way == "pages" else "paged|attngen_copies").eval()
    else:
        batched = model(name, "attngen").eval()
        batched.config._attn_implementation = "attngen_flash"
    done = batched.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=2),
        continuous_batching_config=transformers.ContinuousBatchingConfig(block_size=4, num_blocks=40, max_batch_tokens=16),
    )
    in_order = sorted(done, key=lambda request: int(request.rpartition("_")[2]))
    assert [done[request].generated_tokens for request in in_order] == right
    assert ((-1, -1), way == "pages") in calls
    assert any(window[0] == 4 and not paged for window, paged in calls)  # how far it reaches ahead is said by a causal mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_with_other_numbers_of_keys(causal: bool, window: int | None) -> None:
    """As continuous batching calls attention by a name with "flash" in it. The third case has as many rows as keys in all."""
    for rows, keys in (([3, 1, 2], [5, 1, 7]), ([4], [9]), ([1, 4], [4, 1])):
        q, k, v = torch.randn(1, 4, sum(rows), 8), *torch.randn(2, 1, 2, sum(keys), 8)
        begins = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (rows, keys))
        named = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), begins, strict=True))
        longest = {"max_length_q": max(rows), "max_length_k": max(keys)} if len(rows) > 1 else {}
        how = {"is_causal": causal, "sliding_window": window, **named, **longest, **NAIVE}
        found = attngen.transformers.attention(torch.nn.Module(), q, k, v, None, **how)[0]
        for i, (n, m) in enumerate(zip(rows, keys, strict=True)):
            (first, start), distance = (
                (begin[i] for begin in named.values()),
                torch.arange(n)[:, None] + m - n - torch.arange(m),
            )
            pairs = (distance >= 0) | (not causal)
            pairs &= torch.tensor(True) if window is None else distance.abs() < window
            part = q[:, :, first : first + n], k[:, :, start : start + m], v[:, :, start : start + m]
            right = torch.nn.functional.scaled_dot_product_attention(*part, pairs, enable_gqa=True).transpose(1, 2)
            right = right.nan_to_num(0.0)
            torch.testing.assert_close(found[:, first : first + n], right)
    with pytest.raises(ArgumentError, match="given for 2 rows of queries"):
        attngen.transformers.attention(torch.nn.Module(), *(t.expand(2, -1, -1, -1) for t in (q, k, v)), None, **how)


def test_pages_need_a_cache() -> None:
    with pytest.raises(ArgumentError, match="without a cache"):
        model("Llama", "paged|attngen")(input_ids=torch.tensor([[3, 4]]))
    q, paged = torch.randn(1, 2, 4, 8), {"cache": object(), "cu_seq_lens_q": torch.tensor([0, 4])}
    with pytest.raises(ArgumentError, match="no attention_mask, no position_bias"):
        attngen.transformers.paged_attention(torch.nn.Module(), q, q, q, q, position_bias=q, **paged)


def test_packed_sequences() -> None:
    """Position ids that begin again at 0 separate sequences of one row."""
    tokens = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    found, expected = (
        model("Llama", one)(input_ids=tokens, position_ids=positions, use_cache=False).logits for one in ("attngen", "eager")
    )
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_mask_of_all_pairs(kind: str) -> None:
    tokens = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.7) | torch.eye(9, dtype=torch.bool)
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = model("Llama", "eager")(input_ids=tokens, attention_mask=added).logits
    found = model("Llama", "attngen")(input_ids=tokens, attention_mask=mask if kind == "boolean" else added).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_keywords_say_without_a_mask() -> None:
    """As transformers' flash-attention has it."""
    q, (k, v) = torch.randn(1, 4, 6, 8), torch.randn(2, 1, 2, 6, 8)
    distance, sequence = torch.arange(6)[:, None] - torch.arange(6), torch.tensor([0, 0, 0, 0, 1, 1])
    same, causal = sequence[:, None] == sequence, distance >= 0
    begins = {"cu_seq_lens_q": torch.tensor([0, 4, 6], dtype=torch.int32)}

    def attend(rows: Any = q, mask: Any = None, **keywords: Any) -> Any:
        found = attngen.transformers.attention(torch.nn.Module(), rows, k, v, mask, kernel_options={"mode": "math"}, **keywords)
        return found[0]

    made = attngen.transformers.mask(1, 6, 6)
    for found, pairs in (
        (attend(sliding_window=3), causal & (distance < 3)),
        (attend(sliding_window=3, is_causal=False), distance.abs() < 3),
        (attend(**begins), causal & same),
        (attend(is_causal=False, **begins), same),
        (attend(mask=made, sliding_window=1, **begins), causal & same),
        (attend(mask=(distance < 2)[None, None], **begins), (distance < 2) & same),
        (attend(softcap=0.0), causal),
    ):
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, pairs, enable_gqa=True)
        torch.testing.assert_close(found, right.transpose(1, 2))
    right = torch.nn.functional.scaled_dot_product_attention(q[:, :, 5:], k[:, :, 3:], v[:, :, 3:], enable_gqa=True)
    torch.testing.assert_close(attend(q[:, :, 5:], sliding_window=3), right.transpose(1, 2))
    with pytest.raises(ArgumentError, match="1 rows of 4 queries and 6 keys; expected one row"):
        attend(q[:, :, :4], **begins)


def test_positions_of_queries() -> None:
    """Which early versions of transformers give in the place of a length and an offset."""
    named = {"kv_length": 7, "kv_offset": 1}
    masks = [
        attngen.transformers.mask(2, 3, q_offset=5, **named),
        attngen.transformers.mask(2, cache_position=torch.arange(5, 8), **named),
    ]
    assert masks[0].shape == masks[1].shape
    pairs = torch.arange(3)[:, None], torch.arange(7)
    assert torch.equal(*(mask.mask_mod(0, 0, *pairs) for mask in masks))


def test_slices_of_a_mask() -> None:
    """Layers that compute only the last rows take only these of the mask, as Gemma 4's that share keys do."""
    whole = attngen.transformers.mask(2, 5, 9, q_offset=4, attention_mask=torch.tensor([[0, 0, *[1] * 7], [1] * 9]).bool())
    pairs = torch.arange(2)[:, None, None], 0, torch.arange(5)[:, None], torch.arange(9)
    dense = whole.mask_mod(*pairs)
    for rows, keys in ((slice(-2, None), slice(None)), (slice(1, 4), slice(2, 7)), (slice(None), slice(0, 20))):
        part = whole[1:, :, rows, keys]
        expected = dense[1:, rows, keys]
        assert part.shape == (1, 1, *expected.shape[1:])
        batch, rows_left, keys_left = expected.shape
        pairs = torch.arange(batch)[:, None, None], 0, torch.arange(rows_left)[:, None], torch.arange(keys_left)
        assert torch.equal(part.mask_mod(*pairs), expected)
        assert part.is_function


def test_a_batch_of_1_is_repeated() -> None:
    """As in eager attention, of learned queries."""
    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 6, 8)
    for sizes in ((1, 2), (2, 1)):
        rows, keys, values = q[: sizes[0]].requires_grad_(), k[: sizes[1]], v[: sizes[1]]
        found = attngen.transformers.attention(torch.nn.Module(), rows, keys, values, None, is_causal=False, **NAIVE)[0]
        whole = (one.expand(2, -1, -1, -1) for one in (rows, keys, values))
        right = torch.nn.functional.scaled_dot_product_attention(*whole, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found, right)
        direction = torch.randn(right.shape)
        torch.testing.assert_close(*(torch.autograd.grad(o, rows, direction)[0] for o in (found, right)))


def test_a_mask_for_layers_on_another_device() -> None:
    """accelerate moves the arguments of each layer to its device: what the function captures goes along, once."""
    kept = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    sequence = torch.tensor([[0, 0, 1, 1]] * 2)
    within = and_masks(causal_mask_function, packed_sequence_mask_function(sequence))
    mask = attngen.transformers.mask(2, 4, 4, torch.tensor(0), mask_function=within, attention_mask=kept)
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert moved is mask.to("meta")
    pairs = torch.arange(2)[:, None, None], torch.tensor(0), torch.arange(4)[:, None], torch.arange(4)
    assert moved.mask_mod(*(one.to("meta") for one in pairs)).device.type == "meta"
    copied = attngen.transformers._moved(mask.mask_mod, torch.device("cpu"))
    assert torch.equal(copied(*pairs), mask.mask_mod(*pairs))


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: torch.zeros(4, 4) + mask,
        lambda mask: torch.cat([mask, mask], -1),
        lambda mask: mask.to(torch.bool),
        lambda mask: mask[:, 0],
        lambda mask: mask[:, :, ::2],
        lambda mask: mask.dtype,
    ],
)
def test_masks_are_no_tensors(use: Any) -> None:
    """A model that adds the mask to its own scores does not call attngen."""
    with pytest.raises((ArgumentError, AttributeError), match=r'function.*use attn_implementation="sdpa"'):
        use(attngen.transformers.mask(1, 4, 4))


@pytest.mark.parametrize("name", ["Bloom", "MPNet", "XGLM", "Mpt", "Falcon"])
def test_advice_is_what_the_model_supports(name: str) -> None:
    """Asked of its class: most of these models have no other attention than eager."""
    config = getattr(transformers, f"{name}Config")()
    mask = attngen.transformers.mask(1, 4, 4, config=config)
    layer = torch.nn.Module()
    layer.config = config
    q = torch.randn(1, 2, 4, 8)
    said = set()
    for use in (
        lambda: torch.zeros(4, 4) + mask,
        lambda: torch.cat([mask[:, :, 1:]], -1),
        lambda: mask.to("meta").to(torch.bool),
        lambda: mask[:, 0],
        lambda: mask.dtype,
        lambda: attngen.transformers.attention(layer, q, q, q, None, indices=torch.zeros(1)),
        lambda: attngen.transformers.attention(layer, *3 * [torch.randn(1, 2, 4, 640)], None),
    ):
        with pytest.raises((ArgumentError, AttributeError)) as caught:
            use()
        said.add(str(caught.value).partition("; ")[2])
    (advice,) = said
    only = f"use attn_implementation=\"eager\", the only one of models of type '{config.model_type}'"
    assert advice == (only if name != "Falcon" else attngen.transformers.SDPA)


def test_models_that_would_ignore_a_mask_are_refused() -> None:
    with pytest.raises(ArgumentError, match="models of type 'doge' ignore a mask"):
        attngen.transformers.mask(1, 4, 4, config=transformers.DogeConfig())


@pytest.mark.parametrize("option", ["indices", "block_indices", "sinks"])
def test_options_that_attngen_does_not_read_are_refused(option: str) -> None:
    """They select keys, or change the softmax: without them the result would be that of another model."""
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ArgumentError, match=f"does not read the option `{option}`"):
        attngen.transformers.attention(torch.nn.Module(), q, q, q, None, **{option: torch.zeros(1)})


def test_large_heads_are_refused() -> None:
    q = torch.randn(1, 2, 4, 640)
    with pytest.raises(ArgumentError, match=r'heads of size 640.*at most 576; use attn_implementation="sdpa"'):
        attngen.transformers.attention(torch.nn.Module(), q, q, q, None)


def test_masks_that_do_not_fit_are_refused() -> None:
    q, k = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8)
    for name, pairs, message in (
        ("attention_mask", torch.ones(2, 1, 4, 5).bool(), r"`attention_mask` is \[2, 1, 4, 5\]; expected \[2, 2, 4, 6\]"),
        ("attention_mask", torch.ones(2, 6).bool(), r"`attention_mask` is \[2, 6\]"),
        ("attention_mask", torch.ones(2, 1, 4, 6).long(), "`attention_mask` has elements of torch.int64"),
        ("position_bias", torch.ones(1, 3, 4, 6), r"`position_bias` is \[1, 3, 4, 6\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            attngen.transformers.attention(torch.nn.Module(), q, k, k, **{"attention_mask": None, name: pairs})
    with pytest.raises(ArgumentError, match=r"`attention_mask` is \[2, 4, 6\]; expected \[batch, keys\]"):
        attngen.transformers.mask(2, 4, 6, attention_mask=torch.ones(2, 4, 6))


def test_weights_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ArgumentError, match="eager"):
        attngen.transformers.attention(torch.nn.Module(), q, q, q, None, output_attentions=True)


def test_the_shipped_buckets_of_t5_are_those_of_transformers() -> None:
    """The bias of a row of keys, for every distance up to 2^17 and some beyond, both ways."""
    from transformers.models.t5.modeling_t5 import T5Attention

    spec = attngen.load("t5_buckets")
    (read,) = (node for node in walk(spec.score) if isinstance(node, Gather))
    far = torch.cat([torch.arange(2**17), 2 ** torch.arange(17, 29), 2 ** torch.arange(17, 29) - 1])
    distance = torch.cat([far, -far])  # k - q
    q = torch.clamp(-distance, min=0)
    names = {"q": q.numpy(), "k": (q + distance).numpy(), "h": np.zeros(len(q), np.int64)}
    expected = T5Attention._relative_position_bucket(distance, bidirectional=True, num_buckets=32, max_distance=128)
    assert spec.input(read.input).dims == (32, "q_heads")  # as relative_attention_bias.weight
    assert np.array_equal(evaluate(read.args[0], names, lambda *_: None, np), expected.numpy())
