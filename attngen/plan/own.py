"""`Own`: what a schedule chooses beside the fields of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from attngen.plan.group_parts import GroupParts
from attngen.plan.saved import Delta
from attngen.plan.split_keys import Splits

if TYPE_CHECKING:
    from attngen.plan.plan import Plan

Copies = Literal["tma", "cp_async", ""]  # `templates/parts/decode/by_NAME.j2`


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The base of each schedule's own choices. Its members are all that code outside of `attngen.schedules` reads of them: a
    schedule sets those that it chooses."""

    kernels: tuple[str, ...] = ()  # a backward's, in launch order: those that the wanted gradients need
    delta: Delta = ""  # what a backward computes delta from, if it has a choice
    parts: GroupParts | None = None  # parts of a group of query heads, each with its own work tiles; None: there are no groups
    key_warps: int = 1  # warps, or warpgroups, of a block with tiles of keys of their own; 1: all visit the same
    splits: Splits | None = None  # how many blocks the keys of a tile of rows are split over; None: they are not
    q_in_registers: bool | None = None  # the fragments of Q stay in registers, or in shared memory; None: there is no choice
    held: int = 0  # rows that a block holds; 0: those of a tile
    held_keys: int = 0  # keys that a block holds; 0: those of a tile
    from_first_tile: bool = True  # a block visits its tiles from the first to the last; else from the last to the first
    copies: Copies = ""  # how K and V are copied, in a schedule that has a choice

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        """The choices of a plan whose schedule has this kind of them."""
        assert isinstance(plan.own, cls)
        return plan.own


NONE = Own()
