"""The sizes of a call in the storage of a spec: those that it states, and the lengths that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attngen.device.params import declared_params
from attngen.device.sizes import limits
from attngen.emit.abi import input_tensors
from attngen.emit.program import MULTIPROCESSORS, Axis, OneMore
from attngen.plan.formulas import SYMBOLS, expression
from attngen.spec.attention import SIZES, AttentionSpec
from attngen.spec.expr import Expr

SIZES_OF_STORAGES = (*SIZES, "total_q", "total_k", "pages", "page_size", "max_pages")  # in the order of a struct's members
LONGEST_OF = {"max_q_len": "rows", "max_kv_len": "keys"}
NOT_STATED = -1  # a length that a call has to state, and that is refused


@dataclass(frozen=True, slots=True)
class Longest:
    """A length that no sequence exceeds, a member of the struct; without a default each call states it."""

    name: str
    default: int | None

    @property
    def initial(self) -> int:
        return NOT_STATED if self.default is None else self.default

    @property
    def what(self) -> str:
        default = "each call states it" if self.default is None else "default: all for which there is room"
        return f"no sequence has more {LONGEST_OF[self.name]}; {default}"


@dataclass(frozen=True, slots=True)
class CallSizes:
    """The sizes of a call by their names. The caller states `sizes` of arrays, `free` ones, which captured arrays have alone,
    and `longest`; the spec states the `fixed` ones. `lengths` are those of the longest sequence, if no array states them, and
    `limits` the same of lengths that an array states: expressions over all others."""

    sizes: tuple[str, ...]
    free: tuple[str, ...]
    fixed: Mapping[str, int]
    longest: tuple[Longest, ...]
    lengths: Mapping[str, Expr]
    limits: Mapping[str, Expr]

    @property
    def stated(self) -> tuple[str, ...]:
        """What the caller states."""
        return (*self.of_arrays, *(one.name for one in self.longest))

    @property
    def of_arrays(self) -> tuple[str, ...]:
        """Those that arrays have."""
        return (*self.sizes, *self.free)

    @property
    def names(self) -> tuple[str, ...]:
        """All sizes that formulas may read."""
        return (*self.stated, *self.fixed, *self.lengths, MULTIPROCESSORS)


def sizes_of_call(spec: AttentionSpec) -> CallSizes:
    """The sizes of calls of `spec`: of its arrays by `attngen.emit.abi`, of sequences by `attngen.device.sizes`."""
    axes = [axis for tensor in input_tensors(spec) if not tensor.broadcasts for axis in tensor.axes]
    stated = {_stated(axis) for axis in axes}
    fixed = {a.name: a.size for a in axes if a.name in SIZES_OF_STORAGES and isinstance(a.size, int)}
    defaults = declared_params(spec)
    longest = []
    for name in spec.kernel.longest:
        default = defaults[name][1]
        longest.append(Longest(name, None if default is None else int(default)))
    of_arrays = {n: SYMBOLS[n] for n in SIZES_OF_STORAGES if n in stated} | fixed
    found = limits(of_arrays, {one.name: SYMBOLS[one.name] for one in longest})
    expressions = {length: expression(limit) for length, limit in found.items()}
    return CallSizes(
        tuple(n for n in SIZES_OF_STORAGES if n in stated),
        spec.free_dims,
        fixed,
        tuple(longest),
        {length: limit for length, limit in expressions.items() if length not in stated},
        {length: limit for length, limit in expressions.items() if length in stated},
    )


def _stated(axis: Axis) -> str:
    """The size that an array states along an axis; "": none."""
    return axis.size.size if isinstance(axis.size, OneMore) else axis.name if axis.is_free else ""
