"""Who holds which element: the fragments of mma and wgmma, and what ldmatrix loads. The layouts are those of the PTX ISA,
"Matrix multiply-accumulate operation using mma instruction" and "Asynchronous warpgroup level matrix instructions"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from attngen.drawings.picture import Picture

LANES, WARP_ROWS = 32, 16
WIDE, HIGH = 40.0, 21.0  # a cell

# (lane, which of its elements) of the matrix element [row][column]
Holder = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix of an instruction. Four neighbouring lanes, which share a row (a column of B), have one colour."""

    name: str
    rows: int
    columns: int
    held: Holder


def _a16(row: int, column: int) -> tuple[int, int]:
    return row % 8 * 4 + column % 8 // 2, column % 2 + 2 * (row // 8) + 4 * (column // 8)


def _b16(row: int, column: int) -> tuple[int, int]:
    return column * 4 + row % 8 // 2, row % 2 + 2 * (row // 8)


def _sums(row: int, column: int) -> tuple[int, int]:
    return row % 8 * 4 + column % 8 // 2, column % 2 + 2 * (row // 8) + 4 * (column // 8)


def _a_tf32(row: int, column: int) -> tuple[int, int]:
    return row % 8 * 4 + column % 4, row // 8 + 2 * (column // 4)


def _b_tf32(row: int, column: int) -> tuple[int, int]:
    return column * 4 + row % 4, row // 4


MMA_16 = (Operand("A", 16, 16, _a16), Operand("B", 16, 8, _b16), Operand("D", 16, 8, _sums))
MMA_TF32 = (Operand("A", 16, 8, _a_tf32), Operand("B", 8, 8, _b_tf32), Operand("D", 16, 8, _sums))
_WGMMA = re.compile(r"wgmma\.mma_async\.\S*\.m64n(\d+)k")
OF_WGMMA = Operand("D", 16, 16, _sums)


def _matrix(drawn: Picture, x: float, y: float, one: Operand, what: str) -> None:
    drawn.text(x, y - 18.0, f"{one.name}, {one.rows} x {one.columns}: {what}", "head")
    for column in range(one.columns):
        drawn.text(x + (column + 0.5) * WIDE, y - 4.0, str(column), "small quiet", "middle")
    for row in range(one.rows):
        drawn.text(x - 5.0, y + (row + 0.7) * HIGH, str(row), "small quiet", "end")
        for column in range(one.columns):
            lane, element = one.held(row, column)
            at = x + column * WIDE, y + row * HIGH
            tip = f"{one.name}[{row}][{column}]: lane {lane}, its element {element}"
            drawn.rect(*at, WIDE - 1.0, HIGH - 1.0, f"c{lane // 4}", tip)
            drawn.text(at[0] + WIDE / 2 - 1.0, at[1] + 14.0, f"{lane}:{element}", "small", "middle")


def mma_picture(operands: tuple[Operand, Operand, Operand], name: str) -> Picture:
    """A to the left of D and B above it, as in the product D = A B."""
    a, b, d = operands
    each = ", ".join(f"{one.rows * one.columns // LANES} elements of {one.name}" for one in operands)
    says = (
        f"One instruction of a warp: D += A B, {2 * a.rows * a.columns * b.columns:,} operations. A cell says LANE:ELEMENT: "
        f"which of the 32 lanes holds it, and as which of its own. A lane holds {each}. For Q K^T, A is rows of Q, B keys; a "
        "row of scores is in four neighbouring lanes, which have one colour: its maximum takes two shuffles."
    )
    drawn = Picture(f"Fragments of {name}", says)
    left, top = 24.0, 34.0
    right, below = left + a.columns * WIDE + 40.0, top + b.rows * HIGH + 44.0
    _matrix(drawn, left, below, a, "rows of Q")
    _matrix(drawn, right, top, b, "keys")
    _matrix(drawn, right, below, d, "scores")
    return drawn


def ldmatrix_picture() -> Picture:
    """Who gives the addresses of an ldmatrix.x4, and who receives what."""
    says = (
        "One instruction of a warp loads four matrices of 8 x 8 elements of 16 bits. Lane l gives the address of one row of "
        "16 bytes: row l % 8 of matrix l / 8 (left of each row). It receives two elements of each matrix, in register r0 to "
        "r3 (in the cells: the lane that receives them). The eight rows of a matrix are read at once, so they must lie in "
        "different banks."
    )
    drawn = Picture("ldmatrix.x4", says)
    for matrix in range(4):
        x, y = 58.0 + matrix % 2 * 330.0, 28.0 + matrix // 2 * 220.0
        drawn.text(x, y - 10.0, f"matrix {matrix}: register r{matrix}", "head")
        for row in range(8):
            drawn.text(x - 6.0, y + row * HIGH + 14.0, f"lane {matrix * 8 + row}", "small quiet", "end")
            for pair in range(4):
                lane = row * 4 + pair
                tip = f"elements {2 * pair} and {2 * pair + 1} of row {row}: lane {lane}, r{matrix}"
                drawn.rect(x + pair * 60.0, y + row * HIGH, 59.0, HIGH - 1.0, f"c{row}", tip)
                drawn.text(x + pair * 60.0 + 29.0, y + row * HIGH + 14.0, f"{lane}", "small", "middle")
    return drawn


def wgmma_picture(columns: int) -> Picture:
    """The sums of a wgmma of 64 x `columns`: bands of warps, and the first columns of one of them."""
    says = (
        f"The sums of a warpgroup's product, 64 rows by {columns} columns. Each of its four warps has 16 rows. In every 8 "
        "columns a warp's lanes hold them as in mma: a cell says LANE:ELEMENT, of 8 of a thread for 16 columns. A and B are "
        "not held by threads: the tensor cores read them from shared memory by descriptors (A may also be in registers)."
    )
    drawn = Picture(f"Sums of wgmma, 64 x {columns}", says)
    for warp in range(4):
        y = 24.0 + warp * 44.0
        words = f"warp {warp}: rows {warp * WARP_ROWS} to {warp * WARP_ROWS + WARP_ROWS - 1}, {columns} columns"
        drawn.rect(24.0, y, 640.0, 42.0, f"c{2 * warp}", words)
        drawn.text(344.0, y + 26.0, words, "", "middle")
    drawn.path("M24 24h160v42h-160z", "ring")
    _matrix(drawn, 24.0, 256.0, OF_WGMMA, "a warp's rows, the first 16 columns (framed above)")
    return drawn


def fragments_of(text: str) -> list[Picture]:
    """The pictures of the instructions that a CUDA file names."""
    columns = sorted({int(n) for n in _WGMMA.findall(text)})
    found = [wgmma_picture(n) for n in columns[-1:]]  # the others differ in their number of columns alone
    if "mma_16x8x16(" in text:
        found.append(mma_picture(MMA_16, "mma.m16n8k16"))
    if "mma_16x8x8(" in text:
        found.append(mma_picture(MMA_TF32, "mma.m16n8k8, tf32"))
    if "ldmatrix_x4(" in text:
        found.append(ldmatrix_picture())
    return found
