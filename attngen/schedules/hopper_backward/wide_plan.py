"""The plan of the Hopper backward for wide heads: a kernel for each of dV, dK and dQ, whose columns two warpgroups divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.plan.arch import Arch
from attngen.plan.decisions import saved_decisions, wanted_decision
from attngen.plan.facts import SpecFacts
from attngen.plan.group_parts import GroupParts, rounds_of
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.plan import Decision, Plan, Schedule, refusal
from attngen.plan.saved import saved_results
from attngen.plan.shared_memory import SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned
from attngen.schedules.hopper_backward.buffers import tiles_of, words
from attngen.schedules.hopper_backward.form import CONSUMERS, OF_ROWS, clears_special, may_be_grouped, row_numbers
from attngen.schedules.hopper_backward.plan import WARPS, WHY_CLEARED, WHY_PARTS, WHY_SWIZZLE, WORKSPACES, HopperBackwardPlan
from attngen.schedules.parts import wgmma
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS, slabs
from attngen.spec.gradient import QKV

WIDEST = 512  # elements of a head, at most: half of the columns of 64 rows of a sum are then 128 registers a thread
MOST_SLOTS = 12  # slabs of the matrix that is not kept: more are no faster
REGISTERS = (56, 224)  # a thread of the producer, which has positions of parts and slabs; and of a consumer
TILE = Tile(WARPGROUP_ROWS, WARPGROUP_ROWS, 1, WARPS)


def why_not(facts: SpecFacts, arch: Arch) -> str:
    reason = wgmma.why_not(facts, arch)
    if reason:
        return reason
    captured = [n for n in facts.wanted if n not in QKV]
    if captured:
        return f"it computes no gradients of captured values ({', '.join(captured)})"
    if facts.spec.dropout is not None:
        return "of heads this wide, it computes no gradients of dropout"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideBackwardPlan(HopperBackwardPlan):
    """One warpgroup copies; of each tile of pairs, the two others have half each, and of the sum half of the columns each."""

    qk_parts: int  # parts of a tile of Q or K that is kept for the sum, by columns: the consumers have them in turn
    v_parts: int  # the same of dO
    dv_slots: int  # slabs of Q on their way, in the kernel of dV
    dp_slots: int  # slabs of dO or V on their way, in the kernels of dK and dQ


def saved(facts: SpecFacts) -> tuple[str, ...]:
    """The results of the forward that it reads: O even if dV alone is wanted, as one kernel writes lse and delta of a row."""
    read = saved_results(facts)
    return tuple(dict.fromkeys(("out", *read))) if read else ()


def kernels_of(facts: SpecFacts) -> tuple[str, ...]:
    wanted, softmax = {*facts.wanted}, facts.spec.normalize == "softmax"
    of_keys = {"k", "v"} & wanted
    needed = {
        "delta": softmax,
        "special_rows": not softmax and clears_special(facts.spec) and bool(of_keys),
        "dv": "v" in wanted,
        "dk": "k" in wanted,
        "add_parts": len(of_keys) == 2 and may_be_grouped(facts.spec),
        "dq": "q" in wanted,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def part_slabs(head_dim: int) -> int:
    """Slabs of a part, a product of a consumer each: half of its columns if these are evenly many slabs, else all."""
    half = -(-slabs(head_dim) // CONSUMERS)
    return half // 2 if half % 2 == 0 else half


def parts(head_dim: int) -> int:
    """Parts of a tile; zeros fill the last ones."""
    half = -(-slabs(head_dim) // CONSUMERS)
    return CONSUMERS * half // part_slabs(head_dim)


def buffers_of(facts: SpecFacts, kernel: str, slots: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of one of the kernels of products. The sum goes out over the operand that is held."""
    spec, rows = facts.spec, WARPGROUP_ROWS
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    size, kept, streamed = (spec.head_dim_v, "dO", "Q") if kernel == "dv" else (spec.head_dim, *KEPT[kernel])
    held, other = HELD[kernel]
    numbers = (1, row_numbers(facts), rows)
    of_rows = SharedBuffer(name="ROW_NUMBERS", element="float", shape=numbers, use="numbers of the rows of the tile")
    mbarriers = 5 + 2 * parts(size) + 2 * slots
    in_the_end = {"dv": "dV", "dk": "dK", "dq": "dQ"}[kernel]
    return (
        tiles_of(spec, "HELD_QK", (max(d, dv) if kernel == "dv" else d, rows), f"{held} of the block, in the end {in_the_end}"),
        *([tiles_of(spec, "HELD_V", (dv, rows), f"{other} of the block")] if other else []),
        tiles_of(spec, "KEPT", (parts(size), part_slabs(size), rows), f"a tile of {kept}, in parts of its columns"),
        tiles_of(spec, "STREAMED", (slots, rows), f"slabs of {streamed}"),
        tiles_of(spec, "PAIRS", (1, rows), f"{'P' if kernel == 'dv' else 'dS'} of the tile"),
        *([of_rows] if kernel != "dq" and OF_ROWS & {*kernels_of(facts)} else []),
        *words(1, mbarriers),
    )


