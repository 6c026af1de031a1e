"""Heads of more than 256 columns, latent attention, and keys of 8 bits on the GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import attngen  # noqa: E402
import attngen.torch  # noqa: E402
from attngen.bench import sweep  # noqa: E402
from attngen.language import load_text  # noqa: E402
from attngen.reference.torch_oracle import torch_attention  # noqa: E402
from attngen.torch import Attention  # noqa: E402

LENGTHS = [(1, 1), (64, 64), (200, 1), (1, 700), (130, 257), (300, 300)]
NARROW = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def randn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, device="cuda").to(dtype)


def is_right(found: Any, exact: Any, dtype: Any) -> None:
    """Beside the rounding of O, that of the weights, whose errors add up as roots."""
    unit = torch.finfo(dtype).eps
    assert (found.double() - exact).abs().max() <= unit * (exact.abs().max() + 1), (found.double() - exact).abs().max()


@pytest.mark.parametrize("schedule", ["hopper", "fused", "decode"])
@pytest.mark.parametrize("mask", [None, "causal_bottom_right", "window(64)"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (320, 512), (264, 264), (576, 512)])
def test_wide_heads(schedule: str, mask: str | None, head_dim: int, head_dim_v: int) -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        spec = attngen.define(dtype=name, head_dim=head_dim, head_dim_v=head_dim_v, mask=mask)
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for q_len, kv_len in LENGTHS:
            q = randn(2, 4, q_len, head_dim, dtype=dtype)
            k, v = (randn(2, 2, kv_len, d, dtype=dtype) for d in (head_dim, head_dim_v))
            is_right(kernel(q, k, v), torch_attention(spec, q, k, v)[0], dtype)


@pytest.mark.parametrize("schedule", ["auto", "hopper", "decode"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_latent_attention(schedule: str, heads: int, rows: int) -> None:
    """Dense, and in pages of 64 in any order, with NaN in rows that are not used."""
    keywords: dict[str, Any] = {
        "dtype": "bf16", "head_dim": 576, "values": (0, 512), "heads": (heads, 1), "mask": "causal_bottom_right",
    }  # fmt: skip
    q, k = randn(3, heads, rows, 576), randn(3, 1, 640, 576)
    spec = attngen.define(**keywords)
    exact, _ = torch_attention(spec, q, k, k[..., :512])
    is_right(attngen.compile(spec, kernel=schedule, device="cuda")(q, k), exact, torch.bfloat16)
    paged = attngen.define(**keywords, storage="paged", page_size=64)
    seqused = torch.tensor([640, 133, 71], device="cuda", dtype=torch.int32)
    table = torch.randperm(40, device="cuda")[:30].int().view(3, 10)
    pool = torch.full((40, 1, 64, 576), float("nan"), device="cuda", dtype=torch.bfloat16)
    for b, used in enumerate(seqused.tolist()):
        for row in range(used):
            pool[table[b, row // 64], 0, row % 64] = k[b, 0, row]
    found = attngen.compile(paged, kernel=schedule, device="cuda")(q, pool, page_table=table, seqused=seqused)
    for b, used in enumerate(seqused.tolist()):
        part = k[b : b + 1, :, :used]
        is_right(found[b : b + 1], torch_attention(spec, q[b : b + 1], part, part[..., :512])[0], torch.bfloat16)


@pytest.mark.parametrize("schedule", ["auto", "hopper", "fused", "decode", "tiled"])
@pytest.mark.parametrize("element", NARROW)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_keys_of_8_bits(schedule: str, element: str, head_dim: int) -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        spec = attngen.define(
            dtype={"q": name, "k": element, "v": element},
            head_dim=head_dim,
            mask="causal_bottom_right",
            k_scale="ks[h // 2]",
            v_scale="vs[h // 2]",
            inputs=dict.fromkeys(("ks", "vs"), ("fp32", ("heads_kv",))),
        )
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        scales = {n: torch.rand(2, device="cuda") + 0.5 for n in ("ks", "vs")}
        for q_len, kv_len in LENGTHS:
            q = randn(2, 4, q_len, head_dim, dtype=dtype)
            k, v = (randn(2, 2, kv_len, head_dim, dtype=torch.float32).to(NARROW[element]) for _ in range(2))
            is_right(kernel(q, k, v, **scales), torch_attention(spec, q, k, v, inputs=scales)[0], dtype)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_training_with_wide_heads(mask: str | None, kv_heads: int, head_dim: int) -> None:
    """Gradients beside those of torch's math in the same types: at most their largest error, and a unit in the last place."""
    for length in (65, 300):
        given = [randn(2, 4, length, head_dim), *(randn(2, kv_heads, length, head_dim) for _ in range(2))]
        dout = randn(2, 4, length, head_dim)
        found = {}
        for side, dtype in (("exact", torch.float64), ("torch", torch.bfloat16), ("ours", torch.bfloat16)):
            q, k, v = (t.to(dtype).requires_grad_() for t in given)
            if side == "ours":
                out = Attention(mask=mask, enable_gqa=True)(q, k, v)
            else:
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(mask), enable_gqa=True)
            found[side] = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
        for exact, theirs, ours in zip(found["exact"], found["torch"], found["ours"], strict=True):
            unit = torch.finfo(torch.bfloat16).eps * exact.abs().max()
            assert (ours.double() - exact).abs().max() <= (theirs.double() - exact).abs().max() + unit


