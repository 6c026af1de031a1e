"""The geometry of the page's pictures: what is drawn where. The templates draw it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from attngen.inspect.work import Roofline, Work, roofline, tile_kinds, work
from attngen.plan import Plan, choose
from attngen.plan.choose import rungs_for
from attngen.plan.plan import PlanRefusal
from attngen.plan.tile_map import EMPTY, FULL, PARTIAL
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec, Rung

MOST_TILES = 64  # rows and columns of the map that are drawn
KINDS = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tiles of one kind in a row of the map."""

    row: int
    column: int
    count: int
    kind: str
    says: str


@dataclass(frozen=True, slots=True)
class TileMap:
    """The tiles of one head. `counts` is of all of them, `runs` of the first `rows` x `columns`."""

    rows: int
    columns: int
    runs: tuple[Run, ...]
    counts: dict[str, int]
    is_whole: bool


def tile_map(spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float]) -> TileMap | None:
    """The tiles of batch 0 and head 0; None on the naive rung, which has none."""
    kinds = tile_kinds(spec, plan, problem, names)
    if kinds is None:
        return None
    drawn = kinds[:MOST_TILES, :MOST_TILES]
    missing = plan.missing_rows(int(names["q_len"]))
    runs = []
    for row, line in enumerate(drawn):
        for kind, group in groupby(enumerate(line), key=lambda pair: int(pair[1])):
            first, *others = [column for column, _ in group]
            count = 1 + len(others)
            keys = f"keys {first * plan.block_kv} to {(first + count) * plan.block_kv - 1}"
            first_row = row * plan.block_q - missing
            says = f"rows {max(first_row, 0)} to {first_row + plan.block_q - 1}, {keys}: {KINDS[kind]}"
            runs.append(Run(row, first, count, KINDS[kind], says))
    counts = {name: int((kinds == kind).sum()) for kind, name in KINDS.items()}
    rows, columns = drawn.shape
    return TileMap(rows, columns, tuple(runs), counts, drawn.shape == kinds.shape)


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
        """Powers of ten within."""
        for power in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1):
            yield self.at(10.0**power), f"{10.0**power:g}"


def plans_beside(spec: AttentionSpec, plan: Plan) -> dict[Rung, Plan]:
    """The plans of all rungs on the architecture of `plan`, which is one of them; those left out whose tile, as the spec states
    it, the architecture cannot take."""
    plans: dict[Rung, Plan] = {}
    for rung in rungs_for(spec, plan.arch):
        try:
            plans[rung] = plan if rung == plan.rung else choose(spec, plan.arch, rung)
        except PlanRefusal:
            continue
    return plans


@dataclass(frozen=True, slots=True)
class RungPoint:
    """The most that the roof allows to one rung: a bound, not a measurement."""

    rung: str
    is_shown: bool  # the page's own
    intensity: float
    tflops: float
    microseconds: float
    by_memory: bool


@dataclass(frozen=True, slots=True)
class RooflinePlot:
    """Roofs in TFLOP/s over operations a byte, and every rung of the spec under them."""

    gpu: str
    bandwidth: float  # TB/s
    x: Axis
    y: Axis
    roofs: tuple[tuple[str, float], ...]  # units, TFLOP/s; the highest first
    points: tuple[RungPoint, ...]


def roofline_plot(
    spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float], size: tuple[float, float]
) -> RooflinePlot:
    found = []
    for rung, other in plans_beside(spec, plan).items():
        cost = work(spec, other, problem, names)
        found.append((rung, cost, roofline(spec, other, cost)))
    roofs = {roof.units: roof.peak / 1e12 for _, _, roof in found}
    points = tuple(_point(rung, cost, roof, rung == plan.rung) for rung, cost, roof in found)
    top = 10.0 ** math.ceil(math.log10(max(roofs.values()) * 1.2))
    drawn = [p.intensity for p in points if p.intensity]  # of a mask that allows nothing there is none
    least = min([1.0, *drawn])
    most = max([10.0 ** math.ceil(math.log10(top / plan.arch.bandwidth_tb_s)), *(2 * i for i in drawn)])
    x = Axis(10.0 ** math.floor(math.log10(least)), most, size[0])
    y = Axis(10.0 ** math.floor(math.log10(x.low * plan.arch.bandwidth_tb_s)), top, size[1])
    highest = tuple(sorted(roofs.items(), key=lambda pair: -pair[1]))
    return RooflinePlot(plan.arch.gpu, plan.arch.bandwidth_tb_s, x, y, highest, points)


def _point(rung: str, cost: Work, roof: Roofline, is_shown: bool) -> RungPoint:
    return RungPoint(rung, is_shown, cost.intensity, roof.reachable / 1e12, roof.microseconds, roof.by_memory)
