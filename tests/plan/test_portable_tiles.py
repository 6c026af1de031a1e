"""The tiles of the portable fused kernel for specs that read captured tensors; no default plan spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngen import define
from attngen.device.cuda.compiler import compile_text
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.plan.plan import Plan
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from tests import tiers
from tests.harness import SPECS, shipped, spills

Described = dict[str, Any]  # keywords of `define`
H200 = ARCHES["sm_90a"]
BY_DISTANCE = {"score": "relative_bias(table, 1024)", "inputs": {"table": ("fp32", ("heads", 2049))}}
DENSE = {"score": "s + bias[h, q, k]", "inputs": {"bias": ("fp32", ("heads", "q_len", "kv_len"))}}
DOCUMENTS = {"mask": "causal and same_document(ids)", "inputs": {"ids": ("int32", ("batch", "kv_len"))}}
BIDIRECTIONAL = {**DOCUMENTS, "mask": "same_document(ids)"}


def fused(spec: AttentionSpec) -> Plan:
    plan = choose(spec, H200, "fused")
    assert plan.schedule.name == "fused_mma"
    return plan


def rows_of_a_warp(plan: Plan) -> int:
    return plan.block_q // plan.warps


def test_a_bias_by_distance_leaves_room_for_32_rows_a_warp() -> None:
    assert rows_of_a_warp(fused(define(dtype="bf16", head_dim=128, **BY_DISTANCE))) == 32


def test_a_bias_of_each_pair_does_not() -> None:
    assert rows_of_a_warp(fused(define(dtype="bf16", head_dim=128, **DENSE))) == 16


def test_a_distance_beside_another_index_is_one_of_each_pair() -> None:
    spec = define(
        dtype="bf16", head_dim=128, score="s + table[q, clamp(k - q, -8, 8) + 8]", inputs={"table": ("fp32", ("q_len", 17))}
    )
    assert rows_of_a_warp(fused(spec)) == 16


def test_documents_take_128_rows_and_read_a_key_once() -> None:
    plan = fused(define(dtype="bf16", head_dim=128, **DOCUMENTS))
    assert (plan.block_q, plan.block_kv, plan.stages, plan.warps) == (128, 64, 1, 4)
    assert [e.name for e in plan.staged.keys] == ["ids_of_k"]


MORE = [{}, {"lse": True}]


@pytest.mark.long
@pytest.mark.parametrize("arch", tiers.cases(["sm_80", "sm_90a"], quick=["sm_90a"]))
@pytest.mark.parametrize("more", tiers.cases(MORE, quick=MORE[-1:]))
@pytest.mark.parametrize("documents", [DOCUMENTS, BIDIRECTIONAL])
def test_so_do_those_with_lse_and_spill_nothing(documents: Described, more: Described, arch: str) -> None:
    spec = define(dtype="bf16", head_dim=128, **documents, **more)
    plan = choose(spec, ARCHES[arch], "fused")
    assert plan.block_q == 128
    found = compile_text(emit(spec, plan)).resources()
    assert not any(map(spills, found)), found


WITH_SINKS = {"sink": "z[h]", "inputs": {**DOCUMENTS["inputs"], "z": ("fp32", ("heads",))}}
NEED_MORE = [{"normalize": "sigmoid"}, {"score": "softcap(20.0)"}, {"sink": "0.5", "lse": True}, WITH_SINKS]


@pytest.mark.long
@pytest.mark.parametrize("more", tiers.cases(NEED_MORE, quick=NEED_MORE[1:3]))
def test_documents_of_plans_that_need_more_registers_do_not(more: Described) -> None:
    spec = define(dtype="bf16", head_dim=128, **{**DOCUMENTS, **more})
    assert fused(spec).block_q == 64
    found = compile_text(emit(spec, fused(spec))).resources()
    assert not any(map(spills, found)), found


@pytest.mark.long
@pytest.mark.parametrize("head_dim", tiers.cases([64, 128], quick=[128]))
@pytest.mark.parametrize(
    ("mask", "params"),
    [
        ("prefix(1024) or causal", {}),
        ("causal and (q // side - k // side) % every == 0", {"side": 128, "every": 4}),  # divisions for each pair of a thread
    ],
)
def test_scores_of_masks_that_are_classified_stay_in_registers(mask: str, params: dict[str, int], head_dim: int) -> None:
    spec = define(dtype="bf16", head_dim=head_dim, mask=mask, params=params)
    for found in compile_text(emit(spec, fused(spec))).resources():
        assert not spills(found)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["padding(n)", "causal and padding(n)", "prefix(n[b]) or causal"])
def test_lengths_of_batches_leave_masks_the_tiles_of_plain_attention(mask: str, head_dim: int) -> None:
    """All pairs of a block share such a length: it needs no registers for addresses, and 128 rows are kept."""
    spec = define(dtype="bf16", head_dim=head_dim, mask=mask, inputs={"n": ("int32", ("batch",))})
    assert (fused(spec).block_q, fused(spec).block_kv) == (128, 64)


def test_documents_with_lengths_have_the_tiles_of_documents() -> None:
    padded = {"mask": DOCUMENTS["mask"] + " and padding(z)", "inputs": {**DOCUMENTS["inputs"], "z": ("int32", ("batch",))}}
    spec = define(dtype="bf16", head_dim=128, **padded)
    assert fused(spec).block_q == 128
    found = compile_text(emit(spec, fused(spec))).resources()
    assert not any(map(spills, found)), found


def test_a_mask_of_keys_alone_keeps_its_64_rows() -> None:
    spec = define(dtype="bf16", head_dim=128, mask="keep[b, k]", inputs={"keep": ("bool", ("batch", "kv_len"))})
    assert fused(spec).block_q == 64


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    tiers.cases(
        [("bf16", 64, "sm_90a"), ("bf16", 128, "sm_80"), ("fp32", 64, "sm_80"), ("fp32", 128, "sm_90a")],
        quick=[("bf16", 128, "sm_80"), ("fp32", 64, "sm_80")],
    ),
)
@pytest.mark.parametrize("name", tiers.cases(SPECS, quick=["gpt2", "packed_documents"], one_of=6))
def test_default_plans_of_head_sizes_64_and_128_spill_nothing(name: str, dtype: str, head_dim: int, arch: str) -> None:
    spec = replace(shipped(name, dtype), head_dim=head_dim, head_dim_v=head_dim)
    made = compile_text(emit(spec, choose(spec, ARCHES[arch], "fused")))
    assert "never referenced" not in made.log, made.log
    for found in made.resources():
        assert not spills(found)


def test_q_stays_in_registers_where_it_fits_beside_what_a_thread_reads() -> None:
    assert not fused(define(dtype="bf16", head_dim=96, **DOCUMENTS)).own.q_in_registers
    assert fused(define(dtype="bf16", head_dim=64, mask="causal")).own.q_in_registers
    assert fused(define(dtype="bf16", head_dim=64, **BY_DISTANCE)).own.q_in_registers


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("described", [BY_DISTANCE, DENSE, DOCUMENTS, {**DENSE, "lse": True}])
def test_fp32_of_every_head_size_has_a_fused_plan(described: dict[str, object], precision: str) -> None:
    schedules = [
        choose(define(dtype="fp32", head_dim=d, precision=precision, **described), H200, "fused").schedule.name
        for d in range(8, 257, 8)
    ]
    assert set(schedules) == {"fused_mma"}
