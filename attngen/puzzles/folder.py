"""The folders of puzzles: found by their names, `NN_name`, their files read, primitives put in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import cast

from attngen.diagnostics import ArgumentError
from attngen.emit.comments import at_level
from attngen.emit.templates import template_directory
from attngen.emit.wgmma import Wgmma
from attngen.puzzles.puzzle import Puzzle

BLANK = "    // your code\n"
_FOLDER = re.compile(r"(\d\d)_(\w+)")
_INCLUDE = re.compile(r'^#include "(\w+)\.cuh"\n', re.M)
_REASON = re.compile(r"// (?:wrong|medal): (?P<kind>[^:\n]+)(?:: (?P<words>.*))?\n")
MARK = "// <- reported"
PRODUCTS = "products"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong solution: the first line of its file, `// wrong: KIND: WORDS`, has the kind of its problem and what the report
    must contain. The report is about a line with MARK, if there is one."""

    name: str
    kind: str
    words: str
    body: str


@dataclass(frozen=True)
class Folder:
    """A puzzle on disk."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name[:2])

    @property
    def name(self) -> str:
        """The folder's name, which is that of the student's file without `.cu`."""
        return self.path.name

    @cached_property
    def puzzle(self) -> Puzzle:
        found = spec_from_file_location(f"attngen.puzzles._{self.name}", self.path / "puzzle.py")
        assert found is not None
        assert found.loader is not None
        module = module_from_spec(found)
        found.loader.exec_module(module)
        return cast(Puzzle, module.PUZZLE)

    @cached_property
    def text(self) -> str:
        """What the student gets."""
        return with_primitives((self.path / "puzzle.cu").read_text("utf-8"), self.puzzle.products)

    def filled(self, body: str) -> str:
        """The student's file with `body` in the place of BLANK."""
        before, after = self.text.split(BLANK)
        return before + body + after

    @property
    def hints(self) -> tuple[str, ...]:
        """Each a paragraph, its lines joined."""
        paragraphs = (self.path / "hints.md").read_text("utf-8").strip().split("\n\n")
        return tuple(" ".join(paragraph.split()) for paragraph in paragraphs)

    @property
    def solution(self) -> str:
        return self.filled((self.path / "solution.cu").read_text("utf-8"))

    @property
    def wrong(self) -> tuple[Wrong, ...]:
        return tuple(_wrong(path) for path in sorted((self.path / "wrong").glob("*.cu")))

    @property
    def slow(self) -> tuple[Wrong, ...]:
        """Right, and short of gold: `kind` is the medal, `words` the count that is too large; its first line has MARK."""
        return tuple(_wrong(path) for path in sorted((self.path / "slow").glob("*.cu")))


def _wrong(path: Path) -> Wrong:
    text = path.read_text("utf-8")
    reason = _REASON.match(text)
    assert reason is not None, f"the first line of {path} must be `// wrong: KIND: WORDS` or `// medal: MEDAL: COUNT`"
    return Wrong(path.stem, reason["kind"], reason["words"] or "", text[reason.end() :])


def with_primitives(text: str, products: Sequence[Wgmma]) -> str:
    """`text` with the primitives in the place of their `#include`s, with brief comments: what is taught is in the contract."""
    whole = _INCLUDE.sub(lambda found: _primitive(found[1], products) + "\n", text)
    return re.sub(r"\n{3,}", "\n\n", whole)


def _primitive(name: str, products: Sequence[Wgmma]) -> str:
    if name == PRODUCTS:
        from attngen.emit.emitter import environment

        template = environment().get_template("parts/wgmma.cuh.j2")
        text = "\n".join(template.render(product=one) for one in products)
    else:
        text = (template_directory() / "primitives" / f"{name}.cuh").read_text("utf-8")
    return at_level(text, "brief").strip("\n") + "\n"


@cache
def folders() -> tuple[Folder, ...]:
    """All puzzles, by number."""
    found = sorted(path for path in Path(__file__).parent.iterdir() if _FOLDER.fullmatch(path.name))
    return tuple(map(Folder, found))


def find_folder(wanted: str) -> Folder:
    """The puzzle of a number, a name or the student's file. Raises ArgumentError with what there is."""
    key = Path(wanted).name.removesuffix(".cu")
    for folder in folders():
        if key in (folder.name, folder.name[3:]) or (key.isdigit() and int(key) == folder.number):
            return folder
    names = [folder.name for folder in folders()]
    near = get_close_matches(key, [*names, *(name[3:] for name in names)], 1)
    hint = f"did you mean {near[0]}?" if near else f"their numbers are {folders()[0].number} to {folders()[-1].number};"
    if wanted.endswith(".cu"):
        hint = f"a file with another name follows the number: `attngen puzzle check 1 {wanted}`;"
    raise ArgumentError(f"there is no puzzle {wanted}; {hint} `attngen puzzle list` shows all")
