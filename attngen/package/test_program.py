"""What the test program of a library reads: the expressions of each spec in C++, its arrays, and the calls that it makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attngen.diagnostics import ArgumentError
from attngen.emit.program import Program
from attngen.package.cpp_text import CTYPES, CppPrinter, CppText
from attngen.package.functions import BACKWARD
from attngen.package.of_spec import Argument, OfFunction, OfSpec
from attngen.spec.attention import INDICES, SIZES, Input
from attngen.spec.dropout import INCREMENTS, MULTIPLIERS, ROUNDS, STEPS
from attngen.spec.dtypes import DTYPES, FP8_DTYPES, unit_roundoff
from attngen.spec.expr import Expr, constant
from attngen.spec.gradient import QKV, Gradient, gradient_argument, gradient_of
from attngen.spec.obligations import check_obligations

# The largest error that passes, in units of roundoff of the largest element: tensor cores multiply fp32 in parts
UNITS = {"fp16": 8, "bf16": 8, "fp32": 256}
FEW_HEADS = {"q_heads": 4, "kv_heads": 2}  # heads of specs that fix none
SEQUENCES = 4  # in a call, if each has a length of its own
PAGE_SIZE, SPARE_PAGES = 16, 1  # rows, of a spec that does not state it; pages in no sequence
POSITIONS = 640  # rows of the tables of a rotation
FREE_SIZE = 9  # the size of a dimension that comes with an array
SAMPLES = {"float": "0.5", "int32_t": "3"}  # values of params without default
PHILOX = {"rounds": ROUNDS, "multipliers": MULTIPLIERS, "increments": INCREMENTS, "steps": STEPS}


@dataclass(frozen=True, slots=True)
class OfPairs:
    """A function of a pair of a row and a key."""

    name: str
    ctype: str
    printed: CppText


@dataclass(frozen=True, slots=True)
class Term:
    """What a pair, or a row, adds to an element of a gradient."""

    argument: str
    indices: str
    source: str
    factor: str


@dataclass(frozen=True, slots=True)
class Read:
    """A captured tensor: its accessor's type, and which numbers of an array it reads."""

    name: str
    ctype: str
    member: str


@dataclass(frozen=True, slots=True)
class TestArray:
    name: str
    type: str
    kind: str
    size_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    argument: str
    values: str


