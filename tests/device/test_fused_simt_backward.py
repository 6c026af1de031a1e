"""The fused_simt backward: tiles, masks solved for rows, barriers, and the lse that it reads."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text as compile_cubin
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from tests import tiers
from tests.device.test_mutations import SYNCHRONIZATION
from tests.harness import compiled, unnoticed_in_gradients, wrong_gradients

TURING = "sm_75"  # an architecture without tensor cores for these types
SIZES = [(64, 64), (16, 16), (40, 72), (72, 40), (128, 128), (256, 256), (8, 8)]
MASKS = {
    "causal": {"mask": "causal"},
    "bottom right": {"mask": "causal_bottom_right"},
    "window": {"mask": "causal and window(20)"},
    "tested tile by tile": {"mask": "q >= k and (k < 16 or q - k < 20)"},
    "documents": {"mask": "causal and ids[b, q] == ids[b, k]", "inputs": {"ids": ("int32", ("batch", "kv_len"))}},
    "keys and rows of other documents": {
        "mask": "of_q[b, q] == of_k[b, k]",
        "inputs": {"of_q": ("int32", ("batch", "q_len")), "of_k": ("int32", ("batch", "kv_len"))},
    },
    "by head": {"mask": "k <= q + 10 * h"},
    "dense": {"mask": "allowed[q, k]", "inputs": {"allowed": ("bool", ("q_len", "kv_len"))}},
}


@pytest.mark.parametrize(
    ("arch", "dtype"), tiers.cases([(TURING, "bf16"), (TURING, "fp32"), ("sm_80", "fp32")], quick=[(TURING, "bf16")])
)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(SIZES, quick=[(40, 72)]))
def test_every_tile(head_dim: int, head_dim_v: int, arch: str, dtype: str) -> None:
    spec = attngen.define(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True)
    kernel = compiled(spec, "fused", arch)
    for shape in (Shape(1, 4, 2, 70, 90), Shape(2, 2, 2, 1, 1)):
        assert not wrong_gradients(kernel, shape), kernel.gradients().plan


@pytest.mark.parametrize("name", tiers.cases(list(MASKS), quick=[]))
def test_every_kind_of_mask_from_both_sides(name: str) -> None:
    spec = attngen.define(dtype="fp32", head_dim=16, score="softcap(5.0)", **MASKS[name])
    kernel = compiled(spec, "fused", TURING, seed=3)
    for q_len, kv_len in ((200, 200),) if name == "documents" else ((200, 150), (60, 130)):
        assert not wrong_gradients(kernel, Shape(2, 4, 2, q_len, kv_len)), (q_len, kv_len)


@pytest.mark.long
@pytest.mark.parametrize("arch", tiers.cases(["sm_75", "sm_80"], quick=["sm_75"]))
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(SIZES, quick=[(64, 64)]))
def test_nothing_is_spilled(head_dim: int, head_dim_v: int, arch: str) -> None:
    spec = attngen.define(dtype="fp32", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal")
    for resources in compile_cubin(emit(spec, choose(spec, ARCHES[arch], "fused", direction="backward"))).resources():
        assert resources.spill_store_bytes == resources.stack_bytes == 0, resources


@pytest.mark.long
def test_large_scores_need_the_rest_of_lse() -> None:
    """Rows whose scores are all 1e30 have equal weights: the logarithm of their number is in lse_rest alone."""
    spec = attngen.define(dtype="fp32", head_dim=16, score="s + shift[q]", inputs={"shift": ("fp32", ("q_len",))})
    problem = sample(spec, Shape(1, 2, 1, 20, 40))
    problem.inputs["shift"][:] = np.where(np.arange(20) % 2, 1e30, -1e30)
    for arch in (TURING, "sm_80"):
        kernel = compiled(spec, "fused", arch)
        assert "lse_rest" in kernel.gradients().plan.saved
        assert not wrong_gradients(kernel, problem), arch
    bounded = attngen.define(dtype="bf16", head_dim=16, score="softcap(5.0)")
    assert "lse_rest" not in choose(bounded, ARCHES[TURING], direction="backward").saved


@pytest.mark.long
@pytest.mark.parametrize("mask", ["causal", "q >= k and (k < 16 or q - k < 20)"])
def test_every_barrier_is_needed(mask: str) -> None:
    """Each barrier is needed, also those of the kernels that add up captured gradients."""
    spec = attngen.define(
        dtype="fp32", head_dim=16, mask=mask, score="s * x[h]", inputs={"x": ("fp32", ("heads",))}
    )  # fmt: skip
    kernel = compiled(spec, "fused", TURING)
    assert unnoticed_in_gradients(kernel, SYNCHRONIZATION, Shape(1, 2, 1, 200, 200), ("q", "k", "v", "x")) == []
