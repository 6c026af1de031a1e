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


@pytest.mark.parametrize("seed", range(3))
def test_a_read_is_not_forgotten_for_an_update_of_the_next_interval(seed: int) -> None:
    body = """__shared__ float a[32]; const int t = threadIdx.x;
    a[t] = 1; __syncthreads();
    a[t] += 1; __syncthreads();
    if (t == 1) a[1] += 3;
    if (t == 0) y[0] = a[0] + a[1];"""
    assert finding(body, seed=seed).kind == "race"


@pytest.mark.parametrize("late", [0, 7, 31])
def test_no_reader_of_a_warp_is_forgotten(late: int) -> None:
    """All lanes read, and all but one meet before the next write."""
    body = f"""__shared__ float a[1]; const int t = threadIdx.x;
    if (t == 0) a[0] = 1; __syncthreads();
    y[t] = a[0];
    if (t != {late}) __syncwarp(~(1u << {late}));
    if (t == {(late + 1) % 32}) a[0] = 2;"""
    assert finding(body).kind == "race"


@pytest.mark.parametrize("late", [0, 3, 7])
def test_no_reader_of_a_block_is_forgotten(late: int) -> None:
    """Eight warps read, more than a cell of the shadow memory has room for, and all but one meet before the next write."""
    body = f"""__shared__ float a[1]; const int t = threadIdx.x, warp = t / 32;
    if (t == 0) a[0] = 1; __syncthreads();
    y[t] = a[0];
    if (warp != {late}) named_barrier_sync(1, 224);
    if (t == {(late + 1) % 8 * 32}) a[0] = 2;"""
    x, y = arrays(256)
    with pytest.raises(EmulationError) as caught:
        run(body, x, y, before=primitives("named_barrier"), threads=256)
    assert caught.value.kind == "race"
    assert caught.value.other is not None
    assert late * 32 in (caught.value.at.thread // 32 * 32, caught.value.other.thread // 32 * 32)


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
    """A library has tables of threads and memory, which are megabytes; the last of two kernels of one text closes it."""
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