HELD = {"dv": ("K", ""), "dk": ("K", "V"), "dq": ("Q", "dO")}
KEPT = {"dk": ("Q", "dO"), "dq": ("K", "V")}  # the matrix of the visited tiles that is kept, and the other one


def slots_of(facts: SpecFacts, arch: Arch, kernel: str) -> int:
    """As many slabs on their way as fit; 0: not even two."""
    return next((n for n in range(MOST_SLOTS, 1, -1) if aligned(*buffers_of(facts, kernel, n)) <= arch.shared_per_block), 0)


def slots(facts: SpecFacts, arch: Arch) -> dict[str, int]:
    """Of each kernel; those of dK and dQ have equally many."""
    of_pairs = min(slots_of(facts, arch, "dk"), slots_of(facts, arch, "dq"))
    return {"dv": slots_of(facts, arch, "dv"), "dk": of_pairs, "dq": of_pairs}


def buffers(facts: SpecFacts, arch: Arch) -> tuple[SharedBuffer, ...]:
    of_kernel, kernels = slots(facts, arch), kernels_of(facts)
    return tuple(
        replace(b, name=f"{name.upper()}_{b.name}", kernel=name)
        for name in ("dv", "dk", "dq")
        if name in kernels
        for b in buffers_of(facts, name, max(of_kernel[name], 2))
    )


def cost(facts: SpecFacts, arch: Arch) -> Cost:
    return Cost(aligned(*buffers(facts, arch)))


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, [TILE], lambda _: cost(facts, arch))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    reason = why_not(facts, arch)
    if reason:
        raise refusal("kernel", f"kernel hopper of these gradients on {arch.name}", reason, "use kernel tiled, or auto")
    spec = facts.spec
    tile = pick_tile(spec, arch, [TILE], [TILE], lambda _: cost(facts, arch))
    of_kernel = slots(facts, arch)
    own = WideBackwardPlan(
        kernels=kernels_of(facts),
        dq="own kernel" if "q" in facts.wanted else "",
        consumers=CONSUMERS,
        held=WARPGROUP_ROWS,
        held_keys=WARPGROUP_ROWS,
        split_products=False,
        value_stages=1,
        key_registers=REGISTERS,
        row_registers=REGISTERS,
        row_numbers=row_numbers(facts),
        output_slabs=0,
        qk_parts=parts(spec.head_dim),
        v_parts=parts(spec.head_dim_v),
        dv_slots=of_kernel["dv"],
        dp_slots=of_kernel["dk"],
    )
    if "add_parts" in own.kernels:
        own = replace(own, parts=GroupParts(own.held_keys, rounds_of(mask_bounds(spec, (tile.block_q, tile.block_kv), "q"))))
    return planned(
        schedule,
        facts,
        arch,
        tile,
        tuple(decisions(facts, own)),
        buffers(facts, arch),
        own,
        saved=saved(facts),
        workspaces=tuple(name for name, kernels in WORKSPACES.items() if kernels & {*own.kernels}),
    )


def decisions(facts: SpecFacts, own: WideBackwardPlan) -> Iterator[Decision]:
    yield wanted_decision(facts)
    yield Decision("dV, dK and dQ", "by a kernel each", WHY_THREE)
    yield Decision("deterministic", "yes", WHY_DETERMINISTIC)
    if own.parts is not None:
        yield Decision("query heads of a group", "over several work tiles if there are few", WHY_PARTS)
    yield from saved_decisions(saved(facts))
    if "delta" in own.kernels:
        yield Decision("lse and delta", "stored together by tiles", "one copy in the background brings those of a tile")
    if clears_special(facts.spec):
        yield Decision("NaN and infinity in partial tiles", "left out", WHY_CLEARED)
    yield Decision("warpgroups", f"1 + {own.consumers}", WHY_HALVES)
    yield Decision("keys and rows", f"{own.held} held, {TILE.block_q} visited at a time", WHY_64)
    used = {"dv": f"{own.dv_slots} of Q", "dk": f"{own.dp_slots} of dO", "dq": f"{own.dp_slots} of V"}
    on_their_way = [used[name] for name in own.kernels if name in used]
    yield Decision("slabs on their way", ", ".join(on_their_way), WHY_STREAMED)
    yield Decision("registers", "{} and {} a thread".format(*own.key_registers), "copying needs few; sums need many")
    yield Decision("next products", "behind the sums", "products of the next tile run together with the sum of this one")
    yield Decision("blocks", "one for each SM", WHY_PERSISTENT)
    yield Decision("swizzle", "128 bytes", WHY_SWIZZLE)


WHY_THREE = (
    "the registers of an SM hold one sum of 64 rows, or keys; each kernel computes the pairs that it needs, eight products "
    "instead of five"
)
WHY_PERSISTENT = "persistent kernels: a block takes work tiles from a counter, the longest first"
WHY_DETERMINISTIC = "each sum belongs to one block and has a fixed order: no atomics, the same bits in every run"
WHY_HALVES = "one copies; of a tile of pairs two compute half each, of the sum half of the columns each"
WHY_64 = "half of the columns of 64 rows of a sum fit the registers of a warpgroup"
WHY_STREAMED = "a matrix that is no part of the sum is read once: its columns pass through a few places of shared memory"
