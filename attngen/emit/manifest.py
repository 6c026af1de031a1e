"""A KernelSource's ABI as JSON: enough to launch the kernel from any language that can call the CUDA driver."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from attngen.emit.kernel_source import (
    CeilDiv,
    EntryPoint,
    Extent,
    KernelSource,
    Parameter,
    Product,
    Sections,
    SharedBuffer,
    TensorSpec,
)

FORMAT = "attngen-manifest"
VERSION = 2


def to_manifest(source: KernelSource) -> str:
    """The manifest of `source`. A grid component is a product, or
    {"product": [...], "at_most": name}; an extent is a number, the name of a dimension, or
    {"ceil": name, "by": n} for ceil(name / n). A parameter of binding "section" has
    {"sections": {"rows": n, "least": n, "most": n}}, see `Sections`."""
    entries = [
        {
            "name": e.name,
            "grid": [_component(component) for component in e.grid],
            "block": list(e.block),
            "shared_bytes": e.shared_bytes,
            "shared_buffers": [asdict(b) for b in e.shared_buffers],
            "parameters": [_parameter(p) for p in e.parameters],
        }
        for e in source.entry_points
    ]
    tensors = [asdict(t) | {"shape": [_extent(x) for x in t.shape]} for t in source.tensors]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": source.name,
        "arch": source.arch,
        "source": f"{source.name}.cu",
        "entry_points": entries,
        "tensors": tensors,
    }
    return json.dumps(document, indent=2) + "\n"


def from_manifest(manifest: str, text: str) -> KernelSource:
    """The KernelSource of a manifest and its CUDA text. Raises ValueError for another format or version."""
    document = json.loads(manifest)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ValueError(f"not a manifest of version {VERSION}: {document.get('format')} {document.get('version')}")
    return KernelSource(
        name=document["name"],
        text=text,
        arch=document["arch"],
        entry_points=tuple(_entry(e) for e in document["entry_points"]),
        tensors=tuple(TensorSpec(**t | {"shape": tuple(map(_read_extent, t["shape"]))}) for t in document["tensors"]),
    )


def _entry(e: dict[str, Any]) -> EntryPoint:
    x, y, z = map(_read_component, e["grid"])
    block_x, block_y, block_z = e["block"]
    return EntryPoint(
        name=e["name"],
        parameters=tuple(_read_parameter(p) for p in e["parameters"]),
        grid=(x, y, z),
        block=(block_x, block_y, block_z),
        shared_bytes=e["shared_bytes"],
        shared_buffers=tuple(SharedBuffer(**b) for b in e["shared_buffers"]),
    )


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {name: value for name, value in asdict(parameter).items() if value is not None}


def _read_parameter(parameter: dict[str, Any]) -> Parameter:
    sections = parameter.get("sections")
    return Parameter(**parameter | {"sections": Sections(**sections)}) if sections else Parameter(**parameter)


def _component(component: Product) -> Any:
    factors = [_extent(f) for f in component.factors]
    return {"product": factors, "at_most": component.at_most} if component.at_most else factors


def _read_component(component: Any) -> Product:
    if isinstance(component, dict):
        return Product(tuple(map(_read_extent, component["product"])), component["at_most"])
    return Product(tuple(map(_read_extent, component)))


def _extent(extent: Extent) -> int | str | dict[str, int | str]:
    return {"ceil": extent.size, "by": extent.by} if isinstance(extent, CeilDiv) else extent


def _read_extent(extent: Any) -> Extent:
    if isinstance(extent, dict):
        return CeilDiv(extent["ceil"], extent["by"])
    assert isinstance(extent, (int, str)), extent
    return extent
