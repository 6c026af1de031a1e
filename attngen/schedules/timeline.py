"""What runs beside what in each schedule, as bars on lanes: a schematic with made-up durations, drawn from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec

TILES = 4  # tiles that are drawn
COPY, PRODUCT, SOFTMAX, STORE = "copy", "product", "softmax", "store"


@dataclass(frozen=True, slots=True)
class Bar:
    """Work from `start` on for `length` units of time. `kind` is one of COPY, PRODUCT, SOFTMAX, STORE."""

    start: float
    length: float
    label: str
    kind: str

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bars by lane, the lanes from top to bottom, and what they show in a sentence."""

    lanes: dict[str, tuple[Bar, ...]]
    says: str

    @property
    def end(self) -> float:
        return max(bar.end for bars in self.lanes.values() for bar in bars)


def timeline(spec: AttentionSpec, plan: Plan) -> Timeline:
    weights = "score" if spec.normalize == "none" else spec.normalize  # what comes between the two products
    drawn: Timeline = plan.schedule.timeline(plan, weights)
    return replace(drawn, says=f"{drawn.says} A schematic drawn from the plan, not from a run; lengths are not measured.")


def of_a_tile(start: float, n: int, weights: str) -> tuple[Bar, Bar, Bar]:
    return Bar(start, 1, f"Q K{n}", PRODUCT), Bar(start + 1, 1, weights, SOFTMAX), Bar(start + 2, 1, f"P V{n}", PRODUCT)


def copies_of(stages: int) -> tuple[Bar, ...]:
    """Beside tiles that start at 1, 4, 7, ...: with one stage V under its own Q K^T, then the next K; with two both at once."""
    copies = [Bar(0, 1, "K0" if stages == 1 else "K0, V0", COPY)]
    for n in range(TILES):
        start = 1 + 3 * n
        if stages == 1:
            copies.append(Bar(start, 1, f"V{n}", COPY))
            if n + 1 < TILES:
                copies.append(Bar(start + 1, 1, f"K{n + 1}", COPY))
        elif n + 1 < TILES:
            copies.append(Bar(start, 1.4, f"K{n + 1}, V{n + 1}", COPY))
    return tuple(copies)
