"""Where the plan depends on the sizes of a call: which one is chosen, and that both give the right result."""

from __future__ import annotations

from dataclasses import replace

import pytest

import attngen
from attngen.device.arrays import view
from attngen.device.emulated import EmulatedDevice
from attngen.plan import ARCHES, Problem, choose, depends_on_sizes, plans_for
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import Schedule
from tests.problems import call

SMS = 132
PLAIN = attngen.define(dtype="bf16", head_dim=64, lse=True)


def rows_of_a_block(spec, length: int, heads: int) -> int:
    return choose(spec, ARCHES["sm_90a"], "hopper", Problem(heads, length, length, SMS)).block_q


@pytest.mark.parametrize(("head_dim", "mask"), [(64, None), (64, "causal"), (128, None), (128, "causal")])
def test_long_rows_take_three_consumers(head_dim: int, mask: str | None) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask)
    assert rows_of_a_block(spec, 128, 512) == 128
    assert rows_of_a_block(spec, 16384, 32) == 192
    if mask is not None:  # (rows of equal work are counted in whole rounds of blocks too)
        chosen = [rows_of_a_block(spec, length, 256) for length in range(384, 20000, 384)]
        assert chosen == sorted(chosen)  # whole blocks of either kind: from some length on the wide one


def test_a_few_blocks_are_not_made_fewer() -> None:
    spec = attngen.define(dtype="bf16", head_dim=128)
    assert rows_of_a_block(spec, 4096, 4) == 128  # 128 blocks run at once; 88 would leave a third of the SMs idle


@pytest.mark.parametrize(
    "described",
    [
        {"head_dim": 256},
        {"head_dim": 64, "score": "softcap(20.0)"},
        {"head_dim": 64, "mask": "causal and window(100)"},
        {"head_dim": 64, "mask": "prefix(10) or causal"},
        {"head_dim": 64, "normalize": "sigmoid"},
    ],
)
def test_others_have_one_plan(described) -> None:
    spec = attngen.define(dtype="bf16", **described)
    assert len(plans_for(spec, ARCHES["sm_90a"], "hopper")) == 1


def test_a_stated_tile_is_kept() -> None:
    spec = replace(attngen.define(dtype="bf16", head_dim=64), schedule=Schedule("hopper", 128, 128))
    assert not depends_on_sizes(spec, choose(spec, ARCHES["sm_90a"]))
    assert choose(spec, ARCHES["sm_90a"], problem=Problem(512, 16384, 16384, SMS)).block_q == 128


def test_auto_is_the_best_that_the_architecture_has() -> None:
    for dtype, arch, rung in (("bf16", "sm_90a", "hopper"), ("fp16", "sm_80", "fused"), ("fp32", "sm_90a", "fused")):
        spec = attngen.define(dtype=dtype, head_dim=64)
        assert choose(spec, ARCHES[arch]).rung == choose(spec, ARCHES[arch], "auto").rung == rung


def test_a_call_runs_the_plan_of_its_sizes() -> None:
    """On two SMs: 384 rows are three blocks of 128, in two rounds, or two blocks of 192 in one."""
    compiled = attngen.compile(PLAIN, kernel="hopper", device=EmulatedDevice(arch="sm_90a"))
    for length, rows in ((384, 192), (128, 128), (384, 192)):
        problem = sample(PLAIN, Shape(1, 1, 1, length, 320))
        views = {name: view(getattr(problem, name.lower()), name) for name in "QKV"}
        assert compiled.at(views).plan.block_q == rows
        assert compare(*call(compiled, problem), truth(PLAIN, problem)).passed


def test_a_process_that_serves_can_have_both_compiled_ahead() -> None:
    assert [p.block_q for p in plans_for(PLAIN, ARCHES["sm_90a"])] == [128, 192]
