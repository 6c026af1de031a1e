"""`Schedule`: one way to compute attention. `Plan`: how a spec is computed on an architecture, each choice with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

from attngen.diagnostics import Diagnostic, DiagnosticError, counted
from attngen.keywords import ScheduleName
from attngen.plan.affine_scores import AffineScore
from attngen.plan.arch import Arch, Feature
from attngen.plan.captured_staging import NOTHING, Staged
from attngen.plan.captured_sums import TermSum
from attngen.plan.facts import SpecFacts
from attngen.plan.head_scale import facts_of_head_scale, head_factor
from attngen.plan.heads_in_l2 import HeadsInL2, heads_in_l2
from attngen.plan.mask_bounds import MaskBounds
from attngen.plan.own import NONE, Own
from attngen.plan.prepared import facts_of_converted, has_bytes
from attngen.plan.problem import Problem
from attngen.plan.register_table import Measured
from attngen.plan.shared_memory import Layout, SharedBuffer, layouts
from attngen.plan.tile import Tile
from attngen.spec.attention import AttentionSpec, QPlace, Storage
from attngen.spec.print_attn import shown

Direction = Literal["forward", "backward"]
WITH_GRADIENTS: tuple[Storage, ...] = ("dense", "packed")
NO_GRADIENTS_OF_CACHES = "padded keys and keys in pages are a cache for inference, and have no gradients"
LARGEST_HEAD = 256  # the widest of schedules whose threads hold columns of O, or of gradients, in registers
WIDEST_HEAD = 576  # the widest of the others: rows of latent keys
BACKWARD_SUFFIX = "_backward"  # ends the name of a schedule that computes gradients


Origin = Literal["planned", "stated", "tuned", "short rows"]
ORIGINS: dict[Origin, str] = {
    "planned": "",
    "stated": "stated in the spec",
    "tuned": "as tuned",
    "short rows": "for short rows",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice: printed in the header of the generated file and by `explain`."""

    field: str
    value: str
    why: str  # in words; empty if the origin says all
    origin: Origin = "planned"  # who has chosen

    @property
    def because(self) -> str:
        return "; ".join(words for words in (ORIGINS[self.origin], self.why) if words)


def origin_of(override: object) -> Origin:
    """Who has chosen what a `kernel` statement may override."""
    return "planned" if override is None else "stated"


def stated_by(decisions: Sequence[Decision], origin: Origin) -> tuple[Decision, ...]:
    """The decisions of a plan whose overrides come from elsewhere than the spec."""
    return tuple(replace(d, origin=origin) if d.origin == "stated" else d for d in decisions)


class DoesNotFit(Diagnostic):
    """An override of the spec that the schedule or the architecture cannot take."""

    code: ClassVar[str] = "E301"
    title: ClassVar[str] = "{what}"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "{cure}"

    what: str
    why: str
    cure: str


class PlanRefusal(DiagnosticError):
    """A requested kernel, tile or gradient that the architecture or the schedule cannot provide; the text names what fits."""


def refusal(statement: str, what: str, why: str, cure: str) -> PlanRefusal:
    """A PlanRefusal that points at the spec's statement of that keyword."""
    return PlanRefusal(DoesNotFit(statement=statement, what=what, why=why, cure=cure))


class TileChoice(Protocol):
    """A choice between tiles that is left until the lengths of a call are known."""

    @property
    def tiles(self) -> tuple[Tile, ...]: ...

    def fastest(self, problem: Problem) -> Tile:
        """The tile that a model of its time finds fastest for these lengths."""


def rotates_bytes(spec: AttentionSpec) -> bool:
    """Whether it would rotate keys that are stored in 8 bits, which nothing does."""
    return spec.rotary is not None and spec.k_dtype is not None


