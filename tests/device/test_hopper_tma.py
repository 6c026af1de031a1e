"""TMA on the emulated device: what a copy moves, and how each mistake with one is found."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.device.emulated import EmulationError
from attngen.device.tensor_map import TensorMap, TensorMapError
from tests import tiers
from tests.device.kernels import aligned, primitives, run_on_hopper, swizzled

ROWS, SLABS, HEADS = 20, 2, 3
HEAD_BYTES = ROWS * SLABS * 128


def tensor() -> np.ndarray:
    """[head, row, 128 elements], each element its own number."""
    return aligned(np.arange(1, HEADS * ROWS * SLABS * 64 + 1, dtype=np.uint16).reshape(HEADS, ROWS, SLABS * 64))


def tensor_map(box=(64, 16, 2, 1), *, name="x", swizzle=True, rows=ROWS) -> TensorMap:
    """The tensor as (64, row, slab, head)."""
    return TensorMap(name, "bf16", (64, rows, SLABS, HEADS), (128 * SLABS, 128, HEAD_BYTES), box, swizzle)


def box_of(x: np.ndarray, row: int, slab: int, head: int, shape=(64, 16, 2, 1)) -> np.ndarray:
    """What a copy of the box at (0, row, slab, head) brings, zeros outside; [slab, row, element]."""
    found = np.zeros(shape[::-1], x.dtype)
    for h, s, r in np.ndindex(found.shape[:3]):
        if 0 <= head + h < HEADS and 0 <= slab + s < SLABS and 0 <= row + r < ROWS:
            found[h, s, r] = x[head + h, row + r, 64 * (slab + s) : 64 * (slab + s + 1)]
    return found.reshape(-1, 64)


LOAD = """
    unsigned long long* const full = (unsigned long long*)(smem + 4096);
    if (threadIdx.x == 0) {{
        mbarrier_init(full, 1);
        mbarrier_init_fence();
    }}
    __syncthreads();
    if (threadIdx.x == 0) {{
        mbarrier_expect_bytes(full, 4096);
        tma_load(smem, &x_map, full, 0, {row}, {slab}, {head}, L2_EVICT_FIRST);
    }}
    {wait}
    for (int i = threadIdx.x; i < 2048; i += 32) y[i] = ((unsigned short*)smem)[i];
