"""CUDA that people add to a generated kernel: functions, atomic operations, locks, shared arrays of their own, macros."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device import kernels
from tests.device.kernels import primitives
from tests.device.test_emulator import arrays, finding, run


def test_functions_and_types_of_cuda_that_people_add_are_known() -> None:
    """Of 32 threads: shuffles of parts of a warp, atomic sums, vectors, and what costs nothing to know."""
    table = "__constant__ float table[2] = {1.0f, 2.0f};\n__host__ __device__ float half_of(float x) { return x / 2; }"
    x, y = arrays(32)
    run(
        """
    float4 v = make_float4(__ldg(&x[threadIdx.x]), table[1], half_of(4.0f), max(1.0f, 0.5f));
    float s = __shfl_xor_sync(0xffffffff, v.x, 1, 4) + __shfl_down_sync(0xffffffff, v.x, 1, 4);
    if (threadIdx.x < 16) __syncwarp(0x0000ffff);
    unsigned lane, threads;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));  // asm("not.an.instruction")
    asm("mov.u32 %0, %%ntid.x;" : "=r"(threads));
    assert(lane == threadIdx.x % warpSize && threads == 32);
    __threadfence();
    uint3 place = make_uint3(threadIdx.x, 0, 0);
    assert(__clz(0) == 32 && __clz(1) == 31 && __popc(7) == 3 && __ffs(4) == 3 && max(1.0, 2.0) == 2.0);
    assert(max(x[threadIdx.x], 0.0) == x[threadIdx.x] && min(threadIdx.x, 40) == lane);
    assert(__fmaf_rn(2.0f, 3.0f, __fadd_rn(0.5f, 0.5f)) == 7.0f && __saturatef(2.0f) == 1.0f && place.x == lane);
    y[threadIdx.x] = s + v.y + v.z + v.w + __expf(0.0f);
""",
        x,
        y,
        before=table,
    )
    lane = np.arange(32)
    assert np.array_equal(y, (lane ^ 1) + np.where(lane % 4 == 3, lane, lane + 1) + 6)
    total = np.zeros(1, np.uint32)
    kernels.run("atomicAdd(y, 2u);", {"x": x, "y": total})
    assert total[0] == 64


def test_numbers_of_functions_that_people_add() -> None:
    """Each against a number worked out by hand, so that one kernel covers all."""
    checks = """
    const int t = threadIdx.x, lane = t % 32;
    assert(__syncthreads_count(t < 5) == 5 && __syncthreads_or(t == 40) == 1 && __syncthreads_and(t < 63) == 0);
    assert(__syncthreads_and(1) == 1);
    assert(__reduce_add_sync(~0u, lane) == 496 && __reduce_max_sync(~0u, lane - 40) == -9);
    assert(__reduce_min_sync(~0u, unsigned(lane) + 3) == 3);
    assert(__reduce_or_sync(~0u, 1u << lane) == ~0u && __reduce_and_sync(~0u, 5u) == 5);
    assert(__reduce_xor_sync(~0u, unsigned(lane == 7)) == 1);
    int all;
    assert(__match_any_sync(~0u, lane % 4) == 0x11111111u << lane % 4);
    assert(__match_all_sync(~0u, 3, &all) == ~0u && all == 1 && __match_all_sync(~0u, lane, &all) == 0 && all == 0);
    assert(__activemask() == ~0u);
    if (lane % 2) assert(__activemask() == 0xaaaaaaaa);
    assert(__brev(1) == 0x80000000 && __brev(0x12345678) == 0x1e6a2c48 && __clzll(1) == 63 && __popcll(-1) == 64);
    assert(__ffsll(1ll << 40) == 41);
    assert(__mulhi(-1, 2) == -1 && __umulhi(~0u, ~0u) == ~0u - 1 && __byte_perm(0x33221100, 0x77665544, 0x7610) == 0x77661100);
    assert(__funnelshift_l(0x80000000, 1, 1) == 3 && __funnelshift_r(1, 3, 1) == 0x80000000);
    assert(__float2int_rn(2.5f) == 2 && __float2int_rd(-0.5f) == -1 && __float2int_ru(0.5f) == 1);
    assert(__float2int_rz(3e9f) == 0x7fffffff);
    assert(__float2uint_rn(-1.0f) == 0 && __float2uint_rz(5e9f) == ~0u && __float2int_rz(-3e9f) == -0x7fffffff - 1);
    assert(__frcp_rn(4) == 0.25f && __fdiv_rn(1, 8) == 0.125f && __fsqrt_rn(9) == 3 && __frsqrt_rn(16) == 0.25f);
    assert(__fsub_rn(1, 3) == -2);
    assert(sinpif(0.5f) == 1 && fabsf(cospif(1.5f)) < 1e-6f && normcdff(0) == 0.5f && norm3df(2, 3, 6) == 7);
    assert(rsqrt(4.0) == 0.5);
    assert(min(5l, 3l) == 3 && max(1ull, 2ull) == 2 && min(2ul, sizeof(int)) == 2);
    const ushort4 u = make_ushort4(1, 2, 3, 4);
    const double2 d = make_double2(1, 2);
    assert(sizeof(char3) == 3 && alignof(uchar4) == 4 && alignof(longlong2) == 16 && alignof(double4) == 16 && u.w == 4);
    assert(d.y == 2);
    const dim3 two(2), block = blockDim;
    const uint3 place = threadIdx;
    assert(two.x * two.y * two.z == 2 && block.x == 64 && place.x == t);
    __stcg(y + t, __ldcg(x + t) + __ldcs(x + t));
    __nanosleep(10);
