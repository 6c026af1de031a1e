"""A file of `attngen build` that somebody has changed: which kernel it holds, and whether the plan can launch it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from attngen.diagnostics import ArgumentError
from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.emit.kernel_source import KernelSource
from attngen.plan import PlanRefusal, choose, find_arch
from attngen.plan.arch import ARCHES, Arch
from attngen.plan.choose import default_arch
from attngen.spec.attention import HOPPER_RUNGS, RUNGS, AttentionSpec

_ENTRY = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^()]*\)\s*)?(?:void\s+)?(\w+)\s*\(([^()]*)\)")
_ARCH = re.compile(r"^//\s*Plan, for (sm_\w+)", re.M)
_CONSTANT = re.compile(r"constexpr int (\w+) = (\d+);")
LAUNCHED = ("BLOCK_Q", "THREADS", "THREADS_D")  # constants that the plan's grids and blocks follow


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """The text of a file, and the spec, rung and architecture whose kernel it holds."""

    path: Path
    text: str
    spec: AttentionSpec
    rung: str
    arch: Arch


def changed_file(path: Path, specs: Sequence[AttentionSpec], rung: str | None, arch: str | None) -> ChangedFile:
    """The file at `path`, which must hold a kernel of one of `specs`, of `rung` and `arch` if these are given.

    Raises ArgumentError that says what the file holds and what was expected.
    """
    text = path.read_text(errors="replace")
    held = _Held(path, strip_comments(text))
    rung = None if rung == "auto" else rung
    if not held.entries:
        expected = " or ".join(f"{spec.name}_{one}.cu" for spec in specs for one in ([rung] if rung else RUNGS))
        raise ArgumentError(f"{path} has no __global__ function; expected a file of `attngen build`, such as {expected}")
    built_for = find_arch(stated[1]) if (stated := _ARCH.search(text)) else None
    _check_arch(path, built_for, arch)
    target = find_arch(arch) if arch else built_for
    likely = _likely_rungs(path, text)
    misfit = None
    for one in _possible(specs, likely, target):
        if not {e.name for e in one.source.entry_points} <= {*held.entries}:
            continue
        wrong = held.misfit(one.source)
        if not wrong and rung not in (None, one.rung):
            raise ArgumentError(f"{path} holds the {one.rung} kernel of {one.spec.name}; say --kernel {one.rung}")
        if not wrong:
            return ChangedFile(path, text, one.spec, one.rung, one.arch)
        misfit = misfit or wrong
    raise ArgumentError(misfit or _unknown(path, specs, rung, target, [*held.entries]))


def _check_arch(path: Path, built_for: Arch | None, wanted: str | None) -> None:
    target = find_arch(wanted) if wanted else None
    if built_for is not None and target is not None and built_for != target:
        raise ArgumentError(
            f"{path} was built for {built_for.name}, and this run is for {target.name}; build it with --arch {target.name}, "
            f"or run it with --arch {built_for.name}"
        )


def _likely_rungs(path: Path, text: str) -> list[str]:
    """All rungs, those first that the file's first line or name says."""
    said = f"{text.lstrip().splitlines()[0]} {path.stem}"
    return sorted((*RUNGS, *HOPPER_RUNGS), key=lambda rung: re.search(rf"[, _]{rung}\b", said) is None)


@dataclass(frozen=True, slots=True)
class _Possible:
    spec: AttentionSpec
    rung: str
    arch: Arch
    source: KernelSource


def _possible(specs: Sequence[AttentionSpec], rungs: Sequence[str], target: Arch | None) -> Iterator[_Possible]:
    """Every kernel that the file may hold: for the architecture that is known, or the usual one of a rung and then all."""
    for usual in (True, False) if target is None else (True,):
        for spec, rung in product(specs, rungs):
            arch = find_arch(default_arch(rung))
            assert arch is not None
            others = [other for other in ARCHES.values() if other != arch]
            for one in [target or arch] if usual else others:
                try:
                    yield _Possible(spec, rung, one, emit(spec, choose(spec, one, rung)))
                except PlanRefusal:
                    continue


class _Held:
    """The entry points of a file, with their parameters as written, and its constants."""

    def __init__(self, path: Path, code: str) -> None:
        self.path = path
        self.entries = dict(_ENTRY.findall(code))
        self.constants = dict(_CONSTANT.findall(code))

    def misfit(self, source: KernelSource) -> str:
        """Why the plan of `source` cannot launch the file; "" if it can."""
        for entry in source.entry_points:
            names, wanted = _names(self.entries[entry.name]), [p.name for p in entry.parameters]
            if names != wanted:
                return (
                    f"{self.path}: the parameters of {entry.name} are not those that the plan for {source.arch} passes: "
                    f"{'; '.join(_differences(names, wanted))}. The launch stays that of the spec: build the file again"
                )
        ours = dict(_CONSTANT.findall(source.text))
        for name in LAUNCHED:
            if self.constants.get(name) != ours.get(name):
                return (
                    f"{self.path}: {name} is {self.constants.get(name, 'missing')}, and the plan for {source.arch} launches "
                    f"the kernel for {ours.get(name, 'none')}; state the tile in the spec and build the file again"
                )
        return ""


def _names(parameters: str) -> list[str]:
    """The names of a list of C++ parameters without parentheses or commas inside."""
    return [re.findall(r"\w+", one)[-1] for one in parameters.split(",") if one.strip()]


def _differences(names: Sequence[str], wanted: Sequence[str]) -> Iterator[str]:
    missing, extra = ([n for n in a if n not in b] for a, b in ((wanted, names), (names, wanted)))
    if missing:
        yield f"missing {', '.join(missing)}"
    if extra:
        yield f"unknown {', '.join(extra)}"
    if not missing and not extra:
        yield f"expected the order {', '.join(wanted)}"


def _unknown(path: Path, specs: Sequence[AttentionSpec], rung: str | None, target: Arch | None, found: Sequence[str]) -> str:
    possible = _possible(specs, [rung] if rung else [*RUNGS, *HOPPER_RUNGS], target)
    expected = dict.fromkeys(", ".join(e.name for e in one.source.entry_points) for one in possible)
    names = ", ".join(spec.name for spec in specs)
    if not expected:
        assert target is not None
        return f"{path} holds {', '.join(found)}; {target.name} cannot have the {rung} kernel of {names}"
    return f"{path} holds {', '.join(found)}; {names} has {'; or '.join(expected)}. Name the spec that the file was built from"
