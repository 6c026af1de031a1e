"""Puzzles: each solution reaches gold, each wrong one gets its reason, and the command line is a student's."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from attngen.cli.puzzle import command
from attngen.device.cuda.compiler import compile_text
from attngen.puzzles.counts import COUNTS, MEDALS
from attngen.puzzles.folder import BLANK, MARK, Folder, find_folder, folders
from attngen.puzzles.report import verdict_text
from attngen.puzzles.running import program_of
from attngen.puzzles.verdict import check
from tests import tiers
from tests.conftest import ROOT
from tests.harness import cli as invoke

QUICK = ("01_dot_product", "02_row_sum")
EACH = tiers.cases(folders(), quick=lambda folder: folder.name in QUICK, one_of=1)


@pytest.mark.parametrize("folder", EACH, ids=lambda folder: folder.name)
def test_the_solution_reaches_gold(folder: Folder) -> None:
    verdict = check(folder, folder.solution, f"{folder.name}.cu", on_gpu=False)
    assert verdict.medal == "gold", verdict_text(verdict, folder.solution)
    assert verdict.cases
    assert verdict.gpu is None
    large, first = folder.puzzle.large(np.random.default_rng(0)), folder.puzzle.cases(np.random.default_rng(0))[0]
    assert (large.given.keys(), large.threads) == (first.given.keys(), first.threads)
    (used,) = compile_text(program_of(folder, folder.solution, folder.name)).resources()
    assert (used.spill_store_bytes, used.stack_bytes) == (0, 0), "students learn from it"


@pytest.mark.parametrize("folder", EACH, ids=lambda folder: folder.name)
def test_what_a_student_begins_with_is_called_empty(folder: Folder) -> None:
    """It compiles, and the report points to where the code goes."""
    found = check(folder, folder.text, f"{folder.name}.cu").problem
    assert found is not None
    assert found.label == "the kernel does nothing yet"
    assert folder.text.splitlines()[found.line - 1] + "\n" == BLANK
    assert f"attngen puzzle hint {folder.number}" in found.help


WRONG = [(folder, wrong.name) for folder in folders() for wrong in folder.wrong]


@pytest.mark.parametrize(
    ("folder", "name"),
    tiers.cases(WRONG, quick=lambda folder, name: folder.name in QUICK, one_of=1),
    ids=lambda one: getattr(one, "name", one),
)
def test_a_wrong_solution_gets_its_reason(folder: Folder, name: str) -> None:
    wrong = next(one for one in folder.wrong if one.name == name)
    text = folder.filled(wrong.body)
    verdict = check(folder, text, f"{folder.name}.cu")
    shown = verdict_text(verdict, text)
    assert verdict.problem is not None, shown
    assert verdict.problem.kind == wrong.kind, shown
    assert wrong.words in "\n".join(
        (verdict.problem.message, verdict.problem.label, *verdict.problem.notes, verdict.problem.help)
    ), shown
    marked = [number for number, line in enumerate(text.splitlines(), 1) if MARK in line]
    assert not marked or verdict.problem.line in marked, shown


SLOW = [(folder, slow.name) for folder in folders() for slow in folder.slow]


@pytest.mark.parametrize(
    ("folder", "name"),
    tiers.cases(SLOW, quick=lambda folder, name: folder.name in QUICK, one_of=1),
    ids=lambda one: getattr(one, "name", one),
)
def test_a_slow_solution_is_told_its_line(folder: Folder, name: str) -> None:
    slow = next(one for one in folder.slow if one.name == name)
    text = folder.filled(slow.body)
    verdict = check(folder, text, f"{folder.name}.cu", on_gpu=False)
    shown = verdict_text(verdict, text)
    assert verdict.medal == slow.kind, shown
    named = [line for line in shown.split("\nmedal: ", 1)[1].splitlines() if line.startswith(("for ", "  line "))]
    assert slow.words in named[0], shown
    assert MARK in named[1], shown


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_a_folder_is_whole(folder: Folder) -> None:
    assert [f.number for f in folders()] == [*range(1, len(folders()) + 1)]
    puzzle = folder.puzzle
    assert folder.text.count(BLANK) == 1
    assert len(set(folder.hints)) == 3
    assert len(folder.wrong) >= 3
    assert puzzle.targets, "medals above bronze"
    for target in puzzle.targets:
        assert target.count in COUNTS
        assert target.silver is None or (target.silver <= target.gold if target.at_least else target.silver >= target.gold)
    for text in (folder.text, folder.solution):
        assert max(map(len, text.splitlines())) <= 140


def test_a_student_solves_a_puzzle(tmp_path: Path) -> None:
    """list, start, check, hint, solution; progress is kept beside the file, and the best medal stays."""
    at = ("--dir", str(tmp_path))
    path = tmp_path / "01_dot_product.cu"
    assert "attngen puzzle start 1" in invoke("puzzle", "list", *at).output
    missing = invoke("puzzle", "check", "1", *at)
    assert missing.exit_code == 2
    assert "`attngen puzzle start 1`" in missing.stderr

    started = invoke("puzzle", "start", "1", *at).output
    assert "01_dot_product.cu" in started
    assert re.search(r"sectors of 32 bytes of global memory +any +<= 560\ncounted with n = 256\n", started)
    assert invoke("puzzle", "start", "1", *at).exit_code == 2, "a file is not replaced"
    empty = invoke("puzzle", "check", "1", *at)
    assert empty.exit_code == 1
    assert "the kernel does nothing yet" in empty.output

    assert invoke("puzzle", "hint", "1", *at).output.startswith("1 of 3: ")
    assert "2 of 3: " in invoke("puzzle", "hint", "dot_product", *at).output
    slow = "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) {\n        float sum = 0.0f;\n"
    slow += "        for (int c = 0; c < D; ++c) sum += q[c] * k[i * D + c];\n        s[i] = scale * sum;\n    }\n"
    path.write_text(path.read_text().replace(BLANK, slow))
    silver = invoke("puzzle", "check", str(path))
    assert silver.exit_code == 0
    assert "medal: silver" in silver.output
    missing = "for gold: sectors of 32 bytes of global memory, at most 560; counted 2144\n"
    assert f"{missing}  line 19: 2048 of k (512 for gold) " in silver.output
    assert invoke("puzzle", "check", "1", *at, "--need", "gold").exit_code == 1

    path.write_text(invoke("puzzle", "solution", "1", *at).output)
    assert "medal: gold" in invoke("puzzle", "check", "1", *at).output
    path.write_text(path.read_text().replace("s[i] =", "s[i] +="))
    assert invoke("puzzle", "check", "1", *at).exit_code == 1
    (row, *_) = json.loads(invoke("puzzle", "list", *at, "--json").output)
    assert row == {**row, "medal": "gold", "hints": 2, "solution": True, "checks": 5}


def test_a_grader_reads_json(tmp_path: Path) -> None:
    handed_in = tmp_path / "lee.cu"
    folder = folders()[0]
    handed_in.write_text(folder.filled('    printf("hello\\n");\n' + (folder.path / "solution.cu").read_text()))
    result = invoke("puzzle", "check", "1", str(handed_in), "--json")
    found = json.loads(result.output)
    assert (found["puzzle"], found["file"], found["right"], found["medal"]) == ("01_dot_product", "lee.cu", True, "gold")
    assert {c["count"]: c["good_for"] for c in found["counts"]} == {"read": "gold", "sectors": "gold"}
    assert {*MEDALS} >= {c["good_for"] for c in found["counts"]}
    assert not (tmp_path / "puzzles.json").exists(), "a grader's check is not a student's"
    section = (ROOT / "docs" / "json.md").read_text().split("## `attngen puzzle", 1)[1].split("\n## ", 1)[0]
    keys = {*found, *found["counts"][0], *found["counts"][1]["lines"][0]}
    listed = json.loads(invoke("puzzle", "list", "--json").output)
    assert {*keys, *listed[0]} <= {*re.findall(r"`(\w+)`", section)}


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    """The first fenced output of docs/puzzles.md is that of a slow kernel; its commands can be parsed."""
    page = (ROOT / "docs" / "puzzles.md").read_text()
    (shown,) = re.findall(r"^```\n(right: .*?)^```", page, re.M | re.S)
    folder = find_folder("delta_and_dv")
    (slow,) = folder.slow
    path = tmp_path / f"{folder.name}.cu"
    path.write_text(folder.filled(slow.body.replace(f"  {MARK}", "")))
    assert invoke("puzzle", "check", str(path), "--no-gpu").output == shown
    for line in re.findall(r"^attngen (puzzle .*?)(?:  +#.*)?$", page, re.M):
        _, name, *words = line.split()
        command.commands[name].make_context(name, words)


MISTAKES = {
    "    s[0] = q[0] +;\n": ("does not compile", "expected an expression", True),
    "    #include <cuda_fp16.h>\n": ("does not compile", "cuda_fp16.h", True),
    "    extern __shared__ float mine[];\n": ("dynamic", "size of a shared array", True),
    "    __shared__ int all[40000];\n    s[0] = all[n];\n": ("does not compile", "too much shared data", False),
    "    if (n > 0) {\n": ("does not compile", "expected a \"}\" at the end of the file", False),
    "    while (true) {}\n": ("runaway loop", "endless loop", False),
    "    for (int i = 0; i < n;) s[0] = scale;\n": ("runaway loop", "", True),
    "    ((float*)q)[0] = 1.0f;\n": ("write to a read-only tensor", "only read", True),
    "    *(float*)nullptr = 1.0f;\n": ("out of bounds", "", True),
}  # fmt: skip


@pytest.mark.parametrize("body", MISTAKES)
def test_a_mistake_is_shown_at_its_line(body: str) -> None:
    folder = folders()[0]
    text = folder.filled(body)
    found = check(folder, text, "mine.cu").problem
    assert found is not None
    kind, words, has_line = MISTAKES[body]
    assert found.kind == kind
    assert words in found.message
    assert (text.splitlines()[found.line - 1] + "\n" == body) == has_line
    assert found.help


def test_a_kernel_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the place where it was: many short steps are no endless loop for the emulated device. Also where SIGINT is ignored, as
    by what a shell has started in the background."""
    monkeypatch.setattr("attngen.puzzles.verdict.CPU_SECONDS", 0.5)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = folders()[0]
    line = "    for (int i = 0; i < 1 << 26 && key < n; ++i) s[key] += scale;\n"
    text = folder.filled(f"    const int key = blockIdx.x * 128 + threadIdx.x;\n    if (key < n) s[key] = scale;\n{line}")
    try:
        found = check(folder, text, "mine.cu").problem
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert found is not None
    assert (found.kind, found.label) == ("runaway loop", "it was here")
    assert text.splitlines()[found.line - 1] + "\n" == line


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("const float* q", "const double* q", "parameter 1 is `const double* q`, expected `const float* q`"),
        ("int n, float scale", "int n", "4 parameters, expected 5"),
        ("dot_product(", "dot(", "the name is dot, expected dot_product"),
        ('extern "C" __global__ ', "", ""),
    ],
)
def test_a_changed_signature_is_named(before: str, after: str, words: str) -> None:
    folder = folders()[0]
    found = check(folder, folder.solution.replace(before, after), "mine.cu").problem
    assert found is not None
    assert (found.kind, found.label) == ("signature", words)
    assert 'expected: extern "C" __global__ void dot_product(const float* q, const float* k, ' in found.notes[0]


def test_an_unknown_puzzle_is_named() -> None:
    result = invoke("puzzle", "hint", "dot_produkt")
    assert result.exit_code == 2
    assert "did you mean dot_product?" in result.stderr
    assert "`attngen puzzle check 1 lee.cu`" in invoke("puzzle", "check", "lee.cu").stderr
