"""What a spec's `precision` lets a plan for elements of 16 bits do."""

from __future__ import annotations

from attngen.plan.plan import Decision
from attngen.spec.attention import AttentionSpec


def rough_functions(spec: AttentionSpec) -> bool:
    """Whether functions of scores may be the GPU's own approximations: of results in 16 bits, but of no lse, which is fp32."""
    return spec.dtype.bytes == 2 and spec.precision == "high" and not spec.lse


def precision_decisions(spec: AttentionSpec) -> tuple[Decision, ...]:
    if not rough_functions(spec):
        return ()
    because = "`precision high` allows it: errors of O up to 1e-2 of its largest element"
    return (Decision("tanh of scores", "one instruction, wrong by up to 2^-11", because),)
