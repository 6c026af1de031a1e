"""The hopper schedule for heads of more than 256, emulated: its plans, results, and what each of its steps is for."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text as compile_cuda
from attngen.plan import ARCHES, PlanRefusal
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, KernelRequest
from tests import tiers
from tests.harness import compile_text, emitted, is_right, run, solved
from tests.left_out import first_finding, removable, unnoticed
from tests.removals import ordering_statements

HOPPER = ARCHES["sm_90a"]
INPUTS = {
    "slopes": ("fp32", ("heads",)),
    "sinks": ("fp32", ("heads",)),
    "ids": ("int32", ("batch", "kv_len")),
    "bias": ("bf16", ("batch", "heads", "q_len", "kv_len")),
    "shown": ("bool", ("batch", "heads", "q_len", "kv_len")),
}


def wide(head_dim: int = 264, head_dim_v: int | None = None, **more: Any) -> AttentionSpec:
    text = " ".join(str(v) for v in more.values())
    inputs = {name: INPUTS[name] for name in INPUTS if re.search(rf"\b{name}\b", text)}
    return attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v or head_dim, inputs=inputs, **more)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 264), (512, 512), (576, 512), (128, 512), (512, 64)])
def test_auto_takes_it_where_it_has_room(head_dim: int, head_dim_v: int) -> None:
    plan = choose(wide(head_dim, head_dim_v), HOPPER, "auto")
    assert plan.schedule.name == "hopper_wide"
    assert (plan.block_q, plan.block_kv) == (64, 64)
    assert plan.keyword == choose(wide(256), HOPPER, "auto").schedule.name == "hopper"


def test_refusals() -> None:
    with pytest.raises(PlanRefusal, match="heads have at most 128"):
        choose(attngen.define(dtype="fp32", head_dim=512), HOPPER, "hopper")
    with pytest.raises(PlanRefusal, match="tile"):
        choose(replace(wide(512), kernel=KernelRequest("hopper", 128, 64)), HOPPER, "hopper")


SIZES = [(264, 264), (512, 512), (576, 512), (128, 512), (512, 64), (320, 320), (8, 264), (448, 328)]


@pytest.mark.quick
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(SIZES, quick=[(264, 264), (576, 512)]))
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    assert run(wide(head_dim, head_dim_v, mask="causal", lse=True), "hopper", Shape(1, 2, 1, 70, 150)).passed


@pytest.mark.parametrize("head_dim_v", [64, 128])
def test_few_columns_of_v(head_dim_v: int) -> None:
    """Sums of rows are those of threads: there are no columns of ones beside V, whatever room there is."""
    assert run(wide(264, head_dim_v, mask="causal"), "hopper", Shape(1, 2, 1, 70, 90)).passed


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": "causal and window(40)"},
    "rows without keys": {"mask": "k + 70 <= q"},
    "classified": {"mask": "same_document(ids) and causal"},
    "key vectors": {"mask": "causal", "score": "s + slopes[h] * float(ids[b, k])"},
    "affine": {"mask": "causal", "score": "s + slopes[h] * float(k - q)"},
    "sinks": {"mask": "causal", "sink": "sinks[h]", "lse": True},
    "pairs": {"score": "s + bias[b, h, q, k]"},
    "bounded": {"mask": "causal", "score": "softcap(20.0)"},
    "dropout": {"mask": "causal", "dropout": 0.25, "lse": True},
    "sigmoid": {"mask": "causal", "normalize": "sigmoid"},
    "none": {"mask": "causal", "normalize": "none", "dropout": 0.25},
    "pairs and keys": {"mask": "same_document(ids)", "score": "s + bias[b, h, q, k]", "dropout": 0.25},
    "two of pairs": {"mask": "shown[b, h, q, k]", "score": "s + bias[b, h, q, k]", "lse": True},
}


@pytest.mark.parametrize("kind", tiers.cases([*KINDS], quick=["classified", "sinks", "none"]))
def test_kinds(kind: str) -> None:
    spec = wide(**KINDS[kind])
    for seed, (q_len, kv_len) in enumerate(((3, 3), (130, 150), (100, 200))):
        assert run(spec, "hopper", sample(spec, Shape(2, 2, 1, q_len, kv_len), seed), seed=seed * 7).passed, (q_len, kv_len)


TILES = [(48, 1), (32, 2), (16, 3), (80, 1)]


@pytest.mark.parametrize(("keys", "stages"), tiers.cases(TILES, quick=[(32, 2)]))
def test_tiles(keys: int, stages: int) -> None:
    spec = replace(wide(mask="causal"), kernel=KernelRequest("hopper", 64, keys, stages))
    assert run(spec, "hopper", Shape(1, 2, 1, 100, 230)).passed


@pytest.mark.parametrize("mask", [None, "h == 1"])
@pytest.mark.parametrize("seed", [0, 3, 9])
def test_the_last_work_tile_of_a_block(mask: str | None, seed: int) -> None:
    """Q of a work tile is waited for before the mbarrier goes on to the end, and by the lane that releases it."""
    assert run(wide(mask=mask), "hopper", Shape(1, 3, 1, 130, 0 if mask is None else 5), seed=seed).passed


# Functions that copy, multiply or compute, too: their own steps are found in them; and what the emulated device has no need for
WORK = re.compile(
    r"(?:block\.set_up|(?:scorer|follower)\.compute|producer\.\w+|epilogue|first_weights|finish_\w+|issue_\w+|hand_over"
    r"|(?:\w+\.)?load_\w+|next_work_tile|publish|score_tile|step|store_output|release_\w+|mbarrier_init|(?:take|give)_registers"
    r"|keep_order)\b"
)
MUTATED = {
    "beside": (wide(264, 72, mask="causal and h % 2 == 0"), Shape(1, 4, 4, 200, 200)),  # heads without a tile between others
    "documents": (wide(264, 72, mask="causal and same_document(ids) and h % 2 == 0"), Shape(1, 4, 4, 200, 200)),
    "over": (wide(576, 512, mask="k + 100 <= q"), Shape(1, 3, 1, 250, 150)),
}
ORDERS = (0, 3, 4, 8, 7, 9, 10, 12)  # orders of threads and copies


@pytest.mark.parametrize("name", tiers.cases([*MUTATED], quick=[]))
def test_every_step_between_warps_is_needed(name: str) -> None:
    spec, shape = MUTATED[name]
    source = emitted(spec, "hopper", "sm_90a")
    steps = [step for step in ordering_statements(source.text) if not WORK.match(step[0])]
    under_test = [compile_text(spec, "hopper", removable(source, steps), seed) for seed in ORDERS]
    solution = solved(spec, shape)

    def outcome() -> str:
        return first_finding(partial(is_right, kernel, *solution) for kernel in under_test)

    assert unnoticed(source, steps, under_test[0].kernel.library, outcome) == []


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (576, 512), (320, 320)])
@pytest.mark.parametrize("kind", ["plain", "sinks", "classified", "dropout", "sigmoid", "pairs and keys", "two of pairs"])
def test_plans_are_not_serialized_and_spill_nothing(kind: str, head_dim: int, head_dim_v: int) -> None:
    compiled = compile_cuda(emitted(wide(head_dim, head_dim_v, **KINDS[kind]), "hopper", "sm_90a"))
    assert not re.findall(r"C75\d\d", compiled.log)
    for resources in compiled.resources():
        assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)
