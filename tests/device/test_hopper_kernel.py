"""The hopper schedule emulated: every shipped spec in 16 bits, head sizes, sinks; and what its SASS shows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.language import load_text
from attngen.plan import ARCHES, PlanRefusal
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose, plans_for
from attngen.spec.attention import KernelRequest
from tests import tiers
from tests.harness import IN_16_BITS, SMALL_PARAMS, emitted, run, small
from tests.hopper import HOPPER_SCHEDULES

LENGTHS = ((1, 1), (7, 7), (130, 290), (300, 300))


@pytest.mark.quick
@pytest.mark.parametrize(("name", "dtype"), tiers.cases(IN_16_BITS, quick=[("gpt2", "fp16")], one_of=2))
def test_every_spec_against_the_oracle(name: str, dtype: str) -> None:
    spec = small(name, dtype)
    for seed, (q_len, kv_len) in enumerate(LENGTHS):
        problem = sample(spec, Shape(16 if q_len < 10 else 1, 2, 1, q_len, kv_len), seed % 2 * 7)
        assert run(spec, "hopper", problem, seed=seed % 2 * 7, **SMALL_PARAMS.get(name, {})).passed, (q_len, kv_len)


HEAD_DIMS = [(8, 8), (24, 40), (64, 64), (72, 72), (96, 96), (160, 160), (192, 128), (40, 200), (256, 256)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(HEAD_DIMS, quick=[(24, 40), (192, 128)]))
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True)
    assert run(spec, "hopper", Shape(1, 2, 1, 70, 150)).passed


SINKS = {"sink": "sinks[h]", "inputs": {"sinks": ("fp32", ("heads",))}}


# Without lse, row sums are products with ones; with it, sums of weights.
@pytest.mark.parametrize("lse", tiers.cases([False, True], quick=[True]))
@pytest.mark.parametrize(
    "mask", tiers.cases([None, "causal", "causal and window(40)", "prefix(20) or causal"], quick=["causal"])
)
@pytest.mark.parametrize("head_dim", tiers.cases([64, 128, 256], quick=[64]))
def test_sinks(head_dim: int, mask: str | None, lse: bool) -> None:
    """Of few keys the sink is much of a row's sum, and the largest score is above it or below."""
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, lse=lse, **SINKS)
    for q_len, kv_len in ((3, 3), (70, 5), (150, 150)):
        assert run(spec, "hopper", Shape(2, 3, 1, q_len, kv_len)).passed, (q_len, kv_len)


PADDING = {"mask": "causal and padding(n)", "inputs": {"n": ("int32", ("batch",))}}


@pytest.mark.long
@pytest.mark.parametrize("more", [SINKS, SINKS | {"lse": True}, PADDING], ids=["sinks", "sinks and lse", "padding"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_sinks_and_padding_in_every_tile_that_lengths_choose_from(head_dim: int, more: dict[str, Any]) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, **{"mask": "causal", **more})
    tiles = {(p.block_q, p.block_kv, p.stages) for p in plans_for(spec, ARCHES["sm_90a"], "hopper")}
    assert len(tiles) > 1
    for tile in tiles:
        assert run(replace(spec, kernel=KernelRequest("hopper", *tile)), "hopper", Shape(2, 2, 1, 270, 270)).passed, tile


@pytest.mark.parametrize(
    "mask", tiers.cases(["doc[b, q] != 2", "doc[b, q] > h", "k <= doc[b, q] + 40"], quick=["doc[b, q] > h"])
)
@pytest.mark.parametrize("head_dim", tiers.cases([64, 128, 192], quick=[64]))
def test_ranges_of_rows_are_read_for_rows_that_are_there(head_dim: int, mask: str) -> None:
    """After the last work tile there is no block of rows: nothing may be read for it."""
    inputs = {"doc": ("int32", ("batch", "q_len"))}
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, inputs=inputs)
    assert run(spec, "hopper", Shape(2, 1, 1, 100, 150)).passed


