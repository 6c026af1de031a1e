"""The backward for Hopper: blocks that hold keys add up dK and dV, blocks that hold rows dQ; a producer, and consumers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.code_size import INLINED_UP_TO, operations
from attngen.plan.decisions import saved_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule, refusal
from attngen.plan.saved import needs_lse_rest, saved_results
from attngen.plan.shared_memory import COLUMN, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import STATED, Cost, fitting, pick_tile, planned
from attngen.schedules.hopper import plan as hopper
from attngen.schedules.hopper.needs import SLAB, slabs
from attngen.schedules.hopper.tiles import WARPGROUP_ROWS
from attngen.spec.gradient import QKV

Registers = tuple[int, int]  # of a producer's and of a consumer's thread


@dataclass(frozen=True, slots=True)
class HopperBackwardPlan:
    """The choices of this schedule beside its tile."""

    kernels: tuple[str, ...]  # in launch order: those that the wanted gradients need
    consumers: int  # warpgroups that multiply, each for 64 keys, or rows, that it holds
    key_registers: Registers  # of the kernel whose blocks hold keys
    row_registers: Registers
    row_numbers: int  # of each row, that all its tiles need
    output_slabs: int  # of a warp's rows of a gradient, on their way to global memory

    @property
    def held(self) -> int:
        """The keys, or rows, that a block holds."""
        return self.consumers * WARPGROUP_ROWS


CONSUMERS = 2
WARPS = 4 * (CONSUMERS + 1)
REGISTERS = (40, 232)  # with those of two consumers, all of a multiprocessor
MOST_REGISTERS = (24, 240)
MOST_SUMS = 96  # registers of dK and dV up to which a consumer has enough with REGISTERS
STAGES = (3, 2)  # the first that fits shared memory
MAX_HEAD_DIM = 128  # of either head size: dK and dV of 64 keys are in a warpgroup's registers
WORK_WORDS = 7  # what tells a work tile: the members of Work
FOUND = 64  # places of tiles that the producer has found
VISIT_WORDS = 2  # what tells a tile to visit: the tile, and its head


def kernels_of(facts: SpecFacts) -> tuple[str, ...]:
    """The kernels that the wanted gradients need, in launch order."""
    needed = {
        "delta": facts.spec.normalize == "softmax",
        "dk_dv": "k" in facts.wanted,
        "dq": "q" in facts.wanted,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def why_not(facts: SpecFacts, arch: Arch) -> str:
    """Why this schedule cannot compute the gradients on `arch`; empty if it can."""
    spec = facts.spec
    assert facts.gradient is not None
    reason = hopper.why_not(facts, arch)
    if reason:
        return reason
    captured = [n for n in facts.wanted if n not in QKV]
    if captured:
        return f"it computes no gradients of captured values ({', '.join(captured)})"
    if ("k" in facts.wanted) != ("v" in facts.wanted):
        return "it computes the gradients of k and v together"
    if max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM:
        return f"it computes head sizes up to {MAX_HEAD_DIM}: the sums of larger ones do not fit the registers of a warpgroup"
    if operations(facts.gradient.ds) > INLINED_UP_TO:
        return f"it computes derivatives of at most {INLINED_UP_TO} operations: code between its products is inlined"
    return ""


def row_numbers(facts: SpecFacts) -> int:
    """The numbers of a row: lse in powers of 2, delta, and what is subtracted from large scores."""
    return 2 + needs_lse_rest(facts.spec)


def buffers(facts: SpecFacts, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of either kernel: what it holds, and stages of the tiles that it visits."""
    spec, rows = facts.spec, WARPGROUP_ROWS
    d, dv, held = slabs(spec.head_dim), slabs(spec.head_dim_v), CONSUMERS * rows

    def tiles(name: str, extents: tuple[int, ...], use: str, read: str | None = COLUMN) -> SharedBuffer:
        shape = (*extents, SLAB)
        return SharedBuffer(name=name, element=spec.dtype.name, shape=shape, use=use, swizzled=True, read=read)

    numbers = SharedBuffer(
        name="ROW_NUMBERS", element="float", shape=(stages, row_numbers(facts), rows), use="numbers of the rows of each stage"
    )
    words = 2 * WORK_WORDS + VISIT_WORDS * (FOUND + stages)
    return (
        tiles("HELD_QK", (d, held), "the keys that the block holds, or the rows of Q"),
        tiles("HELD_V", (dv, held), "the values that the block holds, or the rows of dO"),
        tiles("VISITED_QK", (stages, d, rows), f"{stages} tiles of Q, or of keys"),
        tiles("VISITED_V", (stages, dv, rows), f"{stages} tiles of dO, or of values"),
        tiles("OUT", (4 * CONSUMERS, max(d, dv), 16), "rows of a gradient of each warp on their way", None),
        *([numbers] if {"delta", "dk_dv"} <= {*kernels_of(facts)} else []),
        SharedBuffer(name="BARRIERS", element="mbarrier", shape=(4 + 3 * stages,), use="see the kernels"),
        SharedBuffer(
            name="VISITS",
            element="int",
            shape=(words,),
            use="two work tiles, the tiles that were found, and that of each stage",
        ),
    )


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    """What a tile takes: the registers do not depend on it."""
    return Cost(aligned(*buffers(facts, tile.stages)), 0)


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The only tile there is, with each number of stages that fits."""
    possible = [Tile(WARPGROUP_ROWS, WARPGROUP_ROWS, stages, WARPS) for stages in STAGES]
    return fitting(arch, possible, lambda t: cost(facts, t))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    """The only tile there is, with as many stages as fit, or as a KernelRequest states."""
    reason = why_not(facts, arch)
    if reason:
        raise refusal("kernel", f"kernel hopper of these gradients on {arch.name}", reason, "use kernel fused, or auto")
    spec, fit = facts.spec, tiles(facts, arch)
    tile = pick_tile(spec, arch, fit, fit, lambda t: cost(facts, t))
    own = HopperBackwardPlan(
        kernels=kernels_of(facts),
        consumers=CONSUMERS,
        key_registers=MOST_REGISTERS if (spec.head_dim + spec.head_dim_v) // 2 > MOST_SUMS else REGISTERS,
        row_registers=REGISTERS,
        row_numbers=row_numbers(facts),
        output_slabs=max(slabs(spec.head_dim), slabs(spec.head_dim_v)),
    )
    return planned(
        schedule,
        facts,
        arch,
        tile,
        tuple(decisions(facts, own, tile.stages)),
        buffers(facts, tile.stages),
        own,
        saved=saved_results(facts),
        workspaces=("row_numbers",) if "delta" in own.kernels else (),
    )


def decisions(facts: SpecFacts, own: HopperBackwardPlan, stages: int) -> Iterator[Decision]:
    yield Decision("gradients", ", ".join(facts.wanted), "what is not wanted is not computed")
    if {"dk_dv", "dq"} <= {*own.kernels}:
        yield Decision("dK and dV, dQ", "by a kernel each", WHY_TWO)
    yield Decision(
        "deterministic", "yes", "each sum is a block's own, in a fixed order: no atomics, the same bits in every run"
    )
    yield from saved_decisions(saved_results(facts))
    if "delta" in own.kernels:
        yield Decision("lse and delta", "side by side for whole tiles", "a tile's are one copy in the background")
    yield Decision("warpgroups", f"1 + {own.consumers}", f"one copies; {own.consumers} compute for 64 keys, or rows, each")
    shape = f"{own.held} held, {WARPGROUP_ROWS} visited at a time"
    yield Decision("keys and rows", shape, "S, dP and the sums of 64 keys fit the registers of a warpgroup")
    why_stages = "the copies of later tiles are under way while these are used"
    yield Decision("stages", str(stages), f"{STATED}; {why_stages}" if facts.spec.kernel.stages else why_stages)
    used = {"dk_dv": own.key_registers, "dq": own.row_registers}
    splits = sorted({f"{used[n][0]} and {used[n][1]}" for n in own.kernels if n in used})
    yield Decision("registers", ", or ".join(splits) + " a thread", "copying needs few; sums, S and dP need many")
    yield Decision("next scores", "beside the sums", "the weights of a tile begin when the sums of the tile before are done")
    yield Decision(
        "blocks", "one for each SM", "persistent kernels: a block takes work tiles from a counter, the longest first"
    )
    yield Decision("swizzle", "128 bytes", WHY_SWIZZLE)


WHY_TWO = "S and dP are computed for each, seven products instead of five; dQ beside dK would be added up in global memory"
WHY_SWIZZLE = "tiles in slabs of 64 columns, chunks of 16 bytes permuted: neither TMA nor wgmma meets a bank conflict"
