"""Kernels with one statement left out must be noticed to be wrong. One compilation serves all statements of a program."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attngen.device.emulated import EmulationError
from attngen.emit.program import Program

Statements = Sequence[re.Match[str]]  # in the text of a program
NOTHING = -1
VARIABLE = f"""\
extern "C" {{ int attngen_left_out = {NOTHING}; }}
__attribute__((no_sanitize("thread"))) static bool left_out(int statement) {{ return statement == attngen_left_out; }}
"""


def removable(source: Program, statements: Statements) -> Program:
    """`source` for the emulated device, which passes over the statement whose number is in a variable of the library."""
    text, end = VARIABLE, 0
    for number, statement in enumerate(statements):
        text += f"{source.text[end : statement.start()]}if (left_out({number})); else {statement[0]}"
        end = statement.end()
    return replace(source, text=text + source.text[end:])


def first_finding(runs: Iterable[Callable[[], bool]]) -> str:
    """The first finding of `runs`, which return whether their results are right: its kind, or "wrong result"; "" if none has
    one."""
    for is_right in runs:
        try:
            if not is_right():
                return "wrong result"
        except EmulationError as error:
            return error.kind
    return ""


def unnoticed(source: Program, statements: Statements, library: Path, finding: Callable[[], str]) -> list[str]:
    """The statements that can be left out unnoticed, as lines of `source`. `library` is that of the `removable` program;
    `finding` runs it and returns what is found, or ""."""
    assert statements, "a file of which nothing is left out"
    number = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "attngen_left_out")
    found = []
    for i in (NOTHING, *range(len(statements)), NOTHING):
        number.value = i
        finds = finding()
        if i == NOTHING:
            assert finds == "", "with every statement"
        elif not finds:
            line = source.text.count("\n", 0, statements[i].start())
            found.append(f"{line + 1}: {source.text.splitlines()[line].strip()}")
    return found
