"""The levels of comments in generated files, and the lexer that separates comments from code.

Templates contain two kinds of comments. `// ...` is for readers of CUDA; it appears at every level but `none`. `//: ...` is for
learners: the equation, the reason for the layout, what the hardware does, what the previous schedule does instead. It appears
at the level `teach` only, so it can stand beside its code. Its paragraphs are wrapped after names and numbers are filled in.
`//# ...` is the title of a section, which gets its number; `//#` alone, in the header, stands for the list of all.
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
SECTION = re.compile(r"^//# (.*)", re.M)
WIDTH = 124  # characters of a teaching line
# Tokens: comments, and literals that may contain // or /*. Numbers may contain ' between digits.
TOKEN = re.compile(
    r"""(?P<comment> //(?:\\\r?\n|[^\n])* | /\*.*?\*/ )
      | (?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
      | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
      | \d['\w.]* | [A-Za-z_]\w* | .""",
    re.S | re.X,
)
GONE = "\0"  # where a comment was


def with_sections(text: str) -> str:
    """The output of a template with the titles of its sections numbered and listed."""
    titles = [f"{number}. {title}" for number, title in enumerate(SECTION.findall(text), 1)]
    following = iter(titles)
    text = SECTION.sub(lambda _: f"// {next(following)}", text)
    return text.replace("//#\n", "".join(f"//     {title}\n" for title in titles), 1)


def at_level(text: str, level: Comments) -> str:
    """The output of a template with the comments of `level`; the code is the same at every level, byte for byte."""
    if level == "teach":
        return tidy("\n".join(_taught(text.splitlines())))
    brief = tidy("\n".join(line for line in text.splitlines() if not TEACHING.match(line)))
    if level == "brief":
        return brief
    title = brief.split("\n", 1)[0]
    return f"{title}\n\n{strip_comments(brief)}"


def _taught(lines: list[str]) -> Iterator[str]:
    found = ((line, TEACHING.match(line)) for line in lines)
    for margin, run in groupby(found, key=lambda one: one[1]["margin"] if one[1] else None):
        group = list(run)
        yield from (line for line, _ in group) if margin is None else _filled(margin, [match for _, match in group if match])


def _filled(margin: str, lines: list[re.Match[str]]) -> Iterator[str]:
    """Teaching lines, wrapped by paragraph: lines of one indentation, or an item `- ` with lines indented by two more."""
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
    """CUDA without comments. Lines that contain only a comment are removed, and consecutive blank lines become one."""
    marked = TOKEN.sub(lambda found: GONE if found["comment"] else found[0], text)
    code = (line for line in marked.splitlines() if line.strip(f" \t{GONE}") or GONE not in line)
    return tidy("\n".join(line.replace(GONE, " ") for line in code))


def tidy(text: str) -> str:
    """No lines of spaces, where templates had nothing to write, no trailing spaces, no two blank lines in a row, none at the
    start, after an opening brace or at the end of a type."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines() if raw.strip() or not raw):
        if line == "};" and lines[-1:] == [""]:
            lines.pop()
        if line or (lines and lines[-1] and not lines[-1].endswith("{")):
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"
