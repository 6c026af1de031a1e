"""The emulated device and strided views: an access is inside if it is in an element of the tensor that it was meant for."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.device.emulated import EmulationError
from attngen.device.tensor_map import TensorMap
from tests.device.kernels import aligned, primitives, run, run_on_hopper

RNG = np.random.default_rng(0)


def rows(count: int = 4, columns: int = 8, gap: int = 8) -> np.ndarray:
    """[count, columns] of a wider array, with gaps between the rows."""
    whole = np.arange(count * (columns + gap), dtype=np.float32).reshape(count, columns + gap)
    return aligned(whole)[:, :columns]


def finding(body: str, x: np.ndarray, y: np.ndarray, **options: object) -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run(body, {"x": x, "y": y}, **options)  # type: ignore[arg-type]
    return caught.value


IN_GAPS = [
    ("y[0] = x[8];", "a read between the elements of a strided tensor (4 bytes at byte 32 of x, after element [0, 7])"),
    ("y[0] = x[16 * 2 + 15];", "4 bytes at byte 188 of x, after element [2, 7]"),
    ("y[0] = x[16 * 3 + 8];", "4 bytes at byte 0 past the end of x"),
    ("y[9] = 1;", "a write between the elements of a strided tensor (4 bytes at byte 36 of y, after element [0, 7])"),
    ("y[8] = 1;", "a write between the elements"),
    ("y[0] = ((float4*)(x + 8))->x;", "byte 32 of x, after element [0, 7]"),
    ("for (int i = 0; i < 8; ++i) y[i] = 0; atomicAdd(y + 10, 1.0f);", "a write between the elements"),
]


@pytest.mark.parametrize(("body", "words"), IN_GAPS)
def test_accesses_between_rows_are_found(body: str, words: str) -> None:
    error = finding(body, rows(), rows())
    assert error.kind == "out of bounds"
    assert words in str(error)


def test_an_access_that_reaches_over_the_end_of_a_row_is_found() -> None:
    """The first bytes of it are inside."""
    error = finding("float4 four = *(const float4*)(x + 4); y[0] = four.x;", rows(columns=6, gap=2), rows())
    assert "16 bytes at byte 24 of x, after element [0, 5]" in str(error)


def test_what_lies_in_elements_is_no_mistake() -> None:
    """Any strides: negative ones, of columns before rows, of 0, and elements that windows share."""
    body = "for (int r = threadIdx.x; r < 4; r += 32) for (int c = 0; c < 8; ++c) y[r * {0} + c * {1}] = x[r * {2} + c * {3}];"
    whole = np.arange(64, dtype=np.float32)
    windows = np.lib.stride_tricks.as_strided(whole, (4, 8), (12, 8))
    for x in (rows(), rows()[::-1], rows()[:, ::-1], rows(8, 4).T, np.broadcast_to(rows()[:1], (4, 8)), windows):
        for y in (rows(), rows()[::-1], rows(8, 4).T):
            y[...] = 0
            steps = [step // 4 for step in (*y.strides, *x.strides)]
            run(body.format(*steps), {"x": x, "y": y})
            np.testing.assert_array_equal(y, x)


def test_an_output_between_the_rows_of_an_input() -> None:
    """Each is written, or only read, as its own elements; what is between stays."""
    whole = np.arange(64, dtype=np.float32).reshape(4, 2, 8)
    before, x, y = whole.copy(), whole[:, 0], whole[:, 1]
    run("for (int i = threadIdx.x; i < 32; i += 32) y[i / 8 * 16 + i % 8] = -x[i / 8 * 16 + i % 8];", {"x": x, "y": y})
    np.testing.assert_array_equal(whole[:, 0], before[:, 0])
    np.testing.assert_array_equal(whole[:, 1, :8], -before[:, 0, :8] * (np.arange(32).reshape(4, 8) < 32))
    for body, words in (
        ("y[0] = x[8];", "a read between the elements of a strided tensor (4 bytes at byte 32 of x"),
        ("y[8] = 0;", "a write between the elements of a strided tensor (4 bytes at byte 32 of y"),
        ("((float*)x)[8] = 0;", "a write between the elements"),
        ("((float*)x)[0] = 0;", "a write to a tensor that is only read (4 bytes at byte 0 of x, in element [0, 0])"),
    ):
        assert words in str(finding(body, x, y))


@pytest.mark.parametrize("place", [64, 64 + 500, -1])
def test_an_access_to_the_neighbour_in_memory_is_outside(place: int) -> None:
    """The arrays lie one after another in one allocation: the address is that of another tensor."""
    whole = np.zeros(64 * 20, np.float32)
    arrays = {name: whole[64 * i : 64 * (i + 1)] for i, name in enumerate("zxyw")} | {"v": whole[64 * 4 :]}
    with pytest.raises(EmulationError) as caught:
        run(f"y[0] = x[{place}];", arrays)
    words = f"4 bytes at byte {4 * (place - 64)} past the end of x" if place > 0 else "4 bytes at byte 4 before x"
    assert words in str(caught.value)


def test_a_tensor_without_elements_is_not_accessed() -> None:
    error = finding("y[0] = x[0];", np.zeros((0, 8), np.float32), rows())
    assert (error.kind, "a read outside every tensor" in str(error)) == ("out of bounds", True)


def test_a_box_that_reads_the_gap_between_rows_is_found() -> None:
    """A tensor map with more columns than the view has: TMA brings zeros from outside its map alone."""
    body = """
        unsigned long long* const full = (unsigned long long*)(smem + 1024);
        if (threadIdx.x == 0) { mbarrier_init(full, 1); mbarrier_init_fence(); }
        __syncthreads();
        if (threadIdx.x == 0) { mbarrier_expect_bytes(full, 1024); tma_load(smem, &x_map, full, 0, 0, 0, 0, L2_EVICT_FIRST); }
        mbarrier_wait(full, 0);
        if (threadIdx.x < 8) y[threadIdx.x] = ((float*)smem)[threadIdx.x];
    """
    for columns, fits in ((8, True), (16, False)):
        x, y = rows(8), rows()
        maps = {"x_map": TensorMap("x", "fp32", (columns, 8, 1, 1), (64, 512, 512), (32, 8, 1, 1))}
        if fits:
            run_on_hopper(body, {"x": x, "y": y}, maps, shared=1032)
            np.testing.assert_array_equal(y[0], x[0])
        else:
            with pytest.raises(EmulationError, match="a read between the elements of a strided tensor"):
                run_on_hopper(body, {"x": x, "y": y}, maps, shared=1032)


def test_asynchronous_copies_of_nothing_read_nothing() -> None:
    """They bring zeros, wherever their address is."""
    body = """
        __shared__ float4 to[1];
        if (threadIdx.x == 0) {{
            cp_async_16(to, x + 8, {inside});
            cp_async_commit();
            cp_async_wait<0>();
            y[0] = to[0].x, y[1] = to[0].w;
        }}
    """
    options = {"before": primitives("cp_async")}
    x, y = rows(), rows() + 1
    run(body.format(inside="false"), {"x": x, "y": y}, **options)
    assert y[0, :2].tolist() == [0.0, 0.0]
    error = finding(body.format(inside="true"), x, y, **options)
    assert "a read between the elements of a strided tensor" in str(error)


def test_a_call_writes_its_output_between_the_rows_of_its_inputs() -> None:
    """As one array of Q, K, V and O has them; and gradients between gradients."""
    spec = attngen.define(dtype="fp32", head_dim=8, mask="causal", kernel="naive", lse=True)
    kernel = attngen.compile(spec, device="emulated")
    whole = RNG.standard_normal((1, 2, 5, 4, 8)).astype(np.float32)
    q, k, v, out = (whole[:, :, :, i] for i in range(4))
    expected, lse = kernel(*(np.ascontiguousarray(a) for a in (q, k, v)))
    kernel(q, k, v, out=out)
    np.testing.assert_array_equal(out, expected)
    found = kernel.backward(out, q, k, v, out=out, lse=lse)
    of_copies = kernel.backward(*(np.ascontiguousarray(a) for a in (out, q, k, v)), out=np.ascontiguousarray(out), lse=lse)
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, of_copies[name])
