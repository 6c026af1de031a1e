"""The hopper rung emulated: every shipped spec in 16 bits, head sizes, empty rows, thread orders; and what its SASS shows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.device.emulated import EmulatedDevice
from attngen.plan import ARCHES, PlanRefusal, choose, plans_for
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import Schedule
from attngen.spec.dtypes import from_storage
from tests.device.test_specs_emulated import small
from tests.problems import SPECS, call, emitted

LENGTHS = ((1, 1), (7, 7), (130, 290), (300, 300))


def hopper(spec, seed: int = 0):
    return attngen.compile(spec, kernel="hopper", device=EmulatedDevice(arch="sm_90a", seed=seed))


def check(spec, shape: Shape, seed: int = 0, **params) -> None:
    problem = sample(spec, shape, seed)
    found = compare(*call(hopper(spec, seed), problem, **params), truth(spec, problem, params))
    assert found.passed, (spec, shape, found)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_against_the_oracle(name: str, dtype: str) -> None:
    spec = small(name, dtype)
    params = {"size": 50} if name == "mistral_window" else {}
    for seed, (q_len, kv_len) in enumerate(LENGTHS):
        check(spec, Shape(16 if q_len < 10 else 1, 2, 1, q_len, kv_len), seed % 2 * 7, **params)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (24, 40), (64, 64), (72, 72), (96, 96), (160, 160), (192, 128), (40, 200), (256, 256)]
)
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True)
    check(spec, Shape(1, 2, 1, 70, 150))


def test_rows_with_no_key_give_zero_and_minus_infinity() -> None:
    spec = attngen.define(dtype="fp16", head_dim=16, mask="k < q - 40", lse=True)
    problem = sample(spec, Shape(1, 1, 1, 300, 300))
    output, lse = call(hopper(spec), problem)
    assert not from_storage(output)[:, :, :41].any()
    assert np.isneginf(lse[:, :, :41]).all()
    assert compare(output, lse, truth(spec, problem)).passed


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_empty_problems(sizes) -> None:
    batch, heads, q_len, kv_len = sizes
    spec = attngen.define(dtype="bf16", head_dim=8, mask="causal", lse=True)
    output, lse = call(hopper(spec), sample(spec, Shape(batch, heads, heads, q_len, kv_len)))
    assert output.shape == (batch, heads, q_len, 8)
    assert not output.any()
    assert np.isneginf(lse).all()


def test_the_order_of_threads_and_copies_does_not_matter() -> None:
    spec = small("packed_documents", "bf16")
    problem = sample(spec, Shape(1, 1, 1, 300, 300))
    results = {call(hopper(spec, seed), problem)[0].tobytes() for seed in (0, 1, 2)}
    assert len(results) == 1


SINKS = {"sink": "sinks[h]", "inputs": {"sinks": ("fp32", ("heads",))}}


@pytest.mark.parametrize("lse", [False, True])  # of row sums as products with ones, and of those of weights
@pytest.mark.parametrize("mask", [None, "causal", "causal and window(40)", "prefix(20) or causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks(head_dim: int, mask: str | None, lse: bool) -> None:
    """Of few keys the sink is much of a row's sum, and the largest score is above it or below."""
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, lse=lse, **SINKS)
    for q_len, kv_len in ((3, 3), (70, 5), (150, 150)):
        check(spec, Shape(2, 3, 1, q_len, kv_len))


PADDING = {"mask": "causal and padding(n)", "inputs": {"n": ("int32", ("batch",))}}


@pytest.mark.parametrize("more", [SINKS, SINKS | {"lse": True}, PADDING], ids=["sinks", "sinks and lse", "padding"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_sinks_and_padding_in_every_tile_that_lengths_choose_from(head_dim: int, more: dict[str, Any]) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, **{"mask": "causal", **more})
    tiles = {(p.block_q, p.block_kv, p.stages) for p in plans_for(spec, ARCHES["sm_90a"], "hopper")}
    assert len(tiles) > 1
    for tile in tiles:
        check(replace(spec, schedule=Schedule("hopper", *tile)), Shape(2, 2, 1, 270, 270))


@pytest.mark.parametrize("mask", ["doc[b, q] != 2", "doc[b, q] > h", "k <= doc[b, q] + 40"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_ranges_of_rows_are_read_for_rows_that_are_there(head_dim: int, mask: str) -> None:
    """When the work is over there is no block of rows, and nothing to read of it."""
    inputs = {"doc": ("int32", ("batch", "q_len"))}
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, inputs=inputs)
    compiled = attngen.compile(spec, kernel="hopper", device=EmulatedDevice(arch="sm_90a", checked=True))
    problem = sample(spec, Shape(2, 1, 1, 100, 150))
    assert compare(*call(compiled, problem), truth(spec, problem)).passed


@pytest.mark.parametrize("mask", ["doc[b, k] <= 3 and k != k", "doc[b, k] <= 3 and h < 0"])
def test_key_vectors_of_masks_that_allow_nothing(mask: str) -> None:
    """Their range of keys is empty in closed form, so that no tile is asked whether it is partial."""
    spec = attngen.define(dtype="fp16", head_dim=64, mask=mask, inputs={"doc": ("int32", ("batch", "kv_len"))})
    check(spec, Shape(1, 2, 1, 65, 65))


def test_rough_functions_stay_within_what_is_promised() -> None:
    """The emulated tanh is as wrong as it may be."""
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal", score="softcap(20.0)", precision="high")
    check(spec, Shape(1, 2, 1, 200, 200))


def test_a_maximum_that_keeps_growing() -> None:
    """Each tile's scores exceed the last one's by more than the kept maximum allows: O is rescaled at every tile."""
    spec = attngen.define(dtype="bf16", head_dim=64, score="s + 0.5 * k", lse=True)
    check(spec, Shape(1, 1, 1, 64, 600))


PLANS = [(d, mask) for d in (64, 80, 96, 128, 160, 192, 256) for mask in (None, "causal")]


@pytest.mark.parametrize(("head_dim", "mask"), PLANS)
def test_default_plans_are_not_serialized_and_spill_nothing(head_dim: int, mask: str | None) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask)
    compiled = compile_text(emitted(spec, "hopper", "sm_90a"))
    assert not re.findall(r"C75\d\d", compiled.log)
    (resources,) = compiled.resources()
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)


@pytest.mark.parametrize(("mask", "loops"), [(None, 1), ("causal", 2), ("causal and window(1024)", 3)])
def test_waits_for_products_are_those_that_were_written(mask: str | None, loops: int) -> None:
    """One wait for the first scores; two in the step of each loop, and between two pieces of work; one at the end. More would
    mean that ptxas serialized."""
    compiled = compile_text(emitted(attngen.define(dtype="bf16", head_dim=128, mask=mask), "hopper", "sm_90a"))
    assert disassemble(compiled.code).count("WARPGROUP.DEPBAR") == 4 + 2 * loops


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "bf16"), ("sm_100a", "fp16"), ("sm_90a", "fp32")])
def test_what_the_rung_cannot_take_is_refused(arch: str, dtype: str) -> None:
    with pytest.raises(PlanRefusal, match="kernel fused"):
        choose(replace(attngen.define(dtype=dtype, head_dim=64)), ARCHES[arch], "hopper")


def test_the_emulated_device_needs_no_architecture_to_be_named() -> None:
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=64), kernel="hopper", device="emulated")
    assert (compiled.plan.schedule, compiled.plan.arch.name) == ("hopper", "sm_90a")
    assert attngen.compile(attngen.define(dtype="bf16", head_dim=64), device="emulated").plan.arch.name == "sm_80"
