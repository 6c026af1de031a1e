"""Tracing: accesses by statement and warp, banks, sectors, idle lanes and steps, of kernels small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.device.emulated import EmulationError
from attngen.device.emulated.tracing import AccessSite, Watch
from attngen.device.emulated.translate import primitive_lines
from tests.device.kernels import primitives
from tests.device.test_emulator import arrays, run

ALL = Watch(threads=tuple(range(64)))


def traced(body: str, x=None, y=None, **options):
    x = np.arange(4096, dtype=np.float32) if x is None else x
    y = np.zeros(4096, np.float32) if y is None else y
    return run(body, x, y, watch=options.pop("watch", ALL), **options).traced


FILLED = """__shared__ __align__(16) float tile[1152];
    for (int i = threadIdx.x; i < 1152; i += 32) tile[i] = x[i];
    __syncthreads();
    const int t = threadIdx.x;
"""


def only(sites: tuple[AccessSite, ...], what: str, buffer: str, writes: bool) -> AccessSite:
    (found,) = (s for s in sites if (s.what, s.buffer and s.buffer.label, s.writes) == (what, buffer, writes))
    return found


@pytest.mark.parametrize(
    ("index", "wavefronts"),
    [
        ("t", 1),  # neighbours
        ("2 * t", 2),
        ("8 * t", 8),
        ("32 * t", 32),  # a column of a tile of 32 x 32
        ("33 * t", 1),  # the same, rows padded by one
        ("0", 1),  # one word for all lanes
        ("t / 2", 1),
        ("t % 8 * 32", 8),  # eight words of one bank, four lanes each
        ("t ^ 5", 1),  # any order
    ],
)
def test_banks_of_four_bytes(index: str, wavefronts: int) -> None:
    site = only(traced(f"{FILLED}    y[t] = tile[{index}];").sites, "load", "tile", False)
    assert (site.executions, site.lanes, site.bytes, site.width) == (1, 32, 128, 4)
    assert (site.phases, site.wavefronts, site.degree, site.conflicts) == (1, wavefronts, wavefronts, wavefronts - 1)
    assert (site.place.line, site.idle_lanes) == (7, 0)


@pytest.mark.parametrize(
    ("width", "stride", "phases", "wavefronts"),
    [
        (2, 2, 2, 2),  # floats of a lane; floats between lanes
        (2, 4, 2, 4),
        (2, 34, 2, 2),
        (4, 4, 4, 4),
        (4, 8, 4, 8),
        (4, 32, 4, 32),  # eight rows of 128 bytes
        (4, 36, 4, 4),  # eight rows padded by 16 bytes
    ],
)
def test_banks_of_wide_accesses(width: int, stride: int, phases: int, wavefronts: int) -> None:
    """8 bytes a lane go in halves of a warp, 16 bytes in quarters."""
    before = f"struct alignas({4 * width}) Wide {{ float at[{width}]; }};"
    body = f"{FILLED}    *(Wide*)&y[{width} * t] = *(const Wide*)&tile[{stride} * t];"
    site = only(traced(body, before=before).sites, "load", "tile", False)
    assert (site.executions, site.width, site.phases, site.wavefronts) == (1, 4 * width, phases, wavefronts)


@pytest.mark.parametrize(("row_bytes", "conflicts"), [(128, 28), (144, 0)])
def test_banks_of_ldmatrix(row_bytes: int, conflicts: int) -> None:
    """Eight rows a matrix: of 128 bytes they lie in the same banks, padded by 16 they do not."""
    before = primitives("ldmatrix")
    body = f"""__shared__ __align__(16) unsigned char tile[32 * {row_bytes}];
    for (int i = threadIdx.x; i < 8 * {row_bytes}; i += 32) ((float*)tile)[i] = x[i];
    __syncthreads();
    unsigned r[4];
    ldmatrix_x4(r, tile + threadIdx.x * {row_bytes});
    y[threadIdx.x] = r[0] + r[1] + r[2] + r[3];"""
    sites = traced(body, before=before).sites
    site = only(sites, "ldmatrix", "tile", False)
    assert (site.executions, site.lanes, site.phases, site.conflicts) == (1, 32, 4, conflicts)
    assert "ldmatrix_x4(r, tile" in site.place.text  # where the primitive is called, not the asm


@pytest.mark.parametrize(("index", "sectors"), [("t", 4), ("2 * t", 8), ("8 * t", 32), ("0", 1), ("t + 1", 5)])
def test_sectors_of_global_memory(index: str, sectors: int) -> None:
    memory = np.zeros(1024 + 8, np.float32)
    x = memory[-(memory.ctypes.data // 4) % 8 :][:1024]  # begins with a sector
    site = only(traced(f"const int t = threadIdx.x; y[t] = x[{index}];", x).sites, "load", "x", False)
    assert (site.executions, site.sectors, site.bytes) == (1, sectors, 128)


def test_idle_lanes() -> None:
    """Of 8 + 4 + 2 + 1 lanes a warp's executions leave out the others; a warp without any does not execute."""
    body = "for (int n = 8; n > 0; n /= 2) if (threadIdx.x < n) y[threadIdx.x] = n;"
    site = only(traced(body, threads=64).sites, "store", "y", True)
    assert (site.executions, site.lanes, site.idle_lanes) == (4, 15, 4 * 32 - 15)
    site = only(traced("if (threadIdx.x % 4 == 0) y[threadIdx.x] = 1;", threads=64).sites, "store", "y", True)
    assert (site.executions, site.lanes, site.idle_lanes) == (2, 16, 48)
    site = only(traced("y[threadIdx.x] = 1;", threads=40).sites, "store", "y", True)  # the second warp has eight
    assert (site.executions, site.lanes, site.idle_lanes) == (2, 40, 24)


