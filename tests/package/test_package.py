"""Libraries of `attngen package`: their text and numbers, and their calls, run on the emulated device by a driver of that."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from click.testing import CliRunner

from attngen.cli import main
from attngen.emit.program import Binding, GroupParts, HeadsInL2, PackedTiles, Splits
from attngen.language import load_text
from attngen.package.context import ENCODE
from attngen.package.cpp_text import CppPrinter
from attngen.package.functions import Request, packaged
from attngen.package.library import files
from attngen.plan import ARCHES, Problem
from attngen.plan.formulas import SYMBOLS, expression
from attngen.plan.plan import PlanRefusal
from attngen.schedules import choice_of
from attngen.spec.evaluate import on_numbers
from attngen.spec.expr import Expr, Type, name
from attngen.spec.gradient import QKV, differentiable
from attngen.spec.obligations import ObligationError, check_obligations, conditions_of_call
from attngen.spec.operator import apply
from attngen.spec.operators import ROWS
from tests.conftest import ROOT
from tests.harness import SHIPPED, SPECS, shipped
from tests.package.libraries import (
    COMPILERS,
    INCLUDE,
    WARNINGS,
    built,
    emulated,
    extension_prints,
    library_of,
    needs_compiler,
    output_of_tests,
    sizes_of_calls,
    written,
)

TEMPLATES = ROOT / "templates" / "package"
PAGE = ROOT / "docs" / "package.md"


@pytest.mark.parametrize(
    "formula",
    [Splits(16, 64, 1), Splits(16, 128, 2), Splits(16, 512, 0), HeadsInL2(131072, 32, 128), GroupParts(64, 2), PackedTiles(16)],
    ids=str,
)
def test_a_formula_has_the_same_values_as_its_expression(formula: Splits | HeadsInL2 | GroupParts | PackedTiles) -> None:
    value = on_numbers(expression(formula(SYMBOLS)))
    for sizes in sizes_of_calls(300):
        assert value(sizes) == (formula(sizes),), sizes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("spec", ["gpt2", "gemma_softcap", "dropout"])
def test_conditions_select_the_plans_of_calls(spec: str, arch: str) -> None:
    """But for the tile of the usual schedule, which a library does not select."""
    choice = choice_of(shipped(spec), ARCHES[arch])
    conditions, plans = zip(*choice.conditions(), strict=True)
    value = on_numbers(*map(expression, conditions))
    special = 0
    for sizes in sizes_of_calls(200):
        first = plans[value(sizes).index(True)]
        problem = Problem.of(sizes)
        special += choice.has_own(problem)
        assert first == (choice.at(problem) if choice.has_own(problem) else choice.usual)
    assert special


def test_the_same_specs_give_the_same_bytes() -> None:
    first, second = (files(library_of(shipped("gpt2"), only="forward", arches=("sm_80", "sm_90a"))) for _ in range(2))
    assert first == second
    sources = {f"attngen{suffix}" for suffix in (".h", ".cpp", "_test.cpp", "_kernels.cpp")}
    assert {path for path in first if "/" not in path} == {*sources, "CMakeLists.txt"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "attention x { dtype fp16 head_dim 64 param counter: int mask k < counter }",
            "`counter` of attention `x` is a mem",
        ),
        (
            "attention x { dtype fp16 head_dim 64 input a: fp32[pages] score s + a[0] kernel auto { storage paged } }",
            "`pages` of attention `x` is a member",
        ),
    ],
)
def test_what_cannot_be_packaged_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanRefusal, match=re.escape(message)):
        packaged(load_text(text)[0], Request((ARCHES["sm_80"],), only="forward"))


def test_every_binding_has_a_template() -> None:
    """A tensor map, a function that encodes it too."""
    forms = {path.name.removeprefix("parameter_").removesuffix(".j2") for path in TEMPLATES.glob("parameter_*.j2")}
    of_formulas = {"section", "splits", "parts", "size", "param"}
    assert forms == {*get_args(Binding)} - of_formulas - {*ENCODE} | {"map", "number", "narrow_step"}
    assert {b for b in get_args(Binding) if b.endswith("map")} == {*ENCODE}
    assert all(f"Status {function}(" in (TEMPLATES / "runtime.hpp.j2").read_text() for function in ENCODE.values())


def test_the_command_refuses_with_words(tmp_path: Path) -> None:
    run = CliRunner().invoke
    without_gradients = tmp_path / "a.attn"
    without_gradients.write_text("attention a { dtype q bf16 k fp8_e4m3 v fp8_e4m3 head_dim 64 }")
    refused = run(main, ["package", str(without_gradients), "-o", str(tmp_path / "out")])
    assert refused.exit_code == 2
    assert "note: --only forward packages the forward, without gradients" in refused.output
    assert "is no name in C" in run(main, ["package", "gpt2", "-o", "x", "--name", "1"]).output
    assert (
        "forwards have no gradients; leave out --wanted"
        in run(main, ["package", "gpt2", "-o", "x", "--only", "forward", "--wanted", "q"]).output
    )
    assert "several attentions are called gpt2" in run(main, ["package", "gpt2", "gpt2", "-o", "x"]).output


def test_all_gradients_of_a_part_of_the_keys_are_packaged(tmp_path: Path) -> None:
    """V has none of its own there."""
    spec = tmp_path / "a.attn"
    spec.write_text("attention a { dtype fp32 head_dim 24 values k[8:24] input bias: fp32[heads] score s + bias[h] }")
    command = ["package", str(spec), "-o", str(tmp_path / "out"), "--wanted", "all", "--kernel", "naive", "--arch", "sm_80"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "d_bias" in (tmp_path / "out" / "attngen.h").read_text()


# --- what is checked of a call


@pytest.mark.parametrize("spec", SHIPPED)
def test_conditions_are_those_of_python(spec: str) -> None:
    """A library refuses the calls that `check_obligations` refuses, and no others, of sizes that arrays may have."""
    one, random, refused = shipped(spec), Random(1), 0
    parts = [(shortest, on_numbers(*found)) for shortest, found in conditions_of_call(one) if found]
    for sizes in sizes_of_calls(200):
        sizes |= dict.fromkeys(one.free_dims, random.choice((1, 9))) | (
            {"q_heads": one.q_heads, "kv_heads": one.kv_heads} if one.q_heads else {}
        )
        params = {p.name: random.choice((-3, 0, 4)) if p.type is Type.INT else 0.5 for p in one.params}
        rows, keys = sizes["q_len"], sizes["kv_len"]
        held = all(
            all(holds({**sizes, **params})) for least, holds in parts if rows >= least[0] and keys >= least[1] and rows + keys
        )
        try:
            check_obligations(one, sizes, params)
        except ObligationError:
            assert not held, (sizes, params)
            refused += 1
        else:
            assert held, (sizes, params)
    assert refused or spec not in ("packed_documents", "dilated")


# --- C++ text

PROGRAM = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
namespace {{
{functions}
}}
int main() {{
{statements}
}}
"""


