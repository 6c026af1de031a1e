"""The specs of published checkpoints (specs/models) against the models themselves: layers of transformers with random weights,
whose attention is recorded, or, where it has none, a formula of the paper that is written for one element at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from attngen.api import load  # noqa: E402
from attngen.language import load_path  # noqa: E402
from attngen.reference.torch_oracle import torch_attention  # noqa: E402
from attngen.shipped import spec_directory  # noqa: E402
from attngen.spec.attention import AttentionSpec  # noqa: E402

MODELS = spec_directory() / "models"
LENGTH = 37
TIGHT, OF_FP32 = 1e-9, 2e-6  # largest error of O by a model in float64, and of one whose softmax is in fp32


def spec_named(file: str, name: str) -> AttentionSpec:
    return load(f"{file}:{name}")


@dataclass
class Layer:
    """One call of a model's attention: q, k, v [batch, heads, length, size], its keywords, and O in the same layout."""

    module: Any
    q: Any
    k: Any
    v: Any
    keywords: dict[str, Any]
    output: Any


@contextmanager
def recorded(module: Any) -> Iterator[list[Layer]]:
    """The calls of a modeling file's own attention while the context lasts."""
    file = sys.modules[module.__module__]
    own = file.eager_attention_forward
    calls: list[Layer] = []

    def record(layer, q, k, v, *masks, **keywords):
        found = own(layer, q, k, v, *masks, **keywords)
        calls.append(Layer(layer, q, k, v, keywords, found[0].transpose(1, 2)))
        return found

    file.eager_attention_forward = record
    try:
        yield calls
    finally:
        file.eager_attention_forward = own


def error_of(spec: AttentionSpec, layer: Layer, **given: Any) -> float:
    """The largest difference of O, relative to the largest element. Params are numbers of `given`, inputs its tensors."""
    inputs = {n: t for n, t in given.items() if isinstance(t, torch.Tensor)}
    params = {n: t for n, t in given.items() if n not in inputs}
    assert (layer.q.shape[3], layer.v.shape[3]) == (spec.head_dim, spec.head_dim_v)
    if spec.q_heads is not None:
        assert (layer.q.shape[1], layer.k.shape[1]) == (spec.q_heads, spec.kv_heads)
    with torch.no_grad():
        o, _ = torch_attention(spec, layer.q, layer.k, layer.v, inputs=inputs, params=params)
        return float((o - layer.output).abs().max() / o.abs().max())


def run(make: Callable[[Any], Any], config: Any, dtype: Any = torch.float64, **call: Any) -> list[Layer]:
    """The attentions of a model of random weights."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = make(config).to(dtype).eval()
    with recorded(model) as calls, torch.no_grad():
        model(**call or {"input_ids": torch.randint(3, 90, (2, LENGTH))})
    return calls


SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def decoders() -> Iterator[tuple[str, str, Callable[[Any], list[Layer]], list[str]]]:
    """File, configuration and class in transformers, sizes, and the specs of the layers."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    yield "gemma2", "Gemma2", heads | LAYERS | {"query_pre_attn_scalar": 256}, ["gemma2_local", "gemma2_global"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    yield "gemma3", "Gemma3Text", heads | LAYERS | {"query_pre_attn_scalar": 256}, ["gemma3_local", "gemma3_global"]
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    own = {"num_local_experts": 2, "num_experts_per_tok": 1}
    yield "gpt_oss", "GptOss", heads | LAYERS | own | {"sliding_window": 128}, ["gpt_oss_local", "gpt_oss_global"]
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    yield "mistral", "Mistral", heads | {"sliding_window": 8}, ["mistral_window"] * 2
    yield "mistral", "Mistral", heads | {"sliding_window": None}, ["mistral"] * 2
    yield "qwen", "Qwen3", heads, ["qwen3"] * 2
    yield "qwen", "Qwen2", {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}, ["qwen2"] * 2


@pytest.mark.long(one_of=1)
@pytest.mark.parametrize(("file", "model", "sizes", "names"), [*decoders()], ids=lambda x: x if isinstance(x, str) else "")
def test_decoders(file: str, model: str, sizes: dict[str, Any], names: list[str]) -> None:
    import transformers

    config = getattr(transformers, f"{model}Config")(**{**SMALL, **TOKENS, **sizes})
    make = getattr(transformers, f"{model}Model")
    length = 150 if file == "gpt_oss" else LENGTH
    dtype = torch.float32 if file == "gpt_oss" else torch.float64  # torch's product of groups, of its experts, has no float64
    calls = run(make, config, dtype, input_ids=torch.randint(3, 90, (2, length)))
    assert len(calls) == len(names)
    for name, layer in zip(names, calls, strict=True):
        spec = spec_named(file, name)
        sinks = {"sinks": layer.module.sinks} if spec.inputs else {}
        size = {"size": 8} if spec.params else {}
        assert error_of(spec, layer, **sinks, **size) < OF_FP32
        wrong = replace(spec, mask=None) if name != "gpt_oss_global" else replace(spec, sink=None)
        assert error_of(wrong, layer, **sinks, **size) > 100 * OF_FP32


