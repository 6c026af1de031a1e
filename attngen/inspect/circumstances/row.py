"""A circumstance: a row of the tables of this package, and what the plans have in common to which rows apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attngen.inspect.block_work import Block, Case
from attngen.inspect.blocks import visits_keys, visits_rows
from attngen.plan import Plan
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.problems import Scores as FarApart

FEW_ROWS = 8  # fewer than any warp has

Scores = FarApart | Literal["steep"]
OfPlan = Callable[[Plan], bool]
Test = Callable[[Case], object]  # true or false, as an array may be


@dataclass(frozen=True, slots=True)
class Circumstance:
    """`what` happens, in words, to the plans of which all of `needs` are true, in the problems of which `test` is."""

    name: str
    what: str
    needs: tuple[OfPlan, ...]
    test: Test
    absent: str = ""  # why it may not occur: what the mask is like
    by_values: bool = False  # params and captured tensors may decide whether it occurs, not sizes alone
    scores: Scores | None = None  # those that it takes, if they are not the usual ones
    without_pairs: bool = False  # it also occurs without a pair of a row and a key

    def applies(self, plan: Plan) -> bool:
        return all(need(plan) for need in self.needs)

    def occurs(self, case: Case) -> bool:
        return (self.without_pairs or not case.is_empty) and bool(self.test(case))

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Axis:
    """Blocks of rows that visit tiles of keys, or blocks of keys that visit tiles of rows."""

    held: str
    seen: str
    visits: OfPlan
    blocks: Callable[[Case], tuple[Block, ...]]
    bounds: Callable[[Plan], MaskBounds | None]

    @property
    def words(self) -> Mapping[str, str]:
        return {"block": f"a block of {self.held}", "tiles": self.seen}


AXES = (
    Axis("rows", "keys", visits_keys, lambda case: case.row_blocks, lambda plan: plan.bounds),
    Axis("keys", "rows", visits_rows, lambda case: case.key_blocks, lambda plan: plan.row_bounds),
)


def backward(plan: Plan) -> bool:
    return bool(plan.wanted)


def forward(plan: Plan) -> bool:
    return not plan.wanted


def masked(plan: Plan) -> bool:
    return plan.facts.spec.mask is not None


def tiled(plan: Plan) -> bool:
    return plan.schedule.is_tiled


def persistent(plan: Plan) -> bool:
    return plan.schedule.is_warp_specialized


def splits_keys(plan: Plan) -> bool:
    return plan.schedule.packs_heads


def has_sequences(plan: Plan) -> bool:
    """Whether sequences of a call may have several lengths, and results that are compared one by one."""
    kernel = plan.facts.spec.kernel
    return (kernel.is_packed or kernel.is_counted) and (not plan.wanted or plan.wants("q", "k", "v"))


def subtracts_maxima(plan: Plan) -> bool:
    """Whether weights are exponentials of scores less the maximum of their row."""
    return plan.facts.spec.normalize == "softmax" and plan.facts.shift is None


def rescales(plan: Plan) -> bool:
    """Whether kernels of `plan` multiply sums of earlier tiles when the maximum of a row rises."""
    return plan.schedule.is_fused and not plan.wanted and subtracts_maxima(plan)


def is_mixed(has: Any, block: int) -> bool:
    """Whether some elements of a block of so many are true, and others are not."""
    blocks = (has[i : i + block] for i in range(0, len(has), block))
    return any(one.any() and not one.all() for one in blocks)