def of_operators() -> list[Expr]:
    """Each operator on constants that are not folded, because names stand for them."""
    found = []
    for row in ROWS:
        for types in ((Type.INT,) * 3, (Type.FLOAT,) * 3, (Type.BOOL, Type.FLOAT, Type.FLOAT), (Type.BOOL,) * 3):
            for count in (1, 2, 3):
                try:
                    row.typing(row.name, types[:count])
                    found.append(apply(row.name, *(name(f"{t}{i}", t) for i, t in enumerate(types[:count]))))
                except ValueError:
                    continue
    return list(dict.fromkeys(found))


VALUES: Mapping[str, int | float | bool] = {
    "int0": -7,
    "int1": 3,
    "int2": 12,
    "float0": 0.75,
    "float1": -2.5,
    "float2": 1.25,
    "bool0": True,
    "bool1": False,
    "bool2": True,
}


@needs_compiler
def test_every_operator_has_its_value_in_cpp(tmp_path: Path) -> None:
    exprs = [e for e in of_operators() if e.args]
    assert {row.name for row in ROWS} - {e.op for e in exprs if hasattr(e, "op")} <= {"float"}
    printer = CppPrinter({n: n for n in VALUES})
    ctypes = {int: "long long", float: "double", bool: "bool"}
    lines = [f"const {ctypes[type(v)]} {n} = {str(v).lower()};" for n, v in VALUES.items()] + [f"(void){n};" for n in VALUES]
    lines += [f'std::printf("%.17g\\n", double({printer.print(e).results[0]}));' for e in exprs]
    template = (TEMPLATES / "functions.hpp.j2").read_text()
    source, program = tmp_path / "a.cpp", tmp_path / "a"
    source.write_text(PROGRAM.format(functions=template, statements="\n".join(lines)))
    built([COMPILERS[0], *WARNINGS, source, "-o", program])
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    for expr, text in zip(exprs, printed, strict=True):
        try:
            (expected,) = on_numbers(expr)(VALUES)
        except ValueError:  # a root or logarithm of a negative number: NaN in IEEE arithmetic
            expected = math.nan
        if isinstance(expected, complex):
            expected = math.nan
        assert float(text) == pytest.approx(float(expected), rel=1e-12, nan_ok=True), expr


