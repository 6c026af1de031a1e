"""Tables in documents, each between the markers of the command that writes it."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of benchmark `name`. Raises ValueError where `path` has none."""
    begin, end = f"<!-- {name}: begin (python benchmarks/{name}.py --write {path.name}) -->", f"<!-- {name}: end -->"
    page = path.read_text()
    start = page.find(f"<!-- {name}: begin")
    stop = page.find(end)
    if start < 0 or stop < start:
        raise ValueError(f"{path} has no markers of {name}")
    path.write_text(f"{page[:start]}{begin}\n{text}\n{page[stop:]}")
