"""A Program without its text as JSON: enough to launch it from any language that can call the CUDA driver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attngen.emit.program import (
    Axis,
    CeilDiv,
    Extent,
    GroupParts,
    HeadsInL2,
    KernelEntry,
    OneMore,
    PackedBlocks,
    PackedTiles,
    Parameter,
    Product,
    Program,
    Several,
    SharedRange,
    Splits,
    Sum,
    Tensor,
)

Read = Mapping[str, Any]  # an object of a manifest, read from JSON
FORMAT = "attngen-manifest"
VERSION = 2
FORMULAS = {"section": "sections", "splits": "splits", "parts": "parts"}  # the key of a formula, by its binding


def to_manifest(program: Program) -> str:
    """The manifest of `program`; docs/launch_from_cpp.md defines its keys."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": program.name,
        "arch": program.arch,
        "source": f"{program.name}.cu",
        "entry_points": [_kernel(kernel) for kernel in program.kernels],
        "tensors": [_tensor(tensor) for tensor in program.tensors],
    }
    return json.dumps(document, indent=2) + "\n"


def from_manifest(manifest: str, text: str) -> Program:
    """The Program of a manifest and its CUDA text. Raises ValueError for another format or version."""
    document = json.loads(manifest)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ValueError(f"not a manifest of version {VERSION}: {document.get('format')} {document.get('version')}")
    return Program(
        name=document["name"],
        text=text,
        arch=document["arch"],
        kernels=tuple(map(_read_kernel, document["entry_points"])),
        tensors=tuple(map(_read_tensor, document["tensors"])),
    )


def _kernel(kernel: KernelEntry) -> dict[str, object]:
    return {
        "name": kernel.name,
        "grid": [_component(component) for component in kernel.grid],
        "block": list(kernel.block),
        "shared_bytes": kernel.shared_bytes,
        "shared_buffers": [asdict(b) for b in kernel.shared_buffers],
        "early": kernel.early,
        "parameters": [_parameter(p) for p in kernel.parameters],
    }


def _read_kernel(kernel: Read) -> KernelEntry:
    x, y, z = map(_read_component, kernel["grid"])
    block_x, block_y, block_z = kernel["block"]
    return KernelEntry(
        name=kernel["name"],
        parameters=tuple(map(_read_parameter, kernel["parameters"])),
        grid=(x, y, z),
        block=(block_x, block_y, block_z),
        shared_bytes=kernel["shared_bytes"],
        shared_buffers=tuple(SharedRange(**b) for b in kernel["shared_buffers"]),
        early=kernel.get("early", False),  # missing in the first manifests of this version
    )


def _parameter(parameter: Parameter) -> dict[str, object]:
    written = asdict(parameter)
    formula = written.pop("formula")
    return written if formula is None else written | {FORMULAS[parameter.binding]: formula}


def _read_parameter(parameter: Read) -> Parameter:
    given = dict(parameter)
    key = FORMULAS.get(given["binding"])
    if key is None:
        return Parameter(**given)
    numbers = given.pop(key)
    return Parameter(**given, formula=HeadsInL2(**numbers) if key == "sections" else _read_count(numbers))


def _tensor(tensor: Tensor) -> dict[str, object]:
    return {
        "name": tensor.name,
        "role": tensor.role,
        "argument": tensor.argument,
        "dtype": tensor.dtype,
        "shape": [_extent(size) for size in tensor.shape],
        "axes": [axis.name for axis in tensor.axes],
        "alignment": tensor.alignment,
        "unit_stride": tensor.unit_stride,
        "broadcasts": tensor.broadcasts,
        **({"like": tensor.like} if tensor.like else {}),
        **({"unless": [*tensor.unless], "unless_of": tensor.unless_of} if tensor.unless else {}),
    }


def _read_tensor(tensor: Read) -> Tensor:
    given = dict(tensor)
    sizes = [_read_extent(size) for size in given.pop("shape")]
    names = given.pop("axes", None) or [size if isinstance(size, str) else "" for size in sizes]
    unless = tuple(given.pop("unless", ()))
    return Tensor(**given, axes=tuple(map(Axis, names, sizes)), unless=unless)


def _read_count(numbers: Mapping[str, int]) -> Splits | GroupParts:
    return GroupParts(**numbers) if "rounds" in numbers else Splits(**numbers)


def _component(component: Product) -> object:
    factors = [_extent(f) for f in component.factors]
    return {"product": factors, "at_most": component.at_most} if component.at_most else factors


def _read_component(component: Any) -> Product:
    if isinstance(component, dict):
        return Product(tuple(map(_read_extent, component["product"])), component["at_most"])
    return Product(tuple(map(_read_extent, component)))


def _extent(extent: Extent) -> int | str | dict[str, object]:
    match extent:
        case CeilDiv():
            return {"ceil": extent.size, "by": extent.by}
        case OneMore():
            return {"one_more": extent.size}
        case Sum():
            return {"sum": [extent.first, extent.second]}
        case PackedBlocks():
            return {"total": extent.total, "by": extent.by, "batch": extent.batch}
        case PackedTiles():
            return {"packed": extent.rows}
        case Splits():
            return {"splits": asdict(extent)}
        case GroupParts():
            return {"parts": asdict(extent)}
        case Several():
            return {"several": asdict(extent.of)}
    return extent


def _read_extent(extent: Any) -> Extent:
    if isinstance(extent, dict):
        if "total" in extent:
            return PackedBlocks(extent["total"], extent["by"], extent["batch"])
        if "sum" in extent:
            return Sum(*extent["sum"])
        if "one_more" in extent:
            return OneMore(extent["one_more"])
        if "splits" in extent or "parts" in extent:
            return _read_count(extent.get("splits") or extent["parts"])
        if "several" in extent:
            return Several(_read_count(extent["several"]))
        return PackedTiles(extent["packed"]) if "packed" in extent else CeilDiv(extent["ceil"], extent["by"])
    assert isinstance(extent, (int, str)), extent
    return extent
