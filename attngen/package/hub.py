"""A library as a repository of Hugging Face's `kernels`: its metadata, and functions of torch tensors."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from attngen.package.functions import FORWARD
from attngen.package.of_spec import Dim, OfSpec, capability_of
from attngen.spec.dtypes import DTYPES
from attngen.spec.print_attn import to_text

TORCH = "torch-stable-abi20"  # the module uses no part of torch: any torch from 2.0 on suits it
CUDA = "cu130"  # the driver that cubins of NVRTC 13 need


@dataclass(frozen=True, slots=True)
class Result:
    """An array that a function returns; its sizes are those of q, or numbers."""

    name: str
    sizes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class HubFunction:
    name: str
    parameters: tuple[str, ...]
    arrays: tuple[str, ...]
    numbers: tuple[str, ...]
    results: tuple[Result, ...]
    doc: str

    @property
    def numbers_text(self) -> str:
        return "{" + ", ".join(f'"{name}": {name}' for name in self.numbers) + "}"

    @property
    def returned(self) -> str:
        texts = [f'results["{r.name}"]' for r in self.results]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def hub_functions(specs: tuple[OfSpec, ...]) -> Iterator[HubFunction]:
    """A function for each spec with a forward."""
    for of_spec in specs:
        forward = next((f for f in of_spec.packaged.functions if f.name == FORWARD), None)
        if forward is None:
            continue
        roles = {t.argument: t.role for p in forward.programs for t in p.of_role("input", "output")}
        inputs = tuple(a.name for a in of_spec.arguments if roles.get(a.name) == "input")
        of_q = [dim.name for a in of_spec.arguments if a.name == "q" for dim in a.dims]
        results = tuple(
            Result(a.name, tuple(_size(of_q, dim) for dim in a.dims), DTYPES[a.dtype].torch)
            for a in of_spec.arguments
            if roles.get(a.name) == "output"
        )
        required = [p.name for p in of_spec.numbers if p.default is None]
        optional = [f"{p.name}={p.default}" for p in of_spec.numbers if p.default is not None]
        numbers = tuple(p.name for p in of_spec.numbers)
        doc = "; ".join(line.strip() for line in to_text(of_spec.packaged.spec).strip().splitlines()[1:-1])
        yield HubFunction(of_spec.name, (*inputs, *required, *optional), inputs, numbers, results, doc)


def _size(of_q: Sequence[str], dim: Dim) -> str:
    """The size of a result along a dimension that q has too, or a number."""
    return f"q.shape[{of_q.index(dim.name)}]" if dim.name else str(dim.more)


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
