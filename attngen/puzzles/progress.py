"""A student's progress: `puzzles.json` in the folder of the student's files, so that it moves, and is handed in, with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngen.puzzles.counts import MEDALS, Medal

FILE = "puzzles.json"


@dataclass(slots=True)
class Record:
    """One puzzle's: the best medal so far, hints taken, whether the solution was shown, and checks made."""

    medal: Medal = ""
    hints: int = 0
    solution: bool = False
    checks: int = 0


@dataclass(slots=True)
class Progress:
    """The records of a folder by the names of puzzles. A file that cannot be read counts as none."""

    path: Path
    records: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> Progress:
        path = directory / FILE
        try:
            found = json.loads(path.read_text("utf-8"))
            return cls(path, {name: _record(one) for name, one in found.items()})
        except (OSError, ValueError, AttributeError, TypeError):
            return cls(path)

    def record(self, name: str) -> Record:
        return self.records.setdefault(name, Record())

    def checked(self, name: str, medal: Medal) -> None:
        """Counts a check, and keeps the best medal."""
        one = self.record(name)
        one.checks += 1
        one.medal = max(one.medal, medal, key=MEDALS.index)

    def save(self) -> None:
        rows = {name: {n: getattr(r, n) for n in Record.__slots__} for name, r in sorted(self.records.items())}
        self.path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def _record(values: dict[str, Any]) -> Record:
    medal = values.get("medal", "")
    hints, checks = int(values.get("hints", 0)), int(values.get("checks", 0))
    return Record(medal if medal in MEDALS else "", hints, bool(values.get("solution")), checks)