@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3"])
def test_layers_of_their_sizes(name: str) -> None:
    """Random weights: tokens and logits of "attngen" are those of "eager" as far as bf16 allows."""
    transformers = pytest.importorskip("transformers", minversion="5.10")
    import attngen.transformers  # noqa: F401  # registers "attngen"

    sizes: dict[str, Any] = {
        "vocab_size": 199, "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if name == "gemma4":
        config = transformers.Gemma4TextConfig(
            **sizes, num_key_value_heads=2, head_dim=256, global_head_dim=512, num_global_key_value_heads=1,
            layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, vocab_size_per_layer_input=199,
        )  # fmt: skip
    else:
        config = transformers.DeepseekV3Config(
            **sizes, num_key_value_heads=8, moe_intermediate_size=64, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2,
        )  # fmt: skip
    tokens = torch.randint(3, 199, (2, 300), device="cuda")
    found = {}
    for way, dtype in (("eager", torch.float64), ("eager", torch.bfloat16), ("attngen", torch.bfloat16)):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=way).to("cuda", dtype).eval()
        with torch.no_grad():
            found[way, dtype] = model(tokens).logits.double()
    exact = found["eager", torch.float64]
    theirs, ours = ((found[way, torch.bfloat16] - exact).abs().max() for way in ("eager", "attngen"))
    assert ours <= 1.5 * theirs + 1e-3, (ours, theirs)


@pytest.mark.parametrize("text", ["head_dim 64 dtype q bf16 k fp8_e4m3 v fp8_e4m3", "dtype bf16 head_dim 128 values k[0:64]"])
def test_benches_of_their_types(text: str) -> None:
    (spec,) = load_text(f"attention measured {{ {text} }}")
    (case,) = sweep.cases(spec, [256], [], [], False, 512)
    timed = [one.candidate for one in sweep.run([case], {}, 2, print, ("tiled", "decode"), (), False)]
    assert {"attngen tiled", "attngen decode"} <= {*timed}


@pytest.mark.parametrize("storage", ["dense", "padded"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_products_of_8_bits(head_dim: int, storage: str) -> None:
    """Weights of e4m3 beside the rounding of O, in units of 2^-4; sums of wgmma, of which lse has those over the head size."""
    types = {"q": "fp8_e4m3", "k": "fp8_e4m3", "v": "fp8_e4m3", "o": "bf16"}
    for mask in (None, "causal_bottom_right"):
        spec = attngen.define(dtype=types, head_dim=head_dim, mask=mask, lse=True, storage=storage)
        kernel = attngen.compile(spec, kernel="hopper", device="cuda")
        for q_len, kv_len in LENGTHS:
            q = randn(2, 4, q_len, head_dim, dtype=torch.float8_e4m3fn)
            k, v = (randn(2, 2, kv_len, head_dim, dtype=torch.float8_e4m3fn) for _ in range(2))
            used = torch.full((2,), kv_len, dtype=torch.int32, device="cuda")
            lengths = {"seqused": used, "max_kv_len": kv_len} if storage == "padded" else {}
            found, lse = kernel(q, k, v, **lengths)
            exact, exact_lse = torch_attention(spec, q, k, v)
            assert (found.double() - exact).abs().max() <= 2**-4 * exact.abs().max()
            assert torch.allclose(lse.double(), exact_lse, rtol=0, atol=4e-3)
