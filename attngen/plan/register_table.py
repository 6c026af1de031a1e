"""Which kernels have registers enough: a table that ptxas made, a file per compiler and schedule in `registers/`.

A family of kernels differs in head size and in the keys of a tile alone. For each number of keys the table has the widest head
size of which nothing is spilled, with a spec for each thing that a variant may compute, on every architecture. A kernel has
registers enough if each compiler of the table finds so. A schedule's files are read when it is first planned.
`python -m attngen.inspect.registers --write` makes the files of the NVRTC that is installed, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts, facts_of
from attngen.plan.variants import SPECS, Variant
from attngen.spec.attention import AttentionSpec

if TYPE_CHECKING:
    from attngen.plan.plan import Plan, Schedule

FOLDER = Path(__file__).with_name("registers")  # of a folder per compiler
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
    """A row of a schedule's table."""

    schedule: str
    variant: str  # what the mask and the score read and compute (`attngen.plan.variants`), or the schedule's name for several
    operands: str  # of the products
    rows: int  # of a warp, or of a warpgroup
    warps: int  # of a block: so many, or more up to the next row's
    stages: int
    form: str  # a choice beside the tile: where Q's fragments are, "registers" or "shared" memory; of a backward, its kernels

    def __str__(self) -> str:
        return " ".join(str(getattr(self, f.name)) for f in fields(self))


Widest = dict[int, int]  # head sizes by the keys of a tile; of fewer keys than those it has, as of the next more
NOT_COMPILED = "-"
COLUMNS = tuple(f.name for f in fields(Family) if f.name != "schedule")


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
    head_sizes: Callable[[Family], tuple[int, ...]] = lambda family: HEAD_SIZES
    # of a spec: those of a backward have wanted gradients; several, if storages differ in what a thread holds
    facts: Callable[[Family, AttentionSpec], tuple[SpecFacts, ...]] = lambda family, spec: (facts_of(spec),)


def compilers() -> tuple[str, ...]:
    """The compilers that made the table, as in "NVRTC-13.5"."""
    return tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))


def file_of(schedule: str, compiler: str) -> Path:
    return FOLDER / compiler / f"{schedule}.txt"


def measured_by(schedule: str, compiler: str) -> dict[Family, Widest]:
    """What a compiler found, as it is committed."""
    path = file_of(schedule, compiler)
    return parse(schedule, path.read_text()) if path.exists() else {}


@lru_cache
def table(schedule: str) -> dict[Family, Widest]:
    """The table that planning reads: the least of all compilers, and with more keys no more than with fewer."""
    found: dict[Family, Widest] = {}
    for compiler in compilers():
        for family, sizes in measured_by(schedule, compiler).items():
            known = found.setdefault(family, {})
            known.update({keys: min(size, known.get(keys, size)) for keys, size in sizes.items()})
    return {family: _falling(sizes) for family, sizes in found.items()}


def _falling(sizes: Widest) -> Widest:
    """Where ptxas found room for more keys than for fewer, it had luck."""
    keys = sorted(sizes)
    return dict(zip(keys, accumulate((sizes[k] for k in keys), min), strict=True))


def widest(family: Family, keys: int) -> int:
    """The widest head size of which `family` spills nothing in tiles of `keys` keys; 0: of all sizes it does, or may."""
    sizes = table(family.schedule).get(family, {})
    return next((size for most, size in sizes.items() if keys <= most), 0)


def row_of(rows: Mapping[str, tuple[Variant, ...]], kind: Variant) -> str:
    """The row of a variant, of a schedule whose `rows` serve several."""
    return next(name for name, kinds in rows.items() if kind in kinds)


def specs_of_row(rows: Mapping[str, tuple[Variant, ...]], family: Family, dtype: str, kernel: str) -> tuple[str, ...]:
    """`Measured.specs` of such a schedule; `dtype` and `kernel` are statements."""
    return tuple(f"{dtype} {others} {kernel}" for kind in rows[family.variant] for others in SPECS[kind])


def parse(schedule: str, text: str) -> dict[Family, Widest]:
    """The rows of a schedule's file."""
    _, names, *rows = (line.split() for line in text.splitlines())
    keys = [int(name) for name in names if name.isdecimal()]
    found: dict[Family, Widest] = {}
    for variant, operands, warp_rows, warps, stages, form, *sizes in rows:
        family = Family(schedule, variant, operands, int(warp_rows), int(warps), int(stages), form)
        found[family] = {k: int(n) for k, n in zip(keys, sizes, strict=True) if n != NOT_COMPILED}
    return found


def to_text(rows: Mapping[Family, Widest]) -> str:
    """The file of a schedule's rows."""
    keys = sorted({k for found in rows.values() for k in found})
    cells = [["#", *COLUMNS, *map(str, keys)]]
    for family, found in rows.items():
        own = (str(getattr(family, name)) for name in COLUMNS)
        cells.append(["", *own, *(str(found.get(k, NOT_COMPILED)) for k in keys)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(["# Widest head size without spills, by keys of a tile", *lines]) + "\n"
