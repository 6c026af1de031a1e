"""The tour is what it says: its commands print what is shown, its figures are current, exercises fail and solutions do not.

`python -m tests.tour` and `python benchmarks/tour.py --only counts --write docs/tour/[1-9]*_*.md` renew it.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from math import exp
from pathlib import Path
from types import ModuleType

import pytest

from attngen.language import load_text
from tests import tiers, tour
from tests.conftest import ROOT
from tests.tour import CHAPTERS, TOUR

NAMES = [page.stem for page in CHAPTERS]
nbclient = pytest.importorskip("nbclient")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/tour.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("tour")


@pytest.mark.usefixtures("runtime")  # compiling it would be reported among the outputs
@pytest.mark.parametrize("page", tiers.cases(CHAPTERS, quick=CHAPTERS[:2]), ids=NAMES)
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """The cells of a chapter, executed by themselves in an empty folder and without a GPU."""
    shown, done = tour.notebook([page]), tour.notebook([page])
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(done, timeout=None, resources=place).execute(env=tour.environment())
    for old, new in zip(shown.cells, done.cells, strict=True):
        if old.cell_type == "code":
            assert tour.printed(new) == tour.printed(old), old.source


@pytest.mark.long(one_of=1)
def test_commands_and_breakpoints_of_trace_md_are_current() -> None:
    page = tour.TRACE.read_text()
    assert tour.renewed(page) == page
    assert "(gdb) break gpt2_fused.cu:" in page


CALLS_NOTHING = "Couldn't write extended state status"


def gdb_runs_programs() -> bool:
    """Whether there is a gdb, and it may trace processes, which containers often forbid."""
    tried = ["gdb", "-nx", "-batch", "-ex", "run", "--args", "true"]
    return bool(shutil.which("gdb")) and "exited normally" in subprocess.run(tried, capture_output=True, text=True).stdout


@pytest.mark.long(one_of=1)
def test_the_session_of_gdb_in_trace_md(tmp_path: Path) -> None:
    """Its commands run, and gdb knows the variables that the page names."""
    if not gdb_runs_programs():
        pytest.skip("needs gdb, and leave to trace processes")
    page = tour.TRACE.read_text()
    tour.run("attngen build gpt2 --kernel fused -o out", tmp_path)
    start = re.search(r"^(gdb (?:.|\n)*?)^```", page, re.M)
    assert start is not None
    options, program = shlex.split(start[1].replace("\\\n", ""))[1:], re.findall(r"^\(gdb\) (.*)\n", page, re.M)
    prints = [f"print {name}" for name in re.findall(r"`((?:emulator|ptx)::[^`]+)`", page)]
    at = program.index("run") + 1
    commands = [part for one in [*program[:at], *prints, *program[at:]] for part in ("-ex", one)]
    at = options.index("--args")
    command = ["gdb", "-nx", "-batch", *options[:at], *commands, "--args", sys.executable, *options[at + 2 :]]
    done = subprocess.run(command, cwd=tmp_path, env=tour.environment(), capture_output=True, text=True, check=False)
    assert 'No symbol "' not in done.stderr, done.stderr  # if Python has no symbols, gdb says that it has no table
    printed = re.findall(r"^\$\d+ = (.*)", done.stdout, re.M)
    assert printed[0] == "37"
    if CALLS_NOTHING in done.stderr:  # gdb 13 on a processor with AMX; in any program
        prints = [one for one in prints if "(" not in one]
    assert len(printed) == len(prints) + sum(one.startswith("print ") for one in program)
    assert re.search(r"New value = .*\n(.*\n)?.*mma_(16x8x16|sync)", done.stdout), done.stdout


@pytest.mark.parametrize("page", [*CHAPTERS, tour.TRACE], ids=[*NAMES, "trace"])
def test_every_line_of_a_session_is_a_command_or_its_output(page: Path) -> None:
    for session in tour.SESSION.findall(page.read_text()):
        assert "".join(f"$ {step.command}\n{step.output}" for step in tour.steps(session)) == session


@pytest.mark.parametrize("page", [*CHAPTERS, tour.TRACE], ids=[*NAMES, "trace"])
def test_nothing_that_is_shown_is_empty(page: Path) -> None:
    """A `sed` that no longer finds its lines would show nothing."""
    sessions = tour.SESSION.findall(page.read_text())
    assert [step.command for session in sessions for step in tour.steps(session) if step.shows_nothing] == []


def test_a_command_that_prints_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="prints nothing: echo a"):
        tour.renewed("```console\n$ echo a | sed -n /b/p\n```\n")


def test_the_notebook_is_the_chapters() -> None:
    """The stored notebook equals one made from the chapters."""
    import nbformat

    assert nbformat.read(tour.NOTEBOOK, as_version=4) == tour.notebook()


@pytest.mark.parametrize("name", sorted({path.stem for path in (TOUR / "exercises").iterdir()}))
def test_an_exercise_is_refused_and_its_solution_is_not(name: str) -> None:
    """In the outputs that were executed above. A spec is judged against the kernel of its solution, or by the checker."""
    (page,) = (page for page in CHAPTERS if page.name.split("_")[0] == name.split("_")[0])
    steps = [step for session in tour.SESSION.findall(page.read_text()) for step in tour.steps(session)]
    judging = [step for step in steps if f"/{name}." in step.command and step.command.startswith("attngen ")]
    judged = [step.output for step in judging if not step.command.startswith("attngen build")]
    is_refused = [bool(re.search(r"^error|FAILED$", output, re.M)) for output in judged]
    solved = is_refused.index(False)
    assert solved >= 1
    assert not any(is_refused[solved:])
    assert any(re.search(r" ok$|^fused ", output, re.M) for output in judged[solved:])
    assert {path.suffix for path in TOUR.glob(f"solutions/{name}.*")} in ({".attn"}, {".diff"})


def test_minutes_are_current() -> None:
    page = tour.README.read_text()
    assert tour.with_minutes(page) == page
    assert all(tour.title_of(chapter) in page for chapter in CHAPTERS)


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, as GitHub spells them."""
    heads = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_terms_of_the_glossary_are_where_it_says() -> None:
    """Each link leads to a heading, and to a chapter that has the term; terms are in order; chapter 0's terms are all there."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", (TOUR / "glossary.md").read_text(), re.M)[1:]
    terms = [row[0] for row in rows]
    assert terms == sorted(terms, key=str.lower)
    assert all(literature.strip() for *_, literature in rows)
    for term, places, _ in rows:
        for name, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", places):
            page = TOUR / name
            assert not anchor or anchor in anchors(page), (term, anchor)
            assert any(word.lower() in page.read_text().lower() for word in term.split(", ")), (term, name)
    bold = re.findall(r"\*\*([^*]+)\*\*", (TOUR / "0_attention.md").read_text().split("## How a GPU")[1])
    known = {word.rstrip("s") for term in terms for word in term.split(", ")} | {"kernel", "thread", "multiprocessor", "SM"}
    assert {word.lower().rstrip("s") for word in bold} <= {word.lower() for word in known} | {
        "register",
        "shared memory",
        "global memory",
    }


@pytest.mark.parametrize("page", [TOUR / "README.md", *CHAPTERS, TOUR / "glossary.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere_and_specs_are_right(page: Path) -> None:
    text = tour.SESSION.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for spec in re.findall(r"^```\n(attention .*?)^```", text, re.M | re.S):
        assert load_text(spec)


FIGURES = re.compile(r"<!-- tour \w+: begin.*?end -->", re.S)
NUMBER = r"(?:\d[\d,]*(?:\.\d+)?(?:\^\d+)?|exp\(-?\d+\))"
EQUATION = re.compile(rf"({NUMBER}(?: [*+/-] {NUMBER})*(?: [*+/-] \([^()]*\))?)(?: [a-z]+)? = (\d[\d,]*(?:\.\d+)?)")


@pytest.mark.parametrize("page", CHAPTERS, ids=NAMES)
def test_numbers_in_the_text_are_shown_or_computed(page: Path) -> None:
    """Equations are right, and every number with a comma is printed by a command or results from an equation."""
    generated = [*tour.SESSION.findall(page.read_text()), *FIGURES.findall(page.read_text())]
    known = {number.replace(",", "") for part in generated for number in re.findall(r"\d[\d,]*", part)}
    text = " ".join(FIGURES.sub("", tour.SESSION.sub("", page.read_text())).split())
    for left, right in EQUATION.findall(text):
        value = eval(left.replace(",", "").replace("^", "**"), {"exp": exp})
        result = right.replace(",", "")
        assert f"{value:.{len(result.partition('.')[2])}f}" == result, (left, right)
        known.add(result)
    assert {n for n in re.findall(r"\b\d{1,3}(?:,\d{3})+\b", text) if n.replace(",", "") not in known} == set()


def test_broken_kernels_are_those_that_are_emitted_now() -> None:
    for path, text in tour.broken_files().items():
        assert path.read_text() == text, path
    assert sorted(path.stem for path in (TOUR / "exercises").glob("*.cu")) == sorted(tour.BROKEN)


def test_seconds_are_left_out() -> None:
    assert tour.without_times("a    0.04s    12.33s  ok\n1.5s\n") == "a      ...       ...  ok\n ...\n"


@pytest.mark.parametrize("page", tiers.cases(CHAPTERS[1:], quick=CHAPTERS[1:2]), ids=NAMES[1:])
def test_counts_are_current(figures: ModuleType, page: Path) -> None:
    shown = re.search(r"<!-- tour counts: begin .*-->\n(.*?)\n<!-- tour counts: end -->", page.read_text(), re.S)
    assert shown is not None
    chapter = figures.CHAPTERS[CHAPTERS.index(page)]
    assert figures.counts_table(chapter) == shown[1]
    assert ("<!-- tour rates: begin" in page.read_text()) == bool(chapter.timed)


def test_tables_of_rates(figures: ModuleType) -> None:
    """From made-up figures: schedules without a mask before those with one, the share of the ceiling."""
    rows = figures.both(figures.CHAPTERS[2].timed)
    found = {figures.key(row): (float(i + 1), 100.0 * i) for i, row in enumerate(rows)}
    assert figures.rates_table("H200.", figures.CHAPTERS[2], found, 800.0).splitlines()[4:] == [
        "| naive, every pair | 1.000 | 0.0 | 0.0% |",
        "| tiled, every pair | 2.000 | 100.0 | 12.5% |",
        "| naive, causal | 3.000 | 200.0 | 25.0% |",
        "| tiled, causal | 4.000 | 300.0 | 37.5% |",
    ]
