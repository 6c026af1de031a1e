"""The functions of one spec as names, numbers and C++ expressions for the templates of a library, which only write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from attngen.emit.program import (
    MULTIPROCESSORS,
    Extent,
    GroupParts,
    HeadsInL2,
    KernelEntry,
    Parameter,
    Program,
    Several,
    Splits,
    Tensor,
    expression_of,
)
from attngen.package.cpp_text import CppPrinter, CppText, literal
from attngen.package.functions import Function, Packaged, Variant
from attngen.package.of_spec import (
    Argument,
    Check,
    Group,
    Launch,
    Member,
    OfFunction,
    OfProgram,
    OfSpec,
    Param,
    Stage,
    Workspace,
    capability_of,
)
from attngen.plan.formulas import SYMBOLS, expression
from attngen.spec.attention import SIZES
from attngen.spec.attention import Param as SpecParam
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Const, Expr, Name, Type, constant, name
from attngen.spec.obligations import conditions_of_call
from attngen.spec.operator import FLOAT_ONE, FLOAT_ZERO, both, less, less_equal

ROWS_AND_KEYS = ("q", "k", "v", "dout")  # see attngen/device/binding.py
TENSOR_MAP_TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32"}  # see attngen/device/cuda/tensor_map.py
WHAT = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "out": "the result",
    "lse": "log of the sum of exponentials of each row",
    "lse_rest": "saved for the backward, beside lse",
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
        self.fixed = () if spec.q_heads is None else (("q_heads", spec.q_heads), ("kv_heads", spec.kv_heads or 0))
        sizes = (*SIZES, *spec.free_dims)
        self.sizes = tuple(n for n in sizes if n not in dict(self.fixed))
        names = {n: f"s.{n}" for n in (*sizes, MULTIPROCESSORS)} | {p.name: f"args.{p.name}" for p in spec.params}
        self.printer = CppPrinter(names)
        self.of_sizes = CppPrinter(names, of_sizes=True)
        self.of_grid = CppPrinter({n: f"g.{n}" for n in (*sizes, MULTIPROCESSORS)}, of_sizes=True)

    def made(self) -> OfSpec:
        programs = {program: self._program(program) for program in self.packaged.programs}
        return OfSpec(
            self.packaged,
            self.sizes,
            self.fixed,
            tuple(self._arguments()),
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

    def _arguments(self) -> Iterator[Argument]:
        tensors: dict[str, Tensor] = {}
        written = set()
        for program in self.packaged.programs:
            for tensor in program.of_role("input", "output"):
                tensors.setdefault(tensor.argument, tensor)
                if tensor.is_written:
                    written.add(tensor.argument)
        for argument, tensor in tensors.items():
            yield Argument(
                argument,
                tensor.dtype,
                tuple(a.name if a.is_free else str(a.size) for a in tensor.axes),
                tuple(self._text(a.size) for a in tensor.axes),
                tuple(tensor.broadcasts and a.is_free for a in tensor.axes),
                argument not in written,
                tensor.like,
                WHAT.get(argument, f"gradient of {tensor.like}" if tensor.like else ""),
            )

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
            checks.append(Check(t.argument, t.alignment, t.unit_stride, t.is_written, pairs))
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
            tuple(_member(p, tensors, values) for p in entry.parameters),
        )


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


def _member(p: Parameter, tensors: Mapping[str, Tensor], values: Mapping[str, str]) -> Member:
    tensor = tensors.get(p.of)
    value = {"size": f"s.{p.of}", "param": f"args.{p.of}"}.get(p.binding) or values.get(p.name, "")
    form: str = "number" if value else p.binding
    if form == "step" and p.ctype == "int":
        form = "narrow_step"
    if tensor is None or value:
        return Member(form, f"{p.name}_", p.ctype, "", "", p.dim, value, "")
    dtype = TENSOR_MAP_TYPES.get(tensor.dtype, "")
    return Member(form, f"{p.name}_", p.ctype, _array(tensor), tensor.argument, p.dim, value, dtype)


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
