"""The emulated device: the meaning of each primitive; each kind of mistake is found and named."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from attngen.device.emulated import EmulationError
from attngen.device.protocol import CompilationError, DeviceError
from tests.device import kernels
from tests.device.kernels import primitives


def run(body: str, x: np.ndarray, y: np.ndarray, **options):
    """Run `body` as a kernel over arrays x (read) and y (written); gives the kernel."""
    return kernels.run(body, {"x": x, "y": y}, **options)


def arrays(n: int = 64):
    return np.arange(n, dtype=np.float32), np.zeros(n, np.float32)


def finding(body: str, **options) -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run(body, *arrays(), **options)
    return caught.value


TRANSPOSE = """
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    {barrier}
    y[threadIdx.x] = tile[31 - threadIdx.x];
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("barrier", ["__syncthreads();", "__syncwarp();"])
def test_a_barrier_orders_shared_memory(barrier: str, seed: int) -> None:
    x, y = arrays(32)
    kernel = run(TRANSPOSE.format(barrier=barrier), x, y, seed=seed)
    assert np.array_equal(y, x[::-1])
    assert kernel.counters.bytes_read == {"x": 128, "y": 0}
    assert kernel.counters.bytes_written == {"y": 128}
    assert (kernel.counters.shared_bytes_read, kernel.counters.shared_bytes_written) == (128, 128)
    assert kernel.counters.barriers == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_barrier_is_found_in_any_order(seed: int) -> None:
    error = finding(TRANSPOSE.format(barrier=""), seed=seed)
    assert error.kind in ("race", "uninitialized shared read")
    assert error.at.line == 7
    assert "tile[31 - threadIdx.x]" in error.at.text


def test_a_race_names_both_places() -> None:
    error = finding("__shared__ float a[1]; if (threadIdx.x == 0) a[0] = 1;\n if (threadIdx.x == 1) y[0] = a[0];")
    assert (error.kind, error.at.thread, error.at.line) == ("race", 1, 4)
    assert error.other is not None
    assert (error.other.thread, error.other.line) == (0, 3)


def test_overwriting_what_another_thread_read_is_a_race() -> None:
    body = """__shared__ float a[2];
    if (threadIdx.x == 0) a[0] = 1; __syncthreads();
    if (threadIdx.x == 1) y[1] = a[0];
    if (threadIdx.x == 2) a[0] = 2;"""
    assert finding(body).kind == "race"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("y[0] = x[64];", "out of bounds"),
        ("y[0] = x[-1];", "out of bounds"),
        ("y[64] = 1;", "out of bounds"),
        ("((float*)x)[0] = 1;", "write to a read-only tensor"),
        ("y[0] = y[1];", "uninitialized global read"),
        ("__shared__ float a[4]; y[0] = a[0];", "uninitialized shared read"),
        ("y[0] = 1;", "race"),
        (
            "struct alignas(16) V { float a[4]; }; V v = *(const V*)(x + 1); y[threadIdx.x] = v.a[0] + v.a[3];",
            "misaligned access",
        ),
        ("if (threadIdx.x < 16) __syncthreads();", "divergent barrier"),
        ("if (threadIdx.x < 16) __syncthreads(); else\n __syncthreads();", "divergent barrier"),
        ("if (threadIdx.x < 16) __syncwarp();", "deadlock"),
        ("if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);", "deadlock"),
    ],
)
def test_each_kind_of_mistake_has_its_name(body: str, kind: str) -> None:
    error = finding(body)
    assert error.kind == kind
    assert error.kernel == "kernel"
    assert error.at.line >= 3


def test_dynamic_shared_memory_has_exact_bounds() -> None:
    body = "((float*)smem)[{at}] = 1; y[threadIdx.x] = 1;"
    x, y = arrays(32)
    run(body.format(at="threadIdx.x"), x, y, shared=128)
    error = finding(body.format(at="threadIdx.x + 1"), shared=128)
    assert error.kind == "out of bounds"
    assert error.at.thread == 31


def test_a_deadlock_says_where_each_group_waits() -> None:
    error = finding("if (threadIdx.x < 16) __syncwarp(); else\n\n __syncthreads(); y[0] = 0;")
    assert "thread 0 waits for the warp barrier at line 3" in str(error)
    assert "thread 16 waits for the block barrier at line 5" in str(error)


def test_the_device_is_usable_after_a_finding() -> None:
    finding("y[0] = x[64];")
    x, y = arrays(32)
    run("y[threadIdx.x] = 2 * x[threadIdx.x];", x, y)
    assert np.array_equal(y, 2 * x)


