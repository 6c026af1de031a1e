"""Deleting any one wait, arrival, fence or barrier from an emitted backward of the Hopper schedule must be noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

import attngen
from attngen.backward import CompiledBackward
from attngen.device.emulated import EmulatedDevice
from attngen.emit.program import Program
from attngen.reference.problems import Shape
from attngen.schedules.hopper_backward import plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV
from tests.harness import compiled, wrong_gradients
from tests.left_out import first_finding, removable, unnoticed

STEPS = re.compile(
    r"(?:__syncthreads|__syncwarp|mbarrier_init_fence|async_proxy_fence|wgmma_fence|wgmma_commit)\(\);"
    r"|(?:wgmma_wait|tma_store_wait(?:_read)?)<[^>]*>\(\);|tma_store_commit\(\);|mbarrier_(?:wait|arrive|expect_bytes)\([^;]*\);"
    r"|(?:q|k|v|dO|dS|slopes|slot|operand|done|slot_before)\.(?:acquire|wait_full|release)\(\);"
)
# Tiles by closed forms, and tiles that the producer classifies; blocks without a tile, and heads without one in a group. Blocks
# without a tile are followed by others: a step that they lack is noticed there.
SPECS: dict[str, AttentionSpec] = {
    "causal": attngen.define(dtype="bf16", head_dim=8, mask="k >= q + 140 and h % 2 == 0"),
    "documents": attngen.define(
        dtype="bf16",
        head_dim=8,
        mask="causal and same_document(ids) and h != 1 and h < 4",
        inputs={"ids": ("int32", ("batch", 600))},
    ),
}
SHAPES = {"causal": Shape(1, 4, 2, 450, 600), "documents": Shape(1, 6, 3, 400, 400), "held": Shape(1, 4, 2, 450, 600)}
SPLIT = replace(SPECS["causal"], head_dim=16, head_dim_v=16)
# Orders of threads and copies; in all but the first, lanes without a convergence barrier diverge
ORDERS = (0, 3, 4, 8, 7, 9, 10, 12)
MANY = 24  # multiprocessors on which the groups of all SHAPES are divided into parts


@pytest.fixture
def small_heads_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans SPLIT as wide heads are planned, which take much longer: consumers share the keys, values have one stage."""
    monkeypatch.setattr(plan, "MOST_OF_BOTH", 8)
    monkeypatch.setattr(plan, "value_stages", lambda *_: 1)


def steps(source: Program) -> list[re.Match[str]]:
    """Every synchronization between warps, in the kernels of products and in the functions of this file that they call.

    Not the fences of products that always follow others without a wait between: that of dV orders the threads' writes of P,
    which the emulated device takes by value when a product is issued; ptxas inserts that of dP = dO V^T if it is not there.
    """
    start, of_rows = source.text.index("struct SlabTile"), source.text.find("namespace of_rows {")
    behind = [source.text.index("void issue_dv()")]
    if "issue_dv<DV_STEPS" in source.text:  # the rest of dV is issued without a wait before dK
        behind.append(source.text.index("void issue_dk("))
    if of_rows > 0:
        behind.append(source.text.index("void issue_weight_gradients()", of_rows))
    others = [source.text.index("wgmma_fence();", function) for function in behind]
    return [m for m in STEPS.finditer(source.text) if m.start() > start and m.start() not in others]


def outcome(spec: AttentionSpec, shape: Shape, backwards: Sequence[CompiledBackward]) -> str:
    """The first finding over all orders: its kind, or "wrong result"; "" if there is none."""

    def is_right(backward: CompiledBackward) -> bool:
        in_order = backward.plan.facts.deterministic
        kernel = replace(compiled(spec, "hopper"), _backwards={(QKV, in_order): backward})
        return not wrong_gradients(kernel, shape, deterministic=in_order)

    return first_finding(partial(is_right, backward) for backward in backwards)


def steps_that_are_not_needed(spec: AttentionSpec, shape: Shape, deterministic: bool) -> list[str]:
    usual = compiled(spec, "hopper").gradients(None, deterministic)
    source, device = usual.source, EmulatedDevice(checked=True, arch="sm_90a")
    mutant = device.compile(removable(source, steps(source)))
    calls = [*((device, seed) for seed in ORDERS), *((replace(device, multiprocessors=MANY), seed) for seed in ORDERS[:2])]
    backwards = [replace(usual, kernel=replace(mutant, device=replace(of, seed=seed)), device=of) for of, seed in calls]
    return unnoticed(source, steps(source), mutant.library, lambda: outcome(spec, shape, backwards))


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_every_step_between_warps_is_needed(name: str) -> None:
    assert steps_that_are_not_needed(SPECS[name], SHAPES[name], deterministic=True) == []


@pytest.mark.long
@pytest.mark.usefixtures("small_heads_are_split")
def test_every_step_between_warps_is_needed_where_products_are_split() -> None:
    assert compiled(SPLIT, "hopper").gradients().plan.own.split_products
    assert steps_that_are_not_needed(SPLIT, SHAPES["causal"], deterministic=True) == []


# Parts of dQ by columns and by rows; the first and last tiles of a work tile alone, together, and with others between; keys
# in registers.
ADDED = {
    "causal": replace(SPECS["causal"], head_dim=80, head_dim_v=80),
    "documents": SPECS["documents"],
    "held": attngen.define(dtype="bf16", head_dim=16, mask="k >= q + 140 and h % 2 == 0", score="softcap(5.0)"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADDED)
def test_every_step_between_warps_is_needed_where_dq_is_added_up(name: str) -> None:
    assert compiled(ADDED[name], "hopper").gradients(None, False).plan.own.dq == "additions"
    assert steps_that_are_not_needed(ADDED[name], SHAPES[name], deterministic=False) == []
