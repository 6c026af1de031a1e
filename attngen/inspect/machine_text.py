"""Loop nests, and machine code annotated with its source lines, as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attngen.device.cuda.line_table import MachineLine
from attngen.emit.loops import loop_nest
from attngen.emit.origins import origins
from attngen.emit.program import Program
from attngen.language import Loaded
from attngen.plan import Plan

DEFAULTED = {"scale": "head_dim", "score": "scaled k"}  # statements whose default depends on another one


def describe_loops(loaded: Loaded, plan: Plan, source: Program) -> str:
    """The loop nest, one loop per line: line of the file, name, range, who runs it, memory of its operands."""
    nest = loop_nest(loaded.spec, plan, source)
    rows = [(f"{p.line:>4}", "  " * p.depth + p.loop.name, p.loop.range, p.loop.role, p.loop.memory) for p in nest]
    rows.insert(0, ("line", "loop", "range", "run by", "memory"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"{source.name}.cu, on {plan.arch.name}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def spec_lines(loaded: Loaded, plan: Plan, source: Program) -> dict[int, tuple[int, ...]]:
    """The lines of the spec behind each line of CUDA: of its statements, the main one first, then of what these use."""
    found = {}
    for line, statements in origins(loaded.spec, plan, source).items():
        numbers = dict.fromkeys(n for s in statements for n in _lines_of(loaded, s))
        if numbers:
            found[line] = tuple(numbers)
    return found


def _lines_of(loaded: Loaded, statement: str) -> Iterator[int]:
    span = loaded.spans.get(statement) or loaded.spans.get(DEFAULTED.get(statement, ""))
    if span is None:
        return
    text = loaded.source.text.split("\n")
    defined = {m[1]: n for n, line in enumerate(text, 1) if (m := re.match(r"\s*(?:let|def)\s+(\w+)", line))}
    pending = list(range(span.line, span.end_line + 1))
    seen: set[int] = set()
    while pending:
        number = pending.pop(0)
        if number not in seen:
            seen.add(number)
            yield number
            words = re.findall(r"\w+", text[number - 1].split("#")[0])
            pending += [defined[word] for word in words if word in defined]


def annotated(loaded: Loaded, plan: Plan, source: Program, code: tuple[MachineLine, ...]) -> Iterator[str]:
    """Machine code, line by line. Above an instruction are the lines of spec and CUDA that it comes from, unless they are those
    of the instruction before."""
    cuda, of_spec = source.text.splitlines(), spec_lines(loaded, plan, source)
    texts = loaded.source.text.split("\n")
    instructions = [line for line in code if line.is_code]
    mapped = sum(bool(line.cuda) for line in instructions)
    yield f"// {mapped} of {len(instructions)} instructions with a line of {source.name}.cu, here above them"
    shown: tuple[int, ...] = ()
    for line in code:
        if line.cuda and line.cuda != shown:
            shown = line.cuda
            for number in dict.fromkeys(n for at in shown for n in of_spec.get(at, ())):
                yield f"// spec {number:>4}: {texts[number - 1].strip()}"
            called = f"  <- {', '.join(map(str, shown[1:]))}" if len(shown) > 1 else ""
            yield f"// cuda {shown[0]:>4}: {cuda[shown[0] - 1].split('//')[0].strip()}{called}"
        yield ("    " if line.is_code else "") + line.text.strip()
