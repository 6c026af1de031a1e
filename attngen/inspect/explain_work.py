"""Operations, bytes and roofline as text, and the effect of params on them."""

from __future__ import annotations

from dataclasses import replace
from textwrap import wrap

from attngen.inspect.call import Call, defaults
from attngen.inspect.work import Roofline, Work, roofline
from attngen.plan import Plan
from attngen.plan.block_map import count_kinds
from attngen.plan.products import counted_products
from attngen.spec.attention import AttentionSpec

WIDTH = 120


def explain_work(call: Call) -> str:
    """Operations, bytes, arithmetic intensity, and the roofline of the plan's architecture."""
    spec, plan, cost = call.spec, call.plan, call.work()
    roof = roofline(spec, plan, cost)
    heads = call.names["q_heads"]
    counted = counted_products(spec, plan.wanted)
    dims = " + ".join(map(str, counted.values()))
    products = f", for {', '.join(counted)}" if plan.wanted else ""
    lines = [
        f"work at q_len {call.q_len}, kv_len {call.kv_len}, batch 1, {heads} query head{'s' if heads > 1 else ''}",
        *_wrapped(
            f"{_si(cost.operations)}FLOP: 2 ({dims}) for each of the {cost.allowed_pairs} pairs that the mask allows{products}",
            "  operations  ",
        ),
        f"              {_si(cost.computed)}FLOP are computed: {cost.visited_pairs} pairs, those of {_what_is_visited(plan)}",
        f"  bytes       {_si(cost.least_bytes)}B if every launch moves once what it needs of each tensor",
        *_requested(cost),
        f"  intensity   {cost.intensity:.0f} operations a byte",
        f"  roofline    {plan.arch.gpu}: {_si(roof.peak)}FLOP/s ({roof.units}), {_si(roof.bandwidth)}B/s; they meet at "
        f"{roof.ridge:.0f} operations a byte",
        f"              bound by {_bound(roof)}: at most {_si(roof.reachable)}FLOP/s, {_time(roof.microseconds)} at least",
        *_launches(spec, plan, cost),
    ]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, title: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=title, subsequent_indent=" " * len(title))


def _requested(cost: Work) -> list[str]:
    if cost.read is None or cost.written is None:
        return []
    return [f"              {_si(cost.read)}B read and {_si(cost.written)}B written by the instructions, before any cache"]


def _bound(roof: Roofline) -> str:
    return "memory" if roof.by_memory else "arithmetic"


def _launches(spec: AttentionSpec, plan: Plan, cost: Work) -> list[str]:
    """The launches of a backward, each with the least time for all that it computes, and their sum."""
    if not cost.launches:
        return []
    rows, total = [], 0.0
    for launch in cost.launches:
        roof = roofline(spec, plan, launch)
        total += roof.microseconds
        rows.append(
            f"  {launch.kernel:<18} {_si(launch.computed) + 'FLOP':>12} {_si(launch.bytes) + 'B':>10} "
            f"{_time(roof.microseconds):>9} by {_bound(roof):<10}  {', '.join(launch.products)}".rstrip()
        )
    titles = f"{'computed':>12} {'bytes':>10} {'at least':>9}"
    return ["", f"  {'launch':<18} {titles}", *rows, f"  {'one after another':<18} {'':>12} {'':>10} {_time(total):>9}"]


def _what_is_visited(plan: Plan) -> str:
    if not plan.schedule.is_tiled:
        return "the whole matrix"
    return "the tiles that are not empty" + (f" for {plan.tile_rows} rows" if plan.tile_rows < plan.block_q else "")


def explain_changes(call: Call) -> str:
    """The effect of the params compared with the defaults; empty if all have their defaults."""
    usual = defaults(call.spec)
    changed = {name: value for name, value in call.params.items() if value != usual[name]}
    if not changed:
        return ""
    calls = (replace(call, params={}), call)
    before, after = (one.work() for one in calls)
    said = ", ".join(f"{name} = {value} ({_instead_of(call.spec, name, usual[name])})" for name, value in changed.items())
    were, are = ({} if kinds is None else count_kinds(kinds) for kinds in (one.tiles() for one in calls))
    rows = [(f"{kind} tiles", were[kind], n) for kind, n in reversed(are.items())]
    read = {"computed": "computed"} if call.plan.wanted else {"bytes read": "read"}
    counted = {"allowed pairs": "allowed_pairs", "operations": "operations", **read}
    rows += [(what, getattr(before, field), getattr(after, field)) for what, field in counted.items()]
    lines = [f"what {said} changes"]
    lines += [f"  {what:<14} {_change(was, now)}" for what, was, now in rows]
    times = [roofline(call.spec, call.plan, cost).microseconds for cost in (before, after)]
    lines += [f"  {'at least':<14} {_time(times[0])} -> {_time(times[1])}"]
    return "\n".join(lines) + "\n"


def _instead_of(spec: AttentionSpec, name: str, usual: float) -> str:
    """What the value of a param is compared with: its default, or the number that stands in for a default."""
    has_default = any(p.name == name and p.default is not None for p in spec.params)
    return f"{usual} by default" if has_default else f"no default; compared with {usual}"


def _change(was: int, now: int) -> str:
    if was == now:
        return f"{was}, as before"
    return f"{was} -> {now}" + (f" ({(now - was) / was:+.0%})" if was else "")


def _si(value: float) -> str:
    """A number with an SI prefix, as in 53.7 M."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g} "


def _time(microseconds: float) -> str:
    return f"{microseconds:.3g} us" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"
