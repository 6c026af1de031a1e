"""A library as a repository of Hugging Face's `kernels`: its metadata, and functions of torch tensors."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attngen.emit.program import Role
from attngen.package.functions import BACKWARD, FORWARD, SAVING
from attngen.package.of_spec import OfSpec, capability_of
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import gradient_argument
from attngen.spec.print_attn import to_text

TORCH = "torch-stable-abi20"  # the module uses no part of torch: any torch from 2.0 on suits it
CUDA = "cu130"  # the driver that cubins of NVRTC 13 need


@dataclass(frozen=True, slots=True)
class Allocated:
    """An array that a function allocates; `shape` is Python over its tensors."""

    name: str
    shape: str
    dtype: str

    @property
    def empty(self) -> str:
        return f"q.new_empty({self.shape}, dtype=torch.{self.dtype})"


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a function: what the forward saves for it, what it reads and writes."""

    name: str
    saved: tuple[Allocated, ...]
    reads: tuple[str, ...]
    upstream: dict[str, str]  # the arguments that hold gradients of results, by the results
    gradients: dict[str, str]  # the arguments that hold gradients of tensors, by the tensors
    written: tuple[Allocated, ...]  # these, and gradients of numbers and of values that are a part of the keys
    values: tuple[str, int, int] | None  # if they are: the argument of their gradient, their first column, columns


@dataclass(frozen=True, slots=True)
class HubFunction:
    name: str
    dimensions: int  # q has so many
    parameters: tuple[str, ...]
    arrays: tuple[str, ...]
    numbers: tuple[str, ...]
    forward: str
    saving: str  # the forward before a backward
    results: tuple[Allocated, ...]
    backward: Backward | None
    doc: str

    @property
    def numbers_text(self) -> str:
        return "{" + ", ".join(f'"{name}": {name}' for name in self.numbers) + "}"

    @property
    def differentiable(self) -> dict[str, str]:
        """The results of a function without a backward: whoever asks for their gradients is told that there are none."""
        return {r.name: "" for r in self.results}

    @property
    def arrays_text(self) -> str:
        return "{" + ", ".join(f'"{name}": {name}' for name in self.arrays) + "}"


def hub_functions(specs: tuple[OfSpec, ...]) -> Iterator[HubFunction]:
    """A function for each spec."""
    for of_spec in specs:
        names = {f.name for f in of_spec.packaged.functions}
        forward = FORWARD if FORWARD in names else SAVING
        inputs = tuple(_names(of_spec, forward, "input"))
        results = _allocated(of_spec, ("out", "lse") if of_spec.packaged.spec.lse else ("out",))
        required = [p.name for p in of_spec.numbers if p.default is None]
        optional = [f"{p.name}={p.default}" for p in of_spec.numbers if p.default is not None]
        numbers = tuple(p.name for p in of_spec.numbers)
        doc = "; ".join(line.strip() for line in to_text(of_spec.packaged.spec).strip().splitlines()[1:-1])
        of_q = next(a.dims for a in of_spec.arguments if a.name == "q")
        yield HubFunction(
            of_spec.name, len(of_q), (*inputs, *required, *optional), inputs, numbers,
            f"{of_spec.name}_{forward}", f"{of_spec.name}_{SAVING if SAVING in names else forward}",
            results, _backward(of_spec, inputs, results) if BACKWARD in names else None, doc,
        )  # fmt: skip


def _backward(of_spec: OfSpec, inputs: Sequence[str], results: Sequence[Allocated]) -> Backward:
    spec, returned = of_spec.packaged.spec, [r.name for r in results]
    upstream = {name: f"d{name}" for name in returned}
    read = tuple(_names(of_spec, BACKWARD, "input"))
    gradients = {n: gradient_argument(n) for n in of_spec.packaged.wanted if n in inputs}
    shapes = {argument: f"{name}.shape" for name, argument in gradients.items()}
    values = None
    if spec.values is not None and "k" in gradients:
        values = gradient_argument("v"), spec.values[0], spec.head_dim_v
        shapes[values[0]] = f"[*k.shape[:-1], {spec.head_dim_v}]"
    return Backward(
        f"{of_spec.name}_{BACKWARD}",
        _allocated(of_spec, [n for n in _names(of_spec, SAVING, "output") if n not in returned]),
        tuple(n for n in read if n not in upstream.values()),
        {result: argument for result, argument in upstream.items() if argument in read},
        gradients,
        _allocated(of_spec, _names(of_spec, BACKWARD, "output"), shapes),
        values,
    )


def _names(of_spec: OfSpec, function: str, role: Role) -> Iterator[str]:
    """The arrays that a function reads, or writes, in the order of the arguments; none if there is no such function."""
    programs = next((f.programs for f in of_spec.packaged.functions if f.name == function), ())
    names = {t.argument for p in programs for t in p.of_role(role)}
    return (a.name for a in of_spec.arguments if a.name in names)


def _allocated(of_spec: OfSpec, names: Iterable[str], shapes: Mapping[str, str] | None = None) -> tuple[Allocated, ...]:
    """Arrays of these names, whose sizes are `shapes`, or those of q, or numbers."""
    arguments = {a.name: a for a in of_spec.arguments}
    of_q = [dim.name for dim in arguments["q"].dims]

    def shape(name: str) -> str:
        if shapes and name in shapes:
            return shapes[name]
        return f"[{', '.join(f'q.shape[{of_q.index(d.name)}]' if d.name else str(d.more) for d in arguments[name].dims)}]"

    return tuple(Allocated(name, shape(name), DTYPES[arguments[name].dtype].torch) for name in names)


def metadata(name: str, arches: Iterable[str], as_ptx: Container[str]) -> str:
    """What `kernels` reads of a build for these architectures, some of them also as PTX."""
    archs = []
    for arch in sorted(set(arches), key=capability_of):
        number, exact = capability_of(arch)
        archs.append(f"{number // 10}.{number % 10}{'a' if exact else ''}{'+PTX' if arch in as_ptx else ''}")
    fields = {
        "id": f"_{name}_kernels_cuda",
        "name": f"{name}-kernels".replace("_", "-"),
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": archs},
    }
    return json.dumps(fields, indent=2) + "\n"
