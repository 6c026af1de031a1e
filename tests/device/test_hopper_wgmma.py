"""wgmma on the emulated device: its numbers for each form of operand, and how each mistake with one is found."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.device.emulated import EmulationError
from attngen.emit.wgmma import Wgmma
from attngen.spec.dtypes import DTYPES, from_storage, round_to_storage
from tests import tiers
from tests.device.kernels import products, run_on_hopper

# A [64, 64] and B [N, 64] or [64, N] in rows of 128 bytes, slabs of 64 columns one after the other; D [64, N].
PRODUCT = """
    unsigned short *const a = (unsigned short*)smem, *const b = a + 4096;
    const int t = threadIdx.x;
    for (int i = t; i < 4096; i += 128) a[i ^ (i >> 3 & 0x38)] = x[i];
    for (int i = t; i < {b_elements}; i += 128) {{
        const int row = i / {b_width}, column = i % {b_width};
        const int at = (column / 64 * {b_rows} + row) * 64 + column % 64;
        b[at ^ (at >> 3 & 0x38)] = x[4096 + i];
    }}
    async_proxy_fence();
    __syncthreads();
    float d[{registers}];
    {a_fragment}
    const unsigned long long b_at = smem_descriptor(smem_operand(b, {b_leading}));
    const unsigned long long a_at = smem_descriptor(smem_operand(a, 0));
    wgmma_fence();
    for (int step = 0; step < 4; ++step) wgmma_test(d, {a_operand}, b_at + {b_step} * step, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_received(d);
    for (int i = 0; i < {registers}; ++i)
        y[(16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2)) * {n} + 8 * (i / 4) + t % 4 * 2 + i % 2] = d[i];
"""
A_FRAGMENT = """
    unsigned p[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (i % 2), column = 16 * step + t % 4 * 2 + 8 * (i / 2);
            const unsigned short* from = x + row * 64 + column;
            p[step][i] = from[0] | from[1] << 16;
        }
"""


def operands(n: int, dtype: str, transposed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x as the kernel takes it, A [64, 64], B [64, n]."""
    rng = np.random.default_rng(n)
    a, b = (round_to_storage(rng.standard_normal(s), DTYPES[dtype]) for s in ((64, 64), (64, n)))
    stored = b if transposed else np.ascontiguousarray(b.T)
    x = np.concatenate([a.view(np.uint16).ravel(), stored.view(np.uint16).ravel()])
    return x, from_storage(a), from_storage(b)


def product_body(n: int, transposed: bool, registers_a: bool) -> str:
    return PRODUCT.format(
        n=n,
        registers=n // 2,
        b_elements=64 * n,
        b_width=n if transposed else 64,
        b_rows=64 if transposed else n,
        b_leading=64 * 128 if transposed else 0,
        b_step=128 if transposed else 2,
        a_fragment=A_FRAGMENT if registers_a else "",
        a_operand="p[step]" if registers_a else "a_at + 2 * step",
    )


@pytest.mark.parametrize("checked", tiers.cases([True, False], quick=[True]))
@pytest.mark.parametrize("registers_a", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("n", "dtype"), tiers.cases([(8, "bf16"), (64, "fp16"), (128, "bf16"), (256, "fp16")], quick=[(64, "fp16")])
)
def test_a_product_is_numpys(n: int, dtype: str, transposed: bool, registers_a: bool, checked: bool) -> None:
    x, a, b = operands(n, dtype, transposed)
    y = np.zeros((64, n), np.float32)
    kernel = run_on_hopper(
        product_body(n, transposed, registers_a),
        {"x": x, "y": y},
        before=products(Wgmma("wgmma_test", n, dtype, registers_a, transposed)),
        threads=128,
        shared=8192 + max(64, n) * 128,
        checked=checked,
        seed=1,
    )
    assert np.allclose(y, a @ b, atol=1e-4, rtol=1e-5)
    assert 4 * 128 in kernel.counters.instructions.values()


BYTES = """
    unsigned char *const a = smem, *const b = smem + 8192;
    const int t = threadIdx.x;
    for (int i = t; i < 8192; i += 128) a[i ^ (i >> 3 & 0x70)] = x[i];
    for (int i = t; i < 128 * {n}; i += 128) b[i ^ (i >> 3 & 0x70)] = x[8192 + i];
    async_proxy_fence();
    __syncthreads();
    float d[{registers}];
    unsigned p[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i) {{
            const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (i % 2), column = 32 * step + t % 4 * 4 + 16 * (i / 2);
            p[step][i] = 0;
            for (int e = 0; e < 4; ++e) p[step][i] |= x[row * 128 + column + e] << 8 * e;
        }}
    const unsigned long long b_at = smem_descriptor(smem_operand(b, 0)), a_at = smem_descriptor(smem_operand(a, 0));
    wgmma_fence();
    for (int step = 0; step < 4; ++step) wgmma_test(d, {a}, b_at + 2 * step, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_received(d);
    for (int i = 0; i < {registers}; ++i)
        y[(16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2)) * {n} + 8 * (i / 4) + t % 4 * 2 + i % 2] = d[i];
"""