# --- compiled and run


RUN = [
    ("alibi", "sm_80"),
    ("dense_bias", "sm_90a"),
    ("gpt_oss_sinks", "sm_90a"),
    ("dropout", "sm_80"),
    ("sigmoid_attention", "sm_90a"),
]


@needs_compiler
@pytest.mark.long(one_of=2)
@pytest.mark.parametrize(("spec", "arch"), RUN)
def test_the_test_program_passes_on_the_emulated_device(spec: str, arch: str, tmp_path: Path, driver: Path) -> None:
    one = shipped(spec)
    made = library_of(one, arches=(arch,), compile=emulated, wanted=(*QKV, *differentiable(one)))
    output = output_of_tests(made, tmp_path, driver, arch)
    assert len(re.findall(r"^ok ", output, re.M)) >= 20
    assert "backward dq" in output


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_shipped_spec_compiles_without_warnings(compiler: str, tmp_path: Path) -> None:
    made = library_of(*map(shipped, (*SPECS, "latent_decode")), arches=("sm_80", "sm_90a"))  # fp8_cache has no gradients
    directory = written(made, tmp_path)
    for source in (directory / "attngen.cpp", directory / "attngen_test.cpp", next((directory / "code").iterdir())):
        built([compiler, *WARNINGS, "-O0", f"-I{INCLUDE}", "-c", source, "-o", tmp_path / "made.o"])
    header = tmp_path / "only_header.c"
    header.write_text('#include "attngen.h"\nint main(void) { return ATTNGEN_OK; }\n')
    built(
        [
            compiler.replace("++", "cc" if compiler == "g++" else ""),
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{directory}",
            "-c",
            header,
            "-o",
            tmp_path / "h.o",
        ]
    )


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@needs_compiler
@pytest.mark.long
def test_cmake_builds_every_target(tmp_path: Path) -> None:
    directory = written(library_of(shipped("dilated"), only="forward"), tmp_path / "library")
    assert INCLUDE is not None
    built(["cmake", "-S", directory, "-B", tmp_path / "build", f"-DATTNGEN_CUDA_INCLUDE={INCLUDE}"])
    built(["cmake", "--build", tmp_path / "build", "--target", "attngen", "attngen_test", "attngen_kernels"])
    made = {path.name for path in (tmp_path / "build").iterdir()}
    assert made >= {"libattngen.a", "attngen_test", "attngen_kernels.abi3.so"}


