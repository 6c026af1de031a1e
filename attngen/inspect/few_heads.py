"""A spec that states many heads, checked with few: its kernels have the numbers of heads as two constants, and no other place
depends on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.plan import Plan
from attngen.plan.plan import PlanRefusal
from attngen.spec.attention import AttentionSpec

KV_HEADS, GROUP = 2, 2  # at most: key/value heads, and query heads of each


def with_few_heads(spec: AttentionSpec, most_of_group: int = GROUP) -> AttentionSpec:
    """The same spec with fewer heads, if it states more; groups of one query head stay such."""
    if spec.q_heads is None or spec.kv_heads is None:
        return spec
    kv_heads, group = min(spec.kv_heads, KV_HEADS), min(spec.stated_group, most_of_group)
    return replace(spec, q_heads=kv_heads * group, kv_heads=kv_heads)


def few_heads_of(
    spec: AttentionSpec, plan: Plan, plan_for: Callable[[AttentionSpec], Plan]
) -> tuple[AttentionSpec, Plan] | None:
    """The spec with few heads, and its plan, whose kernels differ from those of `plan` in the numbers of heads alone; None if
    there is none."""
    for few in _forms(spec, plan):
        try:
            of_few = plan_for(few)
        except PlanRefusal:  # the tile does not suit so few heads
            continue
        if is_same_code(spec, plan, few, of_few):
            return few, of_few
    return None


def _forms(spec: AttentionSpec, plan: Plan) -> Iterator[AttentionSpec]:
    """Specs with fewer heads whose kernels may be those of `plan`, the fewest first: a tile, and the schedule of a keyword, may
    depend on how many query heads share a key head."""
    few = with_few_heads(spec)
    if few == spec:
        return
    yield few
    kernel = replace(spec.kernel, schedule=plan.keyword, block_q=plan.block_q, block_kv=plan.block_kv)
    yield replace(few, kernel=replace(kernel, stages=plan.stages, warps=plan.warps))
    group = 2 * GROUP
    while group < spec.stated_group:
        yield with_few_heads(spec, group)
        group *= 2


def text_for(text: str, spec: AttentionSpec, few: AttentionSpec) -> str | None:
    """The text of a kernel of `spec` with the numbers of heads of `few`; None if it does not state those of `spec`, once."""
    for name in ("q_heads", "kv_heads"):
        line = re.compile(rf"(constexpr int {name} = ){getattr(spec, name)};")
        text, count = line.subn(rf"\g<1>{getattr(few, name)};", text)
        if count != 1:
            return None
    return text


def is_same_code(spec: AttentionSpec, plan: Plan, few: AttentionSpec, plan_of_few: Plan) -> bool:
    """Whether the kernels of two specs differ in these constants alone."""
    text = text_for(emit(spec, plan).text, spec, few)
    return text is not None and strip_comments(text) == strip_comments(emit(few, plan_of_few).text)
