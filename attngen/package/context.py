"""The functions of one spec as names, numbers and C++ expressions for the templates of a library, which only write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from attngen.device.cuda.tensor_map import MAP_TYPES
from attngen.emit.program import (
    Axis,
    Extent,
    GroupParts,
    HeadsInL2,
    KernelEntry,
    OneMore,
    Parameter,
    Program,
    Several,
    Splits,
    Tensor,
    expression_of,
)
from attngen.package.call_sizes import sizes_of_call
from attngen.package.cpp_text import CppPrinter, CppText, literal
from attngen.package.functions import Function, Packaged, Variant
from attngen.package.of_spec import (
    Argument,
    Check,
    Dim,
    Group,
    Launch,
    Length,
    Member,
    OfFunction,
    OfProgram,
    OfSpec,
    Param,
    Stage,
    View,
    Workspace,
    capability_of,
)
from attngen.plan.formulas import SYMBOLS, expression
from attngen.spec.attention import Param as SpecParam
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Const, Expr, Name, Type, constant, name
from attngen.spec.obligations import conditions_of_call
from attngen.spec.operator import FLOAT_ONE, FLOAT_ZERO, both, less, less_equal

ROWS_AND_KEYS = ("q", "k", "v", "dout")  # see attngen/device/binding.py
ENCODE = {"map": "encode_rows", "packed_map": "encode_packed", "paged_map": "encode_paged"}  # functions of runtime.hpp.j2
WHAT = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "out": "the result",
    "lse": "log of the sum of exponentials of each row",
    "lse_rest": "saved for the backward, beside lse",
    "cu_seqlens_q": "where the rows of each sequence begin, and the last one ends",
    "cu_seqlens_k": "where the keys of each sequence begin, and the last one ends",
    "page_table": "the pages of each sequence",
    "seqused": "the number of keys of each sequence",
    "rng_state": "seed and offset of dropout",
    "dout": "gradient of the result",
    "dlse": "gradient of lse",
    "dq": "gradient of q",
    "dk": "gradient of k",
    "dv": "gradient of v",
}


class SpecContext:
    """Makes an `OfSpec`. `ids` are the names of the library's programs; its kernels are added to `kernels`, with the number of
    their program."""

    def __init__(
        self, packaged: Packaged, ids: Mapping[Program, str], kernels: list[tuple[str, KernelEntry]], ptx: bool
    ) -> None:
        self.packaged, self.spec, self.ids, self.kernels, self.ptx = packaged, packaged.spec, ids, kernels, ptx
        spec = packaged.spec
        self.call = sizes_of_call(spec)
        sizes = {n: f"s.{n}" for n in self.call.names}
        self.printer = CppPrinter(sizes | {p.name: f"args.{p.name}" for p in spec.params})
        self.of_sizes = CppPrinter(sizes, of_sizes=True)
        self.of_grid = CppPrinter({n: f"g.{n}" for n in self.call.names}, of_sizes=True)
        self.views = {} if spec.values is None else {"v": View("v", "k", spec.values[0], spec.head_dim_v)}

    def made(self) -> OfSpec:
        programs = {program: self._program(program) for program in self.packaged.programs}
        return OfSpec(
            self.packaged,
            self.call,
            tuple(self._lengths(self.call.lengths)),
            tuple(self._lengths(self.call.limits)),
            tuple(self._arguments()),
            tuple(self.views.values()),
            tuple(_param(p) for p in self.spec.params),
            tuple(self._conditions()),
            tuple(self._function(f) for f in self.packaged.functions),
            tuple(programs.values()),
        )

    def _text(self, extent: Extent) -> str:
        """An extent as one expression."""
        printed = self.of_sizes.print(expression_of(extent))
        assert not printed.temporaries, extent
        return printed.results[0]

    def _lengths(self, of: Mapping[str, Expr]) -> Iterator[Length]:
        for length, limit in of.items():
            yield Length(length, self.of_sizes.print(limit, share=False).results[0])

    def _dim(self, axis: Axis, broadcasts: bool) -> Dim:
        match axis.size:
            case int(count):
                name, more = "", count
            case OneMore(size):
                name, more = size, 1
            case str(size):
                name, more = size, 0
            case _:
                raise AssertionError(axis)
        return Dim(name, more, self._text(axis.size), broadcasts and axis.is_free)

    def _named(self, argument: str) -> str:
        """The argument of a call that has the array `argument`."""
        return self.views[argument].of if argument in self.views else argument

    def _arguments(self) -> Iterator[Argument]:
        tensors: dict[str, Tensor] = {}
        written = set()
        for program in self.packaged.programs:
            for tensor in program.of_role("input", "output"):
                tensors.setdefault(tensor.argument, tensor)
                if tensor.is_written:
                    written.add(tensor.argument)
        what = WHAT | self._of_views()
        for argument, tensor in tensors.items():
            if argument in self.views:
                continue
            yield Argument(
                argument,
                tensor.dtype,
                tuple(self._dim(a, tensor.broadcasts) for a in tensor.axes),
                argument not in written,
                tensor.like,
                what.get(argument, f"gradient of {tensor.like}" if tensor.like else ""),
            )

    def _of_views(self) -> dict[str, str]:
        """What arguments are beside what they are in other specs."""
        found = {}
        for v in self.views.values():
            columns = f"columns {v.first} to {v.first + v.columns - 1}"
            found[v.of] = f"{WHAT[v.of]}; {columns} are the {WHAT[v.name]}"
            found[f"d{v.of}"] = f"gradient of {v.of} as {WHAT[v.of]} alone"
            found[f"d{v.name}"] = f"gradient of the {WHAT[v.name]}: the caller adds it to {columns} of d{v.of}"
        return found

    def _conditions(self) -> Iterator[tuple[int, int, CppText]]:
        """What a call must fulfil, beside the sizes of its arrays."""
        spec = self.spec
        own: list[Expr] = []
        if isinstance(spec.dropout, Name):
            own.append(both(less_equal(FLOAT_ZERO, spec.dropout), less(spec.dropout, FLOAT_ONE)))
        for table in spec.rotary.tables if spec.rotary is not None else ():
            dim = spec.input(table).dims[0]
            own.append(less(constant(0), name(dim, Type.INT) if isinstance(dim, str) else constant(dim)))
        for (rows, keys), conditions in (((0, 0), own), *conditions_of_call(spec)):
            assert conditions is not None, spec.name
            open_ones = [c for c in conditions if not isinstance(c, Const) or not c.value]
            if open_ones:
                yield rows, keys, self.printer.print(*open_ones)

    def _function(self, function: Function) -> OfFunction:
        return OfFunction(function.name, tuple(self._stage(stage) for stage in function.stages))

    def _stage(self, stage: tuple[Variant, ...]) -> Stage:
        groups, first = [], 0
        for arch, variants in groupby(stage, lambda v: v.arch):
            conditions = [v.condition for v in variants]
            capability, exact = capability_of(arch.name)
            or_newer = f" || device.capability >= {capability}" if self.ptx and not exact else ""
            groups.append(Group(first, capability, exact, or_newer, self.of_sizes.print(*conditions)))
            first += len(conditions)
        return Stage(tuple(groups), tuple(self.ids[v.program] for v in stage))

    def _program(self, program: Program) -> OfProgram:
        checks = []
        for t in program.of_role("input", "output"):
            of_pairs = t.role == "output" and bool(t.like) and not t.broadcasts
            pairs = tuple(self._text(a.size) for a in t.axes) if of_pairs else ()
            checks.append(Check(t.argument, self._named(t.argument), t.alignment, t.unit_stride, t.is_written, pairs))
        formulas = dict.fromkeys(f for one in _extents(program) if (f := _formula(one)) is not None)
        names = _distinct(SNAKE[type(f)] for f in formulas)
        exprs = [expression(f(SYMBOLS)) for f in formulas]
        known = {expr: f"n.{named}" for expr, named in zip(exprs, names, strict=True)}
        spaces = program.of_role("workspace", "counter")
        dims = self.of_sizes.print(*(expression_of(a.size) for t in spaces for a in t.axes), known=known)
        texts = iter(dims.results)
        return OfProgram(
            self.ids[program],
            program,
            tuple(names),
            self.of_sizes.print(*exprs),
            tuple(checks),
            dims.temporaries,
            tuple(self._workspace(t, [next(texts) for _ in t.axes]) for t in spaces),
            tuple(self._launch(program, entry, known) for entry in program.kernels),
        )

    def _workspace(self, tensor: Tensor, dims: list[str]) -> Workspace:
        spared: list[str] = []
        if tensor.like:
            rank = len(self.spec.input(tensor.like).dims)
            dims[:rank] = [f"call.{tensor.like}.sizes[{i}]" for i in range(rank)]
        if tensor.unless:
            spared += [f"call.{tensor.unless_of}.sizes[{i}] == {self._text(n)}" for i, n in enumerate(tensor.unless)]
            spared += [f"{self._text(n)} == 1" for n in sorted({a.name for a in tensor.axes} - {*tensor.unless})]
        form = "counter" if tensor.role == "counter" else "spared" if spared else "whole"
        return Workspace(tensor.name, form, DTYPES[tensor.dtype].bytes, tuple(dims), tuple(spared))

    def _launch(self, program: Program, entry: KernelEntry, known: Mapping[Expr, str]) -> Launch:
        tensors = {t.name: t for t in program.tensors}
        values = {p.name: known[expression(p.formula(SYMBOLS))] for p in entry.parameters if p.formula is not None}
        own_sizes = tuple(_own_sizes(entry, tensors))
        printer = self.of_grid if own_sizes else self.of_sizes
        self.kernels.append((self.ids[program], entry))
        return Launch(
            entry,
            len(self.kernels) - 1,
            printer.print(*(expression(c.whole(SYMBOLS)) for c in entry.grid), known=known),
            tuple(f"s.{c.at_most}" if c.at_most else "0" for c in entry.grid),
            own_sizes,
            tuple(self._member(p, tensors, values) for p in entry.parameters),
        )

    def _member(self, p: Parameter, tensors: Mapping[str, Tensor], values: Mapping[str, str]) -> Member:
        tensor = tensors.get(p.of)
        value = {"size": f"s.{p.of}", "param": f"args.{p.of}"}.get(p.binding) or values.get(p.name, "")
        encode = ENCODE.get(p.binding, "")
        form: str = "number" if value else "map" if encode else p.binding
        if form == "step" and p.ctype == "int":
            form = "narrow_step"
        if tensor is None or value:
            return Member(form, encode, f"{p.name}_", p.ctype, "", "", p.dim, value, "")
        dtype = MAP_TYPES.get(tensor.dtype, "")
        return Member(form, encode, f"{p.name}_", p.ctype, _array(tensor), self._named(tensor.argument), p.dim, value, dtype)


SNAKE = {Splits: "splits", GroupParts: "parts", HeadsInL2: "heads_in_l2"}


def _extents(program: Program) -> Iterator[object]:
    """Whatever a call computes for a program."""
    for entry in program.kernels:
        yield from (p.formula for p in entry.parameters)
        yield from (factor for component in entry.grid for factor in component.factors)
    yield from (a.size for t in program.of_role("workspace") for a in t.axes)


def _formula(extent: object) -> Splits | GroupParts | HeadsInL2 | None:
    """The formula in an extent that takes long enough to be computed once."""
    if isinstance(extent, Several):
        return extent.of
    return extent if isinstance(extent, (Splits, GroupParts, HeadsInL2)) else None


def _distinct(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for one in names:
        count = sum(other.rstrip("0123456789") == one for other in found)
        found.append(f"{one}{count + 1}" if count else one)
    return found


def _param(declared: SpecParam) -> Param:
    is_float = declared.type is Type.FLOAT
    text = "" if declared.default is None else literal(declared.default)[0]
    return Param(declared.name, "float" if is_float else "int32_t", declared.default, f"float({text})" if is_float else text)


def _array(tensor: Tensor) -> str:
    return f"call.{tensor.argument}" if tensor.argument else f"work.{tensor.name}"


def _own_sizes(entry: KernelEntry, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """As `_sizes_of_grid` of attngen/device/binding.py."""
    if any(p.binding == "data" and tensors[p.of].argument in ROWS_AND_KEYS for p in entry.parameters):
        return
    own: dict[str, str] = {}
    for p in entry.parameters:
        axis = tensors[p.of].axes[p.dim].name if p.binding == "extent" else ""
        if axis:
            size = f"{_array(tensors[p.of])}.sizes[{p.dim}]"
            own[axis] = f"max({size}, {own[axis]})" if axis in own else size
    yield from own.items()
