"""The functions of a library: for each spec a forward, one that saves what the backward reads, and the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.package.call_sizes import sizes_of_call
from attngen.plan.arch import Arch
from attngen.plan.facts import DETERMINISTIC
from attngen.plan.formulas import expression
from attngen.plan.plan import refusal
from attngen.schedules import choice_of, choose, parts_of
from attngen.spec.attention import SIZES, AttentionSpec
from attngen.spec.expr import Expr
from attngen.spec.gradient import gradients_of_call
from attngen.spec.obligations import conditions_of_call

FORWARD, SAVING, BACKWARD = "forward", "forward_saving", "backward"
MEMBERS = ("workspace", "workspace_bytes", "counter")  # members of the struct of arguments, beside those of the spec


@dataclass(frozen=True, slots=True)
class Variant:
    """A program for an architecture. It is selected for calls that fulfil `condition` and no earlier one."""

    arch: Arch
    condition: Expr
    program: Program


@dataclass(frozen=True, slots=True)
class Function:
    """What a call does: its stages in order, each by the first variant that suits the device and the call."""

    name: str
    stages: tuple[tuple[Variant, ...], ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(dict.fromkeys(variant.program for stage in self.stages for variant in stage))


@dataclass(frozen=True, slots=True)
class Packaged:
    """The functions of one spec. `wanted` names the gradients of its backward, if it has one."""

    spec: AttentionSpec
    functions: tuple[Function, ...]
    wanted: tuple[str, ...] = ()

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(dict.fromkeys(program for function in self.functions for program in function.programs))


@dataclass(frozen=True, slots=True)
class Request:
    """What a library contains of a spec. `only` is "forward", "backward" (with the forward that saves), or empty for both;
    `wanted` names the gradients, by default those of q, k and v."""

    arches: tuple[Arch, ...]
    schedule: str | None = None
    only: str = ""
    wanted: tuple[str, ...] | None = None
    deterministic: bool = DETERMINISTIC


def packaged(spec: AttentionSpec, request: Request) -> Packaged:
    """The functions of `spec`. Raises PlanRefusal for what cannot be packaged, GradientError for a name without gradient."""
    _refuse(spec)
    functions: list[Function] = []
    wanted: tuple[str, ...] = ()
    if request.only != BACKWARD:
        functions.append(Function(FORWARD, (_stage(spec, request),)))
    if request.only != FORWARD:
        _, wanted = gradients_of_call(spec, request.wanted)
        backward = Function(BACKWARD, tuple(_stages_of_backward(spec, request, wanted)))
        if any(t.argument in ("lse", "lse_rest") for p in backward.programs for t in p.of_role("input")):
            functions.append(Function(SAVING, (_stage(spec, request, saves=True),)))
        elif request.only:
            functions.append(Function(FORWARD, (_stage(spec, request),)))
        functions.append(backward)
    return Packaged(spec, tuple(functions), wanted)


def _refuse(spec: AttentionSpec) -> None:
    """Raises PlanRefusal for a spec whose calls the library could not check, or whose names its struct has."""
    taken = {*MEMBERS, *sizes_of_call(spec).sizes} - {*SIZES}
    for name in (*(i.name for i in spec.inputs), *(p.name for p in spec.params), *spec.free_dims):
        if name in taken:
            what = f"`{name}` of attention `{spec.name}` is a member of a call's struct"
            raise refusal("input", what, "it says where the arrays and the memory of a call are", "rename it in the spec")
    if any(conditions is None for _, conditions in conditions_of_call(spec)):
        what = f"the library could not check the calls of attention `{spec.name}`"
        why = "the bounds of an index or a divisor do not fit 64 bits"
        raise refusal("mask", what, why, "use smaller constants, or clamp the index")


def _stage(spec: AttentionSpec, request: Request, gradients: tuple[str, ...] = (), saves: bool = False) -> tuple[Variant, ...]:
    """The variants for all architectures, those with features of their own first."""
    found = []
    for arch in sorted(request.arches, key=lambda a: (a.name.endswith("a"), int(a.name.strip("sm_a"))), reverse=True):
        choice = choice_of(spec, arch, request.schedule, gradients, request.deterministic)
        for condition, plan in choice.conditions(saves):
            found.append(Variant(arch, expression(condition), emit(spec, plan)))
    return tuple(found)


def _stages_of_backward(spec: AttentionSpec, request: Request, wanted: tuple[str, ...]) -> Iterator[tuple[Variant, ...]]:
    """A stage for each part of the gradients. Architectures may divide them differently: then all are one part."""
    parts = {parts_of(spec, arch, request.schedule, wanted, request.deterministic) for arch in request.arches}
    for part in parts.pop() if len(parts) == 1 else (wanted,):
        choose(spec, request.arches[0], request.schedule, direction="backward", wanted=part)  # raises GradientError
        yield _stage(spec, request, part)