@pytest.mark.long(one_of=1)
def test_gemma4() -> None:
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    own = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "vocab_size_per_layer_input": 96}
    config = Gemma4TextConfig(
        **{**SMALL, **TOKENS, **LAYERS, **own, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    )
    local, whole = run(Gemma4TextModel, config)
    assert error_of(spec_named("gemma4", "gemma4_local"), local, size=8) < OF_FP32
    assert error_of(spec_named("gemma4", "gemma4_global"), whole) < OF_FP32
    assert error_of(spec_named("gemma4", "gemma4_local"), local, size=9) > 100 * OF_FP32


@pytest.mark.long(one_of=1)
def test_modernbert() -> None:
    from transformers import ModernBertConfig, ModernBertModel

    sizes = {"hidden_size": 768, "num_attention_heads": 12, "local_attention": 16, "global_attn_every_n_layers": 2}
    config = ModernBertConfig(**{**SMALL, **TOKENS, **sizes, "reference_compile": False})
    lengths = torch.tensor([LENGTH, 21])
    present = (torch.arange(LENGTH)[None, :] < lengths[:, None]).long()
    whole, local = run(ModernBertModel, config, input_ids=torch.randint(3, 90, (2, LENGTH)), attention_mask=present)
    for layer in (whole, local):
        layer.output[1, :, 21:] = 0  # rows of padding, of which nothing reads
        layer.q = layer.q.clone()
    for name, layer, size in (("modernbert_global", whole, {}), ("modernbert_local", local, {"size": 8})):
        spec = spec_named("modernbert", name)
        o, _ = torch_attention(spec, layer.q, layer.k, layer.v, inputs={"lengths": lengths}, params=size)
        o[1, :, 21:] = 0
        assert float((o - layer.output).abs().max() / o.abs().max()) < OF_FP32


@pytest.mark.long(one_of=1)
def test_t5() -> None:
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=96, d_model=32, d_kv=64, d_ff=32, num_layers=2, num_heads=4, **TOKENS)
    length = 200
    ids = {n: torch.randint(3, 90, (2, length)) for n in ("input_ids", "decoder_input_ids")}
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = T5Model(config).double().eval()
    with recorded(model) as calls, torch.no_grad():
        model(**ids)
    of_encoder = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    of_decoder = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    encoder, decoder = calls[1], calls[4]  # the second layers: that of the decoder has a cross-attention before it
    assert error_of(spec_named("t5", "t5_encoder"), encoder, table=of_encoder) < OF_FP32
    assert error_of(spec_named("t5", "t5_decoder"), decoder, table=of_decoder) < OF_FP32
    assert error_of(spec_named("t5", "t5_decoder"), decoder, table=of_encoder) > 100 * OF_FP32
    cross = replace(spec_named("t5", "t5_encoder"), score=attngen_score(), inputs=())
    assert error_of(cross, calls[3]) < OF_FP32


def attngen_score() -> Any:
    from attngen.spec.attention import S

    return S


@pytest.mark.long(one_of=1)
def test_swin() -> None:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(image_size=56, patch_size=2, embed_dim=64, depths=[2], num_heads=[2], window_size=7, num_channels=1)
    plain, shifted = run(SwinModel, config, pixel_values=torch.randn(2, 1, 56, 56, dtype=torch.float64))
    tables = [layer.module.relative_position_bias.relative_position_bias_table for layer in (plain, shifted)]
    for table in tables:
        torch.nn.init.normal_(table)
    plain, shifted = rerun(plain, shifted, SwinModel, config)
    assert error_of(spec_named("swin", "swin"), plain[0], table=plain[1]) < OF_FP32
    spec = spec_named("swin", "swin_shifted")
    assert error_of(spec, shifted[0], table=shifted[1], rows=4, cols=4) < OF_FP32
    assert error_of(replace(spec, mask=None), shifted[0], table=shifted[1], rows=4, cols=4) > 100 * OF_FP32


def rerun(plain: Layer, shifted: Layer, make: Any, config: Any) -> list[tuple[Layer, Any]]:
    """The layers of a model whose biases are random: they begin with 0."""
    torch.manual_seed(0)
    model = make(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            torch.nn.init.normal_(parameter)
    with recorded(model) as calls, torch.no_grad():
        model(pixel_values=torch.randn(2, 1, 56, 56, dtype=torch.float64))
    return [(layer, layer.module.relative_position_bias.relative_position_bias_table) for layer in calls]


# --- formulas, an element at a time


def by_pairs(q: Any, k: Any, v: Any, score: Callable[..., float], allowed: Callable[..., bool]) -> Any:
    """softmax(score) V over the pairs that are allowed, by loops over rows and keys."""
    scores = torch.full((*q.shape[:3], k.shape[2]), -math.inf, dtype=torch.float64)
    products = q @ k.mT * q.shape[3] ** -0.5
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape)).tolist():
        if allowed(b, h, i, j):
            scores[b, h, i, j] = products[b, h, i, j] + score(b, h, i, j)
    return scores.softmax(-1) @ v


