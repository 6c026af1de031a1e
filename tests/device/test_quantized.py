"""Keys and values of 8 bits beside queries of 16, and what stored keys and values are multiplied with."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.arrays import view
from attngen.diagnostics import DiagnosticError
from attngen.inspect.gpu_memory import from_gpu
from attngen.plan import ARCHES
from attngen.plan.plan import PlanRefusal
from attngen.plan.problem import Problem
from attngen.reference.compare import truth
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.problems import Shape, sample
from attngen.reference.torch_oracle import to_torch
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.dtypes import FP8_DTYPES, DType, from_storage, nans, round_to_storage, within_range
from tests import tiers
from tests.harness import call, call_stored, compared, compile_text, compiled, emitted, run
from tests.random_draws import Case
from tests.random_lengths import Call
from tests.random_problems import arrays_of

ALL_OF_8_BITS = {"q": "fp8_e4m3", "k": "fp8_e4m3", "v": "fp8_e4m3", "o": "bf16"}
KV8 = {"q": "bf16", "k": "fp8_e4m3", "v": "fp8_e4m3"}
TYPES: dict[str, dict[str, str]] = {
    "e4m3": KV8,
    "e5m2": {"q": "fp16", "k": "fp8_e5m2", "v": "fp8_e5m2"},
    "each its own": {"q": "fp32", "k": "fp8_e5m2", "v": "fp8_e4m3", "o": "bf16"},
    "all": {"q": "fp8_e4m3", "k": "fp8_e4m3", "v": "fp8_e4m3", "o": "fp16"},
}
SCALES: dict[str, dict[str, Any]] = {
    "none": {},
    "of tensors": {"params": {"size": 0.5}, "k_scale": "size", "v_scale": "2.0 * size"},
    "of heads": {
        "inputs": {"ks": ("fp32", ("kv_heads",)), "vs": ("fp32", ("batch", "kv_heads"))},
        "k_scale": "ks[h // (heads // kv_heads)]", "v_scale": "vs[b, h // (heads // kv_heads)]",
    },
    "of blocks": {
        "inputs": {"ks": ("bf16", ("batch", "blocks")), "vs": ("bf16", ("batch", "blocks"))},
        "k_scale": "ks[b, min(k // 16, blocks - 1)]", "v_scale": "vs[b, min(k // 16, blocks - 1)]",
    },
}  # fmt: skip
CASES = [(schedule, types, scales) for schedule in ("naive", "tiled") for types in TYPES for scales in SCALES]
OF_DECODE = [
    (types, scales, size)
    for types in ("e4m3", "e5m2")
    for scales in ("none", "of tensors", "of heads")
    for size in (48, 128, 256, 272, 512)
]


def quantized(types: str = "e4m3", scales: str = "none", **more: Any) -> AttentionSpec:
    """With an odd number of columns of V in whole steps, and a soft-cap, which sees keys times their scale."""
    settings = {"head_dim": 48, "head_dim_v": 40, "mask": "causal_bottom_right", "score": "softcap(20.0)"}
    return attngen.define(**(settings | {"dtype": TYPES[types]} | SCALES[scales] | more))


@pytest.mark.parametrize(
    ("schedule", "types", "scales"),
    tiers.cases(CASES, quick=[("naive", "e4m3", "of blocks"), ("tiled", "each its own", "of heads")]),
)
def test_against_the_oracle(schedule: str, types: str, scales: str) -> None:
    spec = quantized(types, scales)
    shape = with_free_sizes(spec, Shape(2, 4, 2, 70, 133), {"blocks": 7})
    found = run(spec, schedule, shape)
    assert found.passed, found


@pytest.mark.parametrize(
    ("schedule", "storage"),
    tiers.cases(
        [(s, t) for s in ("naive", "tiled") for t in ("padded", "packed", "paged", "packed_paged")], quick=[("naive", "paged")]
    ),
)
def test_sequences_whose_unused_rows_are_nan(schedule: str, storage: str) -> None:
    """The bits of NaN lie behind the last key of each sequence, and in pages that none has."""
    spec = quantized(scales="of heads", storage=storage)
    one = Case("", schedule, "sm_80", (), False, 1.0, storage=storage)  # type: ignore[arg-type]
    lengths = Call(Shape(3, 4, 2, 9, 70), (9, 0, 4), (70, 3, 0), {}, page_size=16)
    problem = sample(spec, lengths.shape)
    output, _ = call_stored(compiled(spec, schedule), arrays_of(one, lengths, spec, problem, 0))
    assert np.isfinite(from_storage(output)).all()


@pytest.mark.quick
@pytest.mark.parametrize(("types", "scales", "size"), tiers.cases(OF_DECODE, quick=[("e4m3", "of heads", 48)]))
def test_decode(types: str, scales: str, size: int) -> None:
    """Of several splits and warps; fragments of Q in registers, or read for each tile; warps that share wider heads."""
    spec = quantized(types, scales, head_dim=size, head_dim_v=size)
    for q_len, kv_len in ((1, 700), (7, 133), (3, 5)):
        found = run(spec, "decode", Shape(2, 4, 2, q_len, kv_len), arch="sm_90a")
        assert found.passed, found


OF_WEIGHTS = {"naive": "expf(row[k] - shift) / divisor", "tiled": "expf(s.at[e] - shift) * inverse"}
IN_E4M3 = """static float in_e4m3(float p) {  // a weight as a number of e4m3, times 2^-8
    const float unit = exp2f(floorf(log2f(fmaxf(256.0f * p, 0.015625f))) - 3.0f);
    return rintf(256.0f * p / unit) * unit / 256.0f;
}
"""


@pytest.mark.parametrize("schedule", OF_WEIGHTS)
def test_weights_of_8_bits_are_wrong_in_kernels_that_multiply_numbers_of_fp32(schedule: str) -> None:
    """The types of Q, K and V widen no limits: what a kernel multiplies does."""
    spec = attngen.define(dtype=ALL_OF_8_BITS, head_dim=16)
    usual, problem = emitted(spec, schedule), sample(spec, Shape(1, 2, 1, 33, 133))
    weight, kernels = OF_WEIGHTS[schedule], 'extern "C" __global__'
    assert usual.text.count(weight) == 1
    text = usual.text.replace(weight, f"in_e4m3({weight})").replace(kernels, IN_E4M3 + kernels, 1)
    kernel = compile_text(spec, schedule, replace(usual, text=text))
    assert not compared(kernel, problem).passed
    assert compared(kernel, problem, truth(spec, problem, of_bytes=True)).passed


STORAGES = ("padded", "packed", "paged", "packed_paged")
PLACES_OF_SIZES = [("decode", 64), ("decode", 288), ("hopper", 64), ("fused", 64), ("wgmma", 64)]
QUICK = [("decode", 64, "paged"), ("hopper", 64, "packed_paged"), ("fused", 64, "paged")]
STORED = [(*place, storage) for place in PLACES_OF_SIZES for storage in STORAGES]


@pytest.mark.parametrize(("schedule", "size", "storage"), tiers.cases(STORED, quick=QUICK))
def test_tensor_cores_of_sequences_whose_unused_rows_are_nan(schedule: str, size: int, storage: str) -> None:
    spec = quantized(scales="of heads", storage=storage, score=None, head_dim=size, head_dim_v=size)
    one = Case("", schedule, "sm_90a", (), False, 1.0, storage=storage)  # type: ignore[arg-type]
    lengths = Call(Shape(3, 4, 2, 2, 90), (2, 0, 1), (90, 3, 0), {}, page_size=16)
    problem = sample(spec, lengths.shape)
    output, _ = call_stored(compiled(spec, schedule, "sm_90a"), arrays_of(one, lengths, spec, problem, 0))
    assert np.isfinite(from_storage(output)).all()


CONVERTED: dict[str, dict[str, Any]] = {
    "plain": {"mask": None, "score": None},
    "of 72 and 40": {"head_dim": 72, "head_dim_v": 40, "score": None},  # rows of a multiple of 8 bytes
    "softcap": {"scales": "none"},  # scores that bound themselves, for which bf16 has weights without a maximum
    "classified": {"mask": "(q - k) % 3 != 0 or q == k", "score": None, "lse": True},
    "keys' scales": {
        "score": None, "inputs": {"ks": ("fp32", ("batch", "blocks"))}, "k_scale": "ks[b, min(k // 16, blocks - 1)]"
    },
    "heads' scales": {"scales": "of heads", "score": None},
    "blocks' scales": {"scales": "of blocks", "score": None},  # scales of V too: weights are multiplied with them
    "weights that are scores": {"normalize": "none", "score": None, "scales": "of heads"},
    "dropout": {"params": {"p": 0.2}, "dropout": "p", "score": None, "v_scale": "3.0"},
    "fp32": {"dtype": {"q": "fp32", "k": "fp8_e5m2", "v": "fp8_e4m3"}, "score": None},
}  # fmt: skip
PLACES = (("hopper", "sm_90a"), ("fused", "sm_80"), ("fused", "sm_75"), ("wgmma", "sm_90a"))


@pytest.mark.parametrize(
    ("kind", "schedule", "arch"),
    tiers.cases(
        [(kind, *place) for kind in CONVERTED for place in PLACES if not (kind == "fp32" and place[1] == "sm_90a")],
        quick=[
            ("heads' scales", *PLACES[0]),
            ("blocks' scales", *PLACES[0]),
            ("of 72 and 40", *PLACES[1]),
            ("dropout", *PLACES[2]),
            ("plain", *PLACES[3]),
        ],
    ),
)
def test_keys_that_are_converted_before(kind: str, schedule: str, arch: str) -> None:
    """A kernel before the others writes them in the type of Q, also where no instruction does."""
    spec = quantized(**({"head_dim": 64, "head_dim_v": 64} | CONVERTED[kind]))
    for q_len, kv_len in ((133, 300), (3, 5), (70, 129)):
        shape = with_free_sizes(spec, Shape(2, 4, 2, q_len, kv_len), {"blocks": 19})
        found = run(spec, schedule, shape, arch=arch)
        assert found.passed, (q_len, kv_len, found)


def test_the_workspaces_of_keys_in_pages_hold_the_keys_of_sequences() -> None:
    """Not the pool, which may have more memory than the GPU has left."""
    spec = quantized(storage="packed_paged", page_size=16, head_dim=64, head_dim_v=64)
    program = compiled(spec, "hopper", "sm_90a").source
    shapes = {t.name: [axis.name for axis in t.axes] for t in program.tensors}
    assert shapes["K"] == ["pages", "kv_heads", "page_size", "head_dim"]
    assert shapes["K_converted"] == ["batch", "kv_heads", "kv_len", "head_dim"]
    assert [k.name.removeprefix("attention_") for k in program.kernels] == ["convert", "hopper"]


def test_queries_that_are_multiplied_as_they_are() -> None:
    """Converted keys have their type, so that nothing is lost of rows of any size."""
    spec = attngen.define(dtype=KV8, head_dim=64, params={"small": ("float", 1.0)}, score="s * small")
    problem = sample(spec, Shape(1, 1, 1, 12, 300))
    q = np.clip(from_storage(problem.q), -2.0, 2.0)
    q *= np.array([1e30, 1e-30, 1e38, 1e-38, 0.0, 1.0, 7e4, 2.0**-130, 1e4, 1.0, 1.0, 1.0])[:, None]
    q[0, 0, 9, 3] = np.nan
    problem = replace(problem, q=round_to_storage(q, spec.dtype))
    kernel = compiled(spec, "hopper", "sm_90a")
    for small in (1.0, 1e-30, 1e30):
        found = compared(kernel, problem, small=small)
        assert found.passed, (small, found)


@pytest.mark.parametrize("size", tiers.cases([64, 288], quick=[64]))
def test_queries_that_fp16_has_not(size: int) -> None:
    """Rows of any size, of zeros, with NaN and infinity beside others: a power of 2 for each row brings it to fp16."""
    spec = attngen.define(dtype=KV8, head_dim=size, params={"small": ("float", 1.0)}, score="s * small")
    problem = sample(spec, Shape(1, 1, 1, 12, 300))
    q = np.clip(from_storage(problem.q), -2.0, 2.0)
    q *= np.array([1e30, 1e-30, 1e38, 1e-38, 0.0, 1.0, 7e4, 2.0**-130, 1e4, 1.0, 1.0, 1.0])[:, None]
    q[0, 0, 9, 3], q[0, 0, 10, 5], q[0, 0, 11, 0] = np.nan, np.inf, -np.inf
    problem = replace(problem, q=round_to_storage(q, spec.dtype))
    kernel = compiled(spec, "decode", "sm_90a")
    for small in (1.0, 1e-30, 1e30):
        found = compared(kernel, problem, small=small)
        assert found.passed, (small, found)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("schedule", ["decode", "hopper", "fused", "wgmma"])
def test_nan_stays_nan(schedule: str, code: int) -> None:
    spec = attngen.define(dtype=KV8, head_dim=16)
    q, ones = (
        round_to_storage(np.ones((1, 1, n, 16), np.float32), dtype) for n, dtype in ((1, spec.dtype), (3, FP8_DTYPES[0]))
    )
    kernel = compiled(spec, schedule, "sm_90a")
    for tensor in ("k", "v"):
        arrays = {"k": ones.copy(), "v": ones.copy()}
        arrays[tensor].view(np.uint8)[0, 0, 1, 5] = code
        assert np.isnan(from_storage(kernel(q, **arrays))).any()


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused", "wgmma", "hopper", "decode"])
def test_every_number_of_8_bits_is_read_as_it_is(schedule: str, dtype: DType) -> None:
    """V has all 256 of them, in a row that is the only one that its query sees."""
    spec = attngen.define(dtype={"q": "fp16", "k": dtype.name, "v": dtype.name}, head_dim=16, head_dim_v=256)
    v = np.arange(256, dtype=np.uint8).view(dtype.numpy).reshape(1, 1, 1, 256)
    q, k = (round_to_storage(np.ones((1, 1, 1, 16)), dtype) for dtype in (spec.dtypes["q"], dtype))
    found = compiled(spec, schedule, "sm_90a")(q, k, v)
    assert np.array_equal(from_storage(found), from_storage(v), equal_nan=True)


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = np.ldexp(rng.standard_normal(20_000), rng.integers(-24, 18, 20_000)).astype(np.float32)
    for dtype in FP8_DTYPES:
        codes = from_storage(np.arange(256, dtype=np.uint8).view(dtype.numpy))
        finite = np.sort(codes[np.isfinite(codes)])
        middle = (finite[1:] + finite[:-1]) / 2  # ties
        given = within_range(np.concatenate([values, finite, middle, [0.0, -0.0, np.nan]]).astype(np.float32), dtype)
        found = from_storage(round_to_storage(given, dtype))
        expected = torch.from_numpy(given).to(getattr(torch, dtype.torch)).double().numpy()
        assert np.array_equal(found, expected, equal_nan=True)
        assert np.array_equal(np.signbit(found), np.signbit(expected))
    beyond = from_storage(round_to_storage(np.array([470.0, -1e6]), FP8_DTYPES[0]))
    assert np.isnan(beyond).all()


OF_8_BITS = ["tiled", "decode", "hopper", "fused", "wgmma"]


@pytest.mark.parametrize(
    ("schedule", "size"), tiers.cases([*((one, 32) for one in OF_8_BITS), ("decode", 288)], quick=[("decode", 32)])
)
def test_scales_of_any_size(schedule: str, size: int) -> None:
    """Of K: all keys weigh the same, or one has all weight. Of V: results are 0, or near the largest numbers of bf16."""
    spec = quantized(scales="of heads", score=None, head_dim=size, head_dim_v=size)
    kernel, problem = compiled(spec, schedule, "sm_90a"), sample(spec, Shape(2, 4, 2, 3, 150))
    for of_k, of_v in product(((0.0, 1e30), (-2.0, 1e-30), (3e38, -1e20)), ((0.0, 1e30), (1e-30, -1e36))):
        scales = {"ks": np.float32(of_k), "vs": np.float32([of_v, of_v[::-1]])}
        found = compared(kernel, replace(problem, inputs=scales))
        assert found.passed, (of_k, of_v, found)


@pytest.mark.parametrize("schedule", tiers.cases(OF_8_BITS, quick=["decode"]))
def test_rows_of_k_and_v_in_turn(schedule: str) -> None:
    """One array has a key and a value of each head, then those of the next one, then NaN; Q is a part of wider rows."""
    spec = quantized(score=None, head_dim=32, head_dim_v=32)
    kernel, problem = compiled(spec, schedule, "sm_90a"), sample(spec, Shape(2, 4, 2, 3, 150))
    both = nans((2, 160, 2, 3, 32), problem.k.dtype)
    for i, array in enumerate((problem.k, problem.v)):
        both[:, :150, :, i] = array.swapaxes(1, 2)
    k, v = (both[:, :150, :, i].swapaxes(1, 2) for i in range(2))
    rows = nans((2, 3, 4, 64), problem.q.dtype)
    rows[..., 16:48] = problem.q.swapaxes(1, 2)
    views = replace(problem, q=rows[..., 16:48].swapaxes(1, 2), k=k, v=v)
    assert np.array_equal(*(from_storage(call(kernel, one)[0]) for one in (problem, views)))


def test_a_scale_of_keys_is_a_factor_of_s() -> None:
    scaled = attngen.define(inputs={"x": ("fp32", ("batch", "kv_len"))}, k_scale="x[b, k]", score="softcap(5.0)")
    written = attngen.define(inputs={"x": ("fp32", ("batch", "kv_len"))}, score="5.0 * tanh(s * x[b, k] / 5.0)")
    assert scaled == written


def test_scales_are_functions_too() -> None:
    text = attngen.define(inputs={"x": ("fp32", ("heads", 4))}, k_scale="x[h, k % 4]", v_scale="x[h, 0]")
    declared = {"inputs": {"x": ("fp32", ("heads", 4))}}
    x: Any = None  # the declared input of this name
    assert attngen.define(**declared, k_scale=lambda b, h, k: x[h, k % 4], v_scale=lambda b, h, q, k: x[h, 0]) == text


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"k_scale": "q + 0.5"}, "a key has one scale for all rows"),
        ({"v_scale": "q + 0.5"}, "a key has one scale for all rows"),
        ({"k_scale": "s"}, "the scaled dot product belongs to the score"),
        ({"v_scale": "s"}, "the scaled dot product belongs to the score"),
        ({"k_scale": "k > 3"}, "the scale of K is"),
        ({"v_scale": "k > 3"}, "the scale of V is"),
        ({"v_scale": float("inf")}, "the scale of V is inf"),
    ],
)
def test_what_is_no_scale_is_refused(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(DiagnosticError) as refused:
        attngen.define(**keywords)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("arch", "size", "keyword"),
    [("sm_90a", 64, "hopper"), ("sm_90a", 512, "hopper"), ("sm_80", 256, "fused"), ("sm_75", 64, "fused")],
)
def test_auto_takes_what_it_takes_of_16_bits(arch: str, size: int, keyword: str) -> None:
    for settings in ({"dtype": KV8}, {"dtype": "bf16", "v_scale": 0.5}):
        assert choose(attngen.define(head_dim=size, **settings), ARCHES[arch]).keyword == keyword


@pytest.mark.parametrize(("settings", "statement"), [({"dtype": KV8}, "dtype"), ({"v_scale": 0.5}, "scaled v")])
def test_there_are_no_gradients(settings: dict[str, Any], statement: str) -> None:
    for schedule in ("auto", "naive", "fused"):
        with pytest.raises(PlanRefusal, match=f"(?s)`{statement}`.*no schedule has gradients"):
            choose(attngen.define(head_dim=64, **({"dtype": "bf16"} | settings)), ARCHES["sm_90a"], schedule, wanted=("q",))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": KV8 | {"v": "bf16"}}, "K and V of one type of 8 bits"),
        ({"dtype": KV8 | {"v": "fp8_e5m2"}}, "K and V of one type of 8 bits"),
        ({"dtype": KV8 | {"o": "fp32"}}, "Q and O of one of 16"),
        ({"dtype": ALL_OF_8_BITS}, "Q and O of one of 16"),
        ({"dtype": KV8, "head_dim": 72}, "multiples of 16 elements"),
        ({"dtype": KV8, "normalize": "none"}, "scores may be larger"),
    ],
)
def test_what_decode_lacks_is_refused(settings: dict[str, Any], says: str) -> None:
    spec = attngen.define(**({"dtype": "bf16", "head_dim": 64} | settings))
    with pytest.raises(PlanRefusal, match=f"(?s){says}.*auto, or one of: naive, tiled"):
        choose(spec, ARCHES["sm_90a"], "decode")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": KV8 | {"v": "bf16"}}, "it has K and V of 8 bits"),
        ({"dtype": KV8 | {"o": "fp32"}}, "Q and O of one other"),
        ({"dtype": ALL_OF_8_BITS}, "Q and O of one other"),
        ({"dtype": "fp16", "v_scale": "1.0 + k"}, "exceed the range of fp16"),
    ],
)
def test_what_they_lack_where_keys_are_converted_is_refused(settings: dict[str, Any], says: str) -> None:
    spec = attngen.define(**({"dtype": "bf16", "head_dim": 64} | settings))
    for schedule in ("fused", "wgmma", *(() if settings["dtype"] == ALL_OF_8_BITS else ("hopper",))):
        with pytest.raises(PlanRefusal, match=f"(?s){says}.*auto, or one of: naive, tiled"):
            choose(spec, ARCHES["sm_90a"], schedule)


def test_decode_needs_an_instruction_for_e4m3() -> None:
    with pytest.raises(PlanRefusal, match="sm_80 has no cvt between e4m3 and fp16"):
        choose(quantized(head_dim=64, head_dim_v=64), ARCHES["sm_80"], "decode")
    assert choose(quantized("e5m2", head_dim=64, head_dim_v=64), ARCHES["sm_80"], "decode").keyword == "decode"


def test_what_they_do_not_go_with_is_refused() -> None:
    tables = {"inputs": dict.fromkeys(("c1", "s1"), ("fp32", ("rows", 16))), "rotary": "32 halves by c1, s1"}
    with pytest.raises(
        PlanRefusal, match=r"(?s)`rotary`.*keys of 8 bits are those of a cache.*Attention\.decode takes the spec as it is"
    ):
        choose(attngen.define(dtype=KV8, **tables), ARCHES["sm_80"], "naive")
    apart = {"q": "bf16", "k": "fp8_e4m3", "v": "bf16"}
    with pytest.raises(PlanRefusal, match=r"(?s)`dtype`.*in pages have one element type"):
        choose(attngen.define(dtype=apart, storage="paged"), ARCHES["sm_80"], "naive")


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    import attngen.torch

    spec = quantized("each its own", "of heads", score=None)
    at = np.random.default_rng(0).standard_normal
    shapes = ((2, 4, 5, 48), (2, 2, 9, 48), (2, 2, 9, 40))
    types = (torch.float32, torch.float8_e5m2, torch.float8_e4m3fn)
    q, k, v = (torch.from_numpy(at(shape)).to(dtype) for shape, dtype in zip(shapes, types, strict=True))
    ks, vs = torch.tensor([0.5, 2.0]), torch.tensor([[1.0, 3.0], [0.25, 1.5]])
    wide_k, wide_v = k.double() * ks[:, None, None], v.double() * vs[:, :, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), wide_k, wide_v, attn_mask=torch.ones(5, 9, dtype=torch.bool).tril(4), enable_gqa=True
    )
    for mode in ("auto", "math"):
        module = attngen.torch.Attention(spec, mode=mode)
        for function in (module, torch.compile(module, backend="eager")):
            found = function(q, k, v, ks=ks, vs=vs)
            assert found.dtype is torch.bfloat16
            assert (found.double() - expected).abs().max() < 2e-2 * expected.abs().max()


class ByDlpack:
    """An array that says what it is by DLPack alone."""

    def __init__(self, tensor: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_arrays_of_other_libraries(dtype: DType) -> None:
    """Of DLPack, and as tensors of torch and back, bit for bit."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype.torch))
    assert view(ByDlpack(tensor), "k").dtype is dtype
    stored = np.arange(256, dtype=np.uint8).view(dtype.numpy)
    assert to_torch(stored, "cpu").view(torch.uint8).equal(tensor.view(torch.uint8))
    assert from_gpu(tensor).tobytes() == stored.tobytes()
    assert from_gpu(tensor).dtype == dtype.numpy


