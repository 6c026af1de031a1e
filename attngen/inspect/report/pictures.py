"""The geometry of the page's pictures, which the templates draw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.inspect.call import Call
from attngen.inspect.work import roofline
from attngen.keywords import ScheduleName
from attngen.plan import Plan
from attngen.plan.plan import PlanRefusal
from attngen.schedules import choose, schedules_for
from attngen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis from `low` to `high` over `size` units of the picture."""

    low: float
    high: float
    size: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(share, 0.0), 1.0) * self.size

    def ticks(self) -> Iterator[tuple[float, str]]:
        """The powers of ten on the axis."""
        for power in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1):
            yield self.at(10.0**power), f"{10.0**power:g}"


def plans_beside(spec: AttentionSpec, plan: Plan) -> dict[ScheduleName, Plan]:
    """The plans of all schedules on the architecture of `plan`, which is one of them, in its direction and with its gradients;
    those left out whose tile, as the spec states it, the architecture cannot take."""
    plans: dict[ScheduleName, Plan] = {}
    for schedule in schedules_for(spec, plan.arch, plan.wanted):
        try:
            other = choose(spec, plan.arch, schedule, wanted=plan.wanted)
            plans[schedule] = plan if schedule == plan.keyword else other
        except PlanRefusal:
            continue
    return plans


@dataclass(frozen=True, slots=True)
class SchedulePoint:
    """The roofline's limit for one schedule: a bound, not a measurement."""

    schedule: str
    is_shown: bool  # the page's own
    intensity: float
    tflops: float
    microseconds: float
    by_memory: bool


@dataclass(frozen=True, slots=True)
class RooflinePlot:
    """Roofs in TFLOP/s over operations a byte, and every schedule of the spec under them."""

    gpu: str
    bandwidth: float  # TB/s
    x: Axis
    y: Axis
    roofs: tuple[tuple[str, float], ...]  # units, TFLOP/s; the highest first
    points: tuple[SchedulePoint, ...]


def roofline_plot(call: Call, size: tuple[float, float]) -> RooflinePlot:
    spec, plan, found = call.spec, call.plan, []
    for schedule, other in plans_beside(spec, plan).items():
        cost = replace(call, plan=other).work()
        found.append((schedule, cost, roofline(spec, other, cost)))
    roofs = {roof.units: roof.peak / 1e12 for _, _, roof in found}
    points = tuple(
        SchedulePoint(one, one == plan.keyword, cost.intensity, roof.reachable / 1e12, roof.microseconds, roof.by_memory)
        for one, cost, roof in found
    )
    top = 10.0 ** math.ceil(math.log10(max(roofs.values()) * 1.2))
    drawn = [p.intensity for p in points if p.intensity]  # none if the mask allows nothing
    least = min([1.0, *drawn])
    most = max([10.0 ** math.ceil(math.log10(top / plan.arch.bandwidth_tb_s)), *(2 * i for i in drawn)])
    x = Axis(10.0 ** math.floor(math.log10(least)), most, size[0])
    y = Axis(10.0 ** math.floor(math.log10(x.low * plan.arch.bandwidth_tb_s)), top, size[1])
    highest = tuple(sorted(roofs.items(), key=lambda pair: -pair[1]))
    return RooflinePlot(plan.arch.gpu, plan.arch.bandwidth_tb_s, x, y, highest, points)