def test_lanes_are_matched_again_after_they_have_met() -> None:
    """Lane 0 stores once more than the others before the barrier: after it, all are together."""
    body = """for (int n = 0; n < 2; ++n) {
        y[threadIdx.x] = n;
        if (threadIdx.x == 0) for (int m = 0; m < 3; ++m) y[m + 100] = m;
        __syncwarp();
    }"""
    sites = traced(body).sites
    stores = {s.place.line: s for s in sites if s.what == "store"}
    assert [(s.executions, s.lanes) for s in stores.values()] == [(2, 64), (6, 6)]
    (barrier,) = (s for s in sites if s.what == "warp barrier")
    assert (barrier.executions, barrier.buffer) == (2, None)


@pytest.mark.parametrize("seed", [0, 3])
def test_counts_do_not_depend_on_the_order_of_threads(seed: int) -> None:
    body = f"{FILLED}    y[t] = tile[2 * t];"
    found = {(s.what, s.buffer and s.buffer.label): s for s in traced(body, seed=seed).sites}
    assert found["store", "tile"].executions == 36
    assert found["store", "tile"].degree == 1
    assert found["load", "tile"].degree == 2
    assert found["block barrier", None].executions == 1


def test_a_function_is_a_site_for_each_call() -> None:
    before = "__device__ __noinline__ void put(float* y, int i) { y[i] = i; }"
    sites = traced("put(y, threadIdx.x);\nif (threadIdx.x < 8) put(y + 64, threadIdx.x);", before=before).sites
    assert [(s.place.line, [c.line for c in s.callers], s.lanes) for s in sites] == [(1, [3], 32), (1, [4], 8)]


def test_steps_of_threads_are_in_step() -> None:
    body = """__shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[31 - threadIdx.x];"""
    steps = traced(body, watch=Watch(threads=(0, 2))).steps
    found = [(s.thread, s.phase, s.site.what, s.site.buffer and s.site.buffer.label, s.offset) for s in steps]
    assert found == [
        (0, 0, "load", "x", 0),
        (2, 0, "load", "x", 8),
        (0, 0, "store", "tile", 0),
        (2, 0, "store", "tile", 8),
        (0, 0, "block barrier", None, 0),
        (2, 0, "block barrier", None, 0),
        (0, 1, "load", "tile", 124),
        (2, 1, "load", "tile", 116),
        (0, 1, "store", "y", 0),
        (2, 1, "store", "y", 8),
    ]
    values = {(s.thread, s.site.what, s.phase): np.frombuffer(s.value, np.float32)[0] for s in steps if s.value is not None}
    assert values[2, "store", 0] == 2  # what is written
    assert values[2, "load", 1] == 29  # what is read


def test_steps_are_of_one_block_and_at_most_so_many() -> None:
    body = "for (int i = 0; i < 10; ++i) y[32 * blockIdx.x + threadIdx.x] = x[i];"
    steps = traced(body, blocks=3, watch=Watch(block=1, threads=(5,), limit=7)).steps
    assert len(steps) == 7
    assert {(s.block, s.thread) for s in steps} == {(1, 5)}
    assert {s.offset for s in steps if s.site.buffer is not None and s.site.buffer.name == "y"} == {4 * 37}


def test_nothing_is_traced_unless_asked() -> None:
    x, y = arrays()
    assert run("y[threadIdx.x] = x[threadIdx.x];", x, y).traced is None
    assert traced("y[threadIdx.x] = x[threadIdx.x];", watch=Watch(threads=(), limit=0)).steps == ()


def test_a_finding_names_the_buffer() -> None:
    with pytest.raises(EmulationError) as caught:
        traced(FILLED.replace("__syncthreads();", "") + "y[t] = tile[max(t - 1, 0)];")
    assert caught.value.kind == "race"
    assert caught.value.where is not None
    assert caught.value.where.buffer == "tile"
    with pytest.raises(EmulationError, match=r"4 bytes at byte 0 of x") as caught:
        traced("((float*)x)[0] = 1;")
    assert caught.value.kind == "write to a read-only tensor"


def test_lines_written_in_ptx() -> None:
    text = """int before;
__device__ int one(int a) {
    asm("mov.u32 %0, 1;" : "=r"(a));
    return a;
}
__device__ int two() { asm volatile("nop;"); }
__device__ int three(int a) {
    return one(a);
}
"""
    assert primitive_lines(text) == {2, 3, 4, 5, 6}
