"""Deleting any one wait, arrival, fence or barrier from an emitted backward of the Hopper schedule must be noticed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.backward import CompiledBackward
from attngen.device.emulated import EmulatedDevice
from attngen.emit.program import Program
from attngen.reference.compare import Array
from attngen.reference.compare_gradients import compare_gradients
from attngen.reference.problems import Shape
from attngen.schedules.hopper_backward import buffers, form, plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import round_to_storage
from attngen.spec.gradient import QKV
from tests import tiers
from tests.harness import compiled, gradients, solved_gradients
from tests.left_out import first_finding, removable, unnoticed
from tests.removals import ordering_statements

# Functions that copy, multiply or compute, too: their own steps are found in them. And what has no effect on the emulated
# device: numbers of registers, and barriers of a warp for the compiler alone.
WORK = re.compile(
    r"(?:block\.set_up|consumer\.compute|producer\.load|issue_\w+|(?:\w+\.)?load_\w+|(?:hold|clear|add_finite)_keys|clear_rows|sum_tiles"
    r"|look_at_tiles|step|store_\w+|publish_score_gradients|mbarrier_init|(?:take|give)_registers|keep_order)\b"
)
# Tiles by closed forms, and tiles that the producer classifies, full ones too; blocks without a tile, and heads without one in
# a group. Blocks without a tile are followed by others: a step that they lack is noticed there.
SPECS: dict[str, AttentionSpec] = {
    "causal": attngen.define(dtype="bf16", head_dim=8, mask="k >= q + 140 and h % 2 == 0"),
    "documents": attngen.define(
        dtype="bf16",
        head_dim=8,
        mask="(causal and same_document(ids) or q >= 256 and k < 64) and h != 1 and h < 4 and k != 200 and q < 390",
        inputs={"ids": ("int32", ("batch", 600))},
    ),
}
SHAPES = {"causal": Shape(1, 4, 2, 470, 600), "documents": Shape(1, 6, 3, 400, 400), "held": Shape(1, 4, 2, 470, 600)}
# Rows and keys without pairs, which share tiles with others; and a row that has pairs, with the keys of these.
FAR = (slice(460, None), slice(140), 459, 599)
NOT_FINITE = {"causal": FAR, "documents": (slice(390, None), 200, 1, slice(2)), "held": FAR}
SPLIT = replace(SPECS["causal"], head_dim=16, head_dim_v=16)
HALVES = replace(SPECS["causal"], head_dim=136, head_dim_v=8)
# Orders of threads and copies; in all but the first, lanes without a convergence barrier diverge
ORDERS = (0, 3, 4, 8, 7, 9, 10, 12)
MANY = 24  # multiprocessors on which the groups of all SHAPES are divided into parts


@pytest.fixture
def small_heads_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans SPLIT as wide heads are planned, which take much longer: consumers share the keys, values have one stage."""
    monkeypatch.setattr(form, "MOST_OF_BOTH", 8)
    for module in (buffers, plan):
        monkeypatch.setattr(module, "value_stages", lambda *_: 1)


def steps(source: Program) -> list[re.Match[str]]:
    """Every synchronization between warps, in the kernels of products and in the functions of this file that they call.

    Not the fences of products that always follow others without a wait between: that of dV orders the threads' writes of P,
    which the emulated device takes by value when a product is issued; ptxas inserts that of dP = dO V^T if it is not there.
    """
    of_rows = source.text.find("namespace of_rows {")
    behind = [source.text.index("void issue_dv()")]
    if "issue_dv<DV_STEPS" in source.text:  # the rest of dV is issued without a wait before dK
        behind.append(source.text.index("void issue_dk("))
    if of_rows > 0:
        behind.append(source.text.index("void issue_weight_gradients()", of_rows))
    others = [source.text.index("wgmma_fence();", function) for function in behind]
    return [step for step in ordering_statements(source.text) if not WORK.match(step[0]) and step.start() not in others]


