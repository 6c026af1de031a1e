"""A trace as text for a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from attngen.device.emulated.tracing import AccessSite, Step
from attngen.inspect.coordinates import Layout
from attngen.inspect.tracing import ScheduleTrace, Totals

TEXT = 64  # characters of a statement in a table
VALUES = 4  # numbers shown of a step

TOTALS_HEADER = (
    f"{'':<8}{'global memory, bytes':>25}{'shared memory, bytes':>25}{'bank':>21}\n"
    f"{'schedule':<8}{'read':>13}{'written':>12}{'read':>13}{'written':>12}{'wavefronts':>11}{'conflicts':>10}{'barriers':>9}"
    f"{'mma':>8}{'MFLOP':>9}{'idle lanes':>11}{'time':>8}"
)


def totals_line(trace: ScheduleTrace) -> str:
    t = trace.totals
    return (
        f"{trace.schedule:<8}{t.global_read:>13}{t.global_written:>12}{t.shared_read:>13}{t.shared_written:>12}{t.wavefronts:>11}"
        f"{t.conflicts:>10}{t.barriers:>9}{t.mma:>8}{t.operations / 1e6:>9.2f}{_idle(t):>11}{trace.seconds:>7.1f}s"
    )


def _idle(t: Totals) -> str:
    return f"{t.idle_lanes / t.lanes:.1%}" if t.lanes else "-"


def conflicts_text(trace: ScheduleTrace) -> str:
    """Every access site with bank conflicts, or a line that there is none."""
    found = [s for s in trace.sites if s.conflicts]
    if not found:
        return f"{trace.schedule}: no bank conflict\n"
    every = sum(s.wavefronts > 0 for s in trace.sites)
    lines = [f"{trace.schedule}: bank conflicts at {len(found)} of {every} sites of shared memory"]
    for s in sorted(found, key=lambda s: -s.conflicts):
        assert s.buffer is not None
        access = f"{s.what} {'to' if s.writes else 'from'} {s.buffer.label}"
        more = f"{s.conflicts} wavefronts on top of {s.phases}"
        lines.append(f"  line {s.place.line}{_called_from(s)}, {access}: {s.degree}-way, {more}")
        lines.append(f"      {s.place.text}")
    return "\n".join(lines) + "\n"


def _called_from(site: AccessSite) -> str:
    callers = ", ".join(str(c.line) for c in site.callers)
    return f" (called from {callers})" if callers else ""


def sites_text(trace: ScheduleTrace) -> str:
    """Every access site of a schedule, by kernel, in order of first execution."""
    lines = []
    for kernel in dict.fromkeys(s.kernel for s in trace.sites):
        lines += ["", f"{kernel}", _SITES_HEADER]
        lines += [_site_line(s) for s in trace.sites if s.kernel == kernel]
    return "\n".join(lines) + "\n"


_SITES_HEADER = (
    f"  {'line':>5} {'what':<15} {'buffer':<16} {'times':>8} {'bytes':>10} {'a lane':>6} {'idle':>6} {'wavefr.':>8} "
    f"{'confl.':>7} {'sectors':>8}  statement"
)


def _site_line(s: AccessSite) -> str:
    buffer = "" if s.buffer is None else f"{'->' if s.writes else '<-'} {s.buffer.label}"
    memory = f"{s.bytes:>10} {s.width:>6}" if s.buffer else f"{'':>10} {'':>6}"
    idle = f"{s.idle_lanes / (32 * s.executions):>6.0%}" if s.counts_lanes and s.buffer else f"{'':>6}"
    banks = f"{s.wavefronts:>8} {s.conflicts:>7}" if s.wavefronts else f"{'':>8} {'':>7}"
    sectors = f"{s.sectors:>8}" if s.sectors else f"{'':>8}"
    text = s.place.text if len(s.place.text) <= TEXT else s.place.text[: TEXT - 3] + "..."
    counts = f"{s.executions:>8} {memory} {idle} {banks} {sectors}"
    return f"  {s.place.line:>5} {s.what:<15} {buffer:<16} {counts}  {text}{_called_from(s)}"


def steps_text(trace: ScheduleTrace, block: int) -> str:
    if not trace.steps:
        return f"no kernel has a block {block} with such threads that does anything\n"
    lines = [f"steps of block {block} (phase: block barriers passed; step: the thread's own)"]
    kernel, numbers = "", dict[tuple[str, int], int]()
    for s in trace.steps:
        if s.site.kernel != kernel:
            kernel = s.site.kernel
            lines += ["", kernel, f"  {'phase':>5} {'thread':>6} {'step':>5} {'line':>5}  what"]
        number = numbers[kernel, s.thread] = numbers.get((kernel, s.thread), -1) + 1
        lines.append(f"  {s.phase:>5} {s.thread:>6} {number:>5} {s.site.place.line:>5}  {_what(s, trace.layouts)}")
    return "\n".join(lines) + "\n"


def _what(s: Step, layouts: Mapping[str, Layout]) -> str:
    if s.site.buffer is None:
        return f"{s.site.what:<15} {s.site.place.text[:TEXT]}"
    label = s.site.buffer.label
    layout = layouts.get(label)
    at = layout.at(s.offset, s.width) if layout else f" at byte {s.offset}, {s.width} bytes"
    return f"{s.site.what:<15} {'writes' if s.site.writes else 'reads'} {label}{at}{_values(s, layout)}"


def _values(s: Step, layout: Layout | None) -> str:
    if s.value is None or layout is None:
        return ""
    values = layout.values(s.value)
    shown = ", ".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in values[:VALUES])
    return f" = {shown}{', ...' if len(values) > VALUES else ''}"


def as_json(traces: Sequence[ScheduleTrace]) -> list[dict[str, object]]:
    """One object per schedule: totals, bytes by tensor, access sites, steps."""
    return [
        {
            "schedule": t.schedule,
            "template": t.plan.schedule.name,
            "arch": t.plan.arch.name,
            **asdict(t.totals),
            "operations": t.totals.operations,
            "read": dict(t.read),
            "written": dict(t.written),
            "sites": [_site_json(s) for s in t.sites],
            "steps": [_step_json(s, t.layouts) for s in t.steps],
        }
        for t in traces
    ]


def _site_json(s: AccessSite) -> dict[str, object]:
    counts = ("executions", "lanes", "idle_lanes", "bytes", "width", "phases", "wavefronts", "conflicts", "degree", "sectors")
    return {**_place_json(s), **{name: getattr(s, name) for name in counts}}


def _place_json(s: AccessSite) -> dict[str, object]:
    return {
        "kernel": s.kernel,
        "line": s.place.line,
        "text": s.place.text,
        "called_from": [c.line for c in s.callers],
        "what": s.what,
        "writes": s.writes,
        "buffer": None if s.buffer is None else s.buffer.label,
        "shared": s.buffer is not None and s.buffer.is_shared,
    }


def _step_json(s: Step, layouts: Mapping[str, Layout]) -> dict[str, object]:
    layout = None if s.site.buffer is None else layouts.get(s.site.buffer.label)
    values = [] if s.value is None or layout is None else layout.values(s.value)
    return {
        **_place_json(s.site),
        "block": s.block,
        "thread": s.thread,
        "phase": s.phase,
        "epoch": s.epoch,
        "order": s.order,
        "offset": s.offset,
        "bytes": s.width,
        "element": None if layout is None else layout.at(s.offset, s.width),
        "values": [v if math.isfinite(v) else str(v) for v in values],
    }
