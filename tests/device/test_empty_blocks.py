"""Blocks of rows or of keys without a tile: they read nothing, and their results are zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import attngen
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import of_lengths, of_sequences, stored, unpacked
from attngen.spec.attention import Storage
from tests import tiers
from tests.harness import call_stored, compiled, run, wrong_gradients
from tests.random_lengths import Call

# What is left of a union is classified tile by tile; the other range ends before the first key, or begins after the last
MASKS = (
    "(k > 900 or k < 5) and q + k <= 100",
    "(q >= k or k < 5) and q + k <= 100",
    "(k < 5 or k > 350) and k <= q - 500",
    "(k < 5 or k > 350) and k >= q + 500",
    "q + k <= 100",
    "k <= q - 500",
    "k >= q + 900",
    "(k < 5 or q > 3) and k <= q + kv_len - q_len and q < w",
)
KERNELS = [
    ("fused", "sm_80"), ("fused", "sm_75"), ("hopper", "sm_90a"), ("wgmma", "sm_90a"), ("decode", "sm_90a"),
    ("decode", "sm_80"), ("tiled", "sm_80"), ("naive", "sm_80"),
]  # fmt: skip
SHAPES = (Shape(1, 1, 1, 600, 400), Shape(1, 2, 1, 330, 70))


def spec_of(mask: str, head_dim: int = 64) -> Any:
    return attngen.define(dtype="fp16", head_dim=head_dim, mask=mask, params={"w": "int"} if "w" in mask.split() else {})


def params_of(mask: str, value: int = 300) -> dict[str, Any]:
    return {"w": value} if "w" in mask.split() else {}


@pytest.mark.parametrize("mask", tiers.cases(MASKS, quick=MASKS[:3]))
@pytest.mark.parametrize(("schedule", "arch"), tiers.cases(KERNELS, quick=KERNELS[:1], one_of=2))
def test_forward(schedule: str, arch: str, mask: str) -> None:
    spec = spec_of(mask)
    for shape in SHAPES:
        for value in (300, -(2**30), 2**30) if "w" in mask.split() else (0,):
            assert run(spec, schedule, shape, arch=arch, **params_of(mask, value)).passed, (shape, value)


@pytest.mark.parametrize("mask", tiers.cases(MASKS, one_of=3))
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k[0] not in ("wgmma", "decode")], ids="@".join)
def test_backward(kernel: tuple[str, str], mask: str) -> None:
    """Of heads of 16 elements on the schedules that the emulated device runs slowly."""
    slow = kernel[0] in ("naive", "tiled") or kernel[1] == "sm_75"
    attention = compiled(spec_of(mask, 16 if slow else 64), kernel[0], kernel[1])
    for shape in SHAPES:
        assert wrong_gradients(attention, shape, **params_of(mask)) == [], shape


@pytest.mark.parametrize("storage", tiers.cases(["packed", "padded", "paged", "packed_paged"], quick=["packed"]))
@pytest.mark.parametrize("mask", tiers.cases(MASKS[:4], quick=MASKS[:1]))
def test_sequences_beside_others(mask: str, storage: Storage) -> None:
    """What lies before the keys of a sequence are those of another: a read there is none outside of K."""
    spec = replace(spec_of(mask), lse=True)
    spec = replace(spec, kernel=replace(spec.kernel, storage=storage))
    problem = sample(spec, Shape(4, 1, 1, 600, 400))
    call = Call(Shape(4, 1, 1, 600, 400), (600, 0, 470, 600) if spec.kernel.is_packed else (600,) * 4, (400, 390, 0, 64), {})
    found = call_stored(compiled(spec, "fused"), stored(spec, problem, call.rows, call.keys))
    for b, (output, lse) in enumerate(of_sequences(spec, call.rows, *found)):
        whole = of_lengths(spec, problem, *call.lengths[b])
        alone = Sample(*(array[b : b + 1] for array in (whole.q, whole.k, whole.v)), {})
        assert compare(output, lse, truth(spec, alone)).passed, call.lengths[b]


def test_elements_of_rows_after_the_last_work_tile() -> None:
    """A consumer of hopper goes on to block 0 of the first sequence, whose result is discarded: that may have no rows."""
    inputs = {"of_row": ("int32", ("batch", "q_len")), "of_key": ("int32", ("batch", "kv_len"))}
    mask = "of_row[b, q] == of_key[b, k]"
    spec = attngen.define(dtype="bf16", head_dim=192, mask=mask, inputs=inputs, storage="packed")
    kernel = compiled(spec, "hopper")
    assert kernel.plan.own.beside_last == "next work tile"
    assert kernel.plan.staged.rows
    problem = sample(spec, Shape(3, 1, 1, 100, 70))
    for rows, keys in (((0, 100, 3), (70, 70, 70)), ((0, 0, 3), (0, 0, 70)), ((100, 0, 3), (0, 70, 0))):
        output, _ = call_stored(kernel, stored(spec, problem, rows, keys))
        found = iter(unpacked(output, rows, 0))
        for b, (n, m) in enumerate(zip(rows, keys, strict=True)):
            whole = of_lengths(spec, problem, n, m)
            alone = Sample(
                *(a[b : b + 1] for a in (whole.q, whole.k, whole.v)), {i: a[b : b + 1] for i, a in whole.inputs.items()}
            )
            assert compare(next(found).swapaxes(0, 1)[None], None, truth(spec, alone)).passed, (n, m)
