"""A name that a spec may have compiles, by NVRTC and by the host's compiler; all others are refused with a diagnostic."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text
from attngen.device.emulated import EmulatedDevice
from attngen.device.emulated.translate import RUNTIME
from attngen.emit.emitter import emit
from attngen.plan.arch import ARCHES
from attngen.schedules import choose
from attngen.spec.names import check_name, derived_names, name_mistakes
from tests.conftest import ROOT
from tests.harness import emitted

WORDS = """
    alignas alignof and asm auto bitand bool break case catch char char8_t char16_t char32_t class compl concept const
    consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do double
    dynamic_cast else enum explicit export extern false float for friend goto if inline int long main mutable namespace new
    noexcept not nullptr operator or private protected public register reinterpret_cast requires restrict return short
    signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef typeid
    typename typeof union unsigned using virtual void volatile wchar_t while xor xor_eq
    linux unix NULL NAN INFINITY errno assert stdin EOF M_PI INT_MAX FLT_MAX threadIdx blockDim warpSize cudaStreamDefault
    fp16 bf16 Captured _Bool __half __half2 __global__ _Float16 a__b
""".split()  # noqa: SIM905

# Names of C++, its library, CUDA and generated code that are no keywords and no macros.
ALLOWED = """
    final override import module size_t ptrdiff_t uint32_t string vector std move swap array span printf malloc free memcpy
    dim3 uint4 float4 half half2 nv_bfloat16 clock_t clock64 atomicAdd expf fminf rsqrtf round data begin end y0 j1 jn yn gamma
    in at t0 i0 b_idx h_idx q_idx kv_idx lane index row column transposed tile stage kv_range score_of mask_of row_max emulator
    Position INF LOG2_E BLOCK_Q THREADS softmax_scale complex I near far small interface
""".split()  # noqa: SIM905


def test_words_that_do_not_compile_are_refused() -> None:
    for word in WORDS:
        with pytest.raises(attngen.DiagnosticError, match=f"the name `{word}` cannot be used"):
            check_name(word)


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("standard", ["c++20", "gnu++20"])
def test_macros_of_the_host_s_compilers_are_refused(compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    headers = f'#include "{RUNTIME / "emulator.hpp"}"\n#include <math.h>\n#include <stdlib.h>\n#include <string.h>\n'
    command = [compiler, f"-std={standard}", "-dM", "-E", "-x", "c++", "-"]
    defined = subprocess.run(command, input=headers, capture_output=True, text=True, check=True).stdout
    macros = re.findall(r"^#define ([A-Za-z]\w*)[ \n]", defined, re.M)
    assert "NULL" in macros
    assert [m for m in macros if "__" not in m and not list(name_mistakes(m))] == []


def names_of_generated_code() -> set[str]:
    """Every identifier of the ladder that a spec may use for itself."""
    texts = (re.sub(r"//.*", "", file.read_text()) for file in sorted((ROOT / "generated").glob("*.cu")))
    found = {name for text in texts for name in re.findall(r"\b[A-Za-z]\w*\b", text)}
    return {name for name in found if not list(name_mistakes(name))}


def total(terms: list[str]) -> str:
    """The sum of `terms`, as flat as can be."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return f"({total(terms[:half])} + {total(terms[half:])})"


@pytest.mark.long
def test_all_other_names_compile() -> None:
    """One kernel that has them all: as inputs, whose names become parts of others, and as params."""
    taken = {derived for name in ALLOWED for derived in derived_names(name, 1)}
    params = sorted(names_of_generated_code() - set(ALLOWED) - taken)
    assert len(params) > 300
    spec = attngen.define(
        head_dim=8,
        inputs={name: ("fp16" if len(name) % 2 else "int32", ("heads",)) for name in ALLOWED},
        params=dict.fromkeys(params, 1.0),
        score=total(["s", *(f"{name}[h]" for name in ALLOWED), *params]),
    )
    source = emit(spec, choose(spec, ARCHES["sm_80"], "naive"))
    assert compile_text(source, "ptx").code
    EmulatedDevice(checked=False).compile(source)


@pytest.mark.parametrize(
    ("schedule", "arch"), [("naive", "sm_80"), ("tiled", "sm_80"), ("fused", "sm_80"), ("hopper", "sm_90a")]
)
def test_an_input_may_not_have_the_name_of_a_tensor_of_the_kernels(schedule: str, arch: str) -> None:
    """A call holds all tensors by their names: an input `next_work` would be taken for the counter, and set to 0."""
    program = emitted(attngen.define(dtype="bf16", head_dim=64, mask="causal", lse=True), schedule, arch)
    for name in {n for tensor in program.tensors for n in (tensor.name, tensor.key)}:
        with pytest.raises(attngen.DiagnosticError):
            attngen.define(head_dim=64, inputs={name: ("fp32", ("heads",))}, score=f"s + {name}[h]")
