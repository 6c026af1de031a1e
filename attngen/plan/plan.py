"""`Plan`: how one spec is computed on one architecture, every choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.plan.arch import Arch
from attngen.plan.staging import NOTHING, Staged
from attngen.plan.tiles import TileBounds


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of the planner: printed in the header of the generated file and by `explain`."""

    field: str
    value: str
    because: str


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A named range of a block's shared memory."""

    name: str
    offset: int
    bytes: int
    what: str  # its shape and use, in words


@dataclass(frozen=True, kw_only=True)
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
    """What was asked for does not fit the architecture or the schedule; says what would."""


def refusal(statement: str, what: str, why: str, cure: str) -> PlanRefusal:
    """A PlanRefusal that points at the spec's statement of that keyword."""
    return PlanRefusal(DoesNotFit(statement=statement, what=what, why=why, cure=cure))


FragmentsAhead = Literal["", "Q", "K", "Q and K"]
RowSums = Literal["products", "weights, the heaviest rounded", "weights"]


@dataclass(frozen=True, slots=True)
class Roles:
    """One warpgroup copies, `consumers` others multiply; registers are those of a thread.

    A warp's output leaves by copies of slabs, `output_slabs` of which have room in shared memory. `row_sums` says what the sums
    of a softmax are: "products" of P with columns of ones beside V, or of "weights" that the threads add. `shift` is subtracted
    from the exponents (of 2) of all scores in place of a row's maximum; None: there is a maximum. `own_tiles`: a
    consumer multiplies the tiles that have keys for its own rows, not all of the block's.
    """

    consumers: int
    producer_registers: int
    consumer_registers: int
    output_slabs: int
    row_sums: RowSums
    shift: float | None
    own_tiles: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How: the schedule, its tiles and its use of a block's resources.

    `block_q` query rows and `block_kv` key rows make a tile; a block of `32 * warps` threads works on one tile at a time;
    K and V tiles go round `stages` buffers. `shared_bytes` counts dynamic shared memory.
    """

    rung: str  # "naive", "tiled", "fused", "wgmma" or "hopper"
    schedule: str  # the proposer's name, which is the kernel template's name too
    arch: Arch
    block_q: int
    block_kv: int
    warps: int
    stages: int
    bounds: TileBounds
    decisions: tuple[Decision, ...]
    buffers: tuple[SharedBuffer, ...] = ()
    q_in_registers: bool = False
    copies_between_steps: bool = False  # copies are asked for between the steps of a tile's products, not before them
    fragments_ahead: FragmentsAhead = ""  # whose next fragments are read before the products of these
    staggered: bool = False  # the lower half of a block's rows may be a tile ahead of the upper half
    half_tile: bool = False  # a block's last tile may be for the lower half of its rows alone
    blocks: int = 0  # of an SM at once, as the compiler is told; 0: it is not told
    roles: Roles | None = None  # where warpgroups have different work
    staged: Staged = NOTHING  # elements of captured tensors that are not read pair by pair

    def __repr__(self) -> str:
        stages = f", {self.stages} stage{'s' * (self.stages > 1)}" if self.is_fused else ""
        tile = "" if self.rung == "naive" else f", tile {self.block_q} x {self.block_kv}{stages}"
        return f"<Plan {self.title} on {self.arch.name}{tile}, {self.warps} warps>"

    @property
    def title(self) -> str:
        """The rung, and by which schedule if that has another name."""
        return self.rung if self.schedule == self.rung else f"{self.rung} by {self.schedule}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_rows(self) -> int:
        """Rows that are multiplied with the same tiles: those of a block, or of a consumer."""
        return self.block_q // self.roles.consumers if self.roles is not None and self.roles.own_tiles else self.block_q

    def missing_rows(self, q_len: int) -> int:
        """Rows that the first block has not: where consumers have tiles of their own, blocks are counted from the last row, in
        whole consumers. Other plans count them from the first."""
        own = self.roles is not None and self.roles.own_tiles
        return -q_len % self.block_q // self.tile_rows * self.tile_rows if own else 0

    @property
    def is_fused(self) -> bool:
        """Whether scores and weights stay on the chip, one tile at a time."""
        return self.rung not in ("naive", "tiled")

    @property
    def on_tensor_cores(self) -> bool:
        return self.schedule == "fused_mma" or self.by_tma

    @property
    def by_tma(self) -> bool:
        """Whether TMA copies the tiles, which then lie swizzled in shared memory."""
        return self.schedule in ("wgmma", "hopper")

    @property
    def is_bounded(self) -> bool:
        """Whether a softmax does without maxima: a constant keeps its weights in range."""
        return self.roles is not None and self.roles.shift is not None

    @property
    def shared_bytes(self) -> int:
        return max((b.offset + b.bytes for b in self.buffers), default=0)


ALIGN = 128  # bytes


def lay_out(*wanted: tuple[str, int, str]) -> tuple[SharedBuffer, ...]:
    """Buffers one after another, each at a multiple of ALIGN: (name, bytes, what it is)."""
    buffers: list[SharedBuffer] = []
    offset = 0
    for name, size, what in wanted:
        buffers.append(SharedBuffer(name, offset, size, what))
        offset += -(-size // ALIGN) * ALIGN
    return tuple(buffers)
