"""`check`: a student's file compiled, run and compared; the first problem, or the medal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from attngen.device.cuda import compiler
from attngen.device.cuda.compiler import compile_text
from attngen.device.emulated.findings import EmulationError, Place
from attngen.device.emulated.host_compiler import find_compiler
from attngen.device.emulated.translate import primitive_lines
from attngen.device.protocol import CompilationError, DeviceError
from attngen.emit.program import Program
from attngen.puzzles.advice import HELP, LATER_ROUND, REPLACED, advice, in_words, waiting
from attngen.puzzles.counts import MEDALS, Counted, Medal, count, medal_of
from attngen.puzzles.folder import BLANK, Folder
from attngen.puzzles.limit import TimeLimitError, limited
from attngen.puzzles.on_gpu import OnGpu, gpu_for, run_on_gpu
from attngen.puzzles.puzzle import Array, Case
from attngen.puzzles.running import (
    Ran,
    Signature,
    compile_program,
    never_written,
    program_of,
    run_case,
    signature_of,
    writer_of,
)

SEED = 20
# The family that shows the emulated device each access as the file has it. Others divide accesses of float4 into several, and
# clang 14 turns copies of structs from memory to memory into calls that are not seen.
EXACT = "gcc"
CPU_SECONDS = 6  # limit of one check; a solution takes less than one
_DYNAMIC = re.compile(r"^[^/\n]*\bextern\s+__shared__", re.M)
_NVRTC = re.compile(r"^(?P<file>[^\n(]*)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<what>.*)$", re.M)
_UNCLOSED = re.compile(r"At end of source: error(?: #[\w-]+)?: (?P<what>.*)(?:\n.*\((?P<line>\d+)\): note #3196)?")
_PTXAS = re.compile(r"ptxas error *: (?P<what>.*)$", re.M)
_HOST = re.compile(r"\.cu:(?P<line>\d+):\d+: (?:fatal )?error: (?P<what>.*)$", re.M)
_FUNCTION = re.compile(r"^(?!\s)(?:template .*)?__device__\b.*?\b(\w+)\(")
_BY_TMA = re.compile(r"\b(?:bulk|tma)_load\(")
_LINE = re.compile(r"\b(?:of|at) line (\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, in the lines of the student's file (0: no line). `notes` are further lines of text: the other thread of a
    race, the number of wrong elements."""

    kind: str  # a key of HELP, or another kind of the emulated device
    message: str
    line: int
    label: str = ""
    notes: tuple[str, ...] = ()
    help: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check's result. The counts are of the first case, and there are none if there is a problem."""

    puzzle: str
    file: str
    problem: Problem | None
    counted: tuple[Counted, ...] = ()
    cases: tuple[str, ...] = ()  # those that were right, in words
    compiler: str = EXACT  # the family of the host's compiler
    gpu: OnGpu | None = None  # the large case, if a GPU ran it

    @property
    def is_right(self) -> bool:
        return self.problem is None

    @property
    def medal(self) -> Medal:
        return medal_of(self.counted) if self.is_right else ""

    def as_json(self) -> dict[str, object]:
        """For graders: docs/json.md lists the keys."""
        return {
            "puzzle": self.puzzle,
            "file": self.file,
            "right": self.is_right,
            "medal": self.medal or None,
            "problem": None if self.problem is None else asdict(self.problem),
            "cases": list(self.cases),
            "compiler": self.compiler,
            "counts": [_count_json(c) for c in self.counted],
            "gpu": None if self.gpu is None else _gpu_json(self.gpu),
        }


def _gpu_json(ran: OnGpu) -> dict[str, object]:
    return {
        "name": ran.gpu,
        "case": ran.what,
        "microseconds": ran.microseconds,
        "bytes": ran.bytes,
        "operations": ran.operations,
    }


def _count_json(c: Counted) -> dict[str, object]:
    return {
        "count": c.target.count,
        "what": c.target.words,
        "counted": c.number,
        "silver": c.target.silver,
        "gold": c.target.gold,
        "at_least": c.target.at_least,
        "good_for": next(m for m in reversed(MEDALS) if c.target.allows(c.number, m)),
        "lines": [{"line": p.line, "counted": p.number, "array": p.array or None, "needed": p.needed} for p in c.lines],
    }


