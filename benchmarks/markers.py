"""Tables in documents, each between the markers of the command that writes it."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, script: str, text: str, part: str | None = None) -> None:
    """Replace what stands between the markers of `benchmarks/SCRIPT.py`, or of one part of it (its option --only).

    Raises ValueError where `path` has none.
    """
    name, only = (f"{script} {part}", f" --only {part}") if part else (script, "")
    begin = f"<!-- {name}: begin (python benchmarks/{script}.py{only} --write {path.name}) -->"
    end = f"<!-- {name}: end -->"
    page = path.read_text()
    start = page.find(f"<!-- {name}: begin")
    stop = page.find(end)
    if start < 0 or stop < start:
        raise ValueError(f"{path} has no markers of {name}")
    path.write_text(f"{page[:start]}{begin}\n{text}\n{page[stop:]}")
