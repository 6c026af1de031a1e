"""Masks that read tensors, under which all rows have the same last key: the portable kernel computes its place anew."""

from __future__ import annotations

import pytest

import attngen
from attngen.plan import ARCHES, choose
from attngen.plan.fused_mma_loop import places_anew
from attngen.plan.tiling import Tile
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from tests import tiers
from tests.harness import emitted, run

IDS = {"ids": ("int32", ("batch", "kv_len"))}
OF_HEADS = {"group": ("int32", ("heads", "kv_len"))}
DOCUMENTS = {"mask": "same_document(ids)", "inputs": IDS}
# asks for the first row of a block, and for its head
GROUPS = {"mask": "group[h, k] == group[h, q] and (q - k) % 3 != 1", "inputs": OF_HEADS}


def described(**more: object) -> AttentionSpec:
    return attngen.define(**{"dtype": "bf16", "head_dim": 128, "kernel": "fused", **more})  # type: ignore[arg-type]


def anew(spec: AttentionSpec) -> bool:
    plan = choose(spec, ARCHES["sm_90a"], "fused")
    return places_anew(spec, Tile(plan.block_q, plan.block_kv, plan.stages, plan.warps))


def test_which_masks_do() -> None:
    assert anew(described(**DOCUMENTS))
    assert anew(described(**GROUPS))
    assert not anew(described(**{**DOCUMENTS, "mask": "causal and same_document(ids)"}))  # a last tile for half of the rows
    assert not anew(described(mask="prefix(100) or causal"))  # reads no tensor
    assert not anew(described(**DOCUMENTS, head_dim=64))  # has registers


SHAPES = [Shape(3, 4, 2, 130, 130), Shape(2, 2, 1, 300, 300), Shape(2, 2, 2, 64, 200), Shape(1, 2, 1, 60, 330)]


@pytest.mark.parametrize("shape", tiers.cases(SHAPES, quick=SHAPES[:1]))
@pytest.mark.parametrize("described_as", [DOCUMENTS, GROUPS, {**DOCUMENTS, "score": "softcap(20.0)", "lse": True}])
def test_every_batch_and_head_has_its_own(described_as: dict[str, object], shape: Shape) -> None:
    assert run(described(**described_as), "fused", shape, arch="sm_90a").passed


def test_no_other_place_is_kept() -> None:
    """The head's keys, the rows of a partial tile, and what classifies tiles."""
    text = emitted(described(**GROUPS), "fused", "sm_90a").text
    kernel = text[text.index('extern "C" __global__ void __launch_bounds__(THREADS)') :]
    assert kernel.count("k_head =") == 1
    assert "k_head = K + anew(b_idx)" in kernel
    assert "classify(in, anew(h_idx), q_lo, q_hi, kv_lo, kv_hi, q_tile, tile)" in kernel
    assert kernel.count("const int q_lo = anew(q_block) * BLOCK_Q;") == 2