def check(folder: Folder, text: str, file: str, on_gpu: bool = True) -> Verdict:
    """The verdict on `text`; `file` is its name. What is right on the emulated device runs on a GPU, too, if there is one and
    `on_gpu`. Raises DeviceError if a compiler is missing."""
    program = program_of(folder, text, file.removesuffix(".cu"))
    verdict = replace(_check(folder, program, text, file), compiler=find_compiler().family.name)
    return _with_gpu(folder, program, verdict) if on_gpu and verdict.is_right else verdict


def _with_gpu(folder: Folder, program: Program, verdict: Verdict) -> Verdict:
    device = gpu_for(program.arch)
    if device is None:
        return verdict
    case = folder.puzzle.large(np.random.default_rng(SEED))
    line, notes = _kernel_line(program), [f"with {case.what}"]
    try:
        ran = run_on_gpu(device, program, case)
    except DeviceError as error:
        return replace(verdict, problem=_problem("gpu", f"right on the emulated device, but {error}", line, notes=notes))
    for name, expected in case.expected.items():
        wrong = np.flatnonzero(~_is_right(ran.written[name], expected, case.tolerance))
        if len(wrong):
            got, right = ran.written[name].reshape(-1)[wrong[0]], expected.reshape(-1)[wrong[0]]
            message = f"{_place(name, expected, wrong[0])} is {_number(got)} on {ran.gpu}, expected {_number(right)}"
            notes = [f"{len(wrong)} of {expected.size} elements of {name} are wrong", *notes]
            return replace(verdict, problem=_problem("gpu", message, line, notes=notes))
    return replace(verdict, gpu=ran)


def _check(folder: Folder, program: Program, text: str, file: str) -> Verdict:
    problem = _signature_problem(folder, text) or _dynamic_problem(text) or _compile_problem(program)
    if problem is not None:
        return Verdict(folder.name, file, problem)
    try:
        with limited(CPU_SECONDS):
            return _run(folder, program, file)
    except TimeLimitError as error:
        found = re.search(r"\bline (\d+):", str(error))
        line = int(found[1]) if found else _kernel_line(program)
        message = f"the kernel has not ended after {CPU_SECONDS} seconds"
        # The emulated device counts accesses, and calls this by the same name if so many of them take less time.
        problem = Problem("runaway loop", message, line, "it was here", help=HELP["time limit"])
        return Verdict(folder.name, file, problem)


def first_case(folder: Folder) -> Case:
    """The case that is counted."""
    return folder.puzzle.cases(np.random.default_rng(SEED))[0]


def _run(folder: Folder, program: Program, file: str) -> Verdict:
    cases = folder.puzzle.cases(np.random.default_rng(SEED))
    first: Ran | None = None
    for number, case in enumerate(cases):
        try:
            ran = run_case(compile_program(program, seed=number), case)
        except EmulationError as error:
            return Verdict(folder.name, file, _device_problem(program, case, error))
        except CompilationError as error:
            return Verdict(folder.name, file, _host_problem(error))
        except DeviceError as error:
            return Verdict(folder.name, file, _unknown_problem(error))
        found = _value_problem(folder, program, case, ran)
        if found is not None:
            return Verdict(folder.name, file, found)
        first = first or ran
    assert first is not None, f"{folder.name} has no case"
    counted = _counted(folder, first)
    if medal_of(counted) != MEDALS[-1]:
        gold = run_case(compile_program(program_of(folder, folder.solution, folder.name)), cases[0])
        counted = tuple(c.beside(g) for c, g in zip(counted, _counted(folder, gold), strict=True))
    return Verdict(folder.name, file, None, counted, tuple(case.what for case in cases))


def _counted(folder: Folder, ran: Ran) -> tuple[Counted, ...]:
    return tuple(count(t, ran.counters, ran.traced.sites) for t in folder.puzzle.targets)


def _problem(kind: str, message: str, line: int, label: str = "", notes: Sequence[str] = (), **names: object) -> Problem:
    return Problem(kind, message, line, label, tuple(notes), HELP.get(kind, "").format(**names))


def _signature_problem(folder: Folder, text: str) -> Problem | None:
    wanted, found = signature_of(folder.text), signature_of(text)
    if found == wanted:
        return None
    expected = [f"expected: {wanted}"]
    if found is None or wanted is None:
        what = "exactly one kernel" if "__global__" in text else "a kernel, and has none"
        return _problem("signature", f"the file must have {what}", 0, notes=expected)
    line = text.count("\n", 0, text.find("__global__")) + 1
    message = "the kernel's signature is not that of the puzzle"
    return _problem("signature", message, line, _difference(wanted, found), expected)


