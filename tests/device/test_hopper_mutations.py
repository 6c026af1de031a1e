"""Deleting any one wait, arrival, fence or barrier from an emitted kernel of Hopper's schedules must be noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.emit.program import Program
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec, KernelRequest
from tests import tiers
from tests.harness import compile_text, emitted, is_right, solved
from tests.left_out import first_finding, removable, unnoticed
from tests.removals import ordering_statements

# Functions that copy, multiply or compute, too: their own steps are found in them. And what has no effect on the emulated
# device: numbers of registers, and barriers of a warp for the compiler alone.
WORK = re.compile(
    r"(?:block\.set_up|consumer\.compute|producer\.\w+|epilogue|first_(?:scores|weights)|issue_\w+|(?:\w+\.)?load_\w+|next_work_tile"
    r"|publish|score_tile|step|mbarrier_init|(?:take|give)_registers|keep_order)\b"
)
# Q in registers; Q in shared memory; tiles that the producer classifies, and key vectors; key vectors without that.
# In "wide" consumers skip tiles above their own
SPECS: dict[str, AttentionSpec] = {
    "causal": attngen.define(dtype="bf16", head_dim=64, mask="causal and h % 2 == 0"),  # heads without a tile between others
    "wide": attngen.define(dtype="bf16", head_dim=256, mask="k + 610 <= 3 * q"),  # blocks of no tile, consumers of none
    "documents": attngen.define(
        dtype="bf16",
        head_dim=128,
        mask="causal and same_document(ids) and h % 2 == 0",
        inputs={"ids": ("int32", ("batch", "kv_len"))},
    ),
    "bias": attngen.define(
        dtype="bf16",
        head_dim=128,
        mask="k + 200 <= q",
        score="s * gate[h, q] + bias[h, k] + shift[h, q]",  # two elements per row: Q's fragments find no room beside them
        inputs={
            "bias": ("fp16", ("heads", "kv_len")),
            "gate": ("fp16", ("heads", "q_len")),
            "shift": ("fp16", ("heads", "q_len")),
        },
    ),
    # consumers that skip tiles above their own, below, and all; and above with Q in registers
    "band": attngen.define(dtype="bf16", head_dim=256, mask="k + 120 <= 3 * q and 3 * q < k + 160"),
    # four consumers, each of which skips tiles of the others
    "four": replace(attngen.define(dtype="bf16", head_dim=64, mask="k + 200 <= q"), kernel=KernelRequest("hopper", 256, 64, 2)),
    "narrow": replace(attngen.define(dtype="bf16", head_dim=64, mask="k <= 2 * q"), kernel=KernelRequest("hopper", 128, 64, 2)),
    # elements of pairs in shared memory, and three consumers that skip tiles
    "pairs": replace(
        attngen.define(
            dtype="bf16",
            head_dim=64,
            mask="k + 200 <= q",
            score="s + bias[h, q, k]",
            inputs={"bias": ("bf16", ("heads", "q_len", "kv_len"))},
        ),
        kernel=KernelRequest("hopper", 192, 64, 2),
    ),
    # Q in shared memory, and blocks of no tile, of two, of three: one more than the wgmma schedule has stages
    "far": attngen.define(dtype="bf16", head_dim=256, mask="k + 150 <= q"),
}
BY_SCHEDULE = {"hopper": ("causal", "wide", "documents", "bias", "band", "four", "narrow", "pairs"), "wgmma": ("causal", "far")}
# Orders of threads and copies; in all but the first, lanes without a convergence barrier diverge
ORDERS = (0, 3, 4, 8, 7, 9, 10, 12)
SHAPES = {
    "causal": Shape(1, 4, 4, 300, 300),
    "wide": Shape(1, 4, 1, 380, 600),
    "documents": Shape(1, 4, 4, 300, 300),
    "bias": Shape(1, 4, 1, 400, 400),
    "band": Shape(1, 4, 4, 300, 600),
    "four": Shape(1, 4, 1, 500, 500),
    "narrow": Shape(1, 3, 3, 400, 400),
    "far": Shape(1, 1, 1, 300, 300),
    "pairs": Shape(1, 3, 3, 600, 504),
}


def steps(source: Program) -> list[re.Match[str]]:
    """Every synchronization between warps, in the kernel and in the functions that it calls."""
    return [step for step in ordering_statements(source.text) if not WORK.match(step[0])]


def kernels(name: str, schedule: str, source: Program) -> list[CompiledAttention]:
    """A kernel for each of ORDERS."""
    return [compile_text(SPECS[name], schedule, source, seed) for seed in ORDERS]


def outcome(name: str, kernels: Sequence[CompiledAttention]) -> str:
    """The first finding over all of ORDERS: its kind, or "wrong result"; "" if there is none."""
    solution = solved(SPECS[name], SHAPES[name])
    return first_finding(partial(is_right, kernel, *solution) for kernel in kernels)


@pytest.mark.parametrize(
    ("name", "schedule"),
    tiers.cases([(name, schedule) for schedule in BY_SCHEDULE for name in BY_SCHEDULE[schedule]], one_of=5),
)
def test_every_step_between_warps_is_needed(name: str, schedule: str) -> None:
    source = emitted(SPECS[name], schedule, "sm_90a")
    under_test = kernels(name, schedule, removable(source, steps(source)))
    assert unnoticed(source, steps(source), under_test[0].kernel.library, lambda: outcome(name, under_test)) == []


@pytest.mark.parametrize("begun", tiers.cases(["false", "true"], quick=["true"]))
def test_the_first_product_of_rows_replaces_what_the_ones_before_have_left(begun: str) -> None:
    source = emitted(SPECS["narrow"], "hopper", "sm_90a")
    statement = f"begun = {begun};"
    opposite = {"false": "begun = true;", "true": "begun = false;"}[begun]  # to leave it out would leave it undefined
    assert source.text.count(statement) == 1
    changed = replace(source, text=source.text.replace(statement, opposite))
    assert outcome("narrow", kernels("narrow", "hopper", changed)) == "wrong result"
