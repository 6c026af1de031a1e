"""How much a generated file explains, and the lexer that tells comments from code.

Templates hold two kinds of comments. `// ...` says what a reader of CUDA needs to follow the code; it is in every file but the
bare one. A line that begins with `//: ...` is for who learns: the equation, why the layout is as it is, what the hardware does,
what the rung before did instead. It is text of the level `teach` alone, so that it can stand right beside the code it is about.
Its paragraphs are filled anew, after names and numbers were put in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import Literal, get_args

Comments = Literal["none", "brief", "teach"]
LEVELS: tuple[Comments, ...] = get_args(Comments)

TEACHING = re.compile(r"(?P<margin>[ \t]*)//:(?P<lead> *)(?P<text>.*)")
WIDTH = 124  # of a line that teaches
# What ends where: a comment, else what may hold // or /* without being one. Numbers, for the ' between their digits.
TOKEN = re.compile(
    r"""(?P<comment> //(?:\\\r?\n|[^\n])* | /\*.*?\*/ )
      | (?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
      | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
      | \d['\w.]* | [A-Za-z_]\w* | .""",
    re.S | re.X,
)
GONE = "\0"  # where a comment was


def at_level(text: str, level: Comments) -> str:
    """What a template wrote, with the comments of `level`; the code is the same to the byte at every level."""
    if level == "teach":
        return tidy("\n".join(_taught(text.splitlines())))
    brief = tidy("\n".join(line for line in text.splitlines() if not TEACHING.match(line)))
    if level == "brief":
        return brief
    title = brief.split("\n", 1)[0]  # what the file is
    return f"{title}\n\n{strip_comments(brief)}"


def _taught(lines: list[str]) -> Iterator[str]:
    found = ((line, TEACHING.match(line)) for line in lines)
    for margin, run in groupby(found, key=lambda one: one[1]["margin"] if one[1] else None):
        group = list(run)
        yield from (line for line, _ in group) if margin is None else _filled(margin, [match for _, match in group if match])


def _filled(margin: str, lines: list[re.Match[str]]) -> Iterator[str]:
    """Lines that teach, paragraph by paragraph: those of one indentation, or `- ` and what is indented two further."""
    paragraph: list[str] = []
    first = rest = ""

    def fill() -> Iterator[str]:
        start = f"{margin}//{first}", f"{margin}//{rest}"
        return iter(
            wrap(" ".join(paragraph), WIDTH, initial_indent=start[0], subsequent_indent=start[1], break_on_hyphens=False)
        )

    for line in lines:
        if paragraph and line["text"] and line["lead"] == rest and not line["text"].startswith("- "):
            paragraph.append(line["text"])
            continue
        yield from fill()
        paragraph = [line["text"]] if line["text"] else []
        first = line["lead"]
        rest = first + "  " * line["text"].startswith("- ")
        if not paragraph:
            yield f"{margin}//"
    yield from fill()


def strip_comments(text: str) -> str:
    """CUDA without its comments. A line that held nothing else goes whole, and of blank lines in a row one stays."""
    marked = TOKEN.sub(lambda found: GONE if found["comment"] else found[0], text)
    code = (line for line in marked.splitlines() if line.strip(f" \t{GONE}") or GONE not in line)
    return tidy("\n".join(line.replace(GONE, " ") for line in code))


def tidy(text: str) -> str:
    """No trailing spaces, no two blank lines in a row, none at the start or after an opening brace."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if line or (lines and lines[-1] and not lines[-1].endswith("{")):
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"
