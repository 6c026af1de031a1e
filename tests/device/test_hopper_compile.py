"""Every primitive of sm_90a compiles by itself, with nothing in the compiler's report that would make it slow."""

from __future__ import annotations

import re

import pytest

from attngen.device.cuda.compiler import compile_text
from attngen.emit.program import Program
from attngen.emit.wgmma import Wgmma
from tests import tiers
from tests.device.kernels import primitives, products
from tests.device.test_hopper_pipeline import pipeline

SMEM = "extern __shared__ __align__(1024) unsigned char smem[];"
BARRIER = "unsigned long long* const barrier = (unsigned long long*)smem;"
USES = {
    "mbarrier mbarrier_arrive mbarrier_wait mbarrier_init_fence": BARRIER
    + """mbarrier_init(barrier, 2); mbarrier_init_fence(); __syncthreads();
        mbarrier_expect_bytes(barrier, 16); mbarrier_arrive(barrier); mbarrier_wait(barrier, 0);""",
    "tma_load": BARRIER
    + """tma_load(smem + 1024, &map, barrier, 0, 1, 2, 3, L2_EVICT_FIRST);
        tma_load(smem + 1024, &map, barrier, 0, 1, 2, 3, L2_EVICT_LAST);""",
    "tma_load tma_store": BARRIER
    + """tma_store(&map, smem, 0, 1, 2, 3); tma_store_commit(); tma_store_wait_read<1>(); tma_store_wait<0>();
        tma_load(smem, &map, barrier, 0, 1, 2, 3, L2_EVICT_FIRST); tma_load(smem, &map, barrier, 0, 1, 2, 3, L2_EVICT_LAST);""",
    "tma_load tma_load_5d tma_store tma_store_5d": BARRIER
    + """tma_store_5d(&map, smem, 0, 1, 2, 3, 4); tma_store_commit(); tma_store_wait<0>();
        tma_load_5d(smem, &map, barrier, 0, 1, 2, 3, 4, L2_EVICT_FIRST);
        tma_load_5d(smem, &map, barrier, 0, 1, 2, 3, 4, L2_EVICT_LAST);""",
    "named_barrier": "named_barrier_arrive(1, 256); named_barrier_sync(2, 128);",
    "named_barrier_any": "y[threadIdx.x] = named_barrier_any(threadIdx.x / 128, 128, threadIdx.x == 3);",
    "setmaxnreg": "if (threadIdx.x < 128) give_registers<24>(); else take_registers<240>();",
    "stmatrix": "stmatrix_x4(smem + 16 * threadIdx.x, 1, 2, 3, 4);",
    "stmatrix_trans": "stmatrix_x4_trans(smem + 16 * threadIdx.x, 1, 2, 3, 4);",
    "global_add": "global_add(y + 4 * threadIdx.x, 1.0f, 2.0f, 3.0f, 4.0f);",
    "keep_order": "y[threadIdx.x] = 1.0f; keep_order(); y[threadIdx.x] = 2.0f;",
    "wgmma_unset": "float d[4]; wgmma_unset(d); for (int i = 0; i < 4; ++i) y[i] = d[i];",
    "proxy_fence": "async_proxy_fence();",
}


def report(text: str, parameters: str = "float* y", body: str = "", threads: int = 256) -> str:
    """The compiler's report; it has neither an advisory about wgmma or setmaxnreg nor a spill."""
    kernel = f'extern "C" __global__ void __launch_bounds__({threads}, 1) kernel({parameters}) {{ {SMEM}\n{body} }}\n'
    compiled = compile_text(Program("primitives", f"{text}\n{kernel}" if body else text, "sm_90a", (), ()))
    assert compiled.code
    assert not re.search(r"C75\d\d|warning", compiled.log), compiled.log
    for resources in compiled.resources():
        assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0, compiled.log
    return compiled.log


@pytest.mark.parametrize("names", USES)
def test_a_primitive_compiles(names: str) -> None:
    parameters = "const __grid_constant__ TensorMap map" if "tma_" in names else "float* y"
    report(primitives(*names.split()), parameters, USES[names])


PRODUCTS = [
    (n, t, mn) for n, t in ((8, "bf16"), (64, "fp16"), (80, "bf16"), (128, "bf16"), (256, "fp16")) for mn in (False, True)
]
PRODUCTS += [(128, "fp8_e4m3", False), (256, "fp8_e5m2", False)]


@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize(
    ("columns", "dtype", "b_transposed"), tiers.cases(PRODUCTS, quick=[one for one in PRODUCTS if one[:2] == (64, "fp16")])
)
def test_a_product_compiles(columns: int, dtype: str, b_transposed: bool, a_in_registers: bool) -> None:
    product = Wgmma("wgmma_test", columns, dtype, a_in_registers, b_transposed)
    a = "p[step]" if a_in_registers else "smem_descriptor(smem_operand(smem + 32 * step, 0))"
    fragment = (
        "unsigned p[4][4]; for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = __float_as_uint(y[i]);" if a_in_registers else ""
    )
    body = f"""
    float d[{columns // 2}];
    {fragment}
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        wgmma_test(d, {a}, smem_descriptor(smem_operand(smem + 8192, 8192)) + 2 * step, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_received(d);
#pragma unroll
    for (int i = 0; i < {columns // 2}; ++i) y[128 * i + threadIdx.x] = d[i];
    """
    report(primitives("wgmma") + products(product), body=body, threads=128)


def test_the_pipeline_compiles() -> None:
    report(pipeline().text)


def test_emitted_lines_are_short() -> None:
    text = products(Wgmma("wgmma_test", 256, "bf16", True, True)) + primitives(*dict.fromkeys(" ".join(USES).split()), "wgmma")
    assert max(map(len, text.splitlines())) <= 128