def formula(
    spec: AttentionSpec,
    lengths: tuple[int, int],
    score: Any,
    allowed: Any,
    batch: int = 1,
    heads: int = 2,
    limit: float = TIGHT,
    **given: Any,
) -> None:
    """Compares a spec, of small heads, with a formula."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, n, 8) for n in (lengths[0], lengths[1], lengths[1])]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    small = replace(spec, head_dim=8, head_dim_v=8, q_heads=None, kv_heads=None, scale=scale_of(8))
    expected = by_pairs(q, k, v, score or (lambda *_: 0.0), allowed)
    assert error_of(small, Layer(None, q, k, v, {}, expected), **given) < limit


def scale_of(head_dim: int) -> Any:
    from attngen.spec.expr import constant

    return constant(head_dim**-0.5)


def test_natten() -> None:
    def start(i: int, length: int, size: int) -> int:
        return min(max(i - size // 2, 0), length - size)

    def near(p: tuple[int, ...], r: tuple[int, ...], sizes: tuple[int, ...], size: int) -> bool:
        return all(0 <= b - start(a, n, size) < size for a, b, n in zip(p, r, sizes, strict=True))

    for sizes, size in (((13,), 5), ((5, 6), 3), ((3, 4, 3), 3)):
        count = math.prod(sizes)
        at = torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(count, -1).tolist()
        allowed = lambda b, h, i, j, at=at, sizes=sizes, size=size: near(at[i], at[j], sizes, size)  # noqa: E731
        given = {1: {}, 2: {"width": sizes[-1]}, 3: {"height": sizes[-2] if len(sizes) > 1 else 0, "width": sizes[-1]}}
        spec = spec_named("natten", f"natten_{len(sizes)}d")
        formula(spec, (count, count), None, allowed, size=size, **given[len(sizes)])


def test_block_diffusion() -> None:
    """The mask of the paper's code, M_BD | M_OBC | M_BC, with x_t before x_0."""
    half, block = 9, 3

    def allowed(b: int, h: int, i: int, j: int) -> bool:
        clean_q, clean_k = i >= half, j >= half
        block_q, block_k = ((n - half if n >= half else n) // block for n in (i, j))
        diagonal = block_q == block_k and clean_q == clean_k
        offset = block_q > block_k and clean_k and not clean_q
        causal = block_q >= block_k and clean_k and clean_q
        return diagonal or offset or causal

    formula(spec_named("block_diffusion", "block_diffusion"), (2 * half, 2 * half), None, allowed, block=block)


def test_speculative_tree() -> None:
    """A tree with one root, and one of two drafts that share nothing."""
    parents, prefix = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, -1, 3, 4]], 5

    def ancestors(b: int, node: int) -> set[int]:
        return {node} | (ancestors(b, parents[b][node]) if parents[b][node] >= 0 else set())

    tree = torch.tensor([[[j in ancestors(b, i) for j in range(6)] for i in range(6)] for b in range(2)])
    allowed = lambda b, h, i, j: j < prefix or (j - prefix) in ancestors(b, i)  # noqa: E731
    formula(spec_named("speculative_tree", "speculative_tree"), (6, prefix + 6), None, allowed, batch=2, tree=tree)


def test_triangle_attention() -> None:
    """Two complexes of 5 residues: row b of the batch is row b % 5 of complex b // 5."""
    residues = 5
    bias = torch.randn(2, 2, residues, residues, dtype=torch.float64)
    is_pair = torch.rand(2 * residues, residues) < 0.7
    is_pair[:, 0] = True
    score = lambda b, h, i, j: float(bias[b // residues, h, i, j])  # noqa: E731
    allowed = lambda b, h, i, j: bool(is_pair[b, j])  # noqa: E731
    spec = spec_named("alphafold", "triangle")
    formula(spec, (residues, residues), score, allowed, batch=2 * residues, pair_bias=bias, is_pair=is_pair)


def test_slopes_of_bloom_and_mpt() -> None:
    """The biases that transformers makes, up to a number for each row, which a softmax does not see."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    allowed = lambda b, h, i, j: i >= j  # noqa: E731
    for name, heads in (("bloom", 112), ("mpt_7b", 32), ("mpt_7b", 4)):
        of_bloom = build_alibi_tensor(torch.ones(1, 6), heads, torch.float64).reshape(heads, 6)
        biases = [of_bloom] if name == "bloom" else [of_bloom, build_mpt_alibi_tensor(heads, 6).reshape(heads, 6).double()]
        for bias in biases:
            score = lambda b, h, i, j, bias=bias: float(bias[h, j])  # noqa: E731
            formula(spec_named("bloom_mpt", name), (6, 6), score, allowed, heads=heads, limit=OF_FP32)  # slopes in fp32


def test_every_file_is_loaded_without_a_warning_and_tested() -> None:
    own = Path(__file__).read_text()
    for path in MODELS.glob("*.attn"):
        loaded = load_path(path)
        assert [found for one in loaded for found in one.suspicions()] == []
        assert path.read_text().startswith("# ")
        for one in loaded:
            assert one.spec.name in own or f"{path.stem}_{{" in own, one.spec.name
