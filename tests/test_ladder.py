"""The lesson kernels: right for any lengths, sixty lines from step to step, counts as predicted, and their pages."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from attngen.device.cuda.compiler import compile_text
from attngen.diagnostics import ArgumentError
from attngen.language import load_text
from attngen.lessons.ladder import LADDERS, Rung, rungs
from attngen.lessons.running import counted, program
from attngen.lessons.step import SIZES
from tests import tiers
from tests.conftest import ROOT
from tests.harness import cli, shipped

MOST_LINES = 60
STEPS = [(name, step.number) for name, ladder in LADDERS.items() for step in ladder.steps]
PAGES = {"forward": "ladder.md", "backward": "ladder_backward.md", "decoding": "ladder_decoding.md"}
OTHERS = {
    "scores": "attention scores { dtype bf16 head_dim 32 mask q >= k and q - k < 40 score tanh(s) + float(k - q) / 4.0 }",
    "rows_without_keys": "attention rows_without_keys { dtype fp16 head_dim 32 mask k <= q - 50 allow W208 }",
    "as_many_as_fit": "attention as_many_as_fit { dtype fp16 head_dim 64 }",
}
STEP = "attention step { dtype fp16 head_dim 64 }"
SMALL = dict(zip(SIZES, (6, 2, 70, 331), strict=True))  # no tile divides the lengths; three heads share keys


def rung(name: str, number: int, text: str = "") -> Rung:
    """A step of a spec; if its heads are larger than those of `text`, then of the same spec with such heads."""
    ladder = LADDERS[name]
    heads = ladder.steps[number - 1].heads
    text = text.replace("head_dim 32", f"head_dim {heads[0]}") if heads else text
    spec = load_text(text or STEP)[0] if text or name == "decoding" else shipped("gpt2")
    return rungs(spec, ladder)[number - 1]


@pytest.mark.parametrize("name", LADDERS)
def test_neighbours_differ_in_sixty_lines(name: str) -> None:
    changes = [after.changed(before) for before, after in pairwise(rungs(shipped("gpt2"), LADDERS[name]))]
    assert all(0 < added <= MOST_LINES and removed <= MOST_LINES for removed, added in changes), changes


QUICK = [("forward", 8, "scores"), ("backward", 6, "scores"), ("decoding", 5, "scores")]


@pytest.mark.parametrize(("name", "number", "other"), tiers.cases([(*s, o) for s in STEPS for o in OTHERS], quick=QUICK))
def test_other_masks_scores_and_lengths(name: str, number: int, other: str) -> None:
    """Lengths that no tile divides, groups of heads, rows without keys."""
    found = counted(rung(name, number, OTHERS[other]), {**SMALL, "kv_len": 331 if name == "decoding" else 131})
    assert found.error < (0.005 * found.largest if name == "backward" else 0.02)  # bf16 rounds gradients, which are sums


@pytest.mark.parametrize(
    ("name", "number"), tiers.cases(STEPS, quick=[("forward", 7), ("backward", 5), ("decoding", 4)], one_of=3)
)
def test_counts_are_those_that_are_predicted(name: str, number: int) -> None:
    """And no step has bank conflicts but those that say so."""
    found = counted(rung(name, number))
    what, formula, _ = rung(name, number).step.predicted
    assert found.counts[what] == eval(formula)
    assert found.error < 2e-3
    if name == "forward":
        assert (found.counts["conflicts"] == 0) == (number not in (3, 4))


@pytest.mark.long
@pytest.mark.parametrize(("name", "number"), STEPS)
def test_kernels_compile_without_spills(name: str, number: int) -> None:
    for kernel in compile_text(program(rung(name, number))).resources():
        assert kernel.spill_store_bytes == 0


@pytest.mark.parametrize(("name", "number"), tiers.cases(STEPS, quick=[("forward", 8)], one_of=1))
def test_the_largest_heads_fit_shared_memory(name: str, number: int) -> None:
    """NVRTC refuses more than 48 KiB."""
    wide = f"attention wide {{ dtype bf16 head_dim {max(LADDERS[name].steps[number - 1].heads or LADDERS[name].heads)} }}"
    assert compile_text(program(rung(name, number, wide))).resources()


@pytest.mark.parametrize(
    ("name", "number", "barrier"),
    tiers.cases(
        [
            ("forward", 4, "everyone is done with the tile before"),
            ("forward", 9, "everyone is done with the tile before, whose stage the next one takes"),
            ("backward", 6, "dS of all keys of the block is there"),
            ("decoding", 5, "the parts of all lanes are there"),
        ],
        quick=[("forward", 4, "everyone is done with the tile before")],
        one_of=1,
    ),
)
def test_a_missing_barrier_is_found(name: str, number: int, barrier: str) -> None:
    """The mutation that a student would try: a kernel of the ladder is checked as all others are."""
    whole = rung(name, number, OTHERS["scores"])
    broken = re.sub(rf" *__syncthreads\(\);  // {barrier}\n", "", whole.text, count=1)
    assert broken != whole.text
    with pytest.raises(Exception, match=r"race|uninitialized shared read"):
        counted(replace(whole, text=broken), {**SMALL, "kv_len": 131})


@pytest.mark.parametrize(("number", "lines"), tiers.cases(
    [
        (11, r"mbarrier_wait\(&empty\[stage\], .*"), (11, r"mbarrier_wait\(&full\[stage\], .*"),
        (12, r"mbarrier_wait\(&Q_empty, .*"), (12, r"mbarrier_wait\(&Q_full, .*"), (10, r"mbarrier_wait\(&Q_full, .*"),
    ],
    quick=[(11, r"mbarrier_wait\(&empty\[stage\], .*")], one_of=1,
))  # fmt: skip
def test_a_missing_wait_is_found(number: int, lines: str) -> None:
    """A tile is read before it is there, or copied over while it is read."""
    whole = rung("forward", number, STEP)
    broken = re.sub(rf" *{lines}\n", "", whole.text, count=1)
    assert broken != whole.text
    with pytest.raises(Exception, match=r"copy in flight|barrier misuse"):
        counted(replace(whole, text=broken), {**SMALL, "q_len": 330})


def test_larger_and_smaller_heads_end_before_hopper() -> None:
    for head_dim, steps in ((32, 8), (64, 12), (128, 8)):
        assert len(rungs(load_text(f"attention other {{ dtype fp16 head_dim {head_dim} }}")[0])) == steps


def test_specs_that_it_has_not_are_refused() -> None:
    for name in ("alibi", "cross_attention", "gpt_oss_sinks", "head_dim_80", "mistral_window"):
        for ladder in LADDERS.values():
            with pytest.raises(ArgumentError, match="ladder has no kernels of"):
                rungs(shipped(name), ladder)
    for body in ("score s * (1.0 + float(h))", "mask b + q >= k", "score s + float(k) / float(q_heads)"):
        with pytest.raises(ArgumentError, match="ladder has no kernels of"):
            rungs(load_text(f"attention other {{ dtype fp16 head_dim 64 {body} }}")[0])
    with pytest.raises(ArgumentError, match="heads have 32 or 64 elements"):
        rungs(load_text("attention wide { dtype fp16 head_dim 128 }")[0], LADDERS["backward"])


def test_the_command(tmp_path: Path) -> None:
    for name, ladder in LADDERS.items():
        folder, flags = tmp_path / name, [] if name == "forward" else [f"--{name}"]
        done = cli("ladder", "gpt2", *flags, "-o", str(folder))
        assert done.exit_code == 0, done.output
        assert len([*folder.glob("*.cu")]) == len(ladder.steps)
        assert "gpt2_ladder" in cli("ladder", "gpt2", *flags, "--step", "3").output
        assert cli("ladder", "gpt2", *flags, "--step", str(len(ladder.steps) + 1)).exit_code == 2
        assert cli("ladder", "gpt2", *flags, "--diff", "1").exit_code == 2
    assert re.search(r"^\+.*K_smem", cli("ladder", "gpt2", "--diff", "3").output, re.M)
    assert cli("ladder", "gpt2", "--backward", "--decoding").exit_code == 2


def test_the_command_counts_each_step(tmp_path: Path) -> None:
    spec = tmp_path / "step.attn"
    spec.write_text(STEP)
    shown = cli("ladder", str(spec), "--decoding", "--kv-len", "300").output
    assert "8 query heads over 2, one row, 300 keys" in shown
    assert [int(n) for n in re.findall(r"^(\d) .*", shown, re.M)] == [step.number for step in LADDERS["decoding"].steps]
    assert f"`attngen show {spec} --kernel decode`" in shown


@pytest.mark.parametrize("name", LADDERS)
def test_the_page_has_each_step_with_its_prediction(name: str) -> None:
    page = (ROOT / "docs" / PAGES[name]).read_text()
    ladder, found = LADDERS[name], rungs(rung(name, 1).spec, LADDERS[name])
    for step in ladder.steps:
        assert f"### {step.number}. " in page
        assert f"{step.predicted[1]} = " in page
        assert step.idea in page
        assert step.bound in page
    counts = re.findall(r" = ([\d,]+) [A-Za-z ]+\. \*Counted:\* ([\d,]+)\.", page)
    assert len(counts) == len(ladder.steps)
    assert all(predicted == counted for predicted, counted in counts)
    changed = re.findall(r"(\d+) lines removed and (\d+) added", page)
    assert [(int(a), int(b)) for a, b in changed] == [after.changed(before) for before, after in pairwise(found)]
