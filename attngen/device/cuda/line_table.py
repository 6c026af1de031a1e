"""PTX and SASS with the lines of CUDA that they come from, by the compiler's line tables.

A place is a chain of CUDA lines: the line itself first; if it is in an inlined function, the line of the call, and so on
outwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.device.cuda.compiler import compile_with_lines, disassemble
from attngen.emit.program import Program

Chain = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MachineLine:
    """One line of PTX or SASS. `is_code`: a reachable instruction, not a label, a directive or padding."""

    text: str
    cuda: Chain = ()
    ptx: int = 0  # SASS only: the line of PTX, counted from 1; 0: none
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class MachineCode:
    """PTX and SASS of a file. SASS has one kernel after another, in launch order."""

    ptx: tuple[MachineLine, ...]
    sass: tuple[MachineLine, ...]

    @property
    def mapped(self) -> tuple[int, int]:
        """The number of SASS instructions with a CUDA line, and of all SASS instructions."""
        code = [line for line in self.sass if line.is_code]
        return sum(bool(line.cuda) for line in code), len(code)


def ptx_code(source: Program) -> tuple[MachineLine, ...]:
    """The PTX of `source`. Raises CompilationError."""
    return _without_tables(tuple(read_ptx(compile_with_lines(source)[1])))[0]


def sass_code(source: Program) -> tuple[MachineLine, ...]:
    """The SASS of `source`. Raises CompilationError, and DeviceError if nvdisasm is missing."""
    return machine_code(source).sass


def machine_code(source: Program) -> MachineCode:
    """The machine code of `source`, with its line tables. Raises CompilationError, and DeviceError if nvdisasm is missing."""
    cubin, ptx = compile_with_lines(source)
    sass = disassemble(cubin, "--print-line-info-inline", "--print-line-info-ptx")
    kept, places = _without_tables(tuple(read_ptx(ptx)))
    entries = tuple(e.name for e in source.kernels)
    return MachineCode(kept, tuple(replace(line, ptx=places.get(line.ptx, 0)) for line in read_sass(sass, entries)))


def _without_tables(lines: tuple[MachineLine, ...]) -> tuple[tuple[MachineLine, ...], dict[int, int]]:
    """PTX without its line tables, and the new number of each line: {before: after}, both counted from 1."""
    end = next((i for i, line in enumerate(lines) if line.text.lstrip().startswith((".file", ".section"))), len(lines))
    kept = {i: line for i, line in enumerate(lines[:end], 1) if line.text and not _LOC.match(line.text)}
    return tuple(kept.values()), {before: now for now, before in enumerate(kept, 1)}


_LOC = re.compile(r"\s*\.loc\s+\d+ (\d+) \d+(?:, function_name [^,]+, inlined_at \d+ (\d+) )?")
_PTX_CODE = re.compile(r"\s*(?:@!?%p\d+\s+)?[a-z]\w*[. ;]")
_CALLED = re.compile(r"\bCALL\S*\s+`\(([^)]+)\)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+\S")
_PLACE = re.compile(r'//## File "([^"]*)", line (\d+)')
_SECTION = re.compile(r"\s*\.section\s+\.text\.(\w+)")
_LABEL = re.compile(r"(\S+):\s*$")
PTX_TEXT = ".nv_debug_ptx_txt"  # nvdisasm's name for the PTX inside a cubin


def read_ptx(text: str) -> Iterator[MachineLine]:
    """The lines of PTX. A `.loc` applies to the following lines, up to the end of its function."""
    chain: Chain = ()
    known: dict[int, Chain] = {}  # the chain of each line from which functions are called
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(".section"):
            inside = False
        if line == "{":
            inside, chain, known = True, (), {}
        found = _LOC.match(line)
        if found:
            at, caller = int(found[1]), found[2]
            callers = known.get(int(caller), (int(caller),)) if caller else ()
            chain = (at, *(line for line in callers if line))  # 0: no line
            known[at] = chain
            if at == 0:
                chain = ()
        is_code = inside and found is None and _PTX_CODE.match(line) is not None
        yield MachineLine(line.rstrip(), chain if is_code else (), is_code=is_code)
        if line == "}":
            inside = False


def read_sass(text: str, entries: tuple[str, ...]) -> Iterator[MachineLine]:
    """The lines of nvdisasm's output with their annotations parsed, kernels in the order of `entries`."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        found = _SECTION.match(line)
        if found:
            current = sections.setdefault(found[1], [])
        elif line.startswith("//---"):
            current = []
        else:
            current.append(line)
    for name in entries:
        yield from _with_callers(_without_padding(list(_section(sections[name]))))


def _section(lines: list[str]) -> Iterator[MachineLine]:
    chain: Chain = ()
    ptx = 0
    fresh = False  # whether `chain` is being read
    for line in lines:
        places = _PLACE.findall(line)
        if places:
            file, number = places[0][0], int(places[0][1])
            if file == PTX_TEXT:
                ptx = number
            else:
                chain, fresh = (*chain, number) if fresh else (number,), True
                if number == 0:  # 0: no line
                    chain = ()
            continue
        fresh = False
        if _INSTRUCTION.match(line):
            yield MachineLine(line.strip(), chain, ptx, is_code=True)
        elif _LABEL.match(line):
            yield MachineLine(line.strip())


def _without_padding(lines: list[MachineLine]) -> list[MachineLine]:
    """The lines, with the unreachable end of a kernel (a branch to itself and NOPs) marked as padding."""
    last = max((i for i, line in enumerate(lines) if not re.search(r"\bNOP\b", line.text) and line.is_code), default=-1)
    label = _LABEL.match(lines[last - 1].text)
    if label and f"BRA `({label[1]})" in lines[last].text:
        last -= 1
    return [line if i <= last else MachineLine(line.text) for i, line in enumerate(lines)]


def _with_callers(lines: list[MachineLine]) -> list[MachineLine]:
    """The lines, with the compiler's internal routines (such as the slow path of a division) attributed to the lines that call
    them. The line table has no entries for them, and nvdisasm repeats the line before."""
    callers: dict[str, dict[int, None]] = {}
    for line in lines:
        for routine in _CALLED.findall(line.text):
            callers.setdefault(routine, {}).update(dict.fromkeys(line.cuda))
    routine = ""
    placed = []
    for line in lines:
        found = _LABEL.match(line.text)
        routine = found[1] if found and found[1].startswith("$__internal") else routine
        own = line.is_code and routine
        placed.append(replace(line, cuda=tuple(callers.get(routine, ())), ptx=0) if own else line)
    return placed