"""
    x, y = arrays()
    run(checks, x, y, threads=64)
    assert np.array_equal(y, 2 * x)


ATOMICS = """
    __shared__ int n[8];
    __shared__ float sum;
    const int t = threadIdx.x;
    if (t < 8) n[t] = t == 2 ? 100 : 0;
    if (t == 0) sum = 0;
    __syncthreads();
    atomicAdd(&n[0], 1), atomicMax(&n[1], t), atomicMin(&n[2], t - 5), atomicSub(&n[3], 2), atomicOr(&n[4], 1 << t % 8);
    atomicXor(&n[5], t), atomicCAS(&n[6], 0, t + 1), atomicInc((unsigned*)&n[7], 4), atomicAdd(&sum, 0.5f);
    __syncthreads();
    const int results[] = {64, 63, -5, -128, 255, 0, 0, 4};
    if (t < 8) assert(t == 6 ? n[t] > 0 : n[t] == results[t]);
    y[t] = sum;
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_atomic_updates_of_shared_memory(seed: int) -> None:
    x, y = arrays()
    run(ATOMICS, x, y, threads=64, seed=seed)
    assert (y == 32).all()


def test_a_reduction_of_global_memory_needs_an_address_there() -> None:
    body = "__shared__ alignas(16) float s[4]; s[0] = 0; global_add(s, 1, 1, 1, 1);"
    error = finding(body, before=primitives("global_add"), threads=1)
    assert error.kind == "invalid operand"
    assert "whose address is in shared memory" in str(error)


COUNT = "__shared__ int n; if (threadIdx.x == 0) n = 0; {first} atomicAdd(&n, 1); {second} {use}"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "without",
    [
        {"first": ""},
        {"second": ""},
        {"second": "", "use": "if (threadIdx.x == 0) y[0] = n;"},
        {"second": "", "use": "if (threadIdx.x == 31) y[0] = n;"},
        {"second": "__syncwarp();"},
        {"use": "y[threadIdx.x] = n; if (threadIdx.x == 9) n = 0;"},
    ],
)
def test_atomic_updates_are_ordered_with_ordinary_accesses_by_barriers(without: dict[str, str], seed: int) -> None:
    parts = {"first": "__syncthreads();", "second": "__syncthreads();", "use": "y[threadIdx.x] = n;"}
    error = finding(COUNT.format(**(parts | without)), threads=64, seed=seed)
    assert error.kind in ("race", "uninitialized shared read")


