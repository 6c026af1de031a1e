"""A generated `.cu` as C++ for the host compiler, line for line.

Only three things are changed, because no macro can express them: an inline-assembly statement becomes a call of the C++
function with the meaning of its PTX instruction (`*.emulated.hpp` beside the primitives); the declaration of dynamic shared
memory becomes a pointer; and a 16-bit element that is passed by value is passed by reference, so that its load has a line.
Lines keep their numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.device.protocol import DeviceError
from attngen.emit.program import KernelEntry, Program
from attngen.emit.templates import template_directory

RUNTIME = Path(__file__).parent / "runtime"
COUNTED = "EMULATOR_COUNTS_FMA"  # the macro that makes ordinary multiply-adds counted

_ASM = re.compile(r"\basm\s*(volatile)?\s*\(")
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.DOTALL)  # or a string, which may contain //
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ALIGNED_SHARED = re.compile(r"\b(__shared__)(\s+)(alignas\s*\((?:[^()]|\([^()]*\))*\))")  # C++ wants alignas first
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\(\w+\)\s*)?(\w[\w ]*?)\s+(\w+)\s*\[\s*\]\s*;")
_OPERAND = re.compile(r"%(\d+)|(?<![\w%])(\d+)(?!\w)|%%(\w+(?:\.[xyz])?)|(?<![\w%.])([a-z]\w*)")
_BLOCK = re.compile(r"\{\s*\.reg \.pred (\w+);(.*)\}", re.DOTALL)
_COLUMNS = re.compile(r"(m\d+)n(\d+)(k\d+)")
FMA = "fma.rn.f32"  # the PTX instruction of fmaf
# A macro does not expand itself: the inner fmaf is the function.
_COUNTED_FMA = f"""\
#ifdef {COUNTED}
#define fmaf(...) (emulator::count_instruction({{number}}), fmaf(__VA_ARGS__))
#endif
"""
_MEMORY_FUNCTIONS = f"""\
#ifdef {COUNTED}
#include "memory_functions.hpp"
#endif
"""
# GCC gives no line to the load of a struct that is passed by value to an inlined function.
_BY_VALUE = re.compile(r"\(((?:fp|bf)16) (\w+)\) \{")
_SPECIAL_REGISTERS = {
    "laneid": "emulator::lane_index()",
    **{
        f"{r}.{i}": f"{b}.{i}"
        for r, b in (("tid", "threadIdx"), ("ctaid", "blockIdx"), ("ntid", "blockDim"), ("nctaid", "gridDim"))
        for i in "xyz"
    },
}


@dataclass(frozen=True, slots=True)
class Translated:
    """C++ text, and the counted instructions in the order of their counters."""

    text: str
    instructions: tuple[str, ...]


def translate(source: Program) -> Translated:
    """`source` for the host compiler. Raises DeviceError for an unknown instruction."""
    instructions: list[str] = []
    pieces: list[str] = []
    position = 0
    comments = {i for m in _COMMENT.finditer(source.text) if m[0][0] == "/" for i in range(*m.span())}
    for match in _ASM.finditer(source.text):
        if match.start() in comments:
            continue
        end = _closing(source.text, match.end() - 1)
        statement = source.text[match.end() : end]
        line = source.text.count("\n", 0, match.start()) + 1
        pieces.append(source.text[position : match.start()])
        pieces.append(_call(statement, line, instructions) + "\n" * statement.count("\n"))
        position = end + 1
    pieces.append(source.text[position:])
    pieces = [_BY_VALUE.sub(r"(const \1& \2) {", "".join(pieces))]
    text = _DYNAMIC_SHARED.sub(r"\1* const \2 = (\1*)emulator::dynamic_shared();", "".join(pieces))
    text = _ALIGNED_SHARED.sub(r"\3\2\1", text)
    includes = "".join(f'#include "{name}"\n' for name in ["cuda.hpp", *(p.name for p in meanings())])
    if "fmaf(" in source.text:
        includes += _COUNTED_FMA.format(number=len(instructions))
        instructions.append(FMA)
    thunks = "\n".join(_thunk(entry) for entry in source.kernels)
    includes += _MEMORY_FUNCTIONS + _macros_of_nvrtc(source.arch)
    return Translated(f'{includes}#line 1 "{source.name}.cu"\n{text}\n{thunks}\n', tuple(instructions))


def _macros_of_nvrtc(arch: str) -> str:
    """The macros by which a file distinguishes compilers and architectures; behind the headers of C, which read them too."""
    number, feature = re.fullmatch(r"sm_(\d+)(a?)", arch).groups()  # type: ignore[union-attr]
    names = ["__CUDACC__", "__CUDACC_RTC__", *([f"__CUDA_ARCH_FEAT_SM{number}_ALL"] if feature else [])]
    return f"#define __CUDA_ARCH__ {number}0\n" + "".join(f"#define {name} 1\n" for name in names)


@cache
def meanings() -> tuple[Path, ...]:
    """The files with the meanings of PTX instructions."""
    return tuple(sorted((template_directory() / "primitives").glob("*.emulated.hpp")))


@cache
def known_instructions() -> frozenset[str]:
    """The known instructions, as C++ identifiers."""
    text = "\n".join(p.read_text("utf-8") for p in meanings())
    return frozenset(re.findall(r"(?:inline void |MMA\()(\w+)\b", text))


def primitive_lines(text: str) -> frozenset[int]:
    """The lines of device functions of `text` that contain inline PTX."""
    lines = text.splitlines()
    found: set[int] = set()
    start = 0
    for number, line in enumerate(lines, 1):
        if line and not line[0].isspace() and line[0] not in "}/#":
            start = number
        ends = line.startswith("}") or (start == number and line.endswith("}"))
        function = lines[start - 1 : number] if ends else []
        if any(_ASM.search(one) for one in function) and not any("__global__" in one for one in function):
            found.update(range(start, number + 1))
    return frozenset(found)


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`, strings skipped."""
    depth, i = 0, opening
    while i < len(text):
        if text[i] == '"':
            string = _STRING.match(text, i)
            assert string is not None, text[i : i + 40]
            i = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1
    line = text.count("\n", 0, opening) + 1
    raise DeviceError(f"the asm statement at line {line} is not closed")


