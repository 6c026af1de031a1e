"""The tour of docs/: its commands with their output, its broken kernels, its notebook; and the commands of docs/trace.md.

`python -m tests.tour` rewrites all of them: outputs in the chapters and in trace.md, exercises/*.cu and solutions/*.diff from
the CUDA that is emitted now, and tour.ipynb from the chapters. tests/test_tour.py checks that nothing would change.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from attngen.plan.plan import Direction
from tests.conftest import ROOT
from tests.harness import emitted, shipped

TOUR = ROOT / "docs" / "tour"
CHAPTERS = tuple(sorted(TOUR.glob("[0-9]*_*.md"), key=lambda page: int(page.name.split("_")[0])))
README = TOUR / "README.md"
NOTEBOOK = TOUR / "tour.ipynb"
TRACE = ROOT / "docs" / "trace.md"
SESSION = re.compile(r"^```console\n(.*?)^```\n", re.M | re.S)
FOUND_LINE = re.compile(r"^\$ grep -n .* out/(\S+)\n(\d+):", re.M)
SECONDS = re.compile(r" *\d+\.\d+s\b")


# --- broken kernels


@dataclass(frozen=True, slots=True)
class Broken:
    """A kernel of gpt2 with one statement changed: the first `old` becomes `new`."""

    schedule: str
    arch: str
    old: str
    new: str = ""
    direction: Direction = "forward"

    def intact(self) -> str:
        """The emitted text."""
        return emitted(shipped("gpt2"), self.schedule, self.arch, self.direction).text

    def text(self) -> str:
        """The text of the exercise."""
        assert self.old in self.intact(), self.old
        return self.intact().replace(self.old, self.new, 1)

    def repair(self, name: str) -> str:
        """The solution as a diff for `patch`."""
        lines = (text.splitlines(keepends=True) for text in (self.text(), self.intact()))
        return "".join(difflib.unified_diff(*lines, f"exercises/{name}.cu", f"exercises/{name}.cu"))


BROKEN = {
    "2_barrier": Broken("tiled", "sm_80", "        __syncthreads();  // everyone is done: the next may take its place\n"),
    "3_barrier": Broken(
        "fused", "sm_75", "        __syncwarp();  // the weights of a row are written and read by the same warp\n"
    ),
    "4_wait": Broken("fused", "sm_80", "cp_async_wait<0>();", "cp_async_wait<1>();"),
    "7_deadlock": Broken("hopper", "sm_90a", "        if (thread == 0) ring.release(at);\n"),
    "7_fence": Broken("hopper", "sm_90a", "            async_proxy_fence();\n"),
    "8_barrier": Broken(
        "fused",
        "sm_75",
        "            __syncthreads();  // everyone is done: the next tile may take its place\n",
        direction="backward",
    ),
    "9_barrier": Broken("decode", "sm_80", "    __syncthreads();  // the sums of all warps are there\n"),
    "9_join": Broken("decode", "sm_80", "sum.at[e] += weight * of_split.at[e]", "sum.at[e] += of_split.at[e]"),
    "8_delta": Broken("naive", "sm_80", "p * (dp - delta[row])", "p * dp", "backward"),
}


# --- how long a chapter takes

MINUTES = re.compile(r"(<!-- minutes: begin .*-->\n).*?(<!-- minutes: end -->)", re.S)
WORDS, OF_COMMAND, OF_EXERCISE = 110, 1.0, 10.0  # words read in a minute; minutes of a command with its output, of an exercise


def minutes(page: Path) -> int:
    """About how many minutes a chapter takes, a multiple of five: its words, its commands, and its exercises."""
    text = page.read_text()
    commands = sum(len([*steps(session)]) for session in SESSION.findall(text))
    prose = SESSION.sub("", text)
    exercises = len(re.findall(r"^\*\*\d+[a-d]?\. ", prose, re.M))
    return 5 * round((len(prose.split()) / WORDS + OF_COMMAND * commands + OF_EXERCISE * exercises) / 5)


def with_minutes(readme: str) -> str:
    """The tour's README with its table of minutes."""
    rows = "".join(f"| {title_of(page)} | {minutes(page)} |\n" for page in CHAPTERS)
    return MINUTES.sub(rf"\g<1>| chapter | minutes |\n|---|---:|\n{rows}\g<2>", readme)


def title_of(page: Path) -> str:
    return page.read_text().split("\n", 1)[0].removeprefix("# ")


def broken_files() -> dict[Path, str]:
    """The contents of the files of broken kernels and their repairs."""
    exercises = {TOUR / "exercises" / f"{name}.cu": broken.text() for name, broken in BROKEN.items()}
    return exercises | {TOUR / "solutions" / f"{name}.diff": broken.repair(name) for name, broken in BROKEN.items()}