"""
WAIT = "mbarrier_wait(full, 0);"


def load(row=0, slab=0, head=0, wait=WAIT, seed=0, body=LOAD, **options):
    x, y = tensor(), np.zeros(2048, np.uint16)
    text = body.format(row=row, slab=slab, head=head, wait=wait)
    kernel = run_on_hopper(text, {"x": x, "y": y}, {"x_map": tensor_map(**options)}, shared=4104, seed=seed)
    return kernel, x, y.reshape(-1, 64)


PLACES = [(0, 0, 0), (4, 0, 2), (16, 0, 1), (-5, 0, 1), (0, 1, 0), (0, 0, 3), (40, 0, 0)]


@pytest.mark.parametrize("place", tiers.cases([(place,) for place in PLACES], quick=lambda place: place in PLACES[2:4]))
def test_a_load_brings_a_swizzled_box_with_zeros_outside(place: tuple[int, int, int]) -> None:
    kernel, x, y = load(*place)
    expected = box_of(x, *place)
    assert np.array_equal(y, swizzled(expected))
    assert kernel.counters.bytes_read["x"] == 2 * np.count_nonzero(expected)


def test_a_load_without_swizzle() -> None:
    _, x, y = load(4, 0, 1, swizzle=False)
    assert np.array_equal(y, box_of(x, 4, 0, 1))


def test_five_dimensions_there_and_back() -> None:
    x, y = (aligned(a) for a in (tensor(), np.zeros((HEADS, ROWS, SLABS * 64), np.uint16)))
    sizes, strides = (64, ROWS, SLABS, HEADS, 1), (128 * SLABS, 128, HEAD_BYTES, HEADS * HEAD_BYTES)
    maps = {f"{n}_map": TensorMap(n, "bf16", sizes, strides, (64, 8, 2, 1, 1)) for n in "xy"}
    body = """
    unsigned long long* const full = (unsigned long long*)(smem + 2048);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
        mbarrier_expect_bytes(full, 2048);
        tma_load_5d(smem, &x_map, full, 0, 16, 0, 2, 0, L2_EVICT_FIRST);
        mbarrier_wait(full, 0);
        tma_store_5d(&y_map, smem, 0, 8, 0, 1, 0);
        tma_store_commit();
        tma_store_wait<0>();
    }
    """
    run_on_hopper(body, {"x": x, "y": y}, maps, before=primitives("tma_load_5d", "tma_store_5d"), shared=2056)
    expected = np.zeros_like(y)
    expected[1, 8:12] = x[2, 16:]
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("seed", tiers.cases(range(4), quick=[0]))
def test_a_load_that_is_not_waited_for_is_found(seed: int) -> None:
    with pytest.raises(EmulationError, match="a TMA load writes this memory") as caught:
        load(wait="__syncthreads();", seed=seed)
    assert caught.value.kind == "copy in flight"
    assert "tma_load(smem, &x_map" not in caught.value.at.text


def test_one_thread_waits_for_itself_only() -> None:
    with pytest.raises(EmulationError) as caught:
        load(wait="if (threadIdx.x == 0) mbarrier_wait(full, 0);")
    assert caught.value.kind == "copy in flight"
    load(wait="if (threadIdx.x == 0) mbarrier_wait(full, 0); __syncwarp();")


LOAD_MISTAKES = [
    ("mbarrier_expect_bytes(full, 4096)", "mbarrier_expect_bytes(full, 4112)", "deadlock"),
    ("mbarrier_expect_bytes(full, 4096)", "mbarrier_expect_bytes(full, 4080)", "barrier misuse"),
    ("mbarrier_expect_bytes(full, 4096)", "mbarrier_arrive(full)", ("barrier misuse", "copy in flight")),
    ("mbarrier_expect_bytes(full, 4096)", "", "deadlock"),
    ("mbarrier_init_fence();", "", "missing proxy fence"),
    ("__syncthreads();", "", ("race", "barrier misuse")),
    ("mbarrier_init(full, 1)", "mbarrier_init(full, 2)", "deadlock"),
    ("mbarrier_init(full, 1)", "mbarrier_init(full + 1, 1)", "out of bounds"),
    ("mbarrier_init(full, 1)", "", "barrier misuse"),
    ("mbarrier_init(full, 1);", "mbarrier_init(full, 1); mbarrier_init(full, 1);", "barrier misuse"),
    ("{wait}", "{wait} if (threadIdx.x == 0) *full = 0;", "barrier misuse"),
    ("tma_load(smem,", "tma_load(smem + 1024,", "out of bounds"),
    ("tma_load(smem,", "tma_load(smem + 512,", "misaligned access"),
    ("tma_load(smem,", "tma_load(smem + 2048 - 16,", "misaligned access"),
    ("tma_load(smem,", "((float*)smem)[0] = 0; tma_load(smem,", "missing proxy fence"),
]


@pytest.mark.parametrize("seed", tiers.cases(range(3), quick=[0]))
@pytest.mark.parametrize(("correct", "wrong", "kind"), tiers.cases(LOAD_MISTAKES, quick=LOAD_MISTAKES[::3]))
def test_mistakes_with_a_load(correct: str, wrong: str, kind: str | tuple[str, ...], seed: int) -> None:
    assert correct in LOAD
    with pytest.raises(EmulationError) as caught:
        load(seed=seed, body=LOAD.replace(correct, wrong))
    assert caught.value.kind in ((kind,) if isinstance(kind, str) else kind), caught.value


def test_a_load_that_nobody_waits_for_is_found_at_the_end() -> None:
    body = LOAD[: LOAD.index("    {wait}")]
    with pytest.raises(EmulationError, match="nobody has waited for a TMA load") as caught:
        load(body=body)
    assert caught.value.kind == "copy in flight"


def test_a_map_must_stay_inside_its_tensor() -> None:
    with pytest.raises(EmulationError, match="a TMA copy reaches outside every tensor") as caught:
        load(12, 0, 2, rows=ROWS + 8)
    assert caught.value.kind == "out of bounds"


STORE = """
    unsigned short* const box = (unsigned short*)smem;
    for (int i = threadIdx.x; i < 1024; i += 32) box[i ^ (i >> 3 & 0x38)] = x[i];
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x == 0) {
        tma_store(&y_map, smem, 0, 12, 1, 2);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
    __syncwarp();
    box[threadIdx.x] = 0;
"""


def store(body: str = STORE, seed: int = 0):
    x, y = tensor(), np.zeros((HEADS, ROWS, SLABS * 64), np.uint16)
    y = aligned(y)
    kernel = run_on_hopper(body, {"x": x, "y": y}, {"y_map": tensor_map((64, 16, 1, 1), name="y")}, shared=2048, seed=seed)
    return kernel, x, y


@pytest.mark.parametrize("seed", [0, 1])
def test_a_store_writes_what_lies_inside(seed: int) -> None:
    kernel, x, y = store(seed=seed)
    expected = np.zeros_like(y)
    expected[2, 12:, 64:] = x.ravel()[:1024].reshape(16, 64)[:8]
    assert np.array_equal(y, expected)
    assert kernel.counters.bytes_written == {"y": 8 * 128}


STORE_MISTAKES = [
    ("async_proxy_fence();\n", "", "missing proxy fence"),
    ("async_proxy_fence();\n    __syncwarp();", "__syncwarp(); async_proxy_fence();", "missing proxy fence"),
    ("    async_proxy_fence();\n    __syncwarp();", "async_proxy_fence();", ("race", "uninitialized shared read")),
    ("tma_store_wait_read<0>();", "", "copy in flight"),
    ("tma_store_wait_read<0>();", "tma_store_wait_read<1>();", "copy in flight"),
    ("tma_store_commit();", "", "copy in flight"),
    ("    }\n    __syncwarp();", "    }", ("copy in flight", "race")),
    ("tma_store(&y_map, smem,", "tma_store(&y_map, smem + 2048,", "out of bounds"),
    ("smem, 0, 12, 1, 2)", "smem, 0, -16, 1, 2)", "out of bounds"),  # a load may
]


@pytest.mark.parametrize("seed", tiers.cases(range(3), quick=[0]))
@pytest.mark.parametrize(("correct", "wrong", "kind"), tiers.cases(STORE_MISTAKES, quick=STORE_MISTAKES[::3]))
def test_mistakes_with_a_store(correct: str, wrong: str, kind: str | tuple[str, ...], seed: int) -> None:
    assert correct in STORE
    with pytest.raises(EmulationError) as caught:
        store(STORE.replace(correct, wrong), seed)
    assert caught.value.kind in ((kind,) if isinstance(kind, str) else kind), caught.value


def test_stmatrix_is_ldmatrix_the_other_way_round() -> None:
    x, y = np.arange(128, dtype=np.uint32) * 65537 + 1, np.zeros(256, np.uint16)
    body = """
    stmatrix_x4(smem + 16 * threadIdx.x, x[threadIdx.x], x[32 + threadIdx.x], x[64 + threadIdx.x], x[96 + threadIdx.x]);
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) y[i] = ((unsigned short*)smem)[i];
    """
    run_on_hopper(body, {"x": x, "y": y}, shared=512)
    matrices = y.reshape(4, 8, 8)
    for lane in range(32):
        for m in range(4):
            low, high = matrices[m, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert x[32 * m + lane] == int(high) << 16 | int(low)


def test_stmatrix_transposes() -> None:
    x, y = np.arange(128, dtype=np.uint32) * 65537 + 1, np.zeros(256, np.uint16)
    body = """
    stmatrix_x4_trans(smem + 16 * threadIdx.x, x[threadIdx.x], x[32 + threadIdx.x], x[64 + threadIdx.x], x[96 + threadIdx.x]);
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) y[i] = ((unsigned short*)smem)[i];
    """
    run_on_hopper(body, {"x": x, "y": y}, shared=512)
    matrices = y.reshape(4, 8, 8)
    for lane in range(32):
        for m in range(4):
            low, high = matrices[m, lane % 4 * 2 : lane % 4 * 2 + 2, lane // 4]
            assert x[32 * m + lane] == int(high) << 16 | int(low)


def test_a_tensor_that_tma_cannot_take_is_refused_with_its_name() -> None:
    with pytest.raises(TensorMapError, match=r"`k` has a stride of 130 bytes in dimension 1.*Pass a contiguous copy"):
        TensorMap("k", "bf16", (64, 10), (130,), (64, 8))
    with pytest.raises(TensorMapError, match="`k` starts at an address that is not a multiple of 16 bytes"):
        TensorMap("k", "bf16", (64, 10), (128,), (64, 8)).check_address(24)
    with pytest.raises(TensorMapError, match="`k` has 0 elements in dimension 1"):
        TensorMap("k", "bf16", (64, 0), (128,), (64, 8))
