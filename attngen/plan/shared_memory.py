"""Shared memory of a block: its buffers, and how the rows of tiles lie in the banks, padded or swizzled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from attngen.spec.dtypes import DTYPES

ALIGN = 128  # bytes, of each buffer's offset
CHUNK = 16  # bytes: what a lane reads at once, one of the eight groups of four banks
BANK_GROUPS = 8
COLUMN, ROW, NEITHER = "column", "row", ""
DROPOUT = ("key0", "key1", "tail0", "tail1", "dropped")  # the members of a Dropout
WORK_TILE = ("q_block", "h_idx", "b_idx")  # the members of a WorkTile: where keys are split over blocks, also which part
ELEMENT_BYTES = {"int": 4, "unsigned": 4, "float": 4, "mbarrier": 8, "byte": 1} | {d.name: d.bytes for d in DTYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer:
    """An array in a block's shared memory; the kernel's constant NAME_SMEM is its offset in bytes."""

    name: str
    element: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]  # extents, the outermost first, for instance [stages][slabs][rows][columns]
    use: str  # what it holds, in words
    pad: int = 0  # elements after each row
    swizzled: bool = False  # the chunks of a row of 128 bytes are permuted as in `Layout`
    read: str | None = None  # the chunks that are read at once (`Layout`); None for what is no tile of a matrix
    then: str = ""  # the matrix whose rows it holds at the end
    kernel: str = ""  # the only kernel of the file that has it; empty: all have it
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        return (self.shape[-1] + self.pad) * ELEMENT_BYTES[self.element]

    @property
    def bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def what(self) -> str:
        """Type, extents and use in words: `fp16 [2][64][64 + 8], the keys of 2 tiles`."""
        extents = [*map(str, self.shape[:-1]), f"{self.shape[-1]} + {self.pad}" if self.pad else str(self.shape[-1])]
        return f"{self.element} {''.join(f'[{extent}]' for extent in extents)}, {self.use}"


def lay_out(*buffers: SharedBuffer) -> tuple[SharedBuffer, ...]:
    """`buffers` one after another, each at a multiple of ALIGN; if they have kernels, those of each kernel from 0 on."""
    placed: list[SharedBuffer] = []
    ends = dict.fromkeys((buffer.kernel for buffer in buffers), 0)
    for buffer in buffers:
        placed.append(replace(buffer, offset=ends[buffer.kernel]))
        ends[buffer.kernel] += _aligned(buffer)
    return tuple(placed)


def aligned(*buffers: SharedBuffer) -> int:
    """The bytes that `lay_out` needs."""
    return max(b.offset + _aligned(b) for b in lay_out(*buffers))


def _aligned(buffer: SharedBuffer) -> int:
    return -(-buffer.bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Layout:
    """A tile in shared memory: `rows` of `data_bytes` each, one every `row_bytes`."""

    name: str
    rows: int
    data_bytes: int
    row_bytes: int
    read: str  # the eight chunks that are read at once, at most: a COLUMN of eight rows, neighbours in a ROW, or NEITHER
    swizzled: bool = False  # chunks of a row of 128 bytes are permuted by exclusive or with the row's number modulo 8
    gap: tuple[int, int] = (1, 0)  # after every so many rows, so many bytes are left free

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


def layouts(buffers: tuple[SharedBuffer, ...]) -> tuple[Layout, ...]:
    """The layout of each buffer that holds tiles of a matrix."""
    return tuple(
        Layout(
            ("a slab of " if b.swizzled else "") + b.name + (f", in the end {b.then}" if b.then else ""),
            b.shape[-2],
            b.shape[-1] * ELEMENT_BYTES[b.element],
            b.row_bytes,
            b.read,
            b.swizzled,
        )
        for b in buffers
        if b.read is not None
    )
