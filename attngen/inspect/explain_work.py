"""Operations, bytes and roofline as text, and what a param changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attngen.inspect.work import Work, roofline, tile_kinds, work
from attngen.plan import Plan
from attngen.plan.tile_map import EMPTY, FULL, PARTIAL
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec

KINDS = {"full": FULL, "partial": PARTIAL, "empty": EMPTY}
Params = Mapping[str, int | float]


def _problem(q_len: int, kv_len: int) -> Shape:
    """One batch; one head where the spec leaves heads open."""
    return Shape(batch=1, q_heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len)


def defaults(spec: AttentionSpec) -> dict[str, int | float]:
    """Every param's default, or 1 where it has none."""
    return {p.name: 1 if p.default is None else p.default for p in spec.params}


@dataclass(frozen=True, slots=True)
class Costs:
    """One call: its work, and how many tiles of head 0 are of each kind (none on the naive rung)."""

    work: Work
    tiles: dict[str, int]


def costs(spec: AttentionSpec, plan: Plan, q_len: int, kv_len: int, params: Params) -> Costs:
    shape = _problem(q_len, kv_len)
    problem = sample(spec, shape)
    names = {**shape.sizes(spec), **defaults(spec), **params}
    kinds = tile_kinds(spec, plan, problem, names)
    tiles = {} if kinds is None else {name: int((kinds == kind).sum()) for name, kind in KINDS.items()}
    return Costs(work(spec, plan, problem, names), tiles)


def explain_work(spec: AttentionSpec, plan: Plan, q_len: int, kv_len: int, params: Params) -> str:
    """Operations, bytes, arithmetic intensity, and where that lies under the roofline of the plan's architecture."""
    cost = costs(spec, plan, q_len, kv_len, params).work
    roof = roofline(spec, plan, cost)
    heads = _problem(q_len, kv_len).sizes(spec)["q_heads"]
    bound = "memory" if roof.by_memory else "arithmetic"
    lines = [
        f"work at q_len {q_len}, kv_len {kv_len}, batch 1, {heads} query head{'s' if heads > 1 else ''}",
        f"  operations  {_si(cost.operations)}FLOP: 2 ({spec.head_dim} + {spec.head_dim_v}) for each of the "
        f"{cost.allowed_pairs} pairs that the mask allows",
        f"              {_si(cost.computed)}FLOP are computed: {cost.visited_pairs} pairs, those of {_what_is_visited(plan)}",
        f"  bytes       {_si(cost.least_bytes)}B if every launch moves each of its tensors once",
        f"              {_si(cost.read)}B read and {_si(cost.written)}B written by the instructions, before any cache",
        f"  intensity   {cost.intensity:.0f} operations a byte",
        f"  roofline    {plan.arch.gpu}: {_si(roof.peak)}FLOP/s ({roof.units}), {_si(roof.bandwidth)}B/s; they meet at "
        f"{roof.ridge:.0f} operations a byte",
        f"              bound by {bound}: at most {_si(roof.reachable)}FLOP/s, {_time(roof.microseconds)} at least",
    ]
    return "\n".join(lines) + "\n"


def _what_is_visited(plan: Plan) -> str:
    if plan.rung == "naive":
        return "the whole matrix"
    if plan.staggered:
        return f"two tiles of {plan.block_q // 2} rows in each step"
    if plan.half_tile:
        rows = plan.block_q // 2
        return f"the tiles that are not empty, the last of a block for {rows} rows where the others have none of its keys"
    return "the tiles that are not empty" + (f" for {plan.tile_rows} rows" if plan.tile_rows < plan.block_q else "")


def explain_changes(spec: AttentionSpec, plan: Plan, q_len: int, kv_len: int, params: Params) -> str:
    """What `params` change, beside the defaults; empty where they change no number of them."""
    usual = defaults(spec)
    changed = {name: value for name, value in params.items() if value != usual[name]}
    if not changed:
        return ""
    before, after = (costs(spec, plan, q_len, kv_len, given) for given in (usual, params))
    said = ", ".join(f"{name} = {value} ({usual[name]} by default)" for name, value in changed.items())
    rows = [(f"{kind} tiles", before.tiles[kind], n) for kind, n in after.tiles.items()]
    rows += [("allowed pairs", before.work.allowed_pairs, after.work.allowed_pairs)]
    rows += [("operations", before.work.operations, after.work.operations)]
    rows += [("bytes read", before.work.read, after.work.read)]
    lines = [f"what {said} changes"]
    lines += [f"  {what:<14} {_change(was, now)}" for what, was, now in rows]
    times = [roofline(spec, plan, c.work).microseconds for c in (before, after)]
    lines += [f"  {'at least':<14} {_time(times[0])} -> {_time(times[1])}"]
    return "\n".join(lines) + "\n"


def _change(was: int, now: int) -> str:
    if was == now:
        return f"{was}, as before"
    return f"{was} -> {now}" + (f" ({(now - was) / was:+.0%})" if was else "")


def _si(value: float) -> str:
    """A number with a prefix of 1000s, as in 53.7 M."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g} "


def _time(microseconds: float) -> str:
    return f"{microseconds:.3g} us" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"