def _call(statement: str, line: int, instructions: list[str]) -> str:
    """A C++ expression for one asm statement: an instruction, or a block of some that share a predicate."""
    if not statement.lstrip().startswith('"'):
        raise DeviceError(f"the instruction of the asm statement at line {line} is not an ordinary string")
    template, sections = _sections(statement)
    values = [e for section in sections[:2] for e in section]
    block = _BLOCK.fullmatch(template.strip())
    if block is None:
        return f"({_instruction(template, values, line, instructions)})" if template.strip() else "((void)0)"
    calls = [_instruction(one, values, line, instructions) for one in block[2].split(";") if one.strip()]
    return f"([&] {{ bool {block[1]}; {'; '.join(calls)}; }}())"


def _instruction(text: str, values: list[str], line: int, instructions: list[str]) -> str:
    opcode, _, operands = text.strip().rstrip(";").partition(" ")
    name, template_arguments = re.sub(r"[.:]+", "_", opcode), ""
    columns = _COLUMNS.search(name)
    if name not in known_instructions() and columns is not None:  # one meaning for every N
        name, template_arguments = _COLUMNS.sub(r"\1nN\3", name), f"<{columns[2]}>"
    if name not in known_instructions():
        raise DeviceError(
            f"the emulated device does not know the instruction {opcode} of line {line}; run this kernel on a GPU, or give the "
            "instruction its meaning in templates/primitives/"
        )
    if opcode not in instructions:
        instructions.append(opcode)
    arguments = [_argument(m, values, opcode, line) for m in _OPERAND.finditer(operands)]
    count = f"emulator::count_instruction({instructions.index(opcode)})"
    return f"{count}, ptx::{name}{template_arguments}({', '.join([str(line), *arguments])})"


def _argument(operand: re.Match[str], values: list[str], opcode: str, line: int) -> str:
    """The C++ expression of an operand: one of `values` by its number, a constant, a name, or a special register."""
    number, constant, register, name = operand.groups()
    if number and int(number) >= len(values):
        raise DeviceError(f"{opcode} of line {line} has the operand %{number}, and the asm statement lists {len(values)}")
    if register and register not in _SPECIAL_REGISTERS:
        raise DeviceError(f"the emulated device does not know the special register %{register} of line {line}")
    return values[int(number)] if number else _SPECIAL_REGISTERS[register] if register else constant or name


def _sections(statement: str) -> tuple[str, list[list[str]]]:
    """The instruction's text, and the expressions of the outputs and of the inputs."""
    template, i = "", 0
    while True:
        while statement[i : i + 1].isspace():
            i += 1
        string = _STRING.match(statement, i)
        if string is None:
            break
        template += string[1]
        i = string.end()
    sections: list[list[str]] = []
    while i < len(statement):
        if statement[i] == ":":
            sections.append([])
        elif statement[i] == "(" and sections:
            end = _closing(statement, i)
            sections[-1].append(statement[i + 1 : end])
            i = end
        i += 1
    return template.replace("\\n", " ").replace("\\t", " "), [*sections, [], []]


def _thunk(entry: KernelEntry) -> str:
    """A function that calls the kernel with arguments from an array of addresses."""
    arguments = ", ".join(f"emulator::parameter<{p.ctype}>(a[{i}])" for i, p in enumerate(entry.parameters))
    attributes = '__attribute__((no_sanitize("thread"), noinline))'  # it reads memory of Python, not of the kernel
    call = f"{entry.name}({arguments});"
    return f'extern "C" EMULATOR_EXPORTED {attributes} void attngen_call_{entry.name}(void** a) {{ {call} }}'
