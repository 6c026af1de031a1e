"""The specs, architectures, params and changed files of a command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from attngen.cli.common import colored, words

if TYPE_CHECKING:
    from attngen.emit.comments import Comments
    from attngen.emit.program import Program
    from attngen.inspect.changed_file import ChangedFile
    from attngen.language import Loaded
    from attngen.plan import Plan, Problem
    from attngen.plan.arch import Arch
    from attngen.spec.attention import AttentionSpec

UNKNOWN = (
    "note: the emulated device has no headers, and knows the functions of CUDA that docs/trace.md lists; run others on a GPU"
)
LOADED: list[Loaded] = []  # the specs of this command: a refused call is reported at their source positions


def load_specs(spec: str) -> list[Loaded]:
    """The attentions that SPEC names, as `attngen.load` does; - is /dev/stdin. Raises ArgumentError."""
    from attngen.language.load import load_path
    from attngen.shipped import find_spec

    loaded = list(load_path(*find_spec(_path(spec))))
    LOADED[:] = loaded
    for warning in (found for one in loaded for found in one.suspicions()):
        click.echo(warning.render(color=colored(sys.stderr)), err=True)
    return loaded


def _path(spec: str) -> str:
    return "/dev/stdin" if spec == "-" else spec


def load_one_spec(spec: str) -> Loaded:
    """The only attention that SPEC names. Raises UsageError if there are several."""
    from attngen.language.load import choices

    loaded = load_specs(spec)
    if len(loaded) > 1:
        named = choices(_path(spec), [one.spec for one in loaded])
        raise click.UsageError(f"{spec} has {len(loaded)} attentions; name one of them: {named}")
    return loaded[0]


class Gradients(NamedTuple):
    """What --backward, --wanted and --deterministic say: the gradients of a backward, or none, those of a forward."""

    backward: bool = False
    wanted: str | None = None
    deterministic: bool = False

    def of(self, spec: AttentionSpec) -> tuple[str, ...]:
        """The names of the gradients. Raises BadParameter for options that a forward has not, GradientError."""
        from attngen.spec.gradient import QKV, differentiable, wanted_gradients

        if self.backward:
            return wanted_gradients(spec, (*QKV, *differentiable(spec)) if self.wanted is None else words(self.wanted))
        if self.wanted is not None:
            raise click.BadParameter("gradients are those of a backward; add --backward", param_hint="--wanted")
        if self.deterministic:
            raise click.BadParameter("only a backward can be deterministic; add --backward", param_hint="--deterministic")
        return ()


FORWARD = Gradients()


def arch_named(name: str | None, kernel: str | None, loaded: Sequence[Loaded]) -> Arch:
    """The architecture called `name`; by default, one that supports the schedule `kernel`, or else those of the specs."""
    from attngen.schedules import default_arch

    stated = [kernel] if kernel else [one.spec.kernel.schedule for one in loaded]
    return arch_known(default_arch(*stated) if name is None else name)


def arches_named(names: str | None, kernel: str | None, loaded: Sequence[Loaded]) -> list[Arch]:
    """The architectures in `names`, each once; by default, that of `arch_named`."""
    if names is None:
        return [arch_named(None, kernel, loaded)]
    return list(dict.fromkeys(map(arch_known, names.split(","))))


def arch_known(name: str) -> Arch:
    """The architecture called `name`."""
    from attngen.plan.arch import ARCHES, find_arch

    found = find_arch(name.strip())
    if found is None:
        raise click.BadParameter(
            f"unknown architecture {name.strip() or '(no name)'}; known: {', '.join(ARCHES)}", param_hint="--arch"
        )
    return found


def source_of(
    one: Loaded,
    arch: Arch,
    kernel: str | None,
    gradients: Gradients = FORWARD,
    comments: Comments = "brief",
    problem: Problem | None = None,
    saves_lse: bool = False,
) -> tuple[Plan, Program]:
    """(plan, Program) of one attention: of its forward, for the lengths of `problem` if they are known, or of the backward that
    computes `gradients`. With `saves_lse` the forward also writes what a backward reads. Refusals of the planner
    point at the spec's text."""
    from attngen.device.compiled_templates import keep_compiled_templates
    from attngen.emit.emitter import emit
    from attngen.schedules import choose

    keep_compiled_templates()
    wanted = gradients.of(one.spec)
    with pointing_at(one):
        plan = choose(one.spec, arch, kernel, problem, saves_lse, wanted=wanted, deterministic=gradients.deterministic)
    return plan, emit(one.spec, plan, comments)


def own_problem(
    spec: AttentionSpec, arch: Arch, kernel: str | None, q_len: int, kv_len: int, gradients: Gradients = FORWARD
) -> Problem | None:
    """The problem of a call with these lengths if `auto` has a plan of their own for them: few rows and many keys, or short
    rows of many heads. Raises PlanRefusal."""
    from attngen.plan import Problem
    from attngen.schedules import choice_of

    # only lengths matter here, and how many heads share keys
    problem = Problem(heads=1, rows=q_len, keys=kv_len, multiprocessors=1, group=spec.stated_group)
    choice = choice_of(spec, arch, kernel, gradients.of(spec), gradients.deterministic)
    return problem if choice.has_own(problem) else None