def one_type(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """The limits of schedules whose Q, K, V and O have one type, without a scale of V."""
    others = [tensor for tensor, dtype in spec.dtypes.items() if dtype is not spec.dtype]
    if others:
        yield "dtype", f"its tensors have one element type, and that of {others[0]} is not that of q"
    if spec.v_scale is not None:
        yield "scaled v", "it multiplies no weights by a scale of V"


def any_types(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """Of those that convert each element by itself: none."""
    yield from ()


WHY_ROTATED = "keys of 8 bits are those of a cache, which were rotated when they were appended"
ROTATE_BEFORE = (
    "leave out `rotary` and give rotated queries; attngen.torch.Attention.decode takes the spec as it is, rotates queries "
    "and new keys, and appends these in 8 bits"
)
WHY_CONVERTED = "each is converted once, and read by every block of rows, whose products do not wait for it"
WHY_HEAD_SCALE = (
    "all pairs of a head share it: a positive one joins the exponent's factor; by any other, each score is multiplied"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Schedule:
    """Everything that the compiler knows of one schedule; adding a schedule takes this object and its template.

    A schedule of direction "backward" computes the gradients `facts.wanted`; its name ends in BACKWARD_SUFFIX.
    """

    name: str  # the name of its template, `templates/kernels/NAME.cu.j2`, and its explanation, `templates/lessons/NAME.j2`
    # in a spec's `kernel` statement; of several that share it, the first that suits the spec and the architecture is used
    keyword: ScheduleName
    summary: str  # one sentence, for `attngen list`
    direction: Direction = "forward"
    # planning
    why_not: Callable[[SpecFacts, Arch], str] = lambda facts, arch: ""  # why it cannot compute the spec; empty if it can
    propose: Callable[[Schedule, SpecFacts, Arch], Plan]  # raises PlanRefusal
    largest_head: int = LARGEST_HEAD  # elements of a row of Q, K or V, at most
    heads_above: int = 0  # it is for heads of more elements
    types: Callable[[AttentionSpec], Iterator[tuple[str, str]]] = one_type  # as `limits`: of element types and scales of V
    needs: tuple[Feature, ...] = ()  # what an architecture must have for it to compute any spec
    tiles: Callable[[SpecFacts, Arch], tuple[Tile, ...]] = lambda facts, arch: ()  # those that fit, for tuning
    # whether Q may stay in registers beside a tile
    holds_q: Callable[[SpecFacts, Arch, Tile], bool] = lambda facts, arch, tile: False
    measured: Measured | None = None  # its kernels whose registers ptxas counts; None: they are estimated
    by_lengths: Callable[[SpecFacts], TileChoice | None] = lambda facts: None  # None: one tile for all lengths
    in_return: str = ""  # what it does instead, if it follows another one under its keyword that does not suit
    propose_tile: Callable[[Schedule, SpecFacts, Arch, Tile], Plan] | None = None  # the plan of a tile of `by_lengths`
    heads_side_by_side: Callable[[SpecFacts], tuple[HeadsInL2, str]] = heads_in_l2  # the rule, and the reason
    # whether gradients in a fixed order take no longer than others, for these numbers of queries and keys
    is_faster_in_order: Callable[[SpecFacts, int, int], bool] = lambda facts, q_len, kv_len: False
    # emission: a subclass of `attngen.emit.file.File`
    context: Any
    # pages and traces
    loops: Callable[[AttentionSpec, Plan], Any]  # the loop nest of each kernel, by the kernel's suffix (`emit/loops.py`)
    layouts: Callable[[AttentionSpec, Plan], tuple[Layout, ...]] = lambda spec, plan: layouts(plan.buffers)  # for its tiles
    # properties that shared code branches on
    is_tiled: bool = True  # tiles of the mask are classified
    output_columns: int = 0  # columns of O that a block computes from the weights that it reads; 0: all
    is_fused: bool = True  # scores and weights stay on the chip, one tile at a time
    on_tensor_cores: bool = False
    by_tma: bool = False  # TMA copies the tiles, which then lie swizzled in shared memory
    is_warp_specialized: bool = False  # persistent blocks with a producer and consumers
    listed_tiles: int = 0  # tiles that a producer keeps in a list; 0: it has none
    # of the emulated device, on one core of 2024: for a pair of a row and a key, and each element of their Q, K and V
    emulated_ns: float
    converts_keys: bool = False  # K and V of 8 bits are converted before; else, if `types` allows them, it reads them itself
    multiplies_bytes: bool = False  # its products are of 8 bits: under its keyword, it is for Q of 8 bits and others are not
    multiplies_terms: bool = False  # its products are of terms of fp32: under its keyword, it is for fp32 and others are not
    scales_heads: bool = False  # a factor of s that all pairs of a head share joins the scale
    packs_heads: bool = False  # the rows of all query heads of a key/value head are in one tile

    @property
    def visits_rows(self) -> bool:
        """Whether blocks of keys visit tiles of rows, beside blocks of rows that visit tiles of keys."""
        return self.direction == "backward" and self.is_fused

    def reason_against(self, facts: SpecFacts, arch: Arch) -> str:
        """Why it cannot compute the spec from arrays in its storage on the architecture; empty if it can."""
        if facts.wanted and facts.spec.kernel.storage not in WITH_GRADIENTS:
            return NO_GRADIENTS_OF_CACHES
        return next((reason for _, reason in self.limits(facts.spec)), "") or self.why_not(self.as_read(facts), arch)

    def limits(self, spec: AttentionSpec) -> Iterator[tuple[str, str]]:
        """What keeps it from computing the spec on any architecture: a statement of the spec, and the reason."""
        if max(spec.head_dim, spec.head_dim_v) > self.largest_head:
            yield "head_dim", f"its heads have at most {self.largest_head} elements"
        if max(spec.head_dim, spec.head_dim_v) <= self.heads_above:
            yield "head_dim", f"it is for heads of more than {self.heads_above} elements"
        yield from self.types(spec)
        if rotates_bytes(spec):
            yield "rotary", WHY_ROTATED
        elif spec.kernel.is_paged and spec.dtypes["k"] is not spec.dtypes["v"]:
            yield "dtype", "its keys and values in pages have one element type"

    def suits(self, facts: SpecFacts, arch: Arch) -> bool:
        return not self.reason_against(facts, arch)

    def plan(self, facts: SpecFacts, arch: Arch) -> Plan:
        """The plan for a spec, whatever the lengths of a call. Raises PlanRefusal."""
        return self._of_call(self.propose(self, self.as_read(facts), arch), facts)

    def plan_of_tile(self, facts: SpecFacts, arch: Arch, tile: Tile) -> Plan:
        """The plan of a tile of `by_lengths`."""
        assert self.propose_tile is not None
        return self._of_call(self.propose_tile(self, self.as_read(facts), arch, tile), facts)

    def as_read(self, facts: SpecFacts) -> SpecFacts:
        """The facts of the spec as kernels read it after those that convert keys, and with the scale of a head: planning is
        about these."""
        of_keys = facts_of_converted(facts) if self.converts_keys and has_bytes(facts.spec) else facts
        return facts_of_head_scale(of_keys) if self.scales_heads else of_keys

    def _of_call(self, plan: Plan, facts: SpecFacts) -> Plan:
        """A plan that was made of `as_read(facts)`, as one for calls with `facts`."""
        made_of, decisions = plan.facts.spec, [*plan.decisions]
        if converted := made_of.k_dtype is not facts.spec.k_dtype:
            what = f"in {facts.spec.dtype}, by a kernel before the others"
            decisions.append(Decision("K and V", what, WHY_CONVERTED))
        if scaled := made_of.scale is not facts.spec.scale:
            decisions.append(Decision(f"score's factor {shown(head_factor(facts.spec))}", "in the scale", WHY_HEAD_SCALE))
        if not (converted or scaled):
            return plan
        names = ("K", "V") if converted else ()
        return replace(plan, facts=facts, decisions=tuple(decisions), converted=names, head_scale=scaled)

    def __repr__(self) -> str:
        return f"<Schedule {self.name}>"


@dataclass(frozen=True, slots=True)
class Plan:
    """How: the schedule, its tiles and its use of a block's resources.

    `block_q` query rows and `block_kv` key rows make a tile; a block of `32 * warps` threads works on one tile at a time;
    K and V tiles rotate through `stages` buffers. `shared_bytes` is the dynamic shared memory of a launch.
    """

    schedule: Schedule
    facts: SpecFacts
    arch: Arch
    block_q: int
    block_kv: int
    warps: int
    stages: int
    bounds: MaskBounds
    decisions: tuple[Decision, ...]
    buffers: tuple[SharedBuffer, ...] = ()
    own: Own = NONE  # the schedule's own choices: a frozen value of its package
    blocks: int = 0  # per SM, for the launch bounds; 0: not stated
    least_shared: int = 0  # bytes of shared memory that a block takes if it needs fewer, so that an SM has no more blocks
    heads_in_l2: HeadsInL2 | None = None  # how work tiles are numbered; None: the grid has a dimension per head
    consumer_rows: int = 0  # rows of a consumer that has a tile range of its own; 0: all rows of a block share their tiles
    staged: Staged = NOTHING  # elements of captured tensors that are not read pair by pair
    affine: AffineScore | None = None  # the score's term that is added once for a row and tile; None: with each pair's score
    term_sums: tuple[TermSum, ...] = ()  # backward only: what pairs add to the gradients of captured tensors
    row_bounds: MaskBounds | None = None  # for blocks of keys, see `Schedule.visits_rows`
    saved: tuple[str, ...] = ()  # results that a backward reads: "out", "lse", "lse_rest"; those that a forward writes for it
    rotated: tuple[str, ...] = ()  # tensors whose rows a kernel before the others rotates, into workspaces that those read
    converted: tuple[str, ...] = ()  # tensors of 8 bits that a kernel before the others writes in the type of Q
    in_terms: tuple[str, ...] = ()  # tensors of fp32 that kernels before the others write as three terms of bf16
    transposed: tuple[str, ...] = ()  # tensors that a kernel before the others transposes, in slabs of BLOCK_KV keys
    head_scale: bool = False  # factors of s that all pairs of a head share are in the scale, see `attngen.plan.head_scale`
    workspaces: tuple[str, ...] = ()  # arrays of fp32 numbers, by name; the context has their axes
    written_pairs: tuple[str, ...] = ()  # captured tensors with one element for each pair, whose gradients are dS

    def __repr__(self) -> str:
        stages = f", {counted(self.stages, 'stage')}" if self.schedule.is_fused else ""
        tile = f", tile {self.block_q} x {self.block_kv}{stages}" if self.schedule.is_tiled else ""
        return f"<Plan {self.title} on {self.arch.name}{tile}, {self.warps} warps>"

    @property
    def numbers_of_rows(self) -> tuple[str, ...]:
        """What a forward writes beside O: lse, as the spec's output or for the backward, as exact as weights in 16 bits need;
        lse_rest, what it lacks as one fp32 number (`attngen.plan.saved`)."""
        if self.direction == "backward":
            return ()
        return tuple(n for n in ("lse", "lse_rest") if n in self.saved or (n == "lse" and self.facts.spec.lse))

    @property
    def writes_lse(self) -> bool:
        return "lse" in self.numbers_of_rows

    @property
    def direction(self) -> Direction:
        return self.schedule.direction

    @property
    def suffix(self) -> str:
        """What the names of a backward's file and kernels have after the spec's or the schedule's."""
        return BACKWARD_SUFFIX if self.direction == "backward" else ""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The gradients that a backward computes, by the names of arguments."""
        return self.facts.wanted

    def wants(self, *names: str) -> bool:
        return any(n in self.wanted for n in names)

    @property
    def keyword(self) -> ScheduleName:
        """The schedule's name in a `kernel` statement."""
        return self.schedule.keyword

    @property
    def title(self) -> str:
        """The keyword, and the schedule if its name is another."""
        name = self.schedule.name.removesuffix(BACKWARD_SUFFIX)
        title = self.keyword if name == self.keyword else f"{self.keyword} by {name}"
        return title if self.direction == "forward" else f"{title}, backward"

    @property
    def tile(self) -> Tile:
        return Tile(self.block_q, self.block_kv, self.stages, self.warps)

    @property
    def q_place(self) -> QPlace | None:
        """Where the fragments of Q stay; None if the schedule has no choice."""
        held = self.own.q_in_registers
        return None if held is None else "registers" if held else "shared"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_rows(self) -> int:
        """Rows that are multiplied with the same tiles: those of a block, or of a consumer."""
        return self.consumer_rows or self.block_q

    def missing_rows(self, q_len: int) -> int:
        """Rows missing from the first block: if consumers have tile ranges of their own, blocks are aligned to the last row, in
        whole consumers. Other plans align them to the first."""
        return -q_len % self.block_q // self.tile_rows * self.tile_rows if self.consumer_rows else 0

    @property
    def used_shared(self) -> int:
        """Bytes of a block's buffers."""
        return max((b.offset + b.bytes for b in self.buffers), default=0)

    @property
    def shared_bytes(self) -> int:
        return max(self.least_shared, self.used_shared)

    @property
    def shared_more(self) -> str:
        """Words about shared memory that a launch asks for and no buffer uses."""
        return f"; a launch asks for {self.shared_bytes}" if self.shared_bytes > self.used_shared else ""