def _dynamic_problem(text: str) -> Problem | None:
    """Dynamic shared memory, which no puzzle has."""
    found = _DYNAMIC.search(text)
    if found is None:
        return None
    line = text.count("\n", 0, found.start()) + 1
    return _problem("dynamic", "the size of a shared array is missing", line, "has no size")


def _difference(wanted: Signature, found: Signature) -> str:
    if wanted.name != found.name:
        return f"the name is {found.name}, expected {wanted.name}"
    for at, (one, other) in enumerate(zip(wanted.parameters, found.parameters, strict=False)):
        if one != other:
            return f"parameter {at + 1} is `{' '.join(other)}`, expected `{' '.join(one)}`"
    return f"{len(found.parameters)} parameters, expected {len(wanted.parameters)}"


def _compile_problem(program: Program) -> Problem | None:
    """NVRTC's first error: what compiles here compiles for a GPU. None if the system has no NVRTC."""
    if not compiler.NVRTC_EXISTS:
        return None
    try:
        compile_text(program)
    except CompilationError as error:
        found = _NVRTC.search(error.log)
        if found is None:
            return _unplaced_problem(error)
        number = len(_NVRTC.findall(error.log))
        notes = [f"errors after it: {number - 1}"] if number > 1 else []
        problem = _problem("does not compile", f"does not compile: {found['what']}", int(found["line"]), notes=notes)
        closer = "include" if "open source file" in found["what"] else "semicolon" if 'expected a ";"' in found["what"] else ""
        return replace(problem, help=HELP[closer]) if closer else problem
    return None


def _unplaced_problem(error: CompilationError) -> Problem:
    """An error that NVRTC reports at the end of the file, or ptxas, which knows no lines."""
    unclosed, ptxas = _UNCLOSED.search(error.log), _PTXAS.search(error.log)
    if unclosed is not None:
        message = f"does not compile: {unclosed['what']} at the end of the file"
        return _problem("does not compile", message, int(unclosed["line"] or 0), "this one is not closed")
    if ptxas is not None:
        problem = _problem("does not compile", f"does not compile: {ptxas['what']}", 0)
        return replace(problem, help=HELP["shared memory"]) if "shared data" in ptxas["what"] else problem
    return _problem("does not compile", error.message, 0, notes=error.log.strip().splitlines()[:6])


def _host_problem(error: CompilationError) -> Problem:
    """What compiles for a GPU, and not for the emulated device."""
    found = _HOST.search(error.log)
    line, what = (int(found["line"]), found["what"]) if found else (0, error.log.strip().split("\n")[0])
    message = f"compiles for a GPU, but the emulated device cannot run it: {what}"
    if not compiler.NVRTC_EXISTS:
        message = f"does not compile: {what}"
    return Problem(
        "does not compile", message, line, help="write it with the functions that the contract names, or in plain C++"
    )


def _unknown_problem(error: DeviceError) -> Problem:
    """An instruction that the emulated device does not know. Raises `error` if it is about the machine."""
    found = _LINE.search(str(error))
    if found is None:
        raise error
    message = str(error).split("; ")[0]
    return Problem("does not compile", message, int(found[1]), help="use the primitives that are in the file")


def _own_line(program: Program, place: Place) -> int:
    """The line of a place in the student's own code: for a primitive, that of its call. A copy in the background has no
    callers: then it is the first call of its primitive that the file has."""
    inside = primitive_lines(program.text)
    lines = [place.line, *(line for line, _ in place.callers), *_calls_of(program.text, place.line, inside)]
    return next((line for line in lines if line and line not in inside), place.line)


def _where(program: Program, place: Place) -> str:
    """A place in words, with its statement; of a copy whose call is not known, all calls of its primitive."""
    text = program.text.splitlines()
    inside = primitive_lines(program.text)
    known = [line for line in (place.line, *(line for line, _ in place.callers)) if line not in inside]
    calls = known or _calls_of(program.text, place.line, inside)
    if len(calls) > 1 and not known:
        return f", at one of lines {', '.join(map(str, calls))}"
    line = _own_line(program, place)
    return f", at line {line}: {text[line - 1].strip()}" if line else ""


