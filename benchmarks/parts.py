"""Benchmarks with several parts: `--only` selects parts, and each part has its own table.

A part is a module with `rows(rounds)`, which measures, and `table(rows)`, which formats the results; if it has goals,
`marks(rows)` says whether they are met.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from cell import Row
from markers import write_between
from words import Mark, marks_table

from attngen.bench.peers import flash_versions
from attngen.bench.sweep import where


class Part(Protocol):
    def rows(self, rounds: int) -> Iterator[Row]: ...

    def table(self, rows: list[Row]) -> str: ...


@runtime_checkable
class Marked(Part, Protocol):
    def marks(self, rows: list[Row]) -> list[Mark]: ...  # printed at the end, of all parts together


def chosen(parts: Mapping[str, Part], text: str) -> list[str]:
    """The parts that `--only` names. Raises ArgumentTypeError where there is no such part."""
    names = text.split(",")
    for name in names:
        if name not in parts:
            raise argparse.ArgumentTypeError(f"no part is called {name}; there are {', '.join(parts)}")
    return names


def run(script: str, description: str | None, parts: Mapping[str, Part], rounds: int) -> None:
    """The command line of `benchmarks/SCRIPT.py`: each row is printed as it is found, each table written as soon as its part
    is done, and parts that are left out keep their tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=partial(chosen, parts), default=list(parts), help=f"parts, of {','.join(parts)}")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose tables between the markers of a part are replaced")
    options = parser.parse_args()
    kept, marks = {}, []
    for name in options.only:
        rows = measured(name, parts[name], options.rounds)
        peers = flash_versions({side for row in rows for side in (*row.get("flash", {}), *row.get("us", {}))})
        text = f"{where()}{peers}, {options.rounds} rounds\n\n{parts[name].table(rows)}"
        print(text, flush=True)
        kept[name] = rows
        if isinstance(parts[name], Marked):
            marks += parts[name].marks(rows)
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1))
        if options.write:
            write_between(options.write, script, text, name)
    if marks:
        print(marks_table(marks))


def measured(name: str, part: Part, rounds: int) -> list[Row]:
    torch.manual_seed(0)  # a part has the same inputs, whichever ran before
    rows = []
    with torch.no_grad():
        for row in part.rows(rounds):
            rows.append(row)
            print(json.dumps({"part": name, **row}), flush=True)
    torch.cuda.empty_cache()
    return rows
