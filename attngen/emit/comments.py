"""How much a generated file explains, and the lexer that tells comments from code.

Templates hold two kinds of comments. `// ...` says what a reader of CUDA needs to follow the code; it is in every file but the
bare one. A line that begins with `//: ...` is for who learns: the equation, why the layout is as it is, what the hardware does,
what the rung before did instead. It is text of the level `teach` alone, so that it can stand right beside the code it is about.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Comments = Literal["none", "brief", "teach"]
LEVELS: tuple[Comments, ...] = get_args(Comments)

TEACHING = re.compile(r"^([ \t]*)//:", re.M)
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
        return tidy(TEACHING.sub(r"\1//", text))
    brief = tidy("\n".join(line for line in text.splitlines() if not TEACHING.match(line)))
    if level == "brief":
        return brief
    title = brief.split("\n", 1)[0]  # what the file is
    return f"{title}\n\n{strip_comments(brief)}"


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
