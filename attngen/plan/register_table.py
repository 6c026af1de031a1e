"""Which kernels have registers enough: a table that ptxas made, a file per compiler and schedule in `registers/`.

A family of kernels differs in head size and in the keys of a tile alone. For each number of keys the table has the widest head
size of which nothing is spilled, with a spec for each thing that a variant may compute, on every architecture. A kernel has
registers enough if each compiler of the table finds so. A schedule's files are read when it is first planned.
`python -m attngen.inspect.registers --write` makes the files of the NVRTC that is installed, without a GPU.

The widest head size does not say everything. ptxas sometimes spills a few bytes of a narrower head, and on one architecture
alone: for instance, it limits threads to 168 registers so that three blocks share an SM. So a second file of each schedule
lists the kernels that spill although the first has room for them (`Spilled`). It is found by compiling the default plans:
`python -m attngen.inspect.spilled --write`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.room import Counted
from attngen.plan.tile import Tile

if TYPE_CHECKING:
    from attngen.plan.plan import Plan, Schedule

FOLDER = Path(__file__).with_name("registers")  # one folder per compiler
# The head sizes that are compiled; the table's numbers are among them, or 0: none fits.
HEAD_SIZES = (32, 64, 80, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class Family:
    """A row of a schedule's table."""

    schedule: str
    variant: str  # what the mask and the score read and compute (`attngen.plan.variants`), or the schedule's name for several
    operands: str  # type of the products' operands
    rows: int  # per warp, or per warpgroup
    warps: int  # per block: so many, or more up to the next row's
    stages: int
    form: str  # a choice beside the tile: where Q's fragments are, "registers" or "shared" memory

    def __str__(self) -> str:
        return " ".join(str(getattr(self, f.name)) for f in fields(self))


Widest = dict[int, int]  # head sizes by the keys of a tile; of fewer keys than those it has, as of the next more
NOT_COMPILED = "-"
COLUMNS = tuple(f.name for f in fields(Family) if f.name != "schedule")


PORTABLE = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
SAME_CODE = {"sm_86": "sm_80", "sm_89": "sm_80"}  # architectures whose machine code is that of another


@dataclass(frozen=True, slots=True)
class Spilled:
    """A kernel that spills on an architecture, although its head size is at most the widest of its row."""

    variant: str
    operands: str
    block_q: int
    block_kv: int
    stages: int
    warps: int
    form: str
    head_dim: int  # the least of HEAD_SIZES that is not less than what counts of the spec's
    arch: str

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))


def spilled_kernel(kind: str, operands: str, tile: Tile, form: str, size: int, arch: Arch) -> Spilled:
    """The line of `Spilled` that a kernel would have; `size` is what counts of the spec's head sizes."""
    head_dim, code = next(s for s in HEAD_SIZES if size <= s), SAME_CODE.get(arch.name, arch.name)
    return Spilled(kind, operands, tile.block_q, tile.block_kv, tile.stages, tile.warps, form, head_dim, code)


def narrower(kernel: Spilled) -> int:
    """The next smaller head size; 0: none."""
    return max((size for size in HEAD_SIZES if size < kernel.head_dim), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The families of a schedule whose kernels ptxas compiles."""

    families: tuple[Family, ...]
    keys: Callable[[Family], tuple[int, ...]]  # keys of the tiles that are compiled
    specs: Callable[[Family], tuple[str, ...]]  # statements beside the head size, of specs that take the most registers
    # the plan of a tile with so many keys; None if it is not of the family
    plan: Callable[[Schedule, Family, SpecFacts, Arch, int], Plan | None]
    arches: tuple[str, ...]
    as_spilled: Callable[[Plan], Spilled]  # the line that a plan would have among the kernels that spill


def compilers() -> tuple[str, ...]:
    """The compilers that made the table, as in "NVRTC-13.5"."""
    return tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))


def file_of(schedule: str, compiler: str) -> Path:
    return FOLDER / compiler / f"{schedule}.txt"


def file_of_spilled(schedule: str, compiler: str) -> Path:
    return FOLDER / compiler / f"{schedule}_spilled.txt"


def spilled_by(schedule: str, compiler: str) -> frozenset[Spilled]:
    """The kernels that a compiler spills although the table has room for them, as they are committed."""
    path = file_of_spilled(schedule, compiler)
    return parse_spilled(path.read_text("utf-8")) if path.exists() else frozenset()


@lru_cache
def spilled(schedule: str) -> frozenset[Spilled]:
    """Those of any compiler."""
    return frozenset(kernel for compiler in compilers() for kernel in spilled_by(schedule, compiler))


def measured_by(schedule: str, compiler: str) -> dict[Family, Widest]:
    """What a compiler found, as it is committed."""
    path = file_of(schedule, compiler)
    return parse(schedule, path.read_text("utf-8")) if path.exists() else {}


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


def counted(kernel: Spilled, size: int, keys: int, *families: Family) -> Counted:
    """What the tables say of a kernel with tiles of `keys` keys: that it spills, or the least of the rows of `families`. `size`
    is what counts of the spec's head sizes."""
    if kernel in spilled(families[0].schedule):
        return Counted(narrower(kernel), size)
    return Counted(min(widest(family, keys) for family in families), size)


def parse(schedule: str, text: str) -> dict[Family, Widest]:
    _, names, *rows = (line.split() for line in text.splitlines())
    keys = [int(name) for name in names if name.isdecimal()]
    found: dict[Family, Widest] = {}
    for variant, operands, warp_rows, warps, stages, form, *sizes in rows:
        family = Family(schedule, variant, operands, int(warp_rows), int(warps), int(stages), form)
        found[family] = {k: int(n) for k, n in zip(keys, sizes, strict=True) if n != NOT_COMPILED}
    return found


def to_text(rows: Mapping[Family, Widest]) -> str:
    keys = sorted({k for found in rows.values() for k in found})
    cells = [["#", *COLUMNS, *map(str, keys)]]
    for family, found in rows.items():
        own = (str(getattr(family, name)) for name in COLUMNS)
        cells.append(["", *own, *(str(found.get(k, NOT_COMPILED)) for k in keys)])
    return _aligned("Widest head size without spills, by keys of a tile", cells)


def parse_spilled(text: str) -> frozenset[Spilled]:
    _, names, *rows = (line.split() for line in text.splitlines())
    numbers = {f.name for f in fields(Spilled) if f.type == "int"}
    found = (dict(zip(names[1:], row, strict=True)) for row in rows)
    return frozenset(Spilled(**{n: int(v) if n in numbers else v for n, v in row.items()}) for row in found)  # type: ignore[arg-type]


def spilled_to_text(kernels: Iterable[Spilled]) -> str:
    rows = sorted(astuple(kernel) for kernel in kernels)
    cells = [["#", *(f.name for f in fields(Spilled))], *(["", *map(str, row)] for row in rows)]
    return _aligned("Kernels that spill although the table of head sizes has room for them", cells)


def _aligned(title: str, cells: Sequence[Sequence[str]]) -> str:
    """A title and rows of cells, in columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join([f"# {title}", *lines]) + "\n"