def outcome(name: str, spec: AttentionSpec, backwards: Sequence[CompiledBackward]) -> str:
    """The first finding over all orders: its kind, or "wrong result"; "" if there is none."""
    problem, loss, truth = solved_gradients(spec, SHAPES[name], QKV, backwards[0].plan.saved, 0, ())
    problem, loss = replace(problem, q=problem.q.copy(), k=problem.k.copy()), replace(loss, dout=loss.dout.copy())
    rows, keys, row, its_keys = NOT_FINITE[name]
    for array, places in ((problem.q, rows), (problem.k, keys), (loss.dout, rows), (loss.dout, row)):
        array[:, :, places, 1] = round_to_storage(np.float32(np.nan), spec.dtype)

    def others(gradients: Mapping[str, Array]) -> dict[str, Array]:
        return {of: np.delete(gradient, row if of == "q" else its_keys, 2) for of, gradient in gradients.items()}

    def is_right(backward: CompiledBackward) -> bool:
        in_order = backward.plan.facts.deterministic
        kernel = replace(compiled(spec, "hopper"), _backwards={(QKV, in_order): backward})
        found = gradients(kernel, problem, loss, deterministic=in_order)
        compared = compare_gradients(others(found), replace(truth, exact=others(truth.exact)))
        return all(one.passed for one in compared.values())

    return first_finding(partial(is_right, backward) for backward in backwards)


PARTS = 3  # the steps of a kernel are divided into so many, each in a test of its own


def in_turn(names: Iterable[str]) -> list[Any]:
    return tiers.cases(product(names, range(PARTS)), one_of=5 * PARTS)


def steps_that_are_not_needed(name: str, spec: AttentionSpec, part: int, deterministic: bool) -> list[str]:
    usual = compiled(spec, "hopper").gradients(None, deterministic)
    source, device = usual.source, EmulatedDevice(checked=True, arch="sm_90a")
    removed = steps(source)[part::PARTS]
    mutant = device.compile(removable(source, removed))
    calls = [*((device, seed) for seed in ORDERS), *((replace(device, multiprocessors=MANY), seed) for seed in ORDERS[:2])]
    backwards = [replace(usual, kernel=replace(mutant, device=replace(of, seed=seed)), device=of) for of, seed in calls]
    return unnoticed(source, removed, mutant.library, lambda: outcome(name, spec, backwards))


@pytest.mark.parametrize(("name", "part"), in_turn(SPECS))
def test_every_step_between_warps_is_needed(name: str, part: int) -> None:
    assert steps_that_are_not_needed(name, SPECS[name], part, deterministic=True) == []


@pytest.mark.parametrize("part", tiers.cases(range(PARTS), one_of=PARTS))
@pytest.mark.usefixtures("small_heads_are_split")
def test_every_step_between_warps_is_needed_where_products_are_split(part: int) -> None:
    assert compiled(SPLIT, "hopper").gradients().plan.own.split_products
    assert steps_that_are_not_needed("causal", SPLIT, part, deterministic=True) == []


@pytest.mark.parametrize("part", tiers.cases(range(PARTS), one_of=PARTS))
def test_every_step_between_warps_is_needed_where_halves_of_pairs_meet(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for fewer columns of V than such heads have."""
    monkeypatch.setattr(form, "MOST_OF_BOTH", 64)
    assert compiled(HALVES, "hopper").gradients(None, False).plan.own.by_halves
    assert steps_that_are_not_needed("causal", HALVES, part, deterministic=False) == []


# Parts of dQ by columns and by rows; the first and last tiles of a work tile alone, together, and with others between; keys
# in registers.
ADDED = {
    "causal": replace(SPECS["causal"], head_dim=80, head_dim_v=80),
    "documents": SPECS["documents"],
    "held": attngen.define(dtype="bf16", head_dim=16, mask="k >= q + 140 and h % 2 == 0", score="softcap(5.0)"),
}


@pytest.mark.parametrize(("name", "part"), in_turn(ADDED))
def test_every_step_between_warps_is_needed_where_dq_is_added_up(name: str, part: int) -> None:
    assert compiled(ADDED[name], "hopper").gradients(None, False).plan.own.dq == "additions"
    assert steps_that_are_not_needed(name, ADDED[name], part, deterministic=False) == []