def _calls_of(text: str, line: int, inside: frozenset[int]) -> list[int]:
    """The lines outside of primitives that call the primitive whose body has `line`."""
    lines = text.splitlines()
    above = (number for number in range(line, 0, -1) if number in inside and _FUNCTION.search(lines[number - 1]))
    found = _FUNCTION.search(lines[next(above, 0) - 1]) if line in inside else None
    if found is None:
        return []
    call = re.compile(rf"\b{found[1]}\s*[(<]")
    return [n for n, one in enumerate(lines, 1) if n not in inside and call.search(one.split("//")[0])]


def _is_of_a_later_round(program: Program, line: int, other: int) -> bool:
    """Whether a block barrier stands between the lines of two accesses that race: only a loop can bring them together."""
    between = program.text.splitlines()[min(line, other) : max(line, other) - 1]
    return any("__syncthreads()" in one for one in between)


def _device_problem(program: Program, case: Case, error: EmulationError) -> Problem:
    block = error.block[0] if error.block[1:] == (0, 0) else error.block
    label = f"thread {error.at.thread} of block {block}"
    notes = []
    if error.other is not None:
        notes.append(f"the other is thread {error.other.thread}{_where(program, error.other)}")
    kind = error.kind
    if kind == "race" and error.where is not None and error.where.buffer in case.expected:
        kind = "two writers"
    elif kind == "deadlock" and ("waits for shuffle" in error.what or "waits for a warp" in error.what):
        kind = "lanes missing"
    what = in_words(error.what).replace(" of anchor)", " of shared memory)")
    line = _own_line(program, error.at)
    message, *others = waiting(what) if error.kind == "deadlock" else [what]
    found = _problem(error.kind, f"{error.kind}: {message}", line, label, [*notes, *others, f"with {case.what}"])
    return replace(found, help=_race_help(program, error, line) if kind == "race" else advice(kind, what))


def _race_help(program: Program, error: EmulationError, line: int) -> str:
    if _BY_TMA.search(program.text.splitlines()[line - 1]):
        return REPLACED
    later = error.other is not None and _is_of_a_later_round(program, line, _own_line(program, error.other))
    return LATER_ROUND if later else advice(error.kind, error.what)


def _value_problem(folder: Folder, program: Program, case: Case, ran: Ran) -> Problem | None:
    for name, expected in case.expected.items():
        got = ran.written[name]
        blank = np.zeros(got.size, bool) if name in case.given else never_written(got)
        wrong = np.flatnonzero(blank | ~_is_right(got, expected, case.tolerance))
        if len(wrong):
            return _first_wrong(folder, program, case, ran, name, wrong, blank)
    return None


def _is_right(got: Array, expected: Array, tolerance: float) -> Array:
    """For each element, in order."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        one, other = np.asarray(got, np.float64).reshape(-1), np.asarray(expected, np.float64).reshape(-1)
        right: Array = (one == other) | (np.abs(one - other) <= tolerance * (1 + np.abs(other)))
    return right


def _first_wrong(folder: Folder, program: Program, case: Case, ran: Ran, name: str, wrong: Array, blank: Array) -> Problem:
    expected, got = case.expected[name], ran.written[name]
    at = int(wrong[0])
    place = _place(name, expected, at)
    notes = [f"{len(wrong)} of {expected.size} elements of {name} are wrong", f"with {case.what}"]
    value = _number(expected.reshape(-1)[at])
    if blank[at]:
        message = f"{place} is never written, expected {value}"
        if BLANK in program.text and blank.all():
            line = program.text[: program.text.index(BLANK)].count("\n") + 1
            label = "the kernel does nothing yet"
            return _problem("empty", message, line, label, notes[1:], number=folder.number)
        return _problem("never written", message, _kernel_line(program), "no thread writes it", notes)
    message = f"{place} is {_number(got.reshape(-1)[at])}, expected {value}"
    help_text = HELP["nan" if np.isnan(got.reshape(-1)[at]) else "wrong"]
    writer = writer_of(program, case, name, at)
    if writer is None:
        return Problem("wrong", message, _kernel_line(program), "", tuple(notes), help_text)
    block, thread, call = writer
    return Problem("wrong", message, call.line, f"thread {thread} of block {block} writes it", tuple(notes), help_text)


def _place(name: str, array: Array, at: int) -> str:
    """Element `at` of an array, as a reader finds it."""
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(at, array.shape))}]"


def _kernel_line(program: Program) -> int:
    return program.text[: program.text.index("__global__")].count("\n") + 1


def _number(value: np.generic) -> str:
    return f"{float(np.float32(value)):.6g}" if isinstance(value, np.floating) else str(int(value))
