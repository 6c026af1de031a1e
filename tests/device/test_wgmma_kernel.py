"""The wgmma schedule emulated: chosen specs that have every feature of the language between them, head sizes, tiles; and what
its compiled code shows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.language import load_text
from attngen.plan import ARCHES, Plan, PlanRefusal
from attngen.reference.problems import Shape, sample
from attngen.schedules import candidates, choose
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.print_attn import to_text
from tests import tiers
from tests.harness import SMALL_PARAMS, emitted, run, shipped, small

# (spec, element type): closed forms and tiles classified one by one; scores, sinks, lse; captured tensors of every shape; every
# normalization; grouped heads, unequal head sizes, sizes that no slab fits.
CHOSEN = [
    ("gpt2", "fp16"), ("mistral_window", "bf16"), ("prefix_lm", "fp16"), ("dilated", "bf16"), ("packed_documents", "bf16"),
    ("padding", "fp16"), ("gemma_softcap", "bf16"), ("gpt_oss_sinks", "bf16"), ("t5_relative_bias", "fp16"),
    ("dense_bias", "fp16"), ("dense_mask", "bf16"), ("sigmoid_attention", "bf16"), ("retention", "bf16"),
    ("unequal_heads", "bf16"), ("head_dim_80", "fp16"), ("llama_gqa", "bf16"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("name", "dtype"), tiers.cases(CHOSEN, quick=[("gpt2", "fp16"), ("packed_documents", "bf16")]))
def test_specs_against_the_oracle(name: str, dtype: str) -> None:
    spec = small(name, dtype)
    for seed, (q_len, kv_len) in enumerate(((7, 7), (130, 290))):
        problem = sample(spec, Shape(16 if q_len < 10 else 1, 2, 1, q_len, kv_len), seed * 7)
        assert run(spec, "wgmma", problem, seed=seed * 7, **SMALL_PARAMS.get(name, {})).passed, (q_len, kv_len)


HEAD_DIMS = [(8, 8), (24, 40), (72, 72), (192, 128), (40, 200), (256, 256)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(HEAD_DIMS, quick=[(24, 40)]))
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    """Head sizes of one slab and of several; O takes the place of Q, also if it is the wider one."""
    spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True)
    assert run(spec, "wgmma", Shape(1, 2, 1, 70, 150)).passed


@pytest.mark.parametrize("head_dim", tiers.cases([64, 128, 192, 256], quick=[64]))
def test_tiles_that_are_asked_for(head_dim: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal")
    tiles = candidates(replace(spec, kernel=KernelRequest("wgmma")), ARCHES["sm_90a"], "wgmma")
    assert {t.block_q for t in tiles} >= {64, 128}
    for request in (tiles[-1], min(tiles, key=lambda t: t.block_q)):
        one = replace(spec, kernel=request)
        plan = choose(one, ARCHES["sm_90a"])
        assert (plan.keyword, plan.block_q, plan.block_kv) == ("wgmma", request.block_q, request.block_kv)
        assert run(one, "wgmma", Shape(1, 1, 1, 130, 150)).passed
    with pytest.raises(PlanRefusal, match="stages 3 does not fit"):
        choose(replace(spec, kernel=KernelRequest("wgmma", stages=3)), ARCHES["sm_90a"])


def test_strides_and_broadcasts_are_read_in_place() -> None:
    spec = attngen.define(dtype="fp16", head_dim=64, mask="causal")
    packed = np.random.default_rng(0).standard_normal((2, 40, 3, 4, 64), dtype=np.float32).astype(np.float16)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    problem = replace(sample(spec, Shape(2, 4, 4, 40, 40)), q=q, k=np.broadcast_to(k[:, :1], k.shape), v=v)
    assert run(spec, "wgmma", problem).passed


def test_the_language_asks_for_it() -> None:
    (spec,) = load_text("attention a { dtype bf16 head_dim 64 mask causal kernel wgmma { tile 64 x 128 } }")
    plan = choose(spec, ARCHES["sm_90a"])
    assert (plan.keyword, plan.block_q, plan.block_kv, plan.warps) == ("wgmma", 64, 128, 4)
    assert load_text(to_text(spec)) == (spec,)


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "bf16"), ("sm_100a", "fp16"), ("sm_90a", "fp32")])
def test_what_the_schedule_cannot_take_is_refused(arch: str, dtype: str) -> None:
    with pytest.raises(PlanRefusal, match=r"(?s)kernel wgmma.*use kernel fused"):
        choose(attngen.define(dtype=dtype, head_dim=64), ARCHES[arch], "wgmma")


def test_auto_never_means_it() -> None:
    for arch in ARCHES.values():
        for dtype in ("fp16", "bf16", "fp32"):
            assert choose(attngen.define(dtype=dtype, head_dim=64, mask="causal"), arch).keyword != "wgmma"
    spec = attngen.define(dtype="bf16", head_dim=64)
    unnamed = attngen.compile(spec, kernel="wgmma", device="emulated")
    assert (unnamed.plan.schedule.name, unnamed.plan.arch.name) == ("wgmma", "sm_90a")


def test_it_is_the_fused_kernel_with_other_instructions() -> None:
    """All warps have one role, each block computes BLOCK_Q rows and ends; TMA copies, wgmma multiplies."""
    code = re.sub(r"//[^\n]*", "", emitted(shipped("gpt2"), "wgmma", "sm_90a").text)
    for there in ("tma_load(", "wgmma_qk(", "wgmma_pv(", "work_tile_of(blockIdx.x, gridDim.x"):
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


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "mask"), tiers.cases(PLANS, quick=[(64, "causal")]))
def test_default_plans_are_not_serialized_and_spill_nothing(head_dim: int, mask: str | None) -> None:
    _, _, code = resources(attngen.define(dtype="bf16", head_dim=head_dim, mask=mask))
    assert disassemble(code).count("WARPGROUP.DEPBAR") == 2  # the waits that were written: for Q K^T, and for P V


@pytest.mark.long
def test_a_multiprocessor_has_registers_for_as_many_blocks_as_the_plan_says() -> None:
    for mask in (None, "causal", "causal_bottom_right"):
        plan, registers, _ = resources(attngen.define(dtype="fp16", head_dim=64, mask=mask))
        (reason,) = (d.because for d in plan.decisions if d.field == "BLOCK_Q x BLOCK_KV")
        assert "of 2 blocks on an SM" in reason
        assert registers * plan.threads * 2 <= plan.arch.registers_per_sm


@pytest.mark.long
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