LOCK = """
    __shared__ int lock, value;
    if (threadIdx.x == 0) lock = value = 0;
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {{}}
    {acquire}
    value += 1;
    {release}
    atomicExch(&lock, 0);
    __syncthreads();
    y[threadIdx.x] = value;
"""


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("without", ["", "acquire", "release"])
def test_a_lock_needs_a_fence_on_both_sides(without: str, seed: int) -> None:
    fences = dict.fromkeys(("acquire", "release"), "__threadfence_block();")
    source = LOCK.format(**fences | ({without: ""} if without else {}))
    if without:
        assert finding(source, threads=64, seed=seed).kind == "race"
        return
    x, y = arrays()
    run(source, x, y, threads=64, seed=seed)
    assert (y == 64).all()


def test_single_bytes_of_shared_memory_have_writers_of_their_own() -> None:
    source = """
    __shared__ bool odd[64];
    __shared__ alignas(4) unsigned char c[64];
    odd[threadIdx.x] = threadIdx.x & 1, c[threadIdx.x] = threadIdx.x;
    {barrier}
    y[threadIdx.x] = odd[63 - threadIdx.x] + {read};
    """
    x, y = arrays()
    run(source.format(barrier="__syncthreads();", read="((unsigned*)c)[threadIdx.x / 4] % 256"), x, y, threads=64)
    assert np.array_equal(y, 1 - x % 2 + x // 4 * 4)
    for read in ("c[threadIdx.x ^ 1]", "((unsigned*)c)[threadIdx.x / 4]"):
        error = finding(source.format(barrier="__syncwarp(threadIdx.x % 32 ? ~1u : 1u);", read=read), threads=64)
        assert error.kind in ("race", "uninitialized shared read")
    error = finding("__shared__ char c[32]; c[threadIdx.x / 2] = 1; __syncthreads(); y[threadIdx.x] = c[0];", threads=64)
    assert error.kind == "race"


IN_FUNCTIONS = """
template <int N> __device__ float last(float v) {{
    __shared__ float all[N];
    all[threadIdx.x] = v;
    {barrier}
    return all[N - 1 - threadIdx.x];
}}
__device__ __forceinline__ float inlined(float v) {{
    __shared__ float all[32];
    all[threadIdx.x] = v;
    __syncthreads();
    return all[31 - threadIdx.x];
}}
"""


def test_shared_arrays_of_templates_and_inlined_functions() -> None:
    body = "__shared__ float own[32]; own[threadIdx.x] = last<32>(x[threadIdx.x]); y[threadIdx.x] = inlined(own[threadIdx.x]);"
    for _ in range(2):  # two libraries with a template of the same name
        x, y = arrays(32)
        kernel = run(body, x, y, before=IN_FUNCTIONS.format(barrier="__syncthreads();"))
        assert np.array_equal(y, x)
        body += " "
    assert kernel.counters.shared_bytes_written == 3 * 128
    error = finding(body, before=IN_FUNCTIONS.format(barrier=""))
    assert error.kind in ("race", "uninitialized shared read")
    assert "of all)" in str(error)


def test_the_macros_of_nvrtc_have_its_values() -> None:
    """The kernel is of sm_90a. Otherwise other code would run here than on the GPU."""
    x, y = arrays(32)
    run(
        """
#if __CUDA_ARCH__ == 900 && defined __CUDA_ARCH_FEAT_SM90_ALL && defined __CUDACC__ && defined __CUDACC_RTC__
    static __shared__ float own[32];
    own[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = own[threadIdx.x];
#endif
""",
        x,
        y,
    )
    assert np.array_equal(y, x)