def test_lengths_select_the_tiles_that_they_select_for_16_bits() -> None:
    """Kernels after the one that converts keys are those of 16 bits."""
    spec = attngen.define(dtype=KV8, head_dim=128)
    of_16 = replace(spec, k_dtype=None, v_dtype=None)
    for storage in ("dense", "padded"):
        for length in (512, 2048, 8192):
            plans = [
                choose(
                    replace(one, kernel=KernelRequest(storage=storage)),
                    ARCHES["sm_90a"],
                    "hopper",
                    Problem(64, length, length, 132),
                )
                for one in (spec, of_16)
            ]
            assert plans[0].tile == plans[1].tile


SCALES_OF_KEYS = [("e4m3", "softmax"), ("e5m2", "softmax"), ("fp16", "softmax"), ("bf16", "softmax"), ("e4m3", "sigmoid")]


@pytest.mark.parametrize(("types", "normalize"), tiers.cases(SCALES_OF_KEYS, quick=[("e4m3", "softmax")]))
@pytest.mark.parametrize(
    ("size", "sizes"),
    tiers.cases(
        [(size, sizes) for size in (48, 272) for sizes in ("small", "falling", "rising", "far apart")],
        quick=[(48, "far apart"), (272, "rising")],
    ),
)
def test_scales_of_keys_of_any_size_in_decode(types: str, normalize: str, size: int, sizes: str) -> None:
    """Products of weights and scales are far beyond the numbers of fp16, in both directions, in one row."""
    vs = ("fp32", ("batch", "heads", "kv_len"))
    more: dict[str, Any] = {"inputs": {"vs": vs}, "v_scale": "vs[b, h, k]", "normalize": normalize}
    spec = quantized(dtype=TYPES.get(types, types), head_dim=size, head_dim_v=size, **more)
    problem, keys = sample(spec, Shape(2, 4, 2, 3, 700)), np.arange(700)
    steps = {"small": 0 * keys - 40, "falling": 20 - keys / 17, "rising": keys / 17 - 20, "far apart": keys * 7919 % 81 - 40}
    exponents = steps[sizes]
    if spec.dtypes["o"].name == "fp16":  # O is in its range
        exponents = exponents + min(12 - exponents.max(), 0)
    signs = np.where(keys % 5 == 0, -1.0, 1.0)
    problem.inputs["vs"][...] = signs * 2.0**exponents
    found = run(spec, "decode", problem, arch="sm_90a")
    assert np.isfinite(found.allowed)
    assert found.passed, found
