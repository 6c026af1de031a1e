"""The wgmma rung emulated: chosen specs that have every feature of the language between them, head sizes, empty rows, thread
orders; and what its compiled code shows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.device.emulated import EmulatedDevice
from attngen.language import load_text
from attngen.plan import ARCHES, Plan, PlanRefusal, candidates, choose
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec, Schedule
from attngen.spec.dtypes import from_storage
from attngen.spec.print_attn import to_text
from tests.device.test_specs_emulated import small
from tests.problems import call, emitted, shipped

# (spec, element type): closed forms and tiles classified one by one; scores, sinks, lse; captured tensors of every shape; every
# normalization; grouped heads, unequal head sizes, sizes that no slab fits.
CHOSEN = [
    ("gpt2", "fp16"), ("mistral_window", "bf16"), ("prefix_lm", "fp16"), ("dilated", "bf16"), ("packed_documents", "bf16"),
    ("padding", "fp16"), ("gemma_softcap", "bf16"), ("gpt_oss_sinks", "bf16"), ("t5_relative_bias", "fp16"),
    ("dense_bias", "fp16"), ("dense_mask", "bf16"), ("sigmoid_attention", "bf16"), ("retention", "bf16"),
    ("unequal_heads", "bf16"), ("head_dim_80", "fp16"), ("llama_gqa", "bf16"),
]  # fmt: skip


def compiled(spec: AttentionSpec, seed: int = 0):
    return attngen.compile(spec, kernel="wgmma", device=EmulatedDevice(arch="sm_90a", seed=seed))


def check(spec: AttentionSpec, shape: Shape, seed: int = 0, **params: int) -> None:
    problem = sample(spec, shape, seed)
    found = compare(*call(compiled(spec, seed), problem, **params), truth(spec, problem, params))
    assert found.passed, (spec, shape, found)


@pytest.mark.parametrize(("name", "dtype"), CHOSEN)
def test_specs_against_the_oracle(name: str, dtype: str) -> None:
    spec = small(name, dtype)
    params = {"size": 50} if name == "mistral_window" else {}
    for seed, (q_len, kv_len) in enumerate(((7, 7), (130, 290))):
        check(spec, Shape(16 if q_len < 10 else 1, 2, 1, q_len, kv_len), seed * 7, **params)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (24, 40), (72, 72), (192, 128), (40, 200), (256, 256)])
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    """One slab and several of Q, K and V; O in the place of Q where it is the wider one."""
    spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True)
    check(spec, Shape(1, 2, 1, 70, 150))


def test_rows_with_no_key_give_zero_and_minus_infinity() -> None:
    """Blocks without a tile too: Q arrives all the same."""
    spec = attngen.define(dtype="fp16", head_dim=16, mask="k < q - 150", lse=True)
    problem = sample(spec, Shape(1, 1, 1, 300, 300))
    output, lse = call(compiled(spec), problem)
    assert not from_storage(output)[:, :, :151].any()
    assert np.isneginf(lse[:, :, :151]).all()
    assert compare(output, lse, truth(spec, problem)).passed


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_empty_problems(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = sizes
    spec = attngen.define(dtype="bf16", head_dim=8, mask="causal", lse=True)
    output, lse = call(compiled(spec), sample(spec, Shape(batch, heads, heads, q_len, kv_len)))
    assert output.shape == (batch, heads, q_len, 8)
    assert not output.any()
    assert np.isneginf(lse).all()


def test_the_order_of_threads_and_copies_does_not_matter() -> None:
    spec = small("packed_documents", "bf16")
    problem = sample(spec, Shape(1, 1, 1, 300, 300))
    assert len({call(compiled(spec, seed), problem)[0].tobytes() for seed in (0, 1, 2)}) == 1


def test_a_maximum_that_keeps_growing() -> None:
    """Each tile's scores exceed the last one's by more than the kept maximum allows: O is rescaled at every tile."""
    check(attngen.define(dtype="bf16", head_dim=64, score="s + 0.5 * k", lse=True), Shape(1, 1, 1, 64, 600))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_tiles_that_are_asked_for(head_dim: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal")
    tiles = candidates(replace(spec, schedule=Schedule("wgmma")), ARCHES["sm_90a"], "wgmma")
    assert {t.block_q for t in tiles} >= {64, 128}
    for asked in (tiles[-1], min(tiles, key=lambda t: t.block_q)):
        one = replace(spec, schedule=asked)
        plan = choose(one, ARCHES["sm_90a"])
        assert (plan.rung, plan.block_q, plan.block_kv) == ("wgmma", asked.block_q, asked.block_kv)
        check(one, Shape(1, 1, 1, 130, 150))
    with pytest.raises(PlanRefusal, match="stages 3 does not fit"):
        choose(replace(spec, schedule=Schedule("wgmma", stages=3)), ARCHES["sm_90a"])


def test_strides_and_broadcasts_are_read_in_place() -> None:
    spec = attngen.define(dtype="fp16", head_dim=64, mask="causal")
    packed = np.random.default_rng(0).standard_normal((2, 40, 3, 4, 64), dtype=np.float32).astype(np.float16)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    problem = replace(sample(spec, Shape(2, 4, 4, 40, 40)), q=q, k=np.broadcast_to(k[:, :1], k.shape), v=v)
    assert compare(*call(compiled(spec), problem), truth(spec, problem)).passed


def test_the_language_asks_for_it() -> None:
    (spec,) = load_text("attention a { dtype bf16 head_dim 64 mask causal kernel wgmma { tile 64 x 128 } }")
    plan = choose(spec, ARCHES["sm_90a"])
    assert (plan.rung, plan.block_q, plan.block_kv, plan.warps) == ("wgmma", 64, 128, 4)
    assert load_text(to_text(spec)) == (spec,)


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "bf16"), ("sm_100a", "fp16"), ("sm_90a", "fp32")])
def test_what_the_rung_cannot_take_is_refused(arch: str, dtype: str) -> None:
    with pytest.raises(PlanRefusal, match=r"(?s)kernel wgmma.*use kernel fused"):
        choose(attngen.define(dtype=dtype, head_dim=64), ARCHES[arch], "wgmma")


def test_auto_never_means_it() -> None:
    for arch in ARCHES.values():
        for dtype in ("fp16", "bf16", "fp32"):
            assert choose(attngen.define(dtype=dtype, head_dim=64, mask="causal"), arch).rung != "wgmma"
    spec = attngen.define(dtype="bf16", head_dim=64)
    unnamed = attngen.compile(spec, kernel="wgmma", device="emulated")
    assert (unnamed.plan.schedule, unnamed.plan.arch.name) == ("wgmma", "sm_90a")


def test_it_is_the_fused_kernel_with_other_instructions() -> None:
    """One role, one block for each BLOCK_Q rows, nothing that stays; TMA in, wgmma between."""
    code = re.sub(r"//[^\n]*", "", emitted(shipped("gpt2"), "wgmma", "sm_90a").text)
    for there in ("tma_load(", "wgmma_qk(", "wgmma_pv(", "place_of(blockIdx.x, gridDim.x"):
        assert there in code, there
    for absent in ("setmaxnreg", "next_work", "mbarrier_arrive", "tma_store", "cp_async", "mma_16x8x16", "named_barrier"):
        assert absent not in code, absent


# --- compiled

PLANS = [(d, mask) for d in (64, 80, 96, 128, 160, 192, 256) for mask in (None, "causal")]


def resources(spec: AttentionSpec) -> tuple[Plan, int, bytes]:
    """The plan, registers of a thread, the cubin; neither an advisory about wgmma nor a spill."""
    plan = choose(spec, ARCHES["sm_90a"], "wgmma")
    made = compile_text(emitted(spec, "wgmma", "sm_90a"))
    assert not re.findall(r"C75\d\d", made.log), made.log
    found = {r.entry: r for r in made.resources()}[f"{spec.name}_wgmma"]
    assert (found.spill_store_bytes, found.stack_bytes) == (0, 0), (spec, found)
    return plan, found.registers, made.code


@pytest.mark.parametrize(("head_dim", "mask"), PLANS)
def test_default_plans_are_not_serialized_and_spill_nothing(head_dim: int, mask: str | None) -> None:
    _, _, code = resources(attngen.define(dtype="bf16", head_dim=head_dim, mask=mask))
    assert disassemble(code).count("WARPGROUP.DEPBAR") == 2  # the waits that were written: for Q K^T, and for P V


def test_a_multiprocessor_has_registers_for_as_many_blocks_as_the_plan_says() -> None:
    for mask in (None, "causal", "causal_bottom_right"):
        plan, registers, _ = resources(attngen.define(dtype="fp16", head_dim=64, mask=mask))
        (reason,) = (d.because for d in plan.decisions if d.field == "BLOCK_Q x BLOCK_KV")
        assert "of 2 blocks on an SM" in reason
        assert registers * plan.threads * 2 <= plan.arch.registers_per_sm


@pytest.mark.parametrize("name", ["packed_documents", "dense_bias", "gpt_oss_sinks", "sigmoid_attention"])
def test_other_specs_spill_nothing(name: str) -> None:
    for head_dim in (64, 128, 256):
        resources(replace(shipped(name, "bf16"), head_dim=head_dim, head_dim_v=head_dim))


def test_primitives_that_are_not_used_are_not_there() -> None:
    """Every device function is called, every constant is read."""
    for name, dtype in CHOSEN:
        code = re.sub(r"//[^\n]*", "", emitted(shipped(name, dtype), "wgmma", "sm_90a").text)
        for function in re.findall(r"__device__ __forceinline__ [\w: ]+?[ *](\w+)\(", code):
            assert len(re.findall(rf"\b{function}\b", code)) >= 2, (name, function)
        for constant in re.findall(r"constexpr [\w ]+ (\w+) =", code):
            assert len(re.findall(rf"\b{constant}\b", code)) >= 2, (name, constant)
