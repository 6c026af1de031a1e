"""Removals from emitted files that leave every result right, each with the reason.

A removal is named by its file and statement, and by its line if the file has the statement more than once. `tests/inspect/
test_removals.py` fails if one is no longer in its file, or if its proof is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.removals import Emitted, Removal

_CONSTANT = re.compile(r"constexpr int (\w+) = ([^;]+);")


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """`what`: statements and how they are changed, as `Removal.describe` says it. `line`: a part of the statement's line. `proof`:
    a condition of the file's constants, as text of Python, or a text that the file contains if it begins with "file:"."""

    files: Sequence[str]
    what: Sequence[str]
    because: str
    line: str = ""
    proof: str = ""

    def matches(self, file: str, what: str, line: str) -> bool:
        return file in self.files and what in self.what and self.line in line

    def is_proved(self, text: str) -> bool:
        """Whether the proof holds in the text of a file."""
        if self.proof.startswith("file:"):
            return self.proof.removeprefix("file:") in text
        return not self.proof or bool(eval(self.proof, {}, constants(text)))


def constants(text: str) -> dict[str, int]:
    """The integer constants of a file."""
    values: dict[str, int] = {}
    for name, value in _CONSTANT.findall(text):
        try:
            values[name] = eval(value.replace("/", "//"), {}, dict(values))
        except (NameError, SyntaxError):  # of template parameters, or of a function
            continue
    return values


def reason_of(file: str, emitted: Emitted, removal: Removal) -> WithoutEffect | None:
    """Why a removal has no effect; None if it should have one."""
    what, line = removal.describe(emitted.text), emitted.text.splitlines()[removal.line(emitted.text) - 1]
    return next((one for one in WITHOUT_EFFECT if one.matches(file, what, line)), None)


def all_named() -> Iterator[tuple[str, str, WithoutEffect]]:
    for one in WITHOUT_EFFECT:
        for file in one.files:
            for what in one.what:
                yield file, what, one


NAIVE = ("gpt2_naive.cu", "cross_attention_naive.cu")
TILED = ("gpt2_tiled.cu", "cross_attention_tiled.cu")
FUSED_MMA = ("gpt2_fused.cu", "alibi_fused.cu")

WITHOUT_EFFECT: tuple[WithoutEffect, ...] = ()
