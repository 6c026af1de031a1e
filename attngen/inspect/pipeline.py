"""The pipeline of a fused kernel, drawn from a traced run on the emulated device: copies and products of tiles by role.

The copies and products, their order within each role, and their buffers are those of the run. Times are not measured: each copy
and product has a nominal length and starts as early as its dependencies allow. A product waits for its tile, a copy for the
products that read its buffer before, P V for its weights. Threads that both copy and multiply copy after a product or during
it, as in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from attngen.device.emulated.tracing import Step, Watch
from attngen.diagnostics import counted
from attngen.drawings.timeline import COPY, PRODUCT, SOFTMAX, Bar, Timeline
from attngen.inspect.call import defaults
from attngen.inspect.tracing import trace_spec
from attngen.plan import Plan
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec

LENGTH = 4  # tiles of the traced problem
STEPS = 4000  # recorded for each thread
SHOWN = 5  # tiles shown
LOAD, WEIGHTS, PRODUCTS = 0.5, 1.6, 1.0  # nominal lengths; the products of all consumers of a tile take PRODUCTS
WARPGROUP = 128
COPIES = ("tma load", "cp.async")
OF_THREADS = ("load", "store")  # not of products
NO_PIPELINE = (
    "only forwards of one kernel on tensor cores, whose blocks visit all tiles of keys, copy tiles beside products of others"
)


@dataclass(frozen=True, slots=True)
class Event:
    """A copy into, or a product of, the tile in `slot` of K or V, by the threads of `role`."""

    role: str
    buffer: str
    slot: int
    is_copy: bool


def traced_timeline(spec: AttentionSpec, plan: Plan) -> Timeline | str:
    """The timeline of the first block, from a run of one head; or why there is none.

    Raises DeviceError if the emulated device cannot run.
    """
    schedule = plan.schedule
    if plan.wanted or not (schedule.is_fused and schedule.on_tensor_cores) or schedule.packs_heads:
        return NO_PIPELINE
    one_head = replace(spec, q_heads=None, kv_heads=None)
    length = LENGTH * max(plan.block_q, plan.block_kv)
    watch = Watch(0, tuple(range(plan.threads)) if plan.schedule.by_tma else (0,), STEPS)
    shape = Shape(1, 1, 1, length, length)
    (found,) = trace_spec(one_head, (plan.keyword,), plan.arch.name, shape, defaults(spec), watch)
    events = [*_events(plan, sorted(found.steps, key=lambda step: step.at))]
    weights = "score" if spec.normalize == "none" else spec.normalize
    return _Replay(plan, weights, _copies_during_products(events)).run([*_merged(events)])


def _events(plan: Plan, steps: Sequence[Step]) -> Iterator[Event]:
    slots = {b.name: b.bytes // max(plan.stages, 1) for b in plan.buffers if b.name in "KV"}
    for step in steps:
        site, what, buffer = step.site, step.site.what, step.site.buffer
        name = "" if buffer is None else buffer.label.removesuffix("_smem")
        is_copy = what in COPIES and site.writes
        if name in slots and (is_copy or not (site.writes or what in (*COPIES, *OF_THREADS))):
            yield Event(_role(plan, step.thread, name, what), name, step.offset // slots[name], is_copy)


def _role(plan: Plan, thread: int, buffer: str, what: str) -> str:
    if not plan.schedule.is_warp_specialized:
        return {"tma load": "TMA", "ldmatrix": "warp 0"}.get(what, what)
    return f"TMA, {buffer}" if what in COPIES else f"consumer {thread // WARPGROUP}"


def _copies_during_products(events: Sequence[Event]) -> bool:
    """Whether threads copy between two reads of one product."""
    product, has_copied = None, False
    for event in events:
        if event.is_copy:
            has_copied = True
        elif has_copied and event == product:
            return True
        else:
            product, has_copied = event, False
    return False


def _merged(events: Sequence[Event]) -> Iterator[Event]:
    """One event for all copies or reads of a tile, at the first of them, until the slot is filled or read again."""
    latest: dict[tuple[str, str, bool], Event] = {}
    copied: dict[tuple[str, int], bool] = {}
    for event in events:
        slot = (event.buffer, event.slot)
        key = (event.role, event.buffer, event.is_copy)
        begins = copied.get(slot) is not True if event.is_copy else copied.get(slot) is True
        if latest.get(key) != event or begins:
            yield event
        latest[key] = event
        if event.is_copy or begins:
            copied[slot] = event.is_copy


@dataclass(slots=True)
class _Replay:
    """Assigns times to events, in the order of the run."""

    plan: Plan
    weights: str
    copies_during_products: bool
    consumers: int = 1
    lanes: dict[str, list[Bar]] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)  # so far, by buffer
    tile: dict[tuple[str, int], int] = field(default_factory=dict)  # number of the tile in a slot
    ready: dict[tuple[str, int], float] = field(default_factory=dict)  # when the slot's tile has arrived
    read: dict[tuple[str, int], float] = field(default_factory=dict)  # when all products of the slot's tile are done
    free: dict[str, float] = field(default_factory=dict)  # when a role, or the tensor cores, can continue
    beside: float = 0.0  # when threads that copy and multiply can copy next
    last_weights: float = 0.0
    weighed: dict[tuple[str, int], float] = field(default_factory=dict)  # when the weights of a tile are ready, by consumer

    def run(self, events: Sequence[Event]) -> Timeline:
        self.consumers = len({event.role for event in events if not event.is_copy})
        for event in events:
            if event.is_copy:
                self._copy(event)
            elif self.tile.get((event.buffer, event.slot), SHOWN) < SHOWN:
                self._product(event)
        return Timeline({lane: tuple(self.lanes[lane]) for lane in sorted(self.lanes, key=self._order)}, self._says())

    def _copy(self, event: Event) -> None:
        slot = (event.buffer, event.slot)
        number = self.copies[event.buffer] = self.copies.get(event.buffer, -1) + 1
        self.tile[slot] = number
        if number >= SHOWN:
            return
        start = max(self.free.get(event.role, 0.0), self.read.get(slot, 0.0), self.beside)
        if self.copies_during_products and self.plan.stages == 1 and event.buffer == "K":
            start = max(start, self.last_weights)  # during P V, not during Q K^T
        self.free[event.role] = self.ready[slot] = self._add(event.role, start, LOAD, f"{event.buffer}{number}", COPY)

    def _product(self, event: Event) -> None:
        slot, role = (event.buffer, event.slot), event.role
        number = self.tile[slot]
        start = max(self.free.get("tensor cores", 0.0), self.ready[slot])
        of_scores = event.buffer == "K"
        start = max(start, self.free.get(role, 0.0) if of_scores else self.weighed.get((role, number), 0.0))
        label = f"Q K{number}" if of_scores else f"P V{number}"
        end = self._add(f"products, {role}", start, PRODUCTS / self.consumers, label, PRODUCT)
        self.free["tensor cores"] = end
        if not self.plan.schedule.is_warp_specialized:
            self.beside = start if self.copies_during_products else end
        self.read[slot] = max(self.read.get(slot, 0.0), end)
        if of_scores:
            end = self._add(f"{self.weights}, {role}", end, WEIGHTS, f"{self.weights} {number}", SOFTMAX)
            self.weighed[role, number] = self.last_weights = end
        self.free[role] = max(self.free.get(role, 0.0), end)

    def _add(self, lane: str, start: float, length: float, label: str, kind: str) -> float:
        self.lanes.setdefault(lane, []).append(Bar(start, length, label, kind))
        return start + length

    def _order(self, lane: str) -> tuple[int, str, str]:
        kind, _, role = lane.partition(", ")
        return (0, kind, role) if kind in ("TMA", "cp.async") else (1, role, "a" if kind == "products" else "b")

    def _says(self) -> str:
        slots = self.plan.stages
        return (
            "From a traced run on the emulated device: the copies and products of one block in their order, tiles numbered as "
            f"they are copied, {counted(slots, 'buffer')} each for K and V. Lengths are nominal, not measured: a "
            "product waits for its tile, a copy for the products that read its buffer before, P V for its weights."
        )