# --- commands and what they print


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a chapter and the output below it."""

    command: str
    output: str

    @property
    def shows_nothing(self) -> bool:
        """Whether a command that is there for what it prints, of attngen or at the end of a pipe, prints nothing."""
        return not self.output and (self.command.startswith("attngen") or "|" in self.command)


def steps(session: str) -> Iterator[Step]:
    """The commands of a session: lines after `$ `, continued by backslashes, and their output."""
    for found in re.finditer(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", session, re.M):
        yield Step(found[1], found[2])


def without_times(output: str) -> str:
    """The output with `...` of the same width instead of seconds, and without space at the ends of lines."""
    hidden = SECONDS.sub(lambda found: "...".rjust(len(found[0])), output)
    return "".join(line.rstrip() + "\n" for line in hidden.splitlines())


def environment() -> dict[str, str]:
    """The environment of commands: `attngen` is that of this checkout, runs with this Python, and prints no colours."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}


def run(command: str, directory: Path) -> str:
    """The output of a command, with errors, as a chapter shows it."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return without_times(done.stdout)


def workplace(directory: Path) -> Path:
    """`directory` with copies of the files that the chapters' commands read."""
    for name in ("exercises", "solutions"):
        shutil.copytree(TOUR / name, directory / name)
    return directory


def renewed(page: str) -> str:
    """A chapter with the present output of its commands."""

    def session(found: re.Match[str]) -> str:
        now = [Step(step.command, run(step.command, directory)) for step in steps(found[1])]
        for step in now:
            if step.shows_nothing:
                raise ValueError(f"prints nothing: {step.command}")
        shown = "".join(f"$ {step.command}\n{step.output}" for step in now)
        return f"```console\n{shown}```\n"

    with tempfile.TemporaryDirectory() as place:
        directory = workplace(Path(place))
        return with_breakpoints(SESSION.sub(session, page))


def with_breakpoints(page: str) -> str:
    """`page` with the line that its `grep -n` found in a file as the line of gdb's breakpoint in that file."""
    found = dict(FOUND_LINE.findall(page))
    return re.sub(r"break (\S+):\d+", lambda old: f"break {old[1]}:{found[old[1]]}", page)


# --- the notebook

FIRST_TEXT = """# A tour of attention kernels

From one thread per row to the Hopper pipeline. No GPU is needed: the generated CUDA runs on an emulated device, which needs
a C++ compiler such as `g++`. With a GPU, leave `--device emulated` out, and the same files run there.

Install attngen first: `pip install .` in a checkout. `!` runs a command as in a terminal. The first cells of each chapter write
the files of its exercises."""
INSTALL = """import importlib.util

if importlib.util.find_spec("attngen") is None:
    raise ModuleNotFoundError("attngen is not installed: run `pip install .` in a checkout of attngen, with this Python")"""
PREPARE = """import os
from pathlib import Path

os.environ["NO_COLOR"] = "1"
os.environ["TERM"] = "dumb"  # no line that shows progress
os.environ["COLUMNS"] = "100"
Path("exercises").mkdir(exist_ok=True)
Path("solutions").mkdir(exist_ok=True)"""


def notebook(pages: Sequence[Path] = CHAPTERS) -> Any:
    """Chapters as cells: text, files of exercises, and commands with their output."""
    cells = [new_markdown_cell(FIRST_TEXT), new_code_cell(INSTALL), new_code_cell(PREPARE)]
    for page in pages:
        parts = SESSION.split(page.read_text())
        for i, part in enumerate(parts):
            if i % 2:
                cells += [_command_cell(step) for step in steps(part)]
            elif part.strip():
                cells.append(new_markdown_cell(_for_notebook(part)))
            if i == 0:
                cells += [_file_cell(path) for path in _files_of(page)]
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return new_notebook(cells=cells, metadata=about)


def _files_of(page: Path) -> list[Path]:
    return [path for name in ("exercises", "solutions") for path in sorted((TOUR / name).glob(f"{page.name.split('_')[0]}_*"))]


def _for_notebook(part: str) -> str:
    """The text without links between pages, markers of figures, and boxes that hide answers."""
    text = re.sub(r"^(<!-- .* -->|</?details>|\[Next: .*)\n", "", part, flags=re.M)
    text = re.sub(r"^<summary>(.*)</summary>$", r"**\1**", text, flags=re.M)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!http)[^)]*\)", r"\1", text).strip()


def _file_cell(path: Path) -> Any:
    name = path.relative_to(TOUR).as_posix()
    hidden = {"cellView": "form", "jupyter": {"source_hidden": True}} if path.suffix == ".cu" or "solutions" in name else {}
    return new_code_cell(f"#@title {name}\nPath({name!r}).write_text(r'''{path.read_text()}''');", metadata=hidden)


def _command_cell(step: Step) -> Any:
    shown = [new_output("stream", name="stdout", text=step.output)] if step.output else []
    return new_code_cell(f"!{step.command}", outputs=shown)


def printed(cell: Any) -> str:
    """The output of a cell."""
    return without_times("".join(o.get("text", "") for o in cell.get("outputs", ())).replace("\r\n", "\n"))


def main() -> None:
    """Writes everything that is generated."""
    for path, text in broken_files().items():
        path.write_text(text)
    for page in (*CHAPTERS, TRACE):
        page.write_text(renewed(page.read_text()))
    README.write_text(with_minutes(README.read_text()))
    nbformat.write(notebook(), NOTEBOOK)


if __name__ == "__main__":
    main()
