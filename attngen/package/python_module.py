"""What the Python extension of a library reads: the arrays of each function, as DLPack describes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.device.arrays import DLPACK_DEVICES, DLPACK_DTYPES
from attngen.package.cpp_text import CppPrinter
from attngen.package.of_spec import Argument, Dim, Length, OfFunction, OfSpec

CODES = {name: code for code, name in DLPACK_DTYPES.items()}
UINT = 1  # the code of unsigned integers in DLPack
ON_GPU, MANAGED = (code for code, kind in DLPACK_DEVICES.items() if kind == "cuda")
DLPACK = {"gpu": ON_GPU, "managed": MANAGED, "uint": UINT, "bool": CODES["bool"][0]}


@dataclass(frozen=True, slots=True)
class Array:
    """An array of a function. `axes` are C++: the size that each dimension states, how many elements it has beside that, and
    whether it broadcasts."""

    name: str
    code: int
    bits: int
    like: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays that are read together, after the `lengths` that some of them have."""

    lengths: tuple[Length, ...]
    arguments: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a call; `form` names the template for a call that does not state it."""

    name: str
    form: str


@dataclass(frozen=True, slots=True)
class PythonFunction:
    name: str
    groups: tuple[Arrays, ...]
    doc: str


@dataclass(frozen=True, slots=True)
class PythonSpec:
    name: str
    sizes: tuple[str, ...]
    longest: tuple[Number, ...]
    params: tuple[Number, ...]
    functions: tuple[PythonFunction, ...]


def python_spec(of_spec: OfSpec) -> PythonSpec:
    numbers = {p.name: Number(p.name, "required" if p.default is None else "default") for p in of_spec.numbers}
    longest = tuple(numbers[one.name] for one in of_spec.call.longest)
    params = tuple(numbers[p.name] for p in of_spec.params)
    functions = tuple(_function(of_spec, f) for f in of_spec.functions)
    return PythonSpec(of_spec.name, of_spec.call.of_arrays, longest, params, functions)


def _function(of_spec: OfSpec, function: OfFunction) -> PythonFunction:
    programs = next(f.programs for f in of_spec.packaged.functions if f.name == function.name)
    tensors = {t.argument: t.role for p in programs for t in p.of_role("input", "output")}
    arguments = [a for a in of_spec.arguments if a.name in tensors]
    names = ", ".join([*(a.name for a in arguments), *(p.name for p in of_spec.numbers)])
    written = ", ".join(a.name for a in arguments if tensors[a.name] == "output")
    doc = f"Arguments, by name: {names}; stream, workspace, counter. Writes {written}."
    return PythonFunction(function.name, tuple(_groups(of_spec, arguments)), doc)


def _groups(of_spec: OfSpec, arguments: list[Argument]) -> Iterator[Arrays]:
    """The arrays of a call, those last that are as long as a length which follows from the others."""
    call = of_spec.call
    later = [a for a in arguments if any(dim.name in call.lengths for dim in a.dims)]
    used = {dim.name for a in later for dim in a.dims}
    yield Arrays((), tuple(_array(of_spec, a) for a in arguments if a not in later))
    if later:
        printer = CppPrinter({name: f"args.{name}" for name in call.stated}, of_sizes=True)
        lengths = (Length(n, printer.print(e, share=False).results[0]) for n, e in call.lengths.items() if n in used)
        yield Arrays(tuple(lengths), tuple(_array(of_spec, a) for a in later))


def _array(of_spec: OfSpec, a: Argument) -> Array:
    code, bits = CODES[a.dtype]
    axes = tuple(f"{{{_stated(of_spec, dim)}, {dim.more}, {str(dim.broadcasts).lower()}}}" for dim in a.dims)
    return Array(a.name, code, bits, f"args.{a.like}.strides" if a.like else "nullptr", axes)


def _stated(of_spec: OfSpec, dim: Dim) -> str:
    if not dim.name:
        return "nullptr"
    return f"&{dim.name}" if dim.name in of_spec.call.lengths else f"&args.{dim.name}"
