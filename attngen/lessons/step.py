"""`Step` and `Ladder`: what the lists of steps are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attngen.emit.program import Extent, Product
from attngen.emit.wgmma import Wgmma

HEAD = "head_dim"
GROUP = "group"  # the number of query heads that share a key head
SIZES = ("q_heads", "kv_heads", "q_len", "kv_len")  # sizes of a call, in the order of parameters
ROWS: tuple[Extent, ...] = ("q_heads", "q_len")
KEYS: tuple[Extent, ...] = ("kv_heads", "kv_len")
# What is counted, and its words.
COUNTS: Mapping[str, str] = {
    "global_read": "bytes of global memory read",
    "global_written": "bytes of global memory written",
    "sectors": "sectors",
    "requests": "requests of global memory",
    "shared_read": "bytes of shared memory read",
    "wavefronts": "wavefronts",
    "conflicts": "bank conflicts",
    "fma": "fma",
    "mma": "mma",
    "wgmma_async": "wgmma instructions",
    "tma": "TMA copies",
    "barriers": "barriers",
}


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the kernels of a ladder, without batch; `element` is a type of CUDA, or empty: that of the spec."""

    name: str
    axes: tuple[Extent, ...]
    role: str  # input, output, workspace
    element: str = ""


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel of a step, `SPEC_ladder` and `suffix`: its blocks along x, y and z, each a factor or several; its threads."""

    suffix: str
    blocks: tuple[Extent | tuple[Extent, ...], ...]
    threads: Extent

    @property
    def grid(self) -> tuple[Product, Product, Product]:
        x, y, z = (Product(one if isinstance(one, tuple) else (one,)) for one in (*self.blocks, 1, 1)[:3])
        return x, y, z


@dataclass(frozen=True, slots=True)
class Step:
    """One lesson kernel, or several that follow each other: `NUMBER_NAME.cu.j2` in `templates/ladder/`, in its ladder."""

    number: int
    name: str
    title: str
    bound: str  # what bounds the step before
    idea: str  # what this step changes
    kernels: tuple[Launched, ...]  # in launch order
    constants: tuple[tuple[str, int | str], ...]
    predicted: tuple[str, str, str]  # a name of COUNTS, its formula for the counted problem with heads of 64, why
    primitives: tuple[str, ...] = field(default=("lane_reduce",))
    arch: str = "sm_80"
    heads: tuple[int, ...] = ()  # head sizes, if not all of the ladder
    mapped: tuple[tuple[str, int], ...] = ()  # arrays that it has as tensor maps, in boxes of so many rows
    products: tuple[Wgmma, ...] = ()  # the warpgroup's, with the spec's type in place of theirs


@dataclass(frozen=True, slots=True)
class Ladder:
    """The steps of one subject, of which each changes one idea of the step before."""

    name: str
    steps: tuple[Step, ...]
    arrays: tuple[Array, ...]
    heads: tuple[int, ...]  # head sizes
    counted: tuple[int, int, int, int]  # q_heads, kv_heads, q_len, kv_len of the problem that is counted by default
    columns: tuple[str, ...]  # names of COUNTS that are shown
    after: str  # where to go on; {spec} is the argument of the command

    @property
    def title(self) -> str:
        return f"the {self.name} ladder"

    def sizes(self, q_len: int | None = None, kv_len: int | None = None) -> dict[str, int]:
        """The sizes of the counted problem, with the caller's lengths. `kv_len` follows `q_len` where the two are equal."""
        q_heads, kv_heads, rows, keys = self.counted
        if kv_len is None:
            kv_len = q_len if q_len is not None and rows == keys else keys
        return dict(zip(SIZES, (q_heads, kv_heads, q_len or rows, kv_len), strict=True))
