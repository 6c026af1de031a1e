"""How the rows of each tile lie in shared memory, and in which banks: padded, or swizzled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attngen.plan import fused_mma_needs, fused_simt, hopper, tiled
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec

CHUNK = 16  # bytes: what a lane reads at once, one of the eight groups of four banks
BANK_GROUPS = 8
COLUMN, ROW, NEITHER = "column", "row", ""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tile in shared memory: `rows` of `data_bytes` each, one every `row_bytes`. `swizzled`: the chunks of a row of 128 bytes
    are permuted by exclusive or with the row's number modulo 8. `read`: which eight chunks are read at once, at most: a COLUMN
    of eight rows, neighbours in a ROW, or neither. `gap`: after every `gap[0]` rows, `gap[1]` bytes are left free."""

    name: str
    rows: int
    data_bytes: int
    row_bytes: int
    read: str
    swizzled: bool = False
    gap: tuple[int, int] = (1, 0)

    @property
    def chunks(self) -> int:
        """Of a row, its padding too."""
        return self.row_bytes // CHUNK

    def bank_group(self, row: int, chunk: int) -> int:
        """Which four of the 32 banks hold the logical `chunk` of `row`, 0 to 7."""
        within = chunk ^ row % BANK_GROUPS if self.swizzled else chunk
        every, free = self.gap
        return (row * self.chunks + row // every * (free // CHUNK) + within) % BANK_GROUPS

    def groups_read(self) -> int:
        """How many groups of banks eight chunks that are read at once lie in: 8 means without a conflict. 0: not known."""
        match self.read:
            case "column":
                return len({self.bank_group(row, 0) for row in range(BANK_GROUPS)})
            case "row":
                return len({self.bank_group(0, chunk) for chunk in range(BANK_GROUPS)})
        return 0


def layouts(spec: AttentionSpec, plan: Plan) -> tuple[Layout, ...]:
    """The tiles that a kernel of `plan` keeps in shared memory, one of each kind; none on the naive rung."""
    return LAYOUTS[plan.schedule](spec, plan)


def _tiled(spec: AttentionSpec, plan: Plan) -> tuple[Layout, ...]:
    """Slices of SLICE terms, transposed but for V: a row holds what the threads of a warp read in one step."""
    terms, gap = tiled.slice_of(spec), (tiled.ROWS_PER_PAD, 4 * tiled.pad_of(spec))
    widths = {"Q": plan.block_q, "K": plan.block_kv, "P": plan.block_q}
    padded = [Layout(f"{name}, transposed", terms, 4 * width, 4 * width, ROW, gap=gap) for name, width in widths.items()]
    return (*padded, Layout("V", terms, 4 * tiled.BLOCK_DV, 4 * tiled.BLOCK_DV, ROW))


def _fused_simt(spec: AttentionSpec, plan: Plan) -> tuple[Layout, ...]:
    pad = 4 * fused_simt.PAD

    def layout(name: str, rows: int, width: int, read: str) -> Layout:
        return Layout(name, rows, 4 * width, 4 * width + pad, read)

    return (
        layout("Q", plan.block_q, spec.head_dim, COLUMN),
        layout("K", plan.block_kv, spec.head_dim, COLUMN),
        layout("V", plan.block_kv, spec.head_dim_v, ROW),
        layout("P", plan.block_q, plan.block_kv, COLUMN),
    )


def _fused_mma(spec: AttentionSpec, plan: Plan) -> tuple[Layout, ...]:
    d, dv, size = fused_mma_needs.padded_head_dim(spec), fused_mma_needs.width_of_v(spec), spec.dtype.bytes
    pad = fused_mma_needs.CHUNK_BYTES
    return (
        Layout("Q, in the end O", plan.block_q, size * max(d, dv), size * max(d, dv) + pad, COLUMN),
        Layout("K", plan.block_kv, size * d, size * d + pad, COLUMN),
        Layout("V", plan.block_kv, size * dv, size * dv + pad, NEITHER if fused_mma_needs.operands(spec).split else COLUMN),
    )


def _by_tma(spec: AttentionSpec, plan: Plan) -> tuple[Layout, ...]:
    row = 2 * hopper.SLAB
    q = "a slab of Q" if plan.roles else "a slab of Q, in the end O"
    rows = {q: plan.block_q, "a slab of K": plan.block_kv, "a slab of V": plan.block_kv}
    return tuple(Layout(name, count, row, row, COLUMN, swizzled=True) for name, count in rows.items())


LAYOUTS: dict[str, Callable[[AttentionSpec, Plan], tuple[Layout, ...]]] = {
    "naive": lambda spec, plan: (),
    "tiled": _tiled,
    "fused_simt": _fused_simt,
    "fused_mma": _fused_mma,
    "wgmma": _by_tma,
    "hopper": _by_tma,
}
