"""A spec that states many heads, checked with few: its kernels have the numbers of heads as two constants, and no other place
depends on them."""

from __future__ import annotations

import re
from dataclasses import replace

from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec

KV_HEADS, GROUP = 2, 2  # at most: key/value heads, and query heads of each


def with_few_heads(spec: AttentionSpec) -> AttentionSpec:
    """The same spec with fewer heads, if it states more; groups of one query head stay such."""
    if spec.q_heads is None or spec.kv_heads is None:
        return spec
    kv_heads, group = min(spec.kv_heads, KV_HEADS), min(spec.q_heads // spec.kv_heads, GROUP)
    return replace(spec, q_heads=kv_heads * group, kv_heads=kv_heads)


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