def test_ranges_of_tiles_are_read_for_rows_that_are_there() -> None:
    """A row past the last would have a tile of its own, of which the pre-pass knows nothing."""
    lines = "dtype bf16 head_dim 48, v 80 input doc: int32[batch, kv_len] param w: int = 100 kernel hopper { tile 128 x 64 }"
    mask = "mask 2 * k <= q + w and (doc[b, q] != q and not doc[b, k] != k)"
    (spec,) = load_text(f"attention ranges {{ {lines} {mask} }}")
    assert run(spec, "hopper", Shape(2, 2, 2, 64, 64)).passed


@pytest.mark.parametrize("mask", ["2 * k <= q - 5", "k // 3 <= q"])
def test_ranges_of_tiles_that_need_a_division(mask: str) -> None:
    """No pair is asked, so that the range alone needs the function that divides."""
    assert run(attngen.define(dtype="fp16", head_dim=64, mask=mask), "hopper", Shape(1, 1, 1, 64, 190)).passed


@pytest.mark.parametrize("mask", ["doc[b, k] <= 3 and k != k", "doc[b, k] <= 3 and h < 0"])
def test_key_vectors_of_masks_that_allow_nothing(mask: str) -> None:
    """The closed-form range of keys is empty, so no tile is classified."""
    spec = attngen.define(dtype="fp16", head_dim=64, mask=mask, inputs={"doc": ("int32", ("batch", "kv_len"))})
    assert run(spec, "hopper", Shape(1, 2, 1, 65, 65)).passed


def test_rough_functions_stay_within_what_is_promised() -> None:
    """The emulated tanh has the largest error that the instruction may have."""
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal", score="softcap(20.0)", precision="high")
    assert run(spec, "hopper", Shape(1, 2, 1, 200, 200)).passed


@pytest.mark.parametrize("schedule", HOPPER_SCHEDULES)
def test_a_maximum_that_keeps_growing(schedule: str) -> None:
    """Each tile's scores exceed the last one's by more than the kept maximum allows: O is rescaled at every tile."""
    spec = attngen.define(dtype="bf16", head_dim=64, score="s + 0.5 * k", lse=True)
    assert run(spec, schedule, Shape(1, 1, 1, 64, 600)).passed


PLANS = [(d, mask) for d in (64, 80, 96, 128, 160, 192, 256) for mask in (None, "causal")]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "mask"), tiers.cases(PLANS, quick=[(128, "causal")]))
def test_default_plans_are_not_serialized_and_spill_nothing(head_dim: int, mask: str | None) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask)
    compiled = compile_text(emitted(spec, "hopper", "sm_90a"))
    assert not re.findall(r"C75\d\d", compiled.log)
    (resources,) = compiled.resources()
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "loops"),
    tiers.cases([(None, 1), ("causal", 2), ("causal and window(1024)", 3)], quick=[("causal", 2)]),
)
def test_waits_for_products_are_those_that_were_written(mask: str | None, loops: int) -> None:
    """One wait for the first scores; two in the step of each loop, and between two pieces of work; one at the end. More would
    mean that ptxas serialized."""
    compiled = compile_text(emitted(attngen.define(dtype="bf16", head_dim=128, mask=mask), "hopper", "sm_90a"))
    assert disassemble(compiled.code).count("WARPGROUP.DEPBAR") == 4 + 2 * loops


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "bf16"), ("sm_100a", "fp16"), ("sm_80", "fp32")])
def test_what_the_schedule_cannot_take_is_refused(arch: str, dtype: str) -> None:
    with pytest.raises(PlanRefusal, match="kernel fused"):
        choose(replace(attngen.define(dtype=dtype, head_dim=64)), ARCHES[arch], "hopper")


def test_the_emulated_device_needs_no_architecture_to_be_named() -> None:
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=64), kernel="hopper", device="emulated")
    assert (compiled.plan.schedule.name, compiled.plan.arch.name) == ("hopper", "sm_90a")
    assert attngen.compile(attngen.define(dtype="bf16", head_dim=64), device="emulated").plan.arch.name == "sm_80"
