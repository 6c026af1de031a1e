"""What a `kernel` statement asks of a plan, and what of it a rung that is asked for instead takes."""

from __future__ import annotations

import pytest

import attngen
from attngen.language import load_text
from attngen.plan import ARCHES, choose
from attngen.spec.attention import Rung


def tile(kernel: Rung, rung: str | None, arch: str) -> tuple[int, int]:
    spec = attngen.define(head_dim=128, dtype="bf16", mask="causal", kernel=kernel, tile=(64, 32))
    plan = choose(spec, ARCHES[arch], rung)
    return plan.block_q, plan.block_kv


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_tile_without_a_rung_is_for_the_one_that_is_asked_for(arch: str) -> None:
    """Also where "auto" itself would mean another rung."""
    assert tile("auto", "fused", arch) == (64, 32)


def test_a_tile_of_a_rung_is_for_no_other() -> None:
    assert tile("fused", None, "sm_90a") == tile("fused", "fused", "sm_90a") == (64, 32)
    assert tile("fused", "wgmma", "sm_90a") != (64, 32)


@pytest.mark.parametrize("rung", ["naive", "tiled"])
def test_rungs_of_several_kernels_take_no_tile_from_auto(rung: str) -> None:
    assert tile("auto", rung, "sm_80") != (64, 32)


@pytest.mark.parametrize("rung", ["auto", "naive", "tiled", "fused", "wgmma", "hopper"])
@pytest.mark.parametrize("kernel", ["auto", "fused", "wgmma"])
def test_the_text_that_torch_s_operator_keeps_has_the_same_plan(kernel: Rung, rung: str) -> None:
    description = pytest.importorskip("attngen.torch.description")
    spec = attngen.define(head_dim=128, dtype="bf16", mask="causal", kernel=kernel, tile=(128, 128))
    said = load_text(description.fixed_text(spec, rung))[0]
    plans = choose(spec, ARCHES["sm_90a"], rung), choose(said, ARCHES["sm_90a"])
    assert len({(p.rung, p.block_q, p.block_kv, p.stages, p.warps) for p in plans}) == 1
