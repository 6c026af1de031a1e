"""What the portable fused kernel's tiles go by, beside the head size: how a spec reads captured tensors."""

from __future__ import annotations

import pytest

from attngen import define
from attngen.plan import ARCHES, choose
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec

H200 = ARCHES["sm_90a"]
BY_DISTANCE = {"score": "relative_bias(table, 1024)", "inputs": {"table": ("fp32", ("heads", 2049))}}
DENSE = {"score": "s + bias[h, q, k]", "inputs": {"bias": ("fp32", ("heads", "q_len", "kv_len"))}}
DOCUMENTS = {"mask": "causal and same_document(ids)", "inputs": {"ids": ("int32", ("batch", "kv_len"))}}


def fused(spec: AttentionSpec) -> Plan:
    plan = choose(spec, H200, "fused")
    assert plan.schedule == "fused_mma"
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


@pytest.mark.parametrize("more", [{"lse": True}, {"score": "softcap(20.0)"}, {"sink": "0.5", "lse": True}])
def test_documents_of_plans_that_need_more_registers_do_not(more: dict[str, object]) -> None:
    assert fused(define(dtype="bf16", head_dim=128, **DOCUMENTS, **more)).block_q == 64


def test_a_mask_of_keys_alone_keeps_its_64_rows() -> None:
    spec = define(dtype="bf16", head_dim=128, mask="keep[b, k]", inputs={"keep": ("bool", ("batch", "kv_len"))})
    assert fused(spec).block_q == 64