LOADED = """
import sys
from pathlib import Path
from unittest import mock
import torch
from kernels import get_local_kernel
from kernels.backends import CUDA, Version

with mock.patch("kernels.backends._backend", return_value=CUDA(version=Version("13.0"))):
    found = get_local_kernel(Path(sys.argv[1]))
q = torch.zeros(1, 2, 3, 64, dtype=torch.float16)
try:
    found.dilated(q, q, q, step=2)
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@needs_compiler
@pytest.mark.long
def test_kernels_of_hugging_face_loads_the_repository(tmp_path: Path) -> None:
    """`kernels` of this environment, or of another one that PYTHONPATH names."""
    pytest.importorskip("torch")
    pytest.importorskip("kernels")
    directory = written(library_of(shipped("dilated"), only="forward"), tmp_path / "library")
    built(["cmake", "-S", directory, "-B", tmp_path / "build", f"-DATTNGEN_CUDA_INCLUDE={INCLUDE}"])
    built(["cmake", "--build", tmp_path / "build", "--target", "attngen_hub"])
    command = [sys.executable, "-c", LOADED, str(tmp_path / "build" / "hub")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "`q` is not in the memory of a GPU\n", done.stderr


STUB = """
#pragma once
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
inline int cudaMallocAsync(void**, size_t, cudaStream_t) { return 0; }
inline int cudaFreeAsync(void*, cudaStream_t) { return 0; }
"""


@needs_compiler
def test_the_function_of_the_page_compiles(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```cpp\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    directory = written(library_of(shipped("gpt2"), only="forward"), tmp_path)
    (tmp_path / "cuda_runtime.h").write_text(STUB)
    (tmp_path / "page.cpp").write_text(block)
    built([COMPILERS[0], *WARNINGS, f"-I{directory}", "-fsyntax-only", tmp_path / "page.cpp"])


def test_the_page_has_every_option() -> None:
    text = CliRunner().invoke(main, ["package", "--help"]).output
    options = set(re.findall(r"--[a-z]+", text)) - {"--help", "--json", "--output", "--build", "--target"}
    assert options == set(re.findall(r"`(--[a-z]+)", PAGE.read_text()))


ON_PYTHON = """
import numpy as np
import attngen_kernels
from tests.package.on_gpu import OnGpu, workspace_of

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 3, 70, 64)).astype(np.float16) for _ in range(3))
out = np.full_like(q, np.nan)
arrays = {name: OnGpu(array) for name, array in (("q", q), ("k", k), ("v", v), ("out", out))}
size = attngen_kernels.gpt2_forward_workspace_bytes(**arrays)
workspace = workspace_of(size)
attngen_kernels.gpt2_forward(**arrays, workspace=workspace, stream=0)
scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8.0
scores = np.where(np.tri(70, dtype=bool), scores, -np.inf)
weights = np.exp(scores - scores.max(-1, keepdims=True))
expected = weights / weights.sum(-1, keepdims=True) @ v.astype(float)
assert np.abs(out - expected).max() < 4e-3, np.abs(out - expected).max()

for change, error in (
    ({"k": OnGpu(k[:, :, :, :32])}, "`k` has size 32 in dimension 3; expected 64"),
    ({"k": OnGpu(k.astype(np.float32))}, "`k` has elements of another type"),
    ({"v": OnGpu(v[:1])}, "`v` has size 1 in dimension 0; expected 2"),
    ({"v": v}, ""),
    ({"wrong": 1}, "a keyword is not one of this function's arguments"),
    ({"q": OnGpu(q[..., 1:])}, "`q` has size 63"),
    ({"out": None}, "`out` was not given"),
    ({"q": OnGpu(q[:, :, :, ::-1])}, "`q`: the last dimension of an array must have stride 1"),
):
    try:
        attngen_kernels.gpt2_forward(**{**arrays, "workspace": workspace, **change})
    except (TypeError, ValueError, RuntimeError, BufferError) as found:
        assert error in str(found), (error, found)
    else:
        raise AssertionError(error)
print("right")
"""


@needs_compiler
@pytest.mark.long
def test_the_python_extension_computes_and_refuses(tmp_path: Path, driver: Path) -> None:
    assert (
        extension_prints(library_of(shipped("gpt2"), only="forward", compile=emulated), ON_PYTHON, tmp_path, driver)
        == "right\n"
    )
