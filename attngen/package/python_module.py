"""What the Python extension of a library reads: the arrays of each function, as DLPack describes them."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.device.arrays import DLPACK_DEVICES, DLPACK_DTYPES
from attngen.package.of_spec import Argument, OfFunction, OfSpec

CODES = {name: code for code, name in DLPACK_DTYPES.items()}
UINT = 1  # the code of unsigned integers in DLPack
ON_GPU, MANAGED = (code for code, kind in DLPACK_DEVICES.items() if kind == "cuda")
DLPACK = {"gpu": ON_GPU, "managed": MANAGED, "uint": UINT, "bool": CODES["bool"][0]}


@dataclass(frozen=True, slots=True)
class Array:
    """An array of a function. `axes` are C++: the size that each dimension states, or its number, and whether it broadcasts."""

    name: str
    code: int
    bits: int
    like: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A param; `form` names the template for a call that does not state it."""

    name: str
    form: str


@dataclass(frozen=True, slots=True)
class PythonFunction:
    name: str
    arguments: tuple[Array, ...]
    doc: str


@dataclass(frozen=True, slots=True)
class PythonSpec:
    name: str
    sizes: tuple[str, ...]
    params: tuple[Number, ...]
    functions: tuple[PythonFunction, ...]


def python_spec(of_spec: OfSpec) -> PythonSpec:
    params = tuple(Number(p.name, "required" if p.default is None else "default") for p in of_spec.params)
    functions = tuple(_function(of_spec, f) for f in of_spec.functions)
    return PythonSpec(of_spec.name, of_spec.sizes, params, functions)


def _function(of_spec: OfSpec, function: OfFunction) -> PythonFunction:
    programs = next(f.programs for f in of_spec.packaged.functions if f.name == function.name)
    tensors = {t.argument: t.role for p in programs for t in p.of_role("input", "output")}
    arguments = [a for a in of_spec.arguments if a.name in tensors]
    names = ", ".join([*(a.name for a in arguments), *(p.name for p in of_spec.params)])
    written = ", ".join(a.name for a in arguments if tensors[a.name] == "output")
    doc = f"Arguments, by name: {names}; stream, workspace, counter. Writes {written}."
    return PythonFunction(function.name, tuple(_array(of_spec, a) for a in arguments), doc)


def _array(of_spec: OfSpec, a: Argument) -> Array:
    code, bits = CODES[a.dtype]
    axes = []
    for size, broadcasts in zip(a.size_texts, a.broadcasts, strict=True):
        named = size.removeprefix("s.")
        stated = f"&args.{named}" if named in of_spec.sizes else "nullptr"
        fixed = dict(of_spec.fixed).get(named, 0 if stated != "nullptr" else named)
        axes.append(f"{{{stated}, {fixed}, {str(broadcasts).lower()}}}")
    return Array(a.name, code, bits, f"args.{a.like}.strides" if a.like else "nullptr", tuple(axes))
