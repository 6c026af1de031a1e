"""Tables in documents, each between the markers of the command that writes it."""

from __future__ import annotations

import re
from pathlib import Path


def write_between(path: Path, script: str, text: str, part: str | None = None) -> None:
    """Replace what stands between the markers of `benchmarks/SCRIPT.py`, or of one part of it (its option --only), in the page
    `path`, or in the page of the folder `path` that has them.

    Raises ValueError if there are none.
    """
    name = f"{script} {part}" if part else script
    for page in sorted(path.glob("*.md")) if path.is_dir() else [path]:
        found = page.read_text()
        start = found.find(f"<!-- {name}: begin")
        stop = found.find(f"<!-- {name}: end -->")
        if 0 <= start < stop:
            first = found.index("\n", start) + 1
            page.write_text(f"{found[:first]}{text}\n{found[stop:]}")
            return
    raise ValueError(f"{path} has no markers of {name}")


def read_between(path: Path, name: str) -> str:
    """What was written between the markers `name` in a page of the folder `path`. Raises ValueError if no page has them."""
    pattern = rf"<!-- {re.escape(name)}: begin .*?-->\n(.*?)<!-- {re.escape(name)}: end -->"
    for page in sorted(path.glob("*.md")):
        found = re.search(pattern, page.read_text(), re.S)
        if found is not None:
            return found[1]
    raise ValueError(f"no page of {path} has markers of {name}")