@contextmanager
def pointing_at(one: Loaded) -> Iterator[None]:
    """A context in which refusals of the planner point at the spec's text."""
    from attngen.diagnostics import DiagnosticError

    try:
        yield
    except DiagnosticError as error:
        raise error.located(one.spans) from None


def schedules_named(
    kernel: str | None, spec: AttentionSpec, wanted: tuple[str, ...] = (), arch: Arch | None = None
) -> tuple[str, ...]:
    """The schedule `kernel`; by default, those that every architecture supports, and the one that the spec states, but none
    whose head sizes or element types do not suit the spec, if others do. With
    `wanted` those of them that compute these gradients on `arch`; if there are none, all, which refuse with the reason."""
    from attngen.keywords import PORTABLE_SCHEDULES
    from attngen.schedules import SCHEDULES, schedules_for

    if kernel is not None:
        return (kernel,)
    stated = spec.kernel.schedule
    suited = {s.keyword for s in SCHEDULES if next(s.limits(spec), None) is None}
    portable = tuple(s for s in PORTABLE_SCHEDULES if s in suited) or PORTABLE_SCHEDULES
    every = tuple(dict.fromkeys((*portable, *(() if stated == "auto" else (stated,)))))
    if not wanted or arch is None:
        return every
    suitable = schedules_for(spec, arch, wanted)
    return tuple(schedule for schedule in every if schedule in suitable) or every


def known_params(spec: AttentionSpec, given: tuple[str, ...]) -> dict[str, int | float]:
    """The values of --param. Raises ArgumentError for a name that is not a param of `spec` and for a value of the wrong type,
    BadParameter if a param without default is missing."""
    from attngen.device.params import check_params, refuse_unknown

    values: dict[str, int | float] = {}
    for text in given:
        key, _, value = text.partition("=")
        if key in values:
            raise click.BadParameter(f"`{key}` is given twice", param_hint="--param")
        try:
            values[key] = float(value) if any(c in value for c in ".einf") else int(value)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not of the form NAME=NUMBER", param_hint="--param") from None
    refuse_unknown(list(values), [p.name for p in spec.params])
    for p in spec.params:
        if p.default is None and p.name not in values:
            raise click.BadParameter(f"the param `{p.name}` has no default; add --param {p.name}=NUMBER", param_hint="--param")
    return check_params({p.name: (str(p.type), p.default) for p in spec.params if p.name in values}, values)


class Chosen(NamedTuple):
    """What a command runs: what its options say, or the kernel in the file of --source. `backward`: its backward, its forward,
    or both (None)."""

    loaded: list[Loaded]
    kernel: str | None
    arch: str | None
    backward: bool | None
    gradients: Gradients
    changed: ChangedFile | None = None

    @property
    def text(self) -> str | None:
        """The CUDA text that replaces the emitted one."""
        return None if self.changed is None else self.changed.text

    def by_source(self, source: Path | None) -> Chosen:
        """The same, by the file of --source if there is one. Raises ArgumentError if it contains a kernel of none of the
        attentions, and BadParameter if it is not the backward or forward that the command asks for."""
        from attngen.inspect.changed_file import changed_file

        if source is None:
            return self
        stated = self.gradients
        changed = changed_file(source, [one.spec for one in self.loaded], self.kernel, self.arch, stated.deterministic)
        is_backward = bool(changed.wanted)
        has = f"{changed.path} contains a {'backward' if is_backward else 'forward'}"
        if self.backward is not None and self.backward != is_backward:
            raise click.BadParameter(has, param_hint="--backward" if self.backward else "--forward")
        if stated.wanted is not None and Gradients(is_backward, stated.wanted).of(changed.spec) != changed.wanted:
            raise click.BadParameter(f"{has} that computes {', '.join(changed.wanted)}", param_hint="--wanted")
        gradients = Gradients(True, ",".join(changed.wanted), changed.deterministic) if is_backward else FORWARD
        loaded = [one for one in self.loaded if one.spec == changed.spec]
        return Chosen(loaded, changed.schedule, changed.arch.name, is_backward, gradients, changed)


@contextmanager
def compilation_errors_in(changed: ChangedFile | None) -> Iterator[None]:
    """A context in which errors of compiling the file of --source name that file. Raises ArgumentError for them."""
    from attngen.device.arrays import ArgumentError
    from attngen.device.protocol import CompilationError

    try:
        yield
    except CompilationError as error:
        if changed is None:
            raise
        log = re.sub(rf"(?<![\w./-]){changed.spec.name}_{changed.schedule}\.cu\b", str(changed.path), error.log)
        lines = log.strip().splitlines()
        own = [line for line in lines if line.startswith(f"{changed.path}:")]
        if any("error: " in line for line in own):  # without the emulated device's own files, and lines quoted from them
            lines = own
        hint = f"\n{UNKNOWN}" if any(words in log for words in ("was not declared", "No such file", "undeclared")) else ""
        raise ArgumentError("\n".join([f"{changed.path} does not compile:", *lines]) + hint) from None