@dataclass(frozen=True, slots=True)
class TestFunction:
    name: str
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. `other_layout`: rows hold their heads, and captured arrays are broadcast where they may be. Each sequence
    has its number of `rows` and `keys`."""

    title: str
    sizes: tuple[int, ...]
    other_layout: bool
    rows: tuple[int, ...]
    keys: tuple[int, ...]


def is_tested(of_spec: OfSpec) -> bool:
    """Whether the test program has a reference of the spec."""
    spec = of_spec.packaged.spec
    return spec.dtype not in FP8_DTYPES  # weights have the type of Q


class TestSpec:
    """The context of one spec's part of the test program."""

    def __init__(self, of_spec: OfSpec) -> None:
        self.of, self.spec = of_spec, of_spec.packaged.spec
        self.gradient: Gradient | None = gradient_of(self.spec) if self.has_backward else None
        self.all_sizes = tuple(dict.fromkeys((*of_spec.call.of_arrays, *of_spec.call.fixed, *SIZES, *of_spec.call.stated)))
        names = {n: f"in.sizes.{n}" for n in (*SIZES, *self.spec.free_dims)} | {n: f"p.{n}" for n in (*INDICES, "s")}
        self.printer = CppPrinter(names | {p.name: f"in.{p.name}" for p in self.spec.params})

    # what templates read

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def sizes(self) -> tuple[str, ...]:
        return self.of.call.stated

    @property
    def longest(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.of.call.longest)

    @property
    def params(self) -> list[dict[str, object]]:
        return [{"name": p.name, "type": p.type, "default": p.default, "sample": SAMPLES[p.type]} for p in self.of.params]

    @property
    def normalize(self) -> str:
        return self.spec.normalize.upper()

    @property
    def head_dim_v(self) -> int:
        return self.spec.head_dim_v

    @property
    def first_value(self) -> int:
        """The first column of the values in the array that has them."""
        return self.spec.values[0] if self.spec.values is not None else 0

    @property
    def has_lse(self) -> bool:
        return self.spec.lse

    @property
    def has_backward(self) -> bool:
        return any(f.name == BACKWARD for f in self.of.functions)

    @property
    def precision(self) -> str:
        """The type that weights or results are rounded to, the coarser of both."""
        return max(self.spec.dtype, self.spec.dtypes["o"], key=unit_roundoff).name.upper()

    @property
    def dropout_form(self) -> str:
        return "none" if self.spec.dropout is None else "philox"

    @property
    def rotary_form(self) -> str:
        return "none" if self.spec.rotary is None else "tables"

    @property
    def rotary_dim(self) -> int:
        return 0 if self.spec.rotary is None else self.spec.rotary.dim

    @property
    def interleaved(self) -> bool:
        return self.spec.rotary is not None and self.spec.rotary.pairs == "interleaved"

    @property
    def cosines(self) -> str:
        return "" if self.spec.rotary is None else self.spec.rotary.cosines

    @property
    def sines(self) -> str:
        return "" if self.spec.rotary is None else self.spec.rotary.sines

    @property
    def inputs(self) -> list[Read]:
        return [_read(i) for i in self.spec.inputs]

    @property
    def functions_of_pairs(self) -> list[OfPairs]:
        spec, zero, one = self.spec, constant(0.0), constant(1.0)
        exprs: dict[str, Expr] = {
            "scale": spec.scale,
            "mask": constant(True) if spec.mask is None else spec.mask,
            "score": spec.score,
            "sink": constant(-math.inf) if spec.sink is None else spec.sink,
            "v_scale": one if spec.v_scale is None else spec.v_scale,
            "ds": zero if self.gradient is None else self.gradient.ds,
            "dropped": zero if spec.dropout is None else spec.dropout,
            "q_position": constant(0) if spec.rotary is None else spec.rotary.q,
            "k_position": constant(0) if spec.rotary is None else spec.rotary.k,
        }
        return [OfPairs(name, CTYPES[expr.type], self.printer.print(expr)) for name, expr in exprs.items()]

    @property
    def gradients(self) -> list[Result]:
        names = [n for n in self.of.packaged.wanted if n not in QKV]
        return [Result(gradient_argument(n), "") for n in names]

    @property
    def terms(self) -> list[dict[str, object]]:
        """The functions that add to gradients of captured arrays and params: the terms of a row, and those of a pair."""
        every = list(self._terms())
        sources = {"add_row": ("d_sink",), "add_pair": ("d_score", "d_scale")}
        return [
            {
                "name": name,
                "parameters": "".join(f", [[maybe_unused]] double {source}" for source in of),
                "terms": [term for term in every if term.source in of],
            }
            for name, of in sources.items()
        ]

    @property
    def arrays(self) -> list[TestArray]:
        return [self._array(a) for a in self.of.arguments]

    @property
    def functions(self) -> list[TestFunction]:
        return [TestFunction(f.name, tuple(self._results(f))) for f in self.of.functions]

    @property
    def cases(self) -> list[Case]:
        heads = {**FEW_HEADS, **self.of.call.fixed}
        q_heads, dense = heads["q_heads"], self.spec.kernel.storage == "dense"
        few = (2 if dense else SEQUENCES) if q_heads <= 8 else 1
        many = -(-160 // q_heads)  # as many heads as the largest GPU has multiprocessors
        shapes = {
            "rows and keys": (few, 150, 210, False),
            "another layout": (2, 70, 130, True),
            "few rows": (2, 1, 600, False),
            "many short rows": (many, 48, 48, False),
            "no keys": (1, 5, 0, False),
            "no rows": (1, 0, 5, False),
        }
        found = []
        for title, (batch, q_len, kv_len, other) in shapes.items():
            sizes = {"batch": batch, **heads, "q_len": q_len, "kv_len": kv_len, **self._free_sizes}
            if self._is_allowed(sizes):
                rows, keys = self._lengths(batch, "max_q_len", q_len, 0), self._lengths(batch, "max_kv_len", kv_len, 1)
                sizes |= self._sizes_of_storage(rows, keys, q_len, kv_len)
                found.append(Case(title, tuple(sizes[n] for n in self.all_sizes), other, rows, keys))
        return found

    # how

    @property
    def _free_sizes(self) -> dict[str, int]:
        """The sizes of dimensions that captured arrays have alone; tables of a rotation have a row for each position."""
        tables = () if self.spec.rotary is None else self.spec.rotary.tables
        rows = [self.spec.input(table).dims[0] for table in tables]
        return {dim: POSITIONS if dim in rows else FREE_SIZE for dim in self.spec.free_dims}

    def _lengths(self, batch: int, longest: str, most: int, first: int) -> tuple[int, ...]:
        """The rows or keys of each sequence: `most`, or fewer if each sequence has a number of its own."""
        if longest not in self.spec.kernel.longest:
            return (most,) * batch
        of_each = (most, most * 5 // 8, min(most, 1), 0)
        return tuple(of_each[(b + first) % SEQUENCES] for b in range(batch))

    def _sizes_of_storage(self, rows: tuple[int, ...], keys: tuple[int, ...], q_len: int, kv_len: int) -> dict[str, int]:
        """The sizes that arrays have in other storages than dense."""
        page = self.spec.kernel.page_size or PAGE_SIZE
        return {
            "total_q": sum(rows),
            "total_k": sum(keys),
            "pages": sum(-(-n // page) for n in keys) + SPARE_PAGES,
            "page_size": page,
            "max_pages": max(-(-kv_len // page), 1),
            "max_q_len": q_len,
            "max_kv_len": kv_len,
        }

    def _is_allowed(self, sizes: Mapping[str, int]) -> bool:
        """Whether a call may have these sizes: a mask may read an element for each row of an array of keys."""
        params = {p.name: p.default if p.default is not None else float(SAMPLES[p.type]) for p in self.of.params}
        numbers = {p.name: int(params[p.name]) if p.type == "int32_t" else params[p.name] for p in self.of.params}
        try:
            check_obligations(self.spec, sizes, numbers)
        except ArgumentError:
            return False
        return True

    def _terms(self) -> Iterator[Term]:
        sources = {"score": "d_score", "sink": "d_sink", "scale": "d_scale"}
        for name in self.of.packaged.wanted if self.gradient is not None else ():
            for c in self.gradient.of(name).contributions if name not in QKV and self.gradient else ():
                indices = self.printer.print(*c.indices, share=False).results
                (factor,) = self.printer.print(c.factor, share=False).results
                yield Term(gradient_argument(name), ", ".join(indices), sources[c.source], factor)

    @property
    def _of_whole_arrays(self) -> set[str]:
        """Gradients that a program computes for arrays which are not broadcast, and these arrays."""
        every = (t for f in self.of.functions for p in self._programs(f) for t in p.of_role("output"))
        return {name for t in every if t.like and not t.broadcasts for name in (t.argument, t.like)}

    def _array(self, a: Argument) -> TestArray:
        inputs = {i.name for i in self.spec.inputs}
        kinds = dict.fromkeys((*QKV, "dout", "dlse"), "NORMAL") | dict.fromkeys(inputs, "CAPTURED")
        kind = (kinds | dict.fromkeys(self.spec.kernel.beginnings, "PLACES")).get(a.name, "RESULT")
        broadcasts = kind == "CAPTURED" and any(dim.broadcasts for dim in a.dims[:1])
        of_like = next((o for o in self.of.arguments if o.name == a.like), None)
        broadcasts = broadcasts or (of_like is not None and any(dim.broadcasts for dim in of_like.dims[:1]))
        broadcasts = broadcasts and a.name not in self._of_whole_arrays
        sizes = tuple(a.size_texts)
        if broadcasts:
            sizes = (f"other_layout ? 1 : {sizes[0]}", *sizes[1:])
        return TestArray(a.name, a.dtype.upper(), kind, sizes)

    def _results(self, function: OfFunction) -> Iterator[Result]:
        written = {t.argument for p in self._programs(function) for t in p.of_role("output")}
        for a in self.of.arguments:
            if a.name in written and a.name != "lse_rest":
                values = a.name if a.name in ("out", "lse", "dq", "dk", "dv") else f'captured.at("{a.name}")'
                yield Result(a.name, values)

    def _programs(self, function: OfFunction) -> Iterator[Program]:
        for f in self.of.packaged.functions:
            if f.name == function.name:
                yield from f.programs


def _read(declared: Input) -> Read:
    ctype = {"float": "double", "int": "long long", "bool": "bool"}[declared.dtype.kind]
    return Read(declared.name, ctype, "values" if ctype == "double" else "integers")


def limits() -> dict[str, float]:
    """The largest errors that pass, by element type."""
    return {name: units * unit_roundoff(DTYPES[name]) for name, units in UNITS.items()}
