"""What pages show of this schedule for products of 8 bits: its loops."""

from __future__ import annotations

from attngen.emit.loops import Loop
from attngen.plan.plan import Plan
from attngen.schedules.hopper import shown
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    return shown.loops(spec, plan)
