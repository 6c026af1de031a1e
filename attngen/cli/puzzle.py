"""`puzzle`: CUDA kernels to write oneself, checked without a GPU."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli.common import FAILED, OK, USAGE, colored

if TYPE_CHECKING:
    from attngen.puzzles.folder import Folder
    from attngen.puzzles.progress import Progress

WIDTH = 110  # columns of a hint's lines
MEDALS = click.Choice(["bronze", "silver", "gold"])
EPILOG = "Exit codes: 0 right; 1 not right, or less than --need; 2 a mistake in the command line; 3 a compiler is missing."

puzzle_argument = click.argument("puzzle")
directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="The folder with your files and your progress.  [default: the current one]",
)


@click.group("puzzle", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def command() -> None:
    """Write CUDA kernels yourself, and check them without a GPU.

    \b
    attngen puzzle list          the puzzles, and your medals
    attngen puzzle start 1       write 01_dot_product.cu into the current folder
    attngen puzzle check 1       compile and run it; the first problem, or the medal
    attngen puzzle hint 1        the next hint, of three
    attngen puzzle solution 1    a solution that reaches gold

    A puzzle is a CUDA file with the signature of a kernel, a contract in comments, and an empty body, which you write. `check`
    compiles it for a GPU with NVIDIA's compiler, and then runs it on the emulated device, which needs no GPU: it compares the
    results, and finds races, missing barriers and accesses outside arrays, with line and thread. A kernel that is right gets
    bronze. Silver and gold limit what is counted: bytes and sectors of global memory, bank conflicts, barriers.

    Progress is kept in puzzles.json beside your files.
    """


@command.command("list", epilog=EPILOG)
@directory_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_command(directory: Path, as_json: bool) -> None:
    """List the puzzles with what they teach, and your medals in this folder.

    \b
    attngen puzzle list
    """
    from attngen.puzzles.folder import folders
    from attngen.puzzles.progress import Progress
    from attngen.puzzles.report import list_text

    progress = Progress.of(directory)
    if as_json:
        rows = [
            {
                "number": f.number,
                "name": f.name,
                "title": f.puzzle.title,
                "teaches": f.puzzle.teaches,
                "medal": progress.record(f.name).medal or None,
                "hints": progress.record(f.name).hints,
                "solution": progress.record(f.name).solution,
                "checks": progress.record(f.name).checks,
            }
            for f in folders()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    started = [f.name for f in folders() if (directory / f"{f.name}.cu").exists()]
    medals = {name: one.medal for name, one in progress.records.items()}
    click.echo(list_text(folders(), medals, started), nl=False, color=colored(sys.stdout))
    if not started:
        click.echo("\n`attngen puzzle start 1` writes the first one into this folder.")


@command.command("start", epilog=EPILOG)
@puzzle_argument
@directory_option
@click.option("--again", is_flag=True, help="Replace the file if it exists; what you wrote in it is lost.")
def start_command(puzzle: str, directory: Path, again: bool) -> None:
    """Write the file of PUZZLE, a number or a name, into the current folder.

    \b
    attngen puzzle start 1
    attngen puzzle start transposition --dir course
    """
    from attngen.puzzles.folder import BLANK, find_folder
    from attngen.puzzles.report import targets_text
    from attngen.puzzles.verdict import first_case

    folder = find_folder(puzzle)
    path = directory / f"{folder.name}.cu"
    if path.exists() and not again:
        raise click.UsageError(f"{path} exists already; --again replaces it, and what you wrote in it is lost")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(folder.text, "utf-8")
    line = folder.text[: folder.text.index(BLANK)].count("\n") + 1
    click.echo(f"{folder.puzzle.title}: {folder.puzzle.teaches}")
    click.echo(f"{path}: read the contract, write the body at line {line}, then `attngen puzzle check {folder.number}`")
    click.echo(targets_text(folder.puzzle.targets, first_case(folder).what))


@command.command("check", epilog=EPILOG)
@puzzle_argument
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@directory_option
@click.option("--need", type=MEDALS, default="bronze", show_default=True, help="Exit with 1 below this medal.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, for graders; docs/json.md lists the keys.")
@click.option("--gpu/--no-gpu", default=True, help="Run a right kernel on the GPU, too, if there is one.  [default: --gpu]")
def check_command(puzzle: str, file: Path | None, directory: Path, need: str, as_json: bool, gpu: bool) -> None:
    """Compile and run your file of PUZZLE, and print the first problem, or the medal and its counts. If there is a GPU, a right
    kernel also runs there, with larger sizes, and its time and rate are printed.

    \b
    attngen puzzle check 1
    attngen puzzle check 01_dot_product.cu
    attngen puzzle check 1 handed_in/lee/01.cu --need silver --json    for graders
    """
    from attngen.device.cuda.compiler import NVRTC_EXISTS
    from attngen.puzzles.counts import MEDALS as ORDER
    from attngen.puzzles.folder import find_folder
    from attngen.puzzles.progress import Progress
    from attngen.puzzles.report import verdict_text
    from attngen.puzzles.running import printed_to_stderr
    from attngen.puzzles.verdict import check

    folder = find_folder(puzzle)
    path = file or (Path(puzzle) if puzzle.endswith(".cu") else directory / f"{folder.name}.cu")
    text = _read(path, folder)
    if not NVRTC_EXISTS:
        click.echo("note: NVIDIA has no compiler for this system: the file is compiled for the emulated device alone", err=True)
    with printed_to_stderr():
        verdict = check(folder, text, path.name, gpu)
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        click.echo(verdict_text(verdict, text), nl=False, color=colored(sys.stdout))
    if file is None:
        progress = Progress.of(path.parent)
        progress.checked(folder.name, verdict.medal)
        _save(progress)
    sys.exit(OK if ORDER.index(verdict.medal) >= [*ORDER].index(need) else FAILED)  # type: ignore[arg-type]


@command.command("hint", epilog=EPILOG)
@puzzle_argument
@directory_option
def hint_command(puzzle: str, directory: Path) -> None:
    """Print the hints for PUZZLE that you have seen, and the next one of three.

    \b
    attngen puzzle hint 1
    """
    from attngen.puzzles.folder import find_folder
    from attngen.puzzles.progress import Progress

    folder, progress = find_folder(puzzle), Progress.of(directory)
    record, hints = progress.record(folder.name), folder.hints
    seen, record.hints = record.hints, min(record.hints + 1, len(hints))
    for number, hint in enumerate(hints[: record.hints], 1):
        click.echo(click.wrap_text(f"{number} of {len(hints)}: {hint}", WIDTH, subsequent_indent=" " * 8))
    if seen == len(hints):
        click.echo(f"There are no more; `attngen puzzle solution {folder.number}` prints a solution.")
    _save(progress)


@command.command("solution", epilog=EPILOG)
@puzzle_argument
@directory_option
def solution_command(puzzle: str, directory: Path) -> None:
    """Print a solution of PUZZLE that reaches gold. It is noted in your progress.

    \b
    attngen puzzle solution 1
    """
    from attngen.puzzles.folder import find_folder
    from attngen.puzzles.progress import Progress

    folder, progress = find_folder(puzzle), Progress.of(directory)
    progress.record(folder.name).solution = True
    click.echo(folder.solution, nl=False)
    _save(progress)


def _read(path: Path, folder: Folder) -> str:
    """The student's file. Raises UsageError if there is none."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise click.UsageError(f"there is no {path}; `attngen puzzle start {folder.number}` writes {folder.name}.cu") from None
    except UnicodeDecodeError:
        click.echo(f"error: {path} is not text in UTF-8", err=True)
        sys.exit(USAGE)


def _save(progress: Progress) -> None:
    """Where the folder cannot be written, nothing is kept."""
    with suppress(OSError):
        progress.save()