@pytest.mark.parametrize("registers_a", [False, True])
@pytest.mark.parametrize(("n", "dtype"), tiers.cases([(8, "fp8_e4m3"), (128, "fp8_e5m2")], quick=[(8, "fp8_e4m3")]))
def test_a_product_of_8_bits_is_numpys(n: int, dtype: str, registers_a: bool) -> None:
    """A [64, 128] and B [n, 128], both K-major: m64nNk32."""
    rng = np.random.default_rng(n)
    a, b = (round_to_storage(rng.standard_normal(s, dtype=np.float32), DTYPES[dtype]) for s in ((64, 128), (n, 128)))
    y = np.zeros((64, n), np.float32)
    run_on_hopper(
        BYTES.format(n=n, registers=n // 2, a="p[step]" if registers_a else "a_at + 2 * step"),
        {"x": np.concatenate([a.view(np.uint8).ravel(), b.view(np.uint8).ravel()]), "y": y},
        before=products(Wgmma("wgmma_test", n, dtype, registers_a)),
        threads=128,
        shared=8192 + 128 * n,
    )
    assert np.allclose(y, from_storage(a) @ from_storage(b).T, atol=1e-4, rtol=1e-5)


def attempt(correct: str, wrong: str, *, n: int = 64, seed: int = 0, threads: int = 128) -> EmulationError | np.ndarray:
    """The finding that the product with `wrong` for `correct` gives, or its result."""
    body = product_body(n, False, False)
    assert correct in body
    x, _, _ = operands(n, "bf16", False)
    y = np.zeros((64, n), np.float32)
    try:
        run_on_hopper(
            body.replace(correct, wrong),
            {"x": x, "y": y},
            before=products(Wgmma("wgmma_test", n, "bf16")),
            threads=threads,
            shared=16384,
            seed=seed,
        )
    except EmulationError as error:
        return error
    return y


PRODUCT_MISTAKES = [
    ("    async_proxy_fence();\n", "", "missing proxy fence"),
    ("async_proxy_fence();\n    __syncthreads();", "__syncthreads(); async_proxy_fence();", "missing proxy fence"),
    ("__syncthreads();", "", ("race", "uninitialized shared read")),
    ("    wgmma_fence();\n", "", "missing wgmma fence"),
    ("wgmma_wait<0>();", "", "copy in flight"),
    ("wgmma_wait<0>();", "wgmma_wait<1>();", "copy in flight"),
    ("wgmma_commit();", "", "copy in flight"),
    ("wgmma_commit();", "if (t < 64) wgmma_commit();", ("copy in flight", "deadlock")),
    ("wgmma_commit();", "d[3] *= 2; wgmma_commit();", "accumulator in use"),
    ("wgmma_wait<0>();", "__syncthreads(); a[t] = 0; wgmma_wait<0>();", "copy in flight"),
    ("wgmma_wait<0>();", "__syncthreads(); b[t] = 0; wgmma_wait<0>();", "copy in flight"),
    ("wgmma_wait<0>();", "b[t] = 0; wgmma_wait<0>();", ("race", "copy in flight")),
    ("wgmma_wait<0>();", "wgmma_wait<0>(); a[t] = 0;", ""),
    ("step > 0", "step > 0 && t < 32", "divergent warpgroup"),
    ("smem_descriptor(smem_operand(b, 0))", "(smem_descriptor(smem_operand(b, 0)) + (64ull << 32))", "out of bounds"),
    ("smem_descriptor(smem_operand(b, 0))", "(smem_descriptor(smem_operand(b, 0)) & ~(3ull << 62))", "invalid operand"),
    ("wgmma_fence();", "if (t >= 96) return; wgmma_fence();", "deadlock"),
]


@pytest.mark.parametrize("seed", tiers.cases([0, 3], quick=[0]))
@pytest.mark.parametrize(("correct", "wrong", "kind"), tiers.cases(PRODUCT_MISTAKES, quick=PRODUCT_MISTAKES[::3]))
def test_mistakes_with_a_product(correct: str, wrong: str, kind: str | tuple[str, ...], seed: int) -> None:
    found = attempt(correct, wrong, seed=seed)
    if not kind:
        assert isinstance(found, np.ndarray)
        return
    assert isinstance(found, EmulationError)
    assert found.kind in ((kind,) if isinstance(kind, str) else kind), found


def test_an_accumulator_is_not_there_before_the_wait() -> None:
    found = attempt("wgmma_wait<0>();", "const float early = d[0]; wgmma_wait<0>(); d[0] = early;")
    assert isinstance(found, np.ndarray)
    assert np.isnan(found).any()


def test_a_deadlock_names_who_has_not_committed() -> None:
    found = attempt("wgmma_commit();", "if (t >= 64) named_barrier_sync(1, 128); wgmma_commit();")
    assert "thread 64 waits for the named barrier 1, where 64 of 128 threads are" in str(found)
    assert "thread 0 waits for the other threads of its warpgroup to commit a group of wgmma" in str(found)
    assert "(wgmma_wait<0>();)" in str(found)


def test_two_groups_may_share_an_accumulator() -> None:
    split = "for (int step = 0; step < 4; ++step) wgmma_test(d, a_at + 2 * step, b_at + 2 * step, step > 0);"
    body = "for (int step = 0; step < 4; ++step) { wgmma_test(d, a_at + 2 * step, b_at + 2 * step, step > 0); wgmma_commit(); }"
    found = attempt(split, body + " wgmma_wait<2>(); wgmma_wait<1>();")
    assert isinstance(found, np.ndarray)
    _, a, b = operands(64, "bf16", False)
    assert np.allclose(found, a @ b, atol=1e-4, rtol=1e-5)
