"""Every shipped spec emulated on the portable schedules: every storage type, small shapes, checked mode, two thread orders; and
what every schedule has in common."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.device.emulated import EmulatedDevice
from attngen.keywords import PORTABLE_SCHEDULES, SCHEDULE_NAMES
from attngen.plan.tile import Tile
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.schedules.tiled import plan as tiled
from attngen.spec.dtypes import from_storage
from tests import tiers
from tests.harness import IN_16_BITS_AND_FP32, SMALL_PARAMS, SPECS, call, compiled, run, shipped, small, wrong_gradients

EVERY_SCHEDULE = SCHEDULE_NAMES
ON_SM_80 = (*PORTABLE_SCHEDULES, "decode")

LENGTHS = ((1, 1), (7, 7), (130, 150))
QUICK = [("alibi", "fp32"), ("packed_documents", "bf16")]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "dtype"),
    tiers.cases(IN_16_BITS_AND_FP32, quick=QUICK, one_of=6),
)
def test_every_schedule_against_the_oracle(name: str, dtype: str) -> None:
    spec, params = small(name, dtype, narrow=True), SMALL_PARAMS.get(name, {})
    for position, (q_len, kv_len) in enumerate(LENGTHS):
        batch = 16 if q_len < 10 else 1  # enough rows that the largest of their errors is no accident
        problem = sample(spec, Shape(batch=batch, q_heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len), seed=position)
        expected = truth(spec, problem, params)
        for schedule in ON_SM_80:
            if schedule == "decode" and spec.dropout is not None:
                continue  # refused
            found = run(spec, schedule, problem, expected, seed=position % 2 * 7, **params)
            assert found.passed, (name, dtype, schedule, q_len, kv_len, found)


@pytest.mark.parametrize("schedule", tiers.cases(EVERY_SCHEDULE, quick=["tiled", "hopper"]))
def test_the_order_of_threads_and_copies_does_not_matter(schedule: str) -> None:
    spec = small("packed_documents", "bf16")
    problem = sample(spec, Shape(1, 1, 1, 200, 200))
    assert len({call(compiled(spec, schedule, seed=seed), problem)[0].tobytes() for seed in (0, 1, 2)}) == 1


def test_inputs_without_dimensions_are_read_at_each_call() -> None:
    spec = attngen.define(
        head_dim=16, mask="flag or q - k < steps", score="s * temperature - 0.1 * bias[k]", lse=True,
        inputs={"flag": ("bool", ()), "steps": ("int32", ()), "temperature": ("fp32", ()), "bias": ("fp32", ("kv_len",))},
    )  # fmt: skip
    problem = sample(spec, Shape(batch=1, q_heads=2, kv_heads=2, q_len=70, kv_len=70))
    kernels = [attngen.compile(spec, kernel=schedule, device="emulated:fast") for schedule in ("fused", "hopper")]
    for flag, steps in ((False, 9), (True, 0)):
        changed = problem.inputs | {"flag": np.array(flag), "steps": np.array(steps, np.int32)}
        changed_problem = replace(problem, inputs=changed)
        expected = truth(spec, changed_problem, {})
        for kernel in kernels:
            found = compare(*call(kernel, changed_problem), expected)
            assert found.passed, (kernel.plan.keyword, flag, found)


@pytest.mark.quick
@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_problems_without_rows_or_keys(schedule: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=8, mask="causal", lse=True)
    for batch, q_len, kv_len in ((0, 5, 5), (1, 0, 5), (1, 5, 0)):
        output, lse = call(compiled(spec, schedule), sample(spec, Shape(batch, 2, 2, q_len, kv_len)))
        assert output.shape == (batch, 2, q_len, 8)
        assert not output.any()
        assert np.isneginf(lse).all()


ROWS_WITHOUT_KEYS = [
    *((schedule, "fp16") for schedule in EVERY_SCHEDULE),
    *((schedule, "fp32") for schedule in ON_SM_80),
]


@pytest.mark.parametrize(("schedule", "dtype"), tiers.cases(ROWS_WITHOUT_KEYS, quick=lambda _, dtype: dtype == "fp16"))
def test_rows_with_no_key_give_zero_and_minus_infinity(schedule: str, dtype: str) -> None:
    """Blocks of rows without a tile give 0 too."""
    spec = attngen.define(dtype=dtype, head_dim=16, mask="k < q - 150", lse=True)
    problem = sample(spec, Shape(1, 1, 1, 300, 300))
    output, lse = call(compiled(spec, schedule), problem)
    assert not from_storage(output)[:, :, :151].any()
    assert np.isneginf(lse[:, :, :151]).all()
    assert compare(output, lse, truth(spec, problem)).passed


HEAD_DIMS = [(8, 8), (24, 40), (72, 72), (104, 8), (200, 200), (256, 256)]


@pytest.mark.parametrize("schedule", ON_SM_80)
@pytest.mark.parametrize("dtype", tiers.cases(["bf16", "fp32"], quick=["bf16"]))
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(HEAD_DIMS, quick=[(24, 40)]))
def test_any_head_size(head_dim: int, head_dim_v: int, dtype: str, schedule: str) -> None:
    spec = attngen.define(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, mask="causal")
    assert run(spec, schedule, Shape(1, 1, 1, 70, 70)).passed


@pytest.mark.parametrize("schedule", tiers.cases(["naive", "tiled"], quick=["tiled"]))
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases([(264, 8), (512, 512), (576, 512)], quick=[(264, 8)]))
def test_schedules_with_scores_in_memory_have_wider_heads(head_dim: int, head_dim_v: int, schedule: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal")
    assert run(spec, schedule, Shape(1, 2, 1, 70, 70)).passed
    assert not wrong_gradients(compiled(spec, schedule), Shape(1, 2, 1, 40, 50))


@pytest.mark.parametrize("schedule", ON_SM_80)
def test_strides_and_broadcasts_are_read_in_place(schedule: str) -> None:
    spec = shipped("dense_bias", "fp32")
    rng = np.random.default_rng(0)
    packed = rng.standard_normal((2, 40, 3, 4, 64), dtype=np.float32)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    k = np.broadcast_to(k[:, :1], k.shape)
    bias = rng.standard_normal((1, 4, 1, 40)).astype(np.float16)
    problem = replace(sample(spec, Shape(2, 4, 4, 40, 40)), q=q, k=k, v=v, inputs={"bias": bias})
    assert run(spec, schedule, problem).passed


@pytest.mark.parametrize("dtype", tiers.cases(["fp32", "fp16"], quick=["fp16"]))
def test_transposed_last_dimension_where_the_hardware_allows(dtype: str) -> None:
    spec = attngen.define(dtype=dtype, head_dim=16)
    problem = sample(spec, Shape(1, 2, 2, 20, 20))
    turned = replace(problem, k=np.ascontiguousarray(problem.k.swapaxes(2, 3)).swapaxes(2, 3))
    expected = truth(spec, problem)
    for schedule in ("naive", "tiled"):
        assert run(spec, schedule, turned, expected).passed
    assert compiled(spec, "fused", "sm_75").plan.schedule.name == "fused_simt"
    assert run(spec, "fused", turned, expected, arch="sm_75").passed
    with pytest.raises(attngen.ArgumentError, match=r"`k` has stride 20 in its last dimension.*contiguous"):
        run(spec, "fused", turned, expected)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_that_no_vector_fits_are_read_element_by_element(dtype: str) -> None:
    """The tiled schedule reads four neighbours at once if they are aligned; here the stride of rows is odd."""
    spec = attngen.define(dtype=dtype, head_dim=24, head_dim_v=40, mask="causal")
    problem = sample(spec, Shape(1, 2, 1, 70, 90))

    def shifted(array: np.ndarray) -> np.ndarray:
        wide = np.zeros((*array.shape[:3], array.shape[3] + 3), array.dtype)
        wide[..., 1:-2] = array
        return wide[..., 1:-2]

    expected = truth(spec, problem)
    for name in "qkv":
        assert run(spec, "tiled", replace(problem, **{name: shifted(getattr(problem, name))}), expected).passed, name


@pytest.mark.parametrize("tile", tiers.cases(tiled.POSSIBLE, quick=tiled.POSSIBLE[:1]), ids=str)
def test_the_tiled_schedule_at_every_tile(tile: Tile) -> None:
    for dtype, sizes in (("fp32", (64, 64)), ("bf16", (24, 72))):
        spec = attngen.define(
            dtype=dtype, head_dim=sizes[0], head_dim_v=sizes[1], mask="q - k < 90 and q >= k", lse=True, kernel="tiled",
            tile=(tile.block_q, tile.block_kv), warps=tile.warps,
        )  # fmt: skip
        assert run(spec, "tiled", Shape(1, 2, 1, 150, 270)).passed


def test_the_tiled_schedule_refuses_what_it_has_not() -> None:
    for stated in ({"tile": (32, 32)}, {"warps": 3}, {"stages": 2}):
        with pytest.raises(attngen.DiagnosticError, match="does not fit"):
            attngen.compile(attngen.define(kernel="tiled", **stated), device=EmulatedDevice())


@pytest.mark.parametrize("name", tiers.cases(SPECS, quick=["packed_documents"]))
def test_the_fused_schedule_without_tensor_cores(name: str) -> None:
    """fused_simt serves architectures before sm_80."""
    for dtype, length in (("fp32", 130), ("fp16", 65)):
        spec = small(name, dtype)
        assert compiled(spec, "fused", "sm_75").plan.schedule.name == "fused_simt"
        shape = Shape(batch=1, q_heads=2, kv_heads=1, q_len=length, kv_len=length + 60)
        assert run(spec, "fused", shape, arch="sm_75", **SMALL_PARAMS.get(name, {})).passed, (name, dtype)


@pytest.mark.parametrize("precision", tiers.cases(["highest", "high"], quick=[]))
def test_fp32_by_split_operands_at_every_tile(precision: str) -> None:
    """Rows and keys that are no multiple of the tile, one and two blocks of rows a warp, head sizes in and out of steps."""
    for tile, warps, stages, sizes in (((64, 64), 4, 1, (64, 64)), ((128, 16), 4, 2, (40, 72)), ((32, 16), 1, 1, (24, 8))):
        spec = attngen.define(
            dtype="fp32", head_dim=sizes[0], head_dim_v=sizes[1], mask="causal", lse=True, precision=precision, tile=tile,
            warps=warps, stages=stages,
        )  # fmt: skip
        found = run(spec, "fused", Shape(1, 2, 1, 150, 170))
        assert found.passed, (tile, found)
        assert (found.error > 1e-6) == (precision == "high"), "neither idle nor exact"


def test_what_is_no_number_stays_none() -> None:
    """NaN and infinity pass through split operands."""
    for precision in ("highest", "high"):
        spec = attngen.define(dtype="fp32", head_dim=16, precision=precision)
        for value in (np.nan, np.inf):
            for name in "qkv":
                problem = sample(spec, Shape(1, 1, 1, 40, 40))
                getattr(problem, name)[0, 0, 3, 5] = value
                output, _ = call(compiled(spec, "fused"), problem)
                rows = output[0, 0]
                assert not np.isfinite(rows[3] if name == "q" else rows[:, 5] if name == "v" else rows).all(), (value, name)
                if name == "q":
                    assert np.isfinite(np.delete(rows, 3, axis=0)).all()


def test_causal_reads_only_tiles_on_and_below_the_diagonal() -> None:
    """The bytes of K that the kernel reads, counted by the emulated device."""
    spec = shipped("gpt2")
    fused = compiled(spec, "fused")
    length, block_q, block_kv = 512, fused.plan.block_q, fused.plan.block_kv
    call(fused, sample(spec, Shape(1, 1, 1, length, length)))
    tiles = sum((row + 1) * block_q // block_kv for row in range(length // block_q))
    assert fused.kernel.counters.bytes_read["K"] == tiles * block_kv * 64 * 2


def test_the_tiled_schedule_neither_writes_nor_reads_empty_tiles() -> None:
    """Counted, where the closed form tells and where every tile is tested. A pair of a visited tile has its score and weight
    written, and is read for the maximum and the sum, for the weight, and for each of two blocks of dimensions."""
    for mask, visited in (("causal", sum(range(1, 9))), ("q >= k and (k < 64 or q - k < 64)", 1 + 2 + 6 * 3)):
        spec = attngen.define(dtype="fp32", head_dim=16, head_dim_v=72, mask=mask)
        kernel = compiled(spec, "tiled")
        call(kernel, sample(spec, Shape(1, 1, 1, 512, 512)))
        pairs = visited * kernel.plan.block_q * kernel.plan.block_kv
        assert kernel.kernel.counters.bytes_written["S"] == 2 * 4 * pairs
        assert kernel.kernel.counters.bytes_read["S"] == (2 + 2) * 4 * pairs


def test_a_window_reads_only_its_tiles() -> None:
    spec = shipped("mistral_window", "fp32")
    spec = replace(spec, q_heads=1, kv_heads=1, head_dim=16, head_dim_v=16)
    fused = compiled(spec, "fused")
    length, block_q, block_kv = 640, fused.plan.block_q, fused.plan.block_kv
    call(fused, sample(spec, Shape(1, 1, 1, length, length)), size=100)
    most = (length // block_q) * ((100 + block_q) // block_kv + 2) * block_kv * 16 * 4
    assert fused.kernel.counters.bytes_read["K"] <= most


@pytest.mark.parametrize("mode", tiers.cases(["naive", "tiled", "fused", "auto"], quick=["auto"]))
def test_attention_function(mode: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 2, 30, 16), dtype=np.float32)

    def expected(mask) -> np.ndarray:
        s = np.einsum("bhqd,bhkd->bhqk", q, k) / 4 + mask
        p = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), v)

    causal = np.where(np.arange(30)[:, None] >= np.arange(30), 0.0, -np.inf)
    allowed = rng.random((30, 30)) < 0.8
    allowed |= np.eye(30, dtype=bool)
    bias = rng.standard_normal((1, 2, 1, 30), dtype=np.float32)
    run_ = attngen.attention
    assert np.allclose(run_(q, k, v, mode=mode), expected(0.0), atol=1e-5)
    assert np.allclose(run_(q, k, v, mode=mode, is_causal=True), expected(causal), atol=1e-5)
    assert np.allclose(run_(q, k, v, mode=mode, attn_mask=allowed), expected(np.where(allowed, 0, -np.inf)), atol=1e-5)
    assert np.allclose(run_(q, k, v, mode=mode, attn_mask=bias), expected(bias), atol=1e-5)


def test_what_is_no_input_cannot_be_captured_and_what_is_no_schedule_not_compiled() -> None:
    spec = attngen.define(head_dim=16, dtype="fp32", mask="window(size)", params={"size": 8})
    with pytest.raises(attngen.ArgumentError, match=re.escape("`size` is a param, and captures are for inputs; pass size=...")):
        attngen.compile(spec, device="emulated", captures={"size": 4})
    with pytest.raises(attngen.ArgumentError, match="no input or param `ids`"):
        attngen.compile(spec, device="emulated", captures={"ids": np.zeros(8, np.int32)})
    with pytest.raises(
        attngen.ArgumentError, match="kernel is 'fast'; expected naive, tiled, fused, wgmma, hopper, decode or auto"
    ):
        attngen.compile(spec, kernel="fast", device="emulated")


def test_attention_function_refuses_what_it_cannot_mean() -> None:
    q = np.zeros((1, 4, 8, 16), np.float32)
    kv = np.zeros((1, 2, 8, 16), np.float32)
    with pytest.raises(attngen.ArgumentError, match="enable_gqa=True"):
        attngen.attention(q, kv, kv)
    with pytest.raises(attngen.ArgumentError, match="expected naive, tiled, fused, wgmma, hopper, decode or auto"):
        attngen.attention(q, q, q, mode="fast")
    with pytest.raises(attngen.ArgumentError, match="5 dimensions"):
        attngen.attention(q[None], q, q)
    with pytest.raises(attngen.ArgumentError, match="`q` has 3 dimensions and `k` has 4"):
        attngen.attention(q[0], q, q)
    with pytest.raises(TypeError, match="torch's name for it is `attn_mask`"):
        attngen.attention(q, q, q, mask=np.ones((8, 8), bool))
    with pytest.raises(TypeError, match="elements of int32"):
        attngen.attention(q, q, q, np.ones((8, 8), np.int32))
    assert attngen.attention(q, kv, kv, enable_gqa=True).shape == q.shape
