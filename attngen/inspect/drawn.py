"""The drawings of a spec: the data of a plan or of a traced run for each picture of `attngen.drawings`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from attngen.device.cuda.compiler import compile_text
from attngen.device.emulated.tracing import LANES, Step, Watch
from attngen.diagnostics import ArgumentError
from attngen.drawings.banks import swizzle_picture
from attngen.drawings.barriers import Use, barriers_picture
from attngen.drawings.blocks import Work, blocks_picture
from attngen.drawings.fragments import fragments_of
from attngen.drawings.levels import Bars, bars_picture
from attngen.drawings.picture import Picture, stacked
from attngen.drawings.tiles import MOST, TileMap, tiles_picture
from attngen.drawings.timeline import timeline_picture
from attngen.emit.emitter import emit
from attngen.inspect.call import Call
from attngen.inspect.occupancy import kernel_resources
from attngen.inspect.pipeline import traced_timeline
from attngen.inspect.tracing import ScheduleTrace, trace_spec
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY, KIND_NAMES, count_kinds
from attngen.reference.problems import Shape
from attngen.schedules import schedules_for

WARPGROUP = 128
STEPS = 4000  # recorded of each thread
MOST_BARRIERS, MOST_USES = 8, 36  # barriers that are drawn, and their uses
PROCESSORS, HEADS = 8, 4  # multiprocessors and heads of the picture of blocks, unless the call says otherwise
TRACED = 256  # rows and keys of the runs whose bytes are counted, at most


def drawn_spec(what: str, call: Call, processors: int = PROCESSORS) -> Picture:
    """The drawing `what` of a call's kernel, a name of `attngen.drawings.catalogue`.

    Raises ArgumentError with the reason if the kernel has nothing of the kind, DeviceError if the emulated device cannot run.
    """
    if call.plan.wanted:
        raise ArgumentError("only forwards are drawn")
    return _PICTURES[what](call, processors)


def _title(call: Call, what: str) -> str:
    return f"{call.spec.name}, {call.plan.title} on {call.plan.arch.name}: {what}"


# --- tiles


def tile_map(call: Call) -> TileMap | None:
    """The tiles of batch 0 and head 0; None for the naive schedule, which has none."""
    plan, kinds = call.plan, call.tiles()
    if kinds is None:
        return None
    names = tuple(tuple(KIND_NAMES[int(kind)] for kind in row[:MOST]) for row in kinds[:MOST])
    missing, ascending = plan.missing_rows(call.q_len), plan.own.from_first_tile
    return TileMap(names, plan.block_q, plan.block_kv, missing, ascending, count_kinds(kinds))


def _tiles(call: Call, processors: int) -> Picture:
    found = tile_map(call)
    if found is None:
        raise ArgumentError("naive kernels have no tiles: they compute every pair; another --kernel has some")
    return tiles_picture(found, _title(call, f"the walk over tiles, {call.q_len} rows and {call.kv_len} keys"))


def _blocks(call: Call, processors: int) -> Picture:
    kinds, plan = call.tiles(), call.plan
    if kinds is None or not plan.schedule.is_fused or plan.schedule.packs_heads:
        raise ArgumentError(f"{plan.keyword} has no blocks of rows that visit tiles of keys; --kernel fused has some")
    tiles = [int(n) for n in (kinds != EMPTY).sum(1)]
    heads = int(call.names["q_heads"])
    heads = heads if heads > 1 else HEADS
    order = "They are launched in the order of their rows, head after head."
    works = [Work(block, head, tiles[block]) for head in range(heads) for block in range(len(tiles))]
    if plan.heads_in_l2 is not None:
        together = plan.heads_in_l2({"batch": 1, "kv_heads": heads, "q_heads": heads, "kv_len": call.kv_len})
        order = "The last rows of all heads come first: under a causal mask they have the most keys."
        sections = range(0, heads, together)
        works = [
            Work(block, head, tiles[block])
            for first in sections
            for block in reversed(range(len(tiles)))
            for head in range(first, min(first + together, heads))
        ]
    if plan.schedule.is_warp_specialized:
        order = "One persistent block on each takes work tiles from a counter. " + order
    return blocks_picture(_title(call, "work tiles over multiprocessors"), works, processors, _room(call), order)


def _room(call: Call) -> int:
    """Blocks that a multiprocessor has room for, by the registers that the compiler gives to a thread."""
    source = emit(call.spec, call.plan)
    found = kernel_resources(source, call.plan.arch, compile_text(source).resources())
    return max((one.blocks_per_sm for one in found), default=1) or 1


# --- shared memory and fragments


def _swizzle(call: Call, processors: int) -> Picture:
    found = call.plan.schedule.layouts(call.spec, call.plan)
    if not found:
        raise ArgumentError("naive kernels use no shared memory; another --kernel does")
    return swizzle_picture(_title(call, "banks of shared memory"), found)


def _fragment(call: Call, processors: int) -> Picture:
    pictures = fragments_of(emit(call.spec, call.plan).text)
    if not pictures:
        raise ArgumentError(
            f"{call.plan.title} multiplies on ordinary units and has no fragments; --kernel fused --arch sm_80 has"
        )
    says = " ".join(dict.fromkeys(picture.says for picture in pictures))
    return stacked(_title(call, "who holds which element"), says, pictures)


# --- traced runs


def _traced(call: Call, schedules: Sequence[str], length: int, watch: Watch | None = None) -> Iterator[ScheduleTrace]:
    spec = replace(call.spec, q_heads=None, kv_heads=None)
    shape = Shape(1, 1, 1, min(call.q_len, length), min(call.kv_len, length))
    watched = Watch(threads=(), limit=0) if watch is None else watch
    return trace_spec(spec, schedules, call.plan.arch.name, shape, call.numbers, watched)


def _bytes(call: Call, processors: int) -> Picture:
    arch = call.plan.arch
    schedules = schedules_for(call.spec, arch)
    values: dict[str, Mapping[str, float]] = {}
    rows = min(call.q_len, TRACED)
    for found in _traced(call, schedules, TRACED):
        t = found.totals
        values[found.plan.title] = {
            "global memory": float(t.global_read + t.global_written),
            "shared memory": float(t.shared_read + t.shared_written),
        }
    dtypes, (d, dv) = call.spec.dtypes, (call.spec.head_dim, call.spec.head_dim_v)
    least = rows * (d * dtypes["q"].bytes + dv * dtypes["o"].bytes) + min(call.kv_len, TRACED) * (
        d * dtypes["k"].bytes + dv * dtypes["v"].bytes
    )
    values = {"Q, K, V and O, once": {"global memory": float(least)}, **values}
    says = (
        f"One head, {rows} rows, {min(call.kv_len, TRACED)} keys: bytes that instructions read and write, before any cache, "
        f"counted on the emulated device for {arch.name}. The axis is logarithmic: a step is a factor of ten. Less global "
        "memory is reuse in shared memory and registers; less shared memory is reuse in registers and tensor cores."
    )
    return bars_picture(
        f"{call.spec.name} on {arch.name}: bytes by level of memory", says, Bars(values, "bytes", logarithmic=True)
    )


def _timeline(call: Call, processors: int) -> Picture:
    found = traced_timeline(call.spec, call.plan)
    if isinstance(found, str):
        raise ArgumentError(f"a timeline is drawn of {found}")
    return timeline_picture(found, _title(call, "the pipeline of a block"))


def _barriers(call: Call, processors: int) -> Picture:
    if not call.plan.schedule.by_tma:
        raise ArgumentError(f"{call.plan.title} has no mbarriers; --kernel wgmma and --kernel hopper have")
    length = 4 * max(call.plan.block_q, call.plan.block_kv)
    watch = Watch(0, tuple(range(call.plan.threads)), STEPS)
    long = replace(call, q_len=length, kv_len=length)
    (found,) = _traced(long, (call.plan.keyword,), length, watch)
    uses = uses_of(found.steps, lambda thread: _role(call.plan, thread))
    return barriers_picture(_title(call, "phases of mbarriers"), uses)


def _role(plan: Plan, thread: int) -> str:
    if not plan.schedule.is_warp_specialized:
        return f"warp {thread // LANES}"
    group = thread // WARPGROUP
    return f"consumer {group - 1}" if group else f"producer, warp {thread // LANES}"


def uses_of(steps: Sequence[Step], role: Callable[[int], str]) -> list[Use]:
    """The first uses of the barriers that are used first: what several threads of a role do at one in a phase is one use."""
    found = sorted((step for step in steps if step.mbarrier is not None), key=lambda step: step.at)
    grouped: dict[tuple[object, ...], list[Step]] = {}
    for step in found:
        use = step.mbarrier
        assert use is not None
        key = (use.buffer.name, use.offset, use.phase, use.number, step.site.what, role(step.thread))
        grouped.setdefault(key, []).append(step)
    names = _barrier_names(found)
    uses = []
    for (name, offset, phase, number, what, who), together in grouped.items():
        barrier = names[str(name), int(str(offset))]
        threads = len({step.thread for step in together})
        uses.append(Use(barrier, str(who), threads, together[0].at, what == "mbarrier wait", int(str(phase)), int(str(number))))
    uses.sort(key=lambda use: use.at)
    shown = list(dict.fromkeys(use.barrier for use in uses))[:MOST_BARRIERS]
    return [use for use in uses if use.barrier in shown][:MOST_USES]


def _barrier_names(steps: Sequence[Step]) -> dict[tuple[str, int], str]:
    """A name for each barrier: its array, and its number in it, with the function by which it is waited for."""
    found: dict[tuple[str, int], str] = {}
    for (name, offset), uses in groupby(sorted(steps, key=_barrier), _barrier):
        waits = [step for step in uses if step.site.what == "mbarrier wait"]
        by = next((step.site.place.text for step in waits if step.site.place.text), "")
        kind = "full" if "full" in by else "empty" if "empty" in by or "acquire" in by else ""
        found[name, offset] = f"{name}[{offset // 8}] {'' if kind in name else kind}".strip()
    return found


def _barrier(step: Step) -> tuple[str, int]:
    assert step.mbarrier is not None
    return step.mbarrier.buffer.name, step.mbarrier.offset


_PICTURES: dict[str, Callable[[Call, int], Picture]] = {
    "tiles": _tiles,
    "bytes": _bytes,
    "blocks": _blocks,
    "swizzle": _swizzle,
    "fragment": _fragment,
    "timeline": _timeline,
    "barriers": _barriers,
}
