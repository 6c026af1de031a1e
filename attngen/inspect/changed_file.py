"""A changed file of `attngen build`: the kernel that it contains, and whether the plan, and the manifest beside it, can launch
it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from attngen.diagnostics import ArgumentError
from attngen.emit.abi import map_name
from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect.manifest_beside import contradiction
from attngen.keywords import PORTABLE_SCHEDULES, SCHEDULE_NAMES
from attngen.plan import PlanRefusal, find_arch
from attngen.plan.arch import ARCHES, Arch
from attngen.plan.facts import DETERMINISTIC
from attngen.schedules import choose, default_arch
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV, GradientError, differentiable, gradient_argument

_ATTRIBUTE = r"__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*"  # such as __launch_bounds__(THREADS)
_ENTRY = re.compile(rf'(extern\s+"C"\s+)?(?:{_ATTRIBUTE})*__global__\s+(?:void\s+|{_ATTRIBUTE})*(\w+)\s*\(([^()]*)\)')
_BOUNDS = re.compile(r"__launch_bounds__\s*\(([^,()]*)[^()]*\)\s*(?:void\s+)?(\w+)\s*\(")
_ENTRY_BLOCK = re.compile(r'extern\s+"C"\s*\{')
_ARCH = re.compile(r"^//\s*Plan, for (sm_\w+)", re.M)
_CONSTANT = re.compile(r"constexpr int (\w+) = (\d+);")
MAX_BYTES = 4 * 2**20
LAUNCHED = ("BLOCK_Q", "THREADS", "THREADS_D")  # constants that determine grids and blocks


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """The text of a file, and the spec, schedule and architecture of its kernel; the gradients that it computes, if any."""

    path: Path
    text: str
    spec: AttentionSpec
    schedule: str
    arch: Arch
    wanted: tuple[str, ...] = ()
    deterministic: bool = DETERMINISTIC


def changed_file(
    path: Path, specs: Sequence[AttentionSpec], schedule: str | None, arch: str | None, deterministic: bool = False
) -> ChangedFile:
    """The file at `path`, which must contain a kernel of one of `specs`, of `schedule` and `arch` if these are given. If it
    is `deterministic`, it must be a backward whose gradients have the same bits in every run. A manifest beside it must say
    what the plan says.

    Raises ArgumentError, which says what the file or the manifest contains and what was expected.
    """
    text = read_source(path)
    contents = _Contents(path, text)
    schedule = None if schedule == "auto" else schedule
    if not contents.entries:
        expected = " or ".join(
            f"{spec.name}_{one}.cu" for spec in specs for one in ([schedule] if schedule else PORTABLE_SCHEDULES)
        )
        raise ArgumentError(f"{path} has no __global__ function; expected a file of `attngen build`, such as {expected}")
    built_for = find_arch(stated[1]) if (stated := _ARCH.search(text)) else None
    _check_arch(path, built_for, arch)
    target = find_arch(arch) if arch else built_for
    likely = _likely_schedules(path, text)
    misfit = contradicted = ""
    for one, source in _possible(specs, likely, target, contents):
        if deterministic and not one.deterministic:
            continue
        if not {e.name for e in source.kernels} <= {*contents.entries}:
            continue
        wrong = contents.misfit(source)
        if not wrong and schedule not in (None, one.schedule):
            raise ArgumentError(f"{path} contains the {one.schedule} kernel of {one.spec.name}; add --kernel {one.schedule}")
        if wrong:
            misfit = misfit or wrong
        elif contradicts := contradiction(path, source):
            contradicted = contradicted or contradicts
        else:
            return one
    if contradicted:
        raise ArgumentError(contradicted)
    if deterministic:
        found = changed_file(path, specs, schedule, arch)
        what = "a backward whose gradients differ from run to run" if found.wanted else "a forward"
        raise ArgumentError(f"{path} contains {what}; leave out --deterministic, or build a backward with it")
    raise ArgumentError(misfit or _unknown(path, specs, schedule, target, contents))


def read_source(path: Path) -> str:
    """The text of a CUDA file, without a byte-order mark, with the line ends of Unix. Raises ArgumentError."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        raise ArgumentError(f"{path} has {len(data):,} bytes; a file of `attngen build` has at most {MAX_BYTES:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ArgumentError(f"{path}:{line}: this is not UTF-8 text; save the file with the encoding UTF-8") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ArgumentError(f"{path}:{line}: a character with the code 0; save the file as UTF-8 text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_arch(path: Path, built_for: Arch | None, wanted: str | None) -> None:
    target = find_arch(wanted) if wanted else None
    if built_for is not None and target is not None and built_for != target:
        raise ArgumentError(
            f"{path} was built for {built_for.name}, and this run is for {target.name}; build it with --arch {target.name}, "
            f"or run it with --arch {built_for.name}"
        )


def _likely_schedules(path: Path, text: str) -> list[str]:
    """All schedules; first those that the file's first line or its name mentions."""
    said = f"{text.lstrip().splitlines()[0]} {path.stem}"
    return sorted(SCHEDULE_NAMES, key=lambda schedule: re.search(rf"[, _]{schedule}\b", said) is None)


def _possible(
    specs: Sequence[AttentionSpec], schedules: Sequence[str], target: Arch | None, contents: _Contents
) -> Iterator[tuple[ChangedFile, Program]]:
    """Every kernel that the file may contain, and its program: for `target`, or else for the default architecture of a
    schedule and then all. Those of a file that writes gradients are backwards."""
    for usual in (True, False) if target is None else (True,):
        for spec, schedule in product(specs, schedules):
            arch = ARCHES[default_arch(schedule)]
            others = [other for other in ARCHES.values() if other != arch]
            for one in [target or arch] if usual else others:
                wanted = contents.gradients(spec)
                for deterministic in (DETERMINISTIC, not DETERMINISTIC) if wanted else (DETERMINISTIC,):
                    try:
                        plan = choose(spec, one, schedule, wanted=wanted, deterministic=deterministic)
                    except (PlanRefusal, GradientError):
                        continue
                    kernel = ChangedFile(contents.path, contents.text, spec, schedule, one, wanted, deterministic)
                    yield kernel, emit(spec, plan)


class _Contents:
    """The entry points of a file, with the text of their parameters, and its constants."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, code = path, text, strip_comments(text)
        found = _ENTRY.findall(code)
        self.entries = {name: parameters for _, name, parameters in found}
        self.bounds = {name: bound.strip() for bound, name in _BOUNDS.findall(code)}
        in_c = _ENTRY_BLOCK.search(code) is not None
        self.mangled = {name for is_c, name, _ in found if not (is_c or in_c)}
        self.constants = dict(_CONSTANT.findall(code))

    def gradients(self, spec: AttentionSpec) -> tuple[str, ...]:
        """The gradients of `spec` that the file writes, by the names of its kernels' parameters."""
        written = {name for parameters in self.entries.values() for name in _names(parameters)}
        tensors = {"q": "dQ", "k": "dK", "v": "dV"}
        of = {n: tensors.get(n, gradient_argument(n)) for n in (*QKV, *differentiable(spec))}
        return tuple(n for n, tensor in of.items() if {tensor, map_name(tensor)} & written)

    def misfit(self, source: Program) -> str:
        """The reason why the plan of `source` cannot launch the file; "" if it can."""
        for entry in source.kernels:
            names, wanted = _names(self.entries[entry.name]), [p.name for p in entry.parameters]
            if names != wanted:
                return (
                    f"{self.path}: the parameters of {entry.name} are not those that the plan for {source.arch} passes: "
                    f"{'; '.join(_differences(names, wanted))}. The launch stays that of the spec: build the file again"
                )
            types = [_type(one) for one in self.entries[entry.name].split(",") if one.strip()]
            passed = [_type(f"{p.ctype} {p.name}") for p in entry.parameters]
            for name, expected, theirs in zip(wanted, passed, types, strict=True):
                if expected != theirs:
                    return (
                        f"{self.path}: the parameter {name} of {entry.name} has the type {theirs}, and the plan for "
                        f"{source.arch} passes {expected}; build the file again for the element type of this run"
                    )
            bound = self.bounds.get(entry.name, "")
            most, threads = self.constants.get(bound, bound), prod(entry.block)
            if most.isdecimal() and int(most) < threads:
                return (
                    f"{self.path}: {entry.name} has the launch bound {bound}, and the plan for {source.arch} launches "
                    f"blocks of {threads} threads"
                )
            if entry.name in self.mangled:
                return f'{self.path}: {entry.name} is not declared extern "C": it cannot be found by its name'
        ours = dict(_CONSTANT.findall(source.text))
        for name in LAUNCHED:
            if self.constants.get(name) != ours.get(name):
                return (
                    f"{self.path}: {name} is {self.constants.get(name, 'missing')}, and the plan for {source.arch} launches "
                    f"the kernel for {ours.get(name, 'none')}; state the tile in the spec and build the file again"
                )
        return ""


def _type(parameter: str) -> str:
    """The type of a C++ parameter, in one spelling: without its name, the kernel's promises about it, and `const` of values."""
    words = re.findall(r"\w+|[*&]", parameter)[:-1]
    kept = [word for word in words if word not in ("__restrict__", "__grid_constant__")]
    if "*" not in kept:
        kept = [word for word in kept if word != "const"]
    return " ".join(kept).replace(" *", "*")


def _names(parameters: str) -> list[str]:
    """The names in a list of C++ parameters whose types contain no parentheses or commas."""
    return [re.findall(r"\w+", one)[-1] for one in parameters.split(",") if one.strip()]


def _differences(names: Sequence[str], wanted: Sequence[str]) -> Iterator[str]:
    missing, extra = ([n for n in a if n not in b] for a, b in ((wanted, names), (names, wanted)))
    if missing:
        yield f"missing {', '.join(missing)}"
    if extra:
        yield f"unknown {', '.join(extra)}"
    if not missing and not extra:
        yield f"expected the order {', '.join(wanted)}"


def _unknown(path: Path, specs: Sequence[AttentionSpec], schedule: str | None, target: Arch | None, contents: _Contents) -> str:
    possible = _possible(specs, [schedule] if schedule else SCHEDULE_NAMES, target, contents)
    found = [*contents.entries]
    expected = dict.fromkeys(", ".join(e.name for e in source.kernels) for _, source in possible)
    names = ", ".join(spec.name for spec in specs)
    near = max(expected, key=lambda one: len({*one.split(", ")} & {*found}), default="")
    needed = near.split(", ")
    lacking = [one for one in needed if one not in found]
    if 0 < len(lacking) < len(needed):
        others = [one for one in found if one not in needed]
        renamed = f" (it contains {', '.join(others)})" if others else ""
        return f"{path} lacks the kernel {' and '.join(lacking)} that {names} launches{renamed}"
    if not expected:
        assert target is not None
        return f"{path} contains {', '.join(found)}; {target.name} does not support the {schedule} kernel of {names}"
    wanted = "; or ".join(expected)
    return f"{path} contains {', '.join(found)}; {names} has {wanted}. Name the spec that the file was built from"
