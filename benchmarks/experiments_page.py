"""The page of experiments, docs/experiments.md, written from benchmarks/experiments/*.toml.

    python benchmarks/experiments_page.py

One file for each area: its title, and the GPU and compiler of its experiments. An experiment has the date on which it was
recorded, the change, what was expected, what was seen, and whether the change was kept; an experiment with a `gpu` or a
`compiler` of its own overrides those of its file. tests/bench/test_experiments.py checks that the page is current.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "experiments"
PAGE = ROOT / "docs" / "experiments.md"

AREA = {"order", "title", "about", "gpu", "compiler", "experiment"}
CELLS = ("change", "expected", "seen", "kept")
OVERRIDES = ("gpu", "compiler")

INTRODUCTION = """# Experiments

Each change to the kernels that was measured: what was expected before the run, what was seen, and whether the change was kept.
Failed experiments are listed too. The data is in `benchmarks/experiments/`; `python benchmarks/experiments_page.py` writes this
page. [Performance](performance.md) has the conclusions.

Unless a row says otherwise: percentages are changes of speed between two builds that differ in this one change; times are those
of `benchmarks/schedules.py`; instruction counts are those of `attngen show gpt2 --stage sass`; error bounds are those that
`pytest -m gpu tests/gpu` checks; "full" is attention without a mask, "documents" are causal documents of 1024 tokens; the
"plain rate" of a kernel is its rate without the spec's mask and score; a "section" is a group of heads whose blocks are
numbered together. D is the head size, S the length, B the batches, H the heads. A row whose "kept" is `-` measures a bound and
changes nothing.
"""


def areas() -> list[dict[str, Any]]:
    """The files of DATA in the order of the page. Raises ValueError for a field that is unknown or missing."""
    found = [tomllib.loads(path.read_text()) for path in sorted(DATA.glob("*.toml"))]
    for area in found:
        if set(area) != AREA:
            raise ValueError(f"{area.get('title')}: expected the fields {sorted(AREA)}, found {sorted(area)}")
        for one in area["experiment"]:
            if not {"date", *CELLS} <= set(one) <= {"date", *CELLS, *OVERRIDES}:
                raise ValueError(f"{area['title']}: unknown or missing fields in {one}")
    return sorted(found, key=lambda area: area["order"])


def page() -> str:
    """The text of docs/experiments.md."""
    return "\n".join([INTRODUCTION, *map(_section, areas())])


def _section(area: dict[str, Any]) -> str:
    rows = "".join(_row(one) for one in area["experiment"])
    where = f"{area['gpu']}, {area['compiler']}."
    return f"## {area['title']}\n\n{area['about']} {where}\n\n| date | {' | '.join(CELLS)} |\n|---|---|---|---|---|\n{rows}"


def _row(one: dict[str, Any]) -> str:
    own = [one[name] for name in OVERRIDES if name in one]
    first = f"{one['date']}{''.join(f', {value}' for value in own)}"
    return f"| {' | '.join([first, *(one[name] for name in CELLS)])} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
