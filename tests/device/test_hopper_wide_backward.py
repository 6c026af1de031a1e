"""The Hopper backward for heads of more than 256, on the emulated device: gradients, the same bits in any order, its SASS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import PlanRefusal
from attngen.device.cuda.compiler import compile_text
from attngen.emit.emitter import emit
from attngen.emit.loops import loop_nest
from attngen.plan import ARCHES
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import QKV
from tests import tiers
from tests.device import test_hopper_backward as narrow
from tests.device.test_hopper_backward import VARIANTS, defined
from tests.harness import cli, compiled, gradients, spills, wrong_gradients

SHAPES = (Shape(1, 4, 2, 140, 200), Shape(2, 2, 2, 1, 1), Shape(1, 2, 1, 200, 70))


@pytest.mark.parametrize("name", tiers.cases(VARIANTS, quick=["documents"], one_of=3))
def test_variants(name: str) -> None:
    for seed, shape in enumerate(SHAPES):
        kernel = compiled(defined(name, 264), "hopper", seed=seed % 2 * 7)
        assert kernel.gradients().plan.schedule.name == "hopper_wide_backward"
        assert not wrong_gradients(kernel, shape, seed=seed), shape


# Evenly and oddly many slabs, one of fewer than 16 columns, and sizes of which only one is wide.
HEAD_DIMS = [(512, 512), (320, 320), (264, 512), (512, 264), (8, 512), (512, 8), (384, 448)]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(HEAD_DIMS, one_of=3))
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    kernel = compiled(defined("causal", head_dim, "fp16", head_dim_v=head_dim_v), "hopper")
    assert not wrong_gradients(kernel, Shape(1, 2, 1, 140, 170))


BEHIND_THE_MASK = [(264, "bf16", None, "softmax"), (264, "fp16", "s * 0.5", "softmax"), (264, "bf16", None, "none")]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "dtype", "score", "normalize"), tiers.cases(BEHIND_THE_MASK, one_of=3))
def test_nothing_behind_the_mask_leaves_a_trace(head_dim: int, dtype: str, score: str | None, normalize: str) -> None:
    narrow.test_what_the_mask_excludes_leaves_no_trace(head_dim, dtype, score, normalize, deterministic=True)


@pytest.mark.long
@pytest.mark.parametrize("storage", tiers.cases(["dense", "packed"], one_of=2))
def test_problems_aimed_at_each_circumstance(storage: str, tmp_path: Path) -> None:
    """Of groups whose query heads are several work tiles too."""
    path = tmp_path / "wide.attn"
    kernel = f"kernel hopper {{ storage {storage} }}"
    path.write_text(f"attention wide {{ dtype bf16 head_dim 264, v 320 mask causal heads 4 over 2 {kernel} }}")
    assert cli("check", str(path), "--backward", "--kernel", "hopper").exit_code == 0


@pytest.mark.long
@pytest.mark.parametrize("name", tiers.cases(["causal", "some heads"], one_of=2))
def test_the_order_of_threads_and_copies_does_not_matter(name: str) -> None:
    spec = defined(name, 320)
    problem = sample(spec, Shape(1, 4, 2, 140, 200))
    loss = sample_loss(spec, problem)
    found = [gradients(compiled(spec, "hopper", seed=seed), problem, loss) for seed in (0, 3, 8)]
    for one in "qkv":
        assert len({each[one].tobytes() for each in found}) == 1, one


@pytest.mark.long
def test_only_what_is_wanted_is_computed() -> None:
    spec = defined("causal", 264)
    problem, kernel = sample(spec, Shape(1, 2, 1, 70, 70)), compiled(spec, "hopper")
    every = gradients(kernel, problem, sample_loss(spec, problem))
    for wanted in (("q",), ("k",), ("v",)):
        found = gradients(kernel, problem, sample_loss(spec, problem), wanted)
        assert set(found) == set(wanted)
        assert all(np.array_equal(from_storage(found[n]), from_storage(every[n])) for n in wanted)
        names = [e.name for e in kernel.gradients(wanted).source.kernels]
        assert names == ["attention_backward_delta", f"attention_backward_d{wanted[0]}"]


WITHOUT_LSE = [(normalize, wanted) for normalize in ("none", "sigmoid") for wanted in (("q",), ("k", "v"))]


@pytest.mark.long
@pytest.mark.parametrize(("normalize", "wanted"), tiers.cases(WITHOUT_LSE, one_of=2))
def test_weights_without_lse(normalize: str, wanted: tuple[str, ...]) -> None:
    kernel = compiled(defined(normalize, 8, head_dim_v=264), "hopper")
    assert not wrong_gradients(kernel, Shape(1, 2, 1, 70, 140), wanted)


REFUSED = [
    ({"head_dim": 512, "dropout": 0.1}, None, "no gradients of dropout"),
    ({"head_dim": 512, "score": "s * gate[h, q] + bias[h, k]", "inputs": narrow.BIAS}, ("q", "bias"), "captured"),
    ({"head_dim": 576, "head_dim_v": 512}, None, "at most 512 elements"),
    ({"head_dim": 512, "dtype": "fp32"}, None, "fp16 or bf16"),
]


@pytest.mark.parametrize(("spec", "wanted", "reason"), REFUSED)
def test_what_it_cannot_compute_is_refused_and_left_to_another_schedule(
    spec: dict[str, Any], wanted: tuple[str, ...] | None, reason: str
) -> None:
    defined = attngen.define(**{"dtype": "bf16"} | spec)
    with pytest.raises(PlanRefusal, match=reason):
        choose(defined, ARCHES["sm_90a"], "hopper", direction="backward", wanted=wanted)
    assert choose(defined, ARCHES["sm_90a"], direction="backward", wanted=wanted).keyword == "tiled"


def test_automatic_gradients_of_wide_heads_are_its_own() -> None:
    assert choose(defined("causal", 512), ARCHES["sm_90a"], wanted=QKV).schedule.name == "hopper_wide_backward"


def test_shared_memory_is_what_a_block_may_have() -> None:
    """What fits decides how many slabs are on their way; each kernel has a memory of its own."""
    slots = {}
    for sizes in ((264, 264), (320, 512), (512, 320), (512, 512)):
        plan = choose(defined("causal", sizes[0], head_dim_v=sizes[1]), ARCHES["sm_90a"], direction="backward")
        assert plan.shared_bytes <= plan.arch.shared_per_block
        slots[sizes] = (plan.own.dv_slots, plan.own.dp_slots)
    assert slots[512, 512] == (11, 3)
    assert min(min(s) for s in slots.values()) >= 3


def test_pages_have_its_loops() -> None:
    spec = defined("documents", 512)
    plan = choose(spec, ARCHES["sm_90a"], "hopper", direction="backward")
    nest = loop_nest(spec, plan, emit(spec, plan))
    assert {p.loop.anchor for p in nest if "pairs" in p.loop.range} == {"void multiply_pairs() {", "void issue_sum() {"}


MACHINE_CODE = [(d, mask, "dense") for d in (512, 320) for mask in (None, "causal", "causal and window(40)")]
MACHINE_CODE += [(512, "causal", "packed"), (264, "causal", "dense"), (384, None, "packed")]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "mask", "storage"), tiers.cases(MACHINE_CODE, one_of=3))
def test_products_are_not_serialized_and_nothing_is_spilled(head_dim: int, mask: str | None, storage: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, storage=storage)
    compiled = compile_text(emit(spec, choose(spec, ARCHES["sm_90a"], "hopper", direction="backward")))
    assert not re.findall(r"C75\d\d", compiled.log)
    assert not any(map(spills, compiled.resources()))
