"""What the templates of a library read of one spec: names, numbers and C++ expressions, all of which `SpecContext` makes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from attngen.emit.cuda_text import Temporary
from attngen.emit.program import KernelEntry, Program
from attngen.package.call_sizes import CallSizes, Longest
from attngen.package.cpp_text import CppText
from attngen.package.functions import Packaged
from attngen.spec.dtypes import DTYPES
from attngen.spec.print_attn import to_text


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of an array. It has `more` elements than the size `name` of the call, or `more` elements if it has no name;
    `text` is that as C++ over `s`, the sizes of the call."""

    name: str
    more: int
    text: str
    broadcasts: bool  # whether a stride of 0 stands for one element

    @property
    def words(self) -> str:
        return f"{self.name} + {self.more}" if self.name and self.more else self.name or str(self.more)


@dataclass(frozen=True, slots=True)
class Argument:
    """An array of a call, a member of the struct of arguments."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    is_input: bool  # read by every function, written by none
    like: str  # the argument whose sizes it has
    what: str  # in words

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].bytes

    @property
    def struct(self) -> str:
        return "input" if self.is_input else "array"

    @property
    def and_what(self) -> str:
        return f": {self.what}" if self.what else ""

    @property
    def size_texts(self) -> list[str]:
        return [dim.text for dim in self.dims]

    @property
    def words(self) -> list[str]:
        return [dim.words for dim in self.dims]

    @property
    def initializers(self) -> list[str]:
        return [f"{{{dim.text}, {str(dim.broadcasts).lower()}}}" for dim in self.dims]

    @property
    def like_initializers(self) -> list[str]:
        return [f"{{call.{self.like}.sizes[{i}], false}}" for i in range(len(self.dims))]


@dataclass(frozen=True, slots=True)
class View:
    """An array that is a part of an argument: its columns from `first` on."""

    name: str
    of: str
    first: int
    columns: int


@dataclass(frozen=True, slots=True)
class Length:
    """A length of the longest sequence that a call may have, as C++ over its sizes."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Param:
    """A number of a call; `literal` is its default as C++."""

    name: str
    type: str
    default: int | float | None
    literal: str

    @property
    def and_default(self) -> str:
        return "" if self.default is None else f"  // default: {self.default}"


@dataclass(frozen=True, slots=True)
class Member:
    """The value of a kernel's parameter, a local variable. `form` names the template that writes it, and `encode` the function
    that makes a tensor map."""

    form: str
    encode: str
    local: str
    ctype: str
    array: str
    argument: str  # the caller's name of the array, for a status
    dim: int
    value: str
    dtype: str

    @property
    def pointer(self) -> str:
        return f"&{self.local}.map" if self.form == "map" else f"&{self.local}"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a program, `number` in the library's table."""

    entry: KernelEntry
    number: int
    grid: CppText
    limits: tuple[str, ...]  # the most blocks; "0": any number
    own_sizes: tuple[tuple[str, str], ...]  # sizes of the grid that are those of an array
    members: tuple[Member, ...]

    @property
    def pointers(self) -> list[str]:
        return textwrap.wrap(", ".join(m.pointer for m in self.members), 110)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a call that the caller provides; `form` names the template."""

    name: str
    form: str
    bytes: int
    dims: tuple[str, ...]
    spared: tuple[str, ...]  # conditions of calls that do not need it


@dataclass(frozen=True, slots=True)
class Check:
    """What the kernels of a program require of an array. `pairs`: the sizes of a gradient of an array that may not be
    broadcast."""

    array: str
    argument: str  # at fault if it is not fulfilled
    alignment: int
    unit_stride: bool
    written: bool
    pairs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OfProgram:
    """One program in the library."""

    id: str
    program: Program
    numbers: tuple[str, ...]  # names of what formulas compute for a call
    formulas: CppText
    checks: tuple[Check, ...]
    temporaries: tuple[Temporary, ...]  # what the sizes of workspaces share
    workspaces: tuple[Workspace, ...]
    launches: tuple[Launch, ...]

    @property
    def counters(self) -> list[Workspace]:
        return [w for w in self.workspaces if w.form == "counter"]

    @property
    def first_output(self) -> str:
        return self.program.of_role("output")[0].argument


@dataclass(frozen=True, slots=True)
class Group:
    """The variants of a stage for one architecture: number `first` and those that follow, each with its condition."""

    first: int
    capability: int
    exact: bool
    or_newer: str
    printed: CppText


@dataclass(frozen=True, slots=True)
class Stage:
    groups: tuple[Group, ...]
    ids: tuple[str, ...]  # names of the programs


@dataclass(frozen=True, slots=True)
class OfFunction:
    """A function; `form` names the template that runs its stages."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def form(self) -> str:
        return "stage" if len(self.stages) == 1 else "stages"


@dataclass(frozen=True, slots=True)
class OfSpec:
    """One spec in the library."""

    packaged: Packaged
    call: CallSizes
    lengths: tuple[Length, ...]  # those that no array states
    limits: tuple[Length, ...]  # those of lengths that an array states
    arguments: tuple[Argument, ...]
    views: tuple[View, ...]
    params: tuple[Param, ...]
    conditions: tuple[tuple[int, int, CppText], ...]  # with the least numbers of rows and keys for which they are needed
    functions: tuple[OfFunction, ...]
    programs: tuple[OfProgram, ...]

    @property
    def name(self) -> str:
        return self.packaged.spec.name

    @property
    def lines(self) -> list[str]:
        """The spec."""
        return to_text(self.packaged.spec).rstrip().splitlines()

    @property
    def numbers(self) -> tuple[Longest | Param, ...]:
        """What callers state beside arrays and their sizes."""
        return (*self.call.longest, *self.params)

    @property
    def size_texts(self) -> list[str]:
        return [f"s.{n}" for n in self.call.stated]

    @property
    def int_params(self) -> list[str]:
        return [p.name for p in self.params if p.type == "int32_t"]


def capability_of(arch: str) -> tuple[int, bool]:
    """The compute capability of an architecture, as 90, and whether its code runs on no other."""
    return int(arch.removeprefix("sm_").removesuffix("a")), arch.endswith("a")
