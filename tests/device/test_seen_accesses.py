"""Whatever a compiler makes of a copy of a struct, the emulated device sees its access: it counts the bytes, and finds what is
out of bounds and what races."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.device.emulated import EmulationError
from attngen.device.emulated.device import EmulatedKernel
from attngen.device.emulated.host_compiler import GCC, find_compiler
from tests.device import kernels

# Functions that take or return structs are not inlined: the compiler copies their arguments and results itself.
BEFORE = """
struct Own { float a[8]; };
struct Odd { float x, y, z; };
struct Bits { unsigned low : 3, high : 29; };
struct Rows { float4 row[2]; };
struct Large { float a[300]; };
union Either { float4 whole; float part[4]; };
#define OUTLINED __device__ __attribute__((noinline))
OUTLINED float sum(float4 v) { return v.x + v.y + v.z + v.w; }
OUTLINED float sum(float2 v) { return v.x + v.y; }
OUTLINED float sum(double2 v) { return v.x + v.y; }
OUTLINED float sum(Own v) { return v.a[0] + v.a[7]; }
OUTLINED float sum(Odd v) { return v.x + v.y + v.z; }
OUTLINED float sum(Bits v) { return v.low + v.high; }
OUTLINED float sum(Rows v) { return v.row[0].x + v.row[1].w; }
OUTLINED float sum(Either v) { return v.part[0] + v.part[3]; }
OUTLINED float sum(Large v) { return v.a[0] + v.a[299]; }
OUTLINED float of_reference(const float4& v) { return v.x + v.w; }
OUTLINED float recursive(Own v, int n) { return n ? recursive(v, n - 1) : v.a[0]; }
template <typename T> OUTLINED T load(const T* p) { return *p; }
template <typename T> OUTLINED T made() { return T{}; }
struct Member { float4 v; OUTLINED float sum(float4 w) const { return v.x * w.x; } };
"""
NOT_BY_LLVM = ("sum(*(const Rows*)p)",)
INSIDE = ("OUTLINED T load", "OUTLINED float of_reference")  # they access memory themselves
# The bytes that one thread reads at `p`.
READS = {
    "sum(*(const float4*)p)": 16,
    "sum(*(const float2*)p)": 8,
    "sum(*(const double2*)p)": 16,
    "sum(*(const Own*)p)": 32,
    "sum(*(const Odd*)p)": 12,
    "sum(*(const Bits*)p)": 4,
    "sum(*(const Rows*)p)": 32,
    "sum(((const Rows*)p)->row[0])": 16,
    "sum(*(const Either*)p)": 16,
    "sum(*(const Large*)p)": 1200,
    "sum(p[7] < 0 ? *(const Own*)p : ((const Own*)p)[1])": 32 + 4,
    "sum(load((const float4*)p))": 16,
    "sum(load((const Own*)p))": 32,
    "of_reference(*(const float4*)p)": 8,
    "of_reference(float4{p[0], 1, 2, 3})": 4,
    "recursive(*(const Own*)p, 3)": 32,
    "Member{*(const float4*)p}.sum({1, 2, 3, 4})": 16,
    "Member{{1, 2, 3, 4}}.sum(*(const float4*)p)": 16,
    "[](Own v) __attribute__((noinline)) { return v.a[1]; }(*(const Own*)p)": 32,
    "[v = *(const Own*)p](int i) __attribute__((noinline)) { return v.a[i]; }(threadIdx.x + 7)": 32,
    "({ float (*volatile f)(Own) = sum; f(*(const Own*)p); })": 32,
    "({ Own v; v = *(const Own*)p; sum(v); })": 32,
    "({ auto [a, b, c] = *(const Odd*)p; a + b + c; })": 12,
    "({ float4 v[2] = {*(const float4*)p, ((const float4*)p)[1]}; sum(v[0]) + sum(v[1]); })": 32,
    "({ Bits b = *(const Bits*)p; float(b.high); })": 4,
    "float(((const Bits*)p)->high)": 4,
    "({ float v[8]; memcpy(v, p, 32); v[0] + v[7]; })": 32,
    "({ float v[8]; memcpy(v, p, n); v[0] + v[7]; })": 32,
    "({ float v[8]; memmove(v, p, n); v[0] + v[7]; })": 32,
    "float(*(const volatile float*)p)": 4,
    "sum(__ldg((const float4*)p))": 16,
    "__shfl_sync(1, *(const float*)p, 0)": 4,
}
# The bytes that one thread writes at `p`.
WRITES = {
    "*(float4*)p = made<float4>()": 16,
    "*(Own*)p = made<Own>()": 32,
    "*(Own*)p = Own{}": 32,
    "*(Own*)p = load(&own)": 32,
    "*(Odd*)p = own.a[0] ? Odd{1, 2, 3} : made<Odd>()": 12,
    "*(Large*)p = made<Large>()": 1200,
    "*(float4*)p = *(const float4*)&own": 16,
    "memcpy(p, &own, n)": 32,
    "memset(p, 0, n)": 32,
    "memset(p, 0, 32)": 32,
    "*(volatile float*)p = 1": 4,
    "__stcg((float4*)p, made<float4>())": 16,
}
N = 300


def run(form: str, where: str, written: bool) -> EmulatedKernel:
    """Thread 0 runs `form` with p in the tensor y, past its end, or in shared memory that thread 1 writes at the same time."""
    forms = list(WRITES if written else READS)
    choose = "\n".join(f"    case {i}: {f'{f}; break' if written else f'y[0] = {f}; break'};" for i, f in enumerate(forms))
    tensor = "y" if written else "(float*)x"
    body = f"""
    __shared__ alignas(16) float shared[{N}];
    const int form = which[0], n = which[2];
    float* const p = which[1] == 0 ? {tensor} : which[1] == 1 ? {tensor} + {N} : shared;
    const bool races = which[1] == 2;
    Own own = {{1}};
    if (races && threadIdx.x == 1) for (int i = 0; i < {N}; ++i) shared[i] = 1;
    __syncwarp();
    if (races && threadIdx.x == 1) for (int i = 0; i < {N}; ++i) shared[i] = 2;
    if (threadIdx.x == 0) switch (form) {{
{choose}
    }}"""
    x, y = kernels.aligned(np.full(N, 2.0, np.float32)), kernels.aligned(np.zeros(N, np.float32))
    which = np.array([forms.index(form), ("inside", "outside", "race").index(where), 32], np.int32)
    return kernels.run(body, {"x": x, "y": y, "which": which}, before=BEFORE)


FORMS = [*((form, n, False) for form, n in READS.items()), *((form, n, True) for form, n in WRITES.items())]


@pytest.mark.parametrize(("form", "expected", "written"), FORMS, ids=[form for form, _, _ in FORMS])
def test_a_copy_is_seen(form: str, expected: int, written: bool) -> None:
    if form in NOT_BY_LLVM and find_compiler().family is not GCC:
        pytest.skip("LLVM lets the call copy this argument (MemCpyOptPass); docs/devices.md")
    counters = run(form, "inside", written).counters
    assert (counters.bytes_written["y"] if written else counters.bytes_read["x"]) == expected
    for where, kind in (("outside", "out of bounds"), ("race", "race")):
        with pytest.raises(EmulationError) as caught:
            run(form, where, written)
        assert caught.value.kind == kind
        # clang merges accesses of several statements, which then have no line
        assert find_compiler().family is not GCC or any(line in str(caught.value) for line in (f"{form}; break;", *INSIDE))


@pytest.mark.skipif(find_compiler().family is not GCC, reason="clang merges accesses of several statements")
def test_a_copy_has_the_line_of_its_statement() -> None:
    """Not that of the struct, whose copy constructor does it."""
    with pytest.raises(EmulationError) as caught:
        run("sum(*(const Own*)p)", "outside", False)
    assert caught.value.at.text.endswith("sum(*(const Own*)p); break;")
