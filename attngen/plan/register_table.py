"""Which kernels have registers enough: a table that ptxas made, `registers.txt`.

A family of kernels differs in head size and in the keys of a tile alone. For each number of keys the table has the widest head
size of which nothing is spilled, with a spec for each thing that a variant may compute, on every architecture.
`python -m attngen.inspect.registers --write` makes it, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.variants import SPECS, Variant

if TYPE_CHECKING:
    from attngen.plan.plan import Plan, Schedule

TABLE = Path(__file__).with_name("registers.txt")
HEAD_SIZES = (
    32,
    64,
    80,
    96,
    128,
    160,
    192,
    224,
    256,
)  # that are usually compiled; the table's numbers are among them, or 0: none fits


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table."""

    schedule: str
    variant: str  # what the mask and the score read and compute (`attngen.plan.variants`), or the schedule's name for several
    operands: str  # of the products
    rows: int  # of a warp
    warps: int  # of a block: so many, or more up to the next row's
    stages: int
    q: str  # where its fragments are: in "registers" or in "shared" memory

    def __str__(self) -> str:
        return " ".join(str(value) for value in astuple(self))


Widest = dict[int, int]  # head sizes by the keys of a tile; of fewer keys than those it has, as of the next more
NOT_COMPILED = "-"


PORTABLE = ("sm_80", "sm_90a", "sm_100a", "sm_120a")  # sm_86 and sm_89 have the code of sm_80


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The families of a schedule whose kernels ptxas compiles."""

    families: tuple[Family, ...]
    keys: Callable[[Family], tuple[int, ...]]  # of the tiles that are compiled
    specs: Callable[[Family], tuple[str, ...]]  # statements beside the head size, of specs that take the most registers
    # of a tile with so many keys; None if it is not of the family
    plan: Callable[[Schedule, Family, SpecFacts, Arch, int], Plan | None]
    arches: tuple[str, ...]
    head_sizes: tuple[int, ...] = HEAD_SIZES


@lru_cache(maxsize=1)
def table() -> dict[Family, Widest]:
    """The table as it is committed."""
    return parse(TABLE.read_text())


def widest(family: Family, keys: int) -> int:
    """The widest head size of which `family` spills nothing in tiles of `keys` keys; 0: of all sizes it does, or may."""
    return next((size for most, size in table().get(family, {}).items() if keys <= most), 0)


def row_of(rows: Mapping[str, tuple[Variant, ...]], kind: Variant) -> str:
    """The row of a variant, of a schedule whose `rows` serve several."""
    return next(name for name, kinds in rows.items() if kind in kinds)


def specs_of_row(rows: Mapping[str, tuple[Variant, ...]], family: Family, dtype: str, kernel: str) -> tuple[str, ...]:
    """`Measured.specs` of such a schedule; `dtype` and `kernel` are statements."""
    return tuple(f"{dtype} {others} {kernel}" for kind in rows[family.variant] for others in SPECS[kind])


def parse(text: str) -> dict[Family, Widest]:
    _, names, *rows = (line.split() for line in text.splitlines())
    keys = [int(name) for name in names if name.isdecimal()]
    found: dict[Family, Widest] = {}
    for schedule, variant, operands, warp_rows, warps, stages, q, *sizes in rows:
        family = Family(schedule, variant, operands, int(warp_rows), int(warps), int(stages), q)
        found[family] = {k: int(n) for k, n in zip(keys, sizes, strict=True) if n != NOT_COMPILED}
    return found


def to_text(rows: Mapping[Family, Widest], made_by: str) -> str:
    """The table's file; `made_by` is the compiler."""
    keys = sorted({k for found in rows.values() for k in found})
    cells = [["#", *(f.name for f in fields(Family)), *map(str, keys)]]
    cells += [["", *str(family).split(), *(str(found.get(k, NOT_COMPILED)) for k in keys)] for family, found in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join([f"# Widest head size without spills, by keys of a tile. {made_by}", *lines]) + "\n"


def made_by() -> str:
    """The compiler that the committed table is of."""
    return TABLE.read_text().splitlines()[0].partition(". ")[2]
