"""docs/launch_from_cpp.md: its program launches what the manifest says, and its tables have every key of a manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest

from attngen.emit.emitter import emit
from attngen.emit.manifest import to_manifest
from attngen.emit.program import Binding, evaluate
from attngen.plan import ARCHES
from attngen.schedules import choose
from tests.conftest import ROOT
from tests.harness import emitted, shipped

PAGE = ROOT / "docs" / "launch_from_cpp.md"
PROGRAM = ROOT / "docs" / "launch" / "main.cpp"
SIZES = {"batch": 2, "q_heads": 12, "kv_heads": 12, "q_len": 1000, "kv_len": 1000}
KINDS = {"long long": "l", "int": "i"}
OBJECTS = {"entry_points": "Entry point", "parameters": "Parameter", "tensors": "Tensor", "shared_buffers": "Shared buffer"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_program_launches_what_the_manifest_says(tmp_path: Path) -> None:
    source = emitted(shipped("gpt2"), "fused")
    (entry,) = source.kernels
    program, cubin = tmp_path / "main", tmp_path / "gpt2_fused.cubin"
    cubin.write_bytes(b"cubin")
    fake = Path(__file__).parent / "fake_driver"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{fake}", str(PROGRAM), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    kinds = "".join("p" if p.binding == "data" else KINDS[p.ctype] for p in entry.parameters)
    environment = os.environ | {"PARAMETERS": kinds}
    done = subprocess.run([program, cubin], capture_output=True, text=True, check=False, env=environment)

    shapes = {t.name: [evaluate(e, SIZES) for e in t.shape] for t in source.tensors}
    expected = [
        f"allowed {entry.shared_bytes}",
        f"launch {entry.name}",
        "grid " + " ".join(str(component(SIZES)) for component in entry.grid),
        "block " + " ".join(map(str, entry.block)),
        f"shared {entry.shared_bytes}",
    ]
    for p in entry.parameters:
        batch, heads, rows, width = shapes.get(p.of, [0] * 4)
        values = {
            "data": f"{batch * heads * rows * width * 2} bytes",
            "stride": str([heads * rows * width, rows * width, width, 1][p.dim]),
            "size": str(SIZES.get(p.of)),
            "section": str(p.formula(SIZES)) if p.formula else "",
        }
        expected.append(values[p.binding])
    assert done.stdout.splitlines()[:-1] == expected
    assert done.stdout.splitlines()[-1] == "1536000 elements, 1536000 wrong"  # nothing was computed: that is noticed
    assert done.returncode == 1
    assert "It prints `1536000 elements, 0 wrong`" in PAGE.read_text()


def headers() -> list[Path]:
    """CUDA's own header, if this machine has a toolkit."""
    roots = [os.environ.get("CUDA_HOME", "/nonexistent"), *map(str, Path("/usr/local").glob("cuda*"))]
    return [Path(root) / "include" for root in roots if (Path(root) / "include" / "cuda.h").is_file()][:1]


@pytest.mark.parametrize("include", headers())
def test_the_program_compiles_with_the_header_of_cuda(include: Path) -> None:
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{include}", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def collect(found: dict[str, set[str]], kind: str, value: dict[str, Any]) -> None:
    found[kind] |= value.keys()
    for key, inner in value.items():
        if key in OBJECTS:
            for one in inner:
                collect(found, OBJECTS[key], one)


def test_the_page_documents_every_key_of_a_manifest() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    bindings = set()
    alibi = shipped("alibi")
    programs = (
        emitted(shipped("gpt2"), "fused", "sm_80"),
        emitted(shipped("gpt2"), "tiled", "sm_80"),
        emitted(shipped("mistral_window"), "hopper", "sm_90a"),
        emitted(shipped("mistral_window"), "decode", "sm_90a"),
        emitted(shipped("mistral_window"), "hopper", "sm_90a", "backward"),
        emit(alibi, choose(alibi, ARCHES["sm_80"], "naive", direction="backward", wanted=("q", "slopes"))),
        emit(bias := shipped("dense_bias"), choose(bias, ARCHES["sm_80"], "fused", wanted=("bias",))),
    )
    for program in programs:
        document = json.loads(to_manifest(program))
        collect(found, "Document", document)
        bindings |= {p["binding"] for e in document["entry_points"] for p in e["parameters"]}
    documented = {}
    for title, body in re.findall(r"^### (.*)\n\n((?:.|\n)*?)(?=^#|\Z)", PAGE.read_text(), re.MULTILINE):
        table = body.split("\n\n")[0]
        documented[title] = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert documented == found
    table = PAGE.read_text().split("| binding | value |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(get_args(Binding)) >= bindings


def test_the_page_documents_every_extent() -> None:
    page = PAGE.read_text().split("An *extent* is")[1].split("\n\n")[0]
    for manifest in sorted((ROOT / "generated").glob("*.json")):
        document = json.loads(manifest.read_text())
        components = [c["product"] if isinstance(c, dict) else c for e in document["entry_points"] for c in e["grid"]]
        for extent in chain(*components, *(t["shape"] for t in document["tensors"])):
            keys = extent.keys() if isinstance(extent, dict) else ()
            assert all(f'"{key}":' in page for key in keys), (manifest.name, extent)
