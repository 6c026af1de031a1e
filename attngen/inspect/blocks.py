"""What the blocks of a plan hold, and which tiles they visit."""

from __future__ import annotations

from attngen.plan import Plan

NAIVE_TILE = 128  # rows or keys of a block of the naive kernels
OF_KEYS = ("dk_dv", "dk", "dv")  # kernels of fused backwards whose blocks hold keys; those of the others hold rows


def tile_of(plan: Plan) -> tuple[int, int]:
    """The rows and keys of a block of `plan`."""
    return (plan.block_q, plan.block_kv) if plan.schedule.is_tiled else (NAIVE_TILE, NAIVE_TILE)


def held_by(plan: Plan) -> tuple[int, int]:
    """The rows of a block that visits tiles of keys, and the keys of one that visits tiles of rows."""
    return plan.own.held or plan.block_q, plan.own.held_keys or plan.block_kv


def visits_keys(plan: Plan) -> bool:
    """Whether a kernel of the plan has blocks of rows that visit tiles of keys."""
    if not plan.schedule.is_tiled:
        return False
    if not plan.schedule.visits_rows:
        return True
    return "dq" in plan.own.kernels or plan.own.delta == "sums over keys"


def visits_rows(plan: Plan) -> bool:
    """Whether a kernel of the plan has blocks of keys that visit tiles of rows."""
    return plan.schedule.visits_rows and any(kernel in OF_KEYS for kernel in plan.own.kernels)