def test_shuffles_and_votes() -> None:
    x, y = arrays(32)
    run(
        "float v = x[threadIdx.x]; for (int l = 16; l; l /= 2) v += __shfl_xor_sync(0xffffffffu, v, l); y[threadIdx.x] = v;",
        x,
        y,
    )
    assert (y == x.sum()).all()
    run("y[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 2);", x, y)
    assert np.array_equal(y[:30], x[2:])
    run("y[threadIdx.x] = __ballot_sync(0xffffffffu, x[threadIdx.x] < 5) == 31 && __any_sync(0xffffffffu, true);", x, y)
    assert (y == 1).all()


@pytest.mark.parametrize(("name", "to_float"), [("fp16", np.float16), ("bf16", None)])
def test_conversions_round_to_nearest_even(name: str, to_float) -> None:
    from attngen.spec.dtypes import DTYPES, round_to_storage

    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.standard_normal(2000), 10.0 ** rng.uniform(-9, 5, 2000), [0, -0.0, 65504, 65519.9, 1e-8, 2049, 2051]]
    )
    x = x.astype(np.float32)
    y = np.zeros(x.size, np.uint16)
    run(
        f"int i = blockIdx.x * 32 + threadIdx.x; if (i < {x.size}) y[i] = to_{name}(x[i]).bits;",
        x,
        y,
        before=primitives(f"type_{name}", f"to_float_{name}", f"to_{name}"),
        blocks=-(-x.size // 32),
    )
    assert np.array_equal(y, round_to_storage(x, DTYPES[name]).view(np.uint16))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_mma_multiplies_as_its_fragments_say(name: str) -> None:
    from attngen.spec.dtypes import DTYPES, from_storage, round_to_storage

    rng = np.random.default_rng(0)
    dtype = DTYPES[name]
    a, b = (round_to_storage(rng.standard_normal(s), dtype) for s in ((16, 16), (8, 16)))  # b by columns
    x = np.concatenate([a.view(np.uint16).ravel(), b.view(np.uint16).ravel()])
    y = np.zeros((16, 8), np.float32)
    body = """
    const int l = threadIdx.x;
    const unsigned *a = (const unsigned*)x, *b = (const unsigned*)(x + 256);
    unsigned af[4]; float d[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; ++i) af[i] = a[(l / 4 + 8 * (i % 2)) * 8 + l % 4 + 4 * (i / 2)];
    mma_16x8x16(d, d + 2, af, b[l / 4 * 8 + l % 4], b[l / 4 * 8 + l % 4 + 4]);
    for (int i = 0; i < 4; ++i) y[(l / 4 + 8 * (i / 2)) * 8 + l % 4 * 2 + i % 2] = d[i];
    """
    kernel = run(body, x, y, before=primitives(f"mma_{name}"))
    assert np.allclose(y, from_storage(a) @ from_storage(b).T, atol=1e-4)
    assert list(kernel.counters.instructions.values()) == [32]


@pytest.mark.parametrize("pieces", ["tf32", "bf16"])
def test_products_of_split_numbers(pieces: str) -> None:
    """16 terms, the two halves of which lie in one lane as ldmatrix and the fragments of S hand them out."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((16, 16), (8, 16)))  # b by columns
    x = np.concatenate([a.ravel(), b.ravel()])
    y = np.zeros((16, 8), np.float32)
    body = """
    const int l = threadIdx.x;
    const float *a = x, *b = x + 256;
    float xa[2][4], xb[4], d[4] = {};
    for (int i = 0; i < 8; ++i) xa[i / 4][i % 4] = a[(l / 4 + 8 * (i % 2)) * 16 + l % 4 + 4 * (i / 2)];
    for (int i = 0; i < 4; ++i) xb[i] = b[l / 4 * 16 + l % 4 + 4 * i];
    SplitA fa[1]; SplitB fb[1];
    split_a(fa[0], xa);
    split_b(fb[0], xb);
    mma_split(d, fa, fb);
    for (int i = 0; i < 4; ++i) y[(l / 4 + 8 * (i / 2)) * 8 + l % 4 * 2 + i % 2] = d[i];
    """
    names = ["mma_tf32", "split_tf32"] if pieces == "tf32" else ["pack_bf16", "mma_bf16", "split_bf16"]
    kernel = run(body, x, y, before="".join(primitives(n) for n in names))
    error = np.abs(y - a.astype(np.float64) @ b.T.astype(np.float64)).max()
    assert error < (2e-6 if pieces == "tf32" else 1e-4)
    assert pieces == "tf32" or error > 2e-6
    assert 32 * (6 if pieces == "tf32" else 3) in kernel.counters.instructions.values()


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_hands_out_rows(transposed: bool) -> None:
    x = np.arange(256, dtype=np.uint16)
    y = np.zeros((32, 4), np.uint32)
    suffix = "_trans" if transposed else ""
    body = f"""
    __shared__ __align__(16) unsigned short tile[32][8];
    for (int i = 0; i < 8; ++i) tile[threadIdx.x][i] = x[8 * threadIdx.x + i];
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4{suffix}(r, tile[threadIdx.x]);
    for (int m = 0; m < 4; ++m) y[4 * threadIdx.x + m] = r[m];
    """
    run(body, x, y, before=primitives(f"ldmatrix{suffix}"))
    matrices = x.reshape(4, 8, 8)
    for lane in range(32):
        for m in range(4):
            matrix = matrices[m].T if transposed else matrices[m]
            low, high = matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert y[lane, m] == int(high) << 16 | int(low)


COPY = """
    __shared__ __align__(16) float tile[128];
    cp_async_16(tile + 4 * threadIdx.x, x + 4 * (threadIdx.x % 16), threadIdx.x != 3);
    {commit}
    {wait}
    {barrier}
    y[threadIdx.x] = tile[4 * (31 - threadIdx.x)];
"""


def copy(commit="cp_async_commit();", wait="cp_async_wait<0>();", barrier="__syncthreads();") -> str:
    return COPY.format(commit=commit, wait=wait, barrier=barrier)


def test_asynchronous_copies_arrive_when_waited_for() -> None:
    x, y = arrays(64)
    run(copy(), x, y, before=primitives("cp_async"))
    expected = x[4 * (np.arange(31, -1, -1) % 16)]
    expected[28] = 0  # lane 3's source was not inside
    assert np.array_equal(y[:32], expected)


@pytest.mark.parametrize(
    ("missing", "kind"), [("commit", "copy in flight"), ("wait", "copy in flight"), ("barrier", "uninitialized shared read")]
)
def test_a_copy_that_is_not_waited_for_is_found(missing: str, kind: str) -> None:
    assert finding(copy(**{missing: ""}), before=primitives("cp_async")).kind == kind


@pytest.mark.parametrize("missing", ["commit", "wait"])
def test_a_copy_that_nobody_reads_is_waited_for_before_the_block_ends(missing: str) -> None:
    source = copy(**{missing: ""})
    found = finding(source[: source.index("y[threadIdx.x]")], before=primitives("cp_async"))
    assert found.kind == "copy in flight"
    assert "the block ends" in str(found)


def test_an_endless_loop_ends() -> None:
    from attngen.device.emulated import device

    before, device.ACCESS_BUDGET = device.ACCESS_BUDGET, 10_000
    try:
        error = finding("volatile float* p = y; p[threadIdx.x] = 1; while (p[threadIdx.x] > 0) p[threadIdx.x] = 1;")
    finally:
        device.ACCESS_BUDGET = before
    assert error.kind == "runaway loop"


def test_an_unknown_instruction_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match=r"does not know the instruction fancy\.new of line 3"):
        run('asm volatile("fancy.new %0;" :: "r"(1));', *arrays())


def test_text_that_does_not_compile_shows_its_line() -> None:
    with pytest.raises(CompilationError, match=r"test\.cu:4:"):
        run("int a = 1;\nthis is not C++;", *arrays())


def test_what_a_kernel_takes_goes_with_it() -> None:
    """A library has the stacks of its threads, which are megabytes; the last of two kernels of one text closes it."""
    y = np.zeros(256, np.float32)
    text = "    y[threadIdx.x] = 1.0f;"
    kernels = [run(text, np.zeros(1, np.float32), y, threads=256) for _ in range(2)]
    library = str(kernels[0].library)
    assert kernels[1].library == kernels[0].library
    for loaded in (True, False):
        kernels.pop()
        gc.collect()
        assert (library in Path("/proc/self/maps").read_text()) == loaded
    assert y.all()


# --- what stops a kernel from outside


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    "loop",
    [
        "while (1) {}",
        "while (1) __syncthreads();",
        "while (1) __syncwarp();",
        "float s = 0; while (1) { s += x[0]; if (s < 0) y[0] = s; }",
    ],
)
def test_endless_loops_end_whatever_is_in_them(loop: str, checked: bool) -> None:
    error = finding(loop, checked=checked)
    assert error.kind == "runaway loop"
    assert error.at.line in ((2, 3) if "(1) {}" in loop else (3,))  # GCC gives an empty loop the line before it


FAULTS = [
    ("int* p = 0; y[0] = *(volatile int*)p;", "out of bounds", False),
    ("*(volatile int*)64 = 1;", "out of bounds", True),
    ("volatile int zero = 0; y[0] = 7 / zero;", "division by zero", True),
    ("__builtin_trap();", "trap", True),
    (
        "float many[100000]; for (int i = 0; i < 100000; ++i) many[i] = x[i % 64]; y[0] = many[(int)x[3]];",
        "stack overflow",
        True,
    ),
]


@pytest.mark.parametrize(("body", "kind", "checked"), FAULTS)
def test_a_fault_of_the_cpu_is_a_finding_and_not_the_end_of_the_process(body: str, kind: str, checked: bool) -> None:
    error = finding(body, checked=checked)
    assert error.kind == kind
    assert error.at.line == (3 if kind != "stack overflow" else 2)  # the stack is full where the function begins


def test_an_endless_recursion_is_a_finding() -> None:
    deep = "__device__ __noinline__ int deep(int n) { volatile int a[50]; a[n % 50] = n; return deep(n + 1) + a[n % 7]; }"
    assert finding("y[0] = deep(int(x[1]));", before=deep).kind == "stack overflow"


@pytest.mark.parametrize("loop", ["while (1) {}", "while (1) __syncthreads();"])
def test_an_interrupt_ends_a_launch_at_once_and_says_where_it_was(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(*_: object) -> int:
        """Called when the launch begins."""
        Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return 2**34

    monkeypatch.setattr("attngen.device.emulated.device._budget", budget)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            run(f"y[0] = 1;\n{loop}", *arrays(), checked=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert str(caught.value).startswith("interrupted in kernel, block (0, 0, 0), thread ")
    monkeypatch.undo()
    x, y = arrays(32)
    run("y[threadIdx.x] = x[threadIdx.x];", x, y)  # the next launch is an ordinary one
    assert np.array_equal(x, y)


def test_a_load_of_a_16_bit_element_is_reported_at_its_own_line() -> None:
    text = "struct fp16 { unsigned short bits; };\n__device__ __forceinline__ float to_float(fp16 x) {\n    return x.bits;\n}"
    body = "const fp16* p = (const fp16*)x;\nint n = threadIdx.x;\nif (n > 99) return;\ny[n] = to_float(p[n * 1000]);"
    error = finding(body, before=text)
    assert error.kind == "out of bounds"
    assert "to_float(p[n * 1000])" in [text.strip() for _, text in ((error.at.line, error.at.text), *error.at.callers)][-1]


# --- what else a kernel may use


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


@pytest.mark.parametrize("shared", ["extern __shared__ float mine[];", "extern __shared__ alignas(16) char mine[ ];"])
def test_dynamic_shared_memory_has_any_type(shared: str) -> None:
    x, y = arrays(32)
    run(
        f"{shared}\n float* m = (float*)mine; m[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = m[threadIdx.x];",
        x,
        y,
        shared=128,
    )
    assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            "float a[8]; for (int i = 0; i <= 8; ++i) a[i] = x[i]; y[0] = a[(int)x[3]];",
            "out of bounds",
            "the index 8 of an array",
        ),
        (
            "float a[4][8] = {}; y[0] = a[(int)x[4]][(int)x[1]];",
            "out of bounds",
            "the index 4 of an array of the type 'float",
        ),
        ("y[0] = x[64];", "out of bounds", "byte 0 past the end of x"),
        ("if (threadIdx.x < 20) y[threadIdx.x] = __shfl_xor_sync(0xfffff, x[0], 16);", "invalid operand", "reads from a lane"),
        ("y[threadIdx.x] = __shfl_xor_sync(0xffff, x[0], 1);", "invalid operand", "whose mask does not name it"),
        (
            "static int n; n = threadIdx.x; __syncthreads(); y[0] = n;",
            "out of bounds",
            "a variable in global memory (__device__)",
        ),
        ("assert(x[1] > 1);", "trap", "the assertion x[1] > 1 fails"),
    ],
)
def test_mistakes_are_reported_at_their_line_in_words(body: str, kind: str, words: str) -> None:
    error = finding(body)
    assert error.kind == kind
    assert words in str(error)
    assert error.at.line == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('unsigned a; asm("mov.u32 %0, %%clock;" : "=r"(a));', "the special register %clock of line 3"),
        ('unsigned a; asm("mov.u32 %0, %7;" : "=r"(a));', "the operand %7, and the asm statement lists 1"),
        ('unsigned a; asm(R"(mov.u32 %0, 1;)" : "=r"(a));', "line 3 is not an ordinary string"),
    ],
)
def test_asm_statements_that_cannot_be_translated_are_refused(body: str, words: str) -> None:
    with pytest.raises(DeviceError, match=re.escape(words)):
        run(body, *arrays())
