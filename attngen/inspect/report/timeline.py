"""What runs beside what in each schedule, as bars on lanes: a schematic with made-up durations, drawn from the plan alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec

TILES = 4  # that are drawn
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
    drawn = TIMELINES[plan.schedule](plan, weights)
    return replace(drawn, says=f"{drawn.says} A schematic drawn from the plan, not from a run; lengths are not measured.")


def _naive(plan: Plan, weights: str) -> Timeline:
    names = [("scores", PRODUCT), *([(weights, SOFTMAX)] if weights != "score" else []), ("weighted sum", PRODUCT)]
    bars = tuple(Bar(3 * n, 3, name, kind) for n, (name, kind) in enumerate(names))
    return Timeline({"kernels": bars}, "One kernel after the other: the scores cross global memory between them.")


def _tiled(plan: Plan, weights: str) -> Timeline:
    fetches, stores, products = [Bar(0, 1, "fetch 0", COPY)], [], []
    for n in range(TILES):
        start = 1 + 2.5 * n
        stores.append(Bar(start, 0.5, str(n), STORE))
        products.append(Bar(start + 0.5, 2, f"multiply {n}", PRODUCT))
        if n + 1 < TILES:
            fetches.append(Bar(start + 0.5, 1, f"fetch {n + 1}", COPY))
    lanes = {"global to registers": tuple(fetches), "registers to shared": tuple(stores), "arithmetic": tuple(products)}
    return Timeline(lanes, "One product: the next slices are fetched into registers while this one is multiplied.")


def _of_a_tile(start: float, n: int, weights: str) -> tuple[Bar, Bar, Bar]:
    return Bar(start, 1, f"Q K{n}", PRODUCT), Bar(start + 1, 1, weights, SOFTMAX), Bar(start + 2, 1, f"P V{n}", PRODUCT)


def _fused_simt(plan: Plan, weights: str) -> Timeline:
    copies: list[Bar] = []
    work: list[Bar] = []
    for n in range(TILES - 1):
        copies.append(Bar(4 * n, 1, f"K{n}, V{n}", COPY))
        work += _of_a_tile(4 * n + 1, n, weights)
    lanes = {"global to shared": tuple(copies), "arithmetic": tuple(work)}
    return Timeline(lanes, "One block: it waits for each tile; other blocks of the multiprocessor compute meanwhile.")


def _copies_of(stages: int) -> tuple[Bar, ...]:
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


def _fused_mma(plan: Plan, weights: str) -> Timeline:
    work = [bar for n in range(TILES) for bar in _of_a_tile(1 + 3 * n, n, weights)]
    lanes = {"cp.async": _copies_of(plan.stages), "warps": tuple(work)}
    says = (
        f"V is copied during Q K^T, the next K during the {weights} and P V: one buffer for each."
        if plan.stages == 1
        else "The next K and V are copied into the other stage while this one is used."
    )
    return Timeline(lanes, says)


def _wgmma(plan: Plan, weights: str) -> Timeline:
    """As fused with two stages; a product is in the background, but its warpgroup waits for it."""
    work = [bar for n in range(TILES) for bar in _of_a_tile(1 + 3 * n, n, weights)]
    products = tuple(bar for bar in work if bar.kind == PRODUCT)
    between = tuple(bar for bar in work if bar.kind == SOFTMAX)
    lanes = {"TMA": _copies_of(plan.stages), "wgmma": products, f"{weights}, the same warps": between}
    says = (
        "TMA copies the next K and V into the other stage while this one is used. Tensor cores and threads take turns: each "
        "waits for the other."
    )
    return Timeline(lanes, says)


def _hopper(plan: Plan, weights: str) -> Timeline:
    """The consumers take turns on the tensor cores; a copy starts when its stage is empty."""
    assert plan.roles is not None
    lanes: dict[str, tuple[Bar, ...]] = {}
    qk_end, pv_end = [0.0] * TILES, [0.0] * TILES  # when the last consumer is done with a tile
    step = 2.0
    each = step / (2 * plan.roles.consumers)  # of a product: together they keep the tensor cores busy
    for c in range(plan.roles.consumers):
        products, between = [], []
        for n in range(TILES + 1):
            start = 0.6 + 2 * c * each + step * n
            if n < TILES:
                products.append(Bar(start, each, f"Q K{n}", PRODUCT))
                between.append(Bar(start + each, step - 1.2 * each, f"{weights} {n}", SOFTMAX))
                qk_end[n] = start + each
            if n > 0:
                products.append(Bar(start + each, each, f"P V{n - 1}", PRODUCT))
                pv_end[n - 1] = start + 2 * each
        lanes[f"wgmma, consumer {c + 1}"] = tuple(products)
        lanes[f"{weights}, consumer {c + 1}"] = tuple(between)
    copies: list[Bar] = []
    for n in range(TILES):
        for name, free in (("K", qk_end), ("V", pv_end)):
            empty = free[n - plan.stages] if n >= plan.stages else 0.0
            copies.append(Bar(max(empty, copies[-1].end if copies else 0.0), 0.5, f"{name}{n}", COPY))
    says = (
        f"The producer copies as soon as one of {plan.stages} stages is empty. Of each consumer the tensor cores multiply the "
        f"next keys and this tile's values while its threads compute the {weights} between; the consumers take turns."
    )
    return Timeline({"producer, TMA": tuple(copies), **lanes}, says)


TIMELINES: dict[str, Callable[[Plan, str], Timeline]] = {
    "naive": _naive,
    "tiled": _tiled,
    "fused_simt": _fused_simt,
    "fused_mma": _fused_mma,
    "wgmma": _wgmma,
    "hopper": _hopper,
}
