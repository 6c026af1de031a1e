"""Masks that divide by params: tiles found empty by their step, and a division for each distance, not for each pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.keywords import SCHEDULE_NAMES
from attngen.plan import ARCHES
from attngen.plan.block_map import EMPTY, FULL, classify_tiles
from attngen.reference.problems import Shape
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from tests import tiers
from tests.harness import emitted, run, shipped

EVERY_SCHEDULE = SCHEDULE_NAMES

BLOCKS = attngen.define(
    dtype="bf16", head_dim=64, params={"side": 64, "every": 3}, mask="causal and (q // side - k // side) % every == 0"
)


def right(spec: AttentionSpec, schedule: str, length: int, **params: int) -> bool:
    return run(spec, schedule, Shape(1, 1, 1, length, length), arch="sm_90a", **params).passed


@pytest.mark.parametrize("step", tiers.cases([-3, 1, 5, 200], quick=[5]))
@pytest.mark.parametrize("schedule", tiers.cases(EVERY_SCHEDULE, quick=["tiled", "hopper"]))
def test_dilated_by_steps_on_both_sides_of_a_tile(schedule: str, step: int) -> None:
    assert right(shipped("dilated"), schedule, 330, step=step)


@pytest.mark.parametrize("schedule", tiers.cases(EVERY_SCHEDULE, quick=["hopper"]))
def test_blocks_whose_side_is_a_param(schedule: str) -> None:
    assert right(BLOCKS, schedule, 400)


def test_tiles_between_the_steps_are_not_visited() -> None:
    """Of 64 x 64 tiles of blocks of 64 a third is visited, and a tile below the diagonal is empty or full."""
    bounds = choose(BLOCKS, ARCHES["sm_80"], "fused").bounds
    names = {"b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 1024, "kv_len": 1024, "side": 64, "every": 3}
    kinds = classify_tiles(bounds, 64, 64, names)
    below = kinds[np.tril_indices(16, -1)]
    assert set(below) == {EMPTY, FULL}
    assert (below == FULL).sum() == sum(1 for i in range(16) for j in range(i) if (i - j) % 3 == 0)


@pytest.mark.parametrize("schedule", tiers.cases(EVERY_SCHEDULE, quick=["fused"]))
def test_a_remainder_is_an_index_of_as_many_elements(schedule: str) -> None:
    spec = attngen.define(
        dtype="bf16", head_dim=64, score="s + t[(q - k) % n]", inputs={"t": ("fp32", (9,))}, params={"n": "int"}
    )
    assert right(spec, schedule, 70, n=9)
    with pytest.raises(ValueError, match="index 0 of `t` can be 0 to 9"):
        right(spec, schedule, 70, n=10)


def test_a_division_stands_before_the_branches() -> None:
    """Behind `&&` each pair has a branch and a division of its own; before it, pairs at the same distance share one."""
    text = emitted(shipped("dilated"), "fused").text
    assert "    const int t0 = (q_idx - kv_idx) % in.step;\n    return q_idx >= kv_idx && t0 == 0;\n" in text
    by_constant = attngen.define(dtype="fp16", head_dim=64, mask="causal and (q - k) % 4 == 0")
    assert "return q_idx >= kv_idx && (q_idx - kv_idx) % 4 == 0;" in emitted(by_constant, "fused").text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ("(q - k) % 4 == 0", "(q_idx - kv_idx) % 4 == 0"),
        ("(q - k) % 4 != 0", "(q_idx - kv_idx) % 4 != 0"),
        ("(q - k) % 4 == 1", "floor_mod(q_idx - kv_idx, 4) == 1"),
        ("(q - k) % 4 == 0 or (q - k) % 4 > 2", "t0 = floor_mod(q_idx - kv_idx, 4)"),
    ],
)
def test_the_sign_of_a_remainder_matters_unless_it_is_asked_for_zero_alone(mask: str, text: str) -> None:
    spec = attngen.define(dtype="fp16", head_dim=64, mask=mask)
    assert text in emitted(spec, "fused").text
    assert right(spec, "naive", 40)


def test_remainders_take_registers() -> None:
    """At head size 128 they leave room for tiles of 32 keys."""
    wide = replace(shipped("dilated"), head_dim=128, head_dim_v=128)
    for arch in ("sm_80", "sm_90a"):
        plan = choose(wide, ARCHES[arch], "fused")
        assert (plan.block_q, plan.block_kv) == (128, 32)


def test_tiles_of_the_hopper_schedule_are_whole_blocks() -> None:
    """Of 128 or 64 keys: 96 would have an edge of a mask's blocks in each tile. No head size is left without a tile."""
    for head_dim in range(8, 257, 8):
        spec = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal and dilated(step)", params={"step": 4})
        plan = choose(spec, ARCHES["sm_90a"], "hopper")
        assert plan.block_kv in (64, 128), head_dim
