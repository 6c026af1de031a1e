"""The lesson kernels: right for any lengths, sixty lines from step to step, counts as predicted, and their page."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from attngen.device.cuda.compiler import compile_text
from attngen.diagnostics import ArgumentError
from attngen.language import load_text
from attngen.lessons.ladder import Rung, counted, program, rungs
from attngen.lessons.steps import STEPS
from tests import tiers
from tests.conftest import ROOT
from tests.harness import cli, shipped

MOST_LINES = 60
NUMBERS = [step.number for step in STEPS]
OTHERS = {
    "scores": "attention scores { dtype bf16 head_dim 32 mask q >= k and q - k < 40 score s + 0.25 * float(k - q) }",
    "rows_without_keys": "attention rows_without_keys { dtype fp16 head_dim 32 mask k <= q - 50 }",
}


def rung(number: int, text: str = "") -> Rung:
    spec = load_text(text)[0] if text else shipped("gpt2")
    return rungs(spec)[number - 1]


def test_neighbours_differ_in_sixty_lines() -> None:
    found = rungs(shipped("gpt2"))
    changes = [after.changed(before) for before, after in pairwise(found)]
    assert all(0 < added <= MOST_LINES and removed <= MOST_LINES for removed, added in changes), changes


@pytest.mark.parametrize(
    ("number", "name"),
    tiers.cases([(n, name) for n in NUMBERS for name in OTHERS], quick=lambda n, name: n == 8 and name == "scores"),
)
def test_other_masks_scores_and_lengths(number: int, name: str) -> None:
    """Lengths that no tile divides, groups of heads, rows without keys."""
    found = counted(rung(number, OTHERS[name]), 70, 131, (4, 2))
    assert found.error < 0.02


@pytest.mark.parametrize("number", tiers.cases(NUMBERS, quick=(7,), one_of=1))
def test_counts_are_those_that_are_predicted(number: int) -> None:
    """And no step has bank conflicts once rows are padded."""
    found = counted(rung(number), 256, 256)
    what, formula, _ = rung(number).step.predicted
    assert getattr(found.totals, what) == eval(formula)
    assert found.error < 2e-3
    assert (found.totals.conflicts == 0) == (number not in (3, 4))


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS)
def test_kernels_compile_without_spills(number: int) -> None:
    for kernel in compile_text(program(rung(number))).resources():
        assert kernel.spill_store_bytes == 0


def test_a_missing_barrier_is_found() -> None:
    """The mutation that a student would try: a kernel of the ladder is checked as all others are."""
    whole = rung(4, OTHERS["scores"])
    broken = whole.text.replace("        __syncthreads();  // everyone is done with the tile before\n", "", 1)
    assert broken != whole.text
    with pytest.raises(Exception, match="race"):
        counted(replace(whole, text=broken), 70, 131, (4, 2))


def test_specs_that_it_has_not_are_refused() -> None:
    for name in ("alibi", "cross_attention", "gpt_oss_sinks", "head_dim_80", "mistral_window"):
        with pytest.raises(ArgumentError, match="the ladder has no kernels of"):
            rungs(shipped(name))


def test_the_command(tmp_path: Path) -> None:
    done = cli("ladder", "gpt2", "-o", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert len([*tmp_path.glob("*.cu")]) == len(STEPS)
    assert "gpt2_ladder(" in cli("ladder", "gpt2", "--step", "3").output
    assert re.search(r"^\+.*K_smem", cli("ladder", "gpt2", "--diff", "3").output, re.M)
    assert cli("ladder", "gpt2", "--step", "9").exit_code == 2
    assert cli("ladder", "gpt2", "--diff", "1").exit_code == 2


def test_the_page_has_each_step_with_its_prediction() -> None:
    page = (ROOT / "docs" / "ladder.md").read_text()
    for step in STEPS:
        assert f"### {step.number}. " in page
        assert f"{step.predicted[1]} = " in page
        assert step.idea in page
    counts = re.findall(r" = ([\d,]+) [a-z ]+\. \*Counted:\* ([\d,]+)\.", page)
    assert len(counts) == len(STEPS)
    assert all(predicted == found for predicted, found in counts)
