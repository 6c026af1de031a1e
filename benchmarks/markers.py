"""Tables in documents, each between the markers of the command that writes it."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, script: str, text: str, part: str | None = None) -> None:
    """Replace what stands between the markers of `benchmarks/SCRIPT.py`, or of one part of it (its option --only).

    Raises ValueError where `path` has none.
    """
    name = f"{script} {part}" if part else script
    page = path.read_text()
    start = page.find(f"<!-- {name}: begin")
    stop = page.find(f"<!-- {name}: end -->")
    if start < 0 or stop < start:
        raise ValueError(f"{path} has no markers of {name}")
    first = page.index("\n", start) + 1
    path.write_text(f"{page[:first]}{text}\n{page[stop:]}")
