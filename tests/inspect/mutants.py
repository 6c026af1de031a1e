"""Wrong kernels derived from a spec: a part of the spec or of its tile bounds is removed or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect.wrong_bounds import changed_bounds
from attngen.plan import Plan
from attngen.plan.mask_bounds import MaskBounds, mask_bounds
from attngen.reference.alternatives import alternatives
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import inputs_in


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel with one change, in words. It may read less than the original does."""

    what: str
    source: Program


def mutants(spec: AttentionSpec, plan: Plan, of_bounds: bool = True) -> Iterator[Mutant]:
    """The mutants whose code differs from the original; without `of_bounds` those of the spec alone."""
    original = emit(spec, plan)
    seen = {strip_comments(original.text)}
    for what, changed, bounds in (*_of_spec(spec, plan), *(_of_bounds(spec, plan) if of_bounds else ())):
        if _reads(changed) == _reads(spec):
            source = emit(changed, replace(plan, bounds=bounds))
        else:  # what the plan stages of captured tensors may not be read any more
            source = emit(changed, choose(changed, plan.arch, plan.keyword))
        code = strip_comments(source.text)
        if code not in seen:
            seen.add(code)
            yield Mutant(what, source)


def _reads(spec: AttentionSpec) -> frozenset[str]:
    return inputs_in(*(expr for expr in (spec.mask, spec.score, spec.sink) if expr is not None))


Changed = tuple[str, AttentionSpec, MaskBounds]


def _of_spec(spec: AttentionSpec, plan: Plan) -> Iterator[Changed]:
    """A mask is changed alone, as by somebody who edits the line, and with the tiles that follow from it."""
    for one in alternatives(spec):
        yield str(one), one.spec, plan.bounds
        if one.keyword == "mask":
            yield f"{one}, tiles too", one.spec, mask_bounds(one.spec, (plan.block_q, plan.block_kv))


def _of_bounds(spec: AttentionSpec, plan: Plan) -> Iterator[Changed]:
    if plan.schedule.is_tiled:  # others visit every key
        for what, bounds in changed_bounds(plan.bounds):
            yield what, spec, bounds
