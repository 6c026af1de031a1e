"""Many short rows: which plan a call by `auto` takes, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

import attngen
from attngen.emit.emitter import emit
from attngen.plan import ARCHES, Problem
from attngen.schedules import choice_of, choose
from attngen.spec.attention import KernelRequest

QKV = ("q", "k", "v")
SMS = 132


def planned(rows: int, heads: int = 1000, kernel: str | None = None, wanted: Any = None, **said: Any) -> Any:
    spec = attngen.define(**{"dtype": "bf16", "head_dim": 64, **said})
    return choose(spec, ARCHES["sm_90a"], kernel, Problem(heads, rows, rows, SMS), wanted=wanted)


@pytest.mark.parametrize("wanted", [None, QKV])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_auto_takes_fused_with_small_tiles(head_dim: int, wanted: Any) -> None:
    short, usual = (planned(rows, head_dim=head_dim, wanted=wanted) for rows in (49, 500))
    assert (short.keyword, usual.keyword) == ("fused", "hopper")
    assert max(short.block_q, short.block_kv) <= 64
    assert "for short rows" in str(short.decisions[0].value)
    assert short.saved == usual.saved  # the forward does not know which of them will read its results


@pytest.mark.parametrize(
    "said",
    [
        {"rows": 65},  # keys would be in a second tile
        {"heads": SMS - 1},  # some SMs would have nothing to do
        {"kernel": "hopper"},
        {"head_dim": 256},  # not measured
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_other_calls_take_the_usual_schedule(said: dict[str, Any]) -> None:
    assert planned(**{"rows": 49, **said}).keyword == "hopper"


def test_a_stated_tile_is_kept() -> None:
    spec = attngen.define(dtype="bf16", head_dim=64)
    request = KernelRequest("auto", block_q=128, block_kv=128)
    assert choose(spec, ARCHES["sm_90a"], request, Problem(1000, 49, 49, SMS)).block_q == 128


def test_no_plan_is_compiled_twice() -> None:
    for wanted in ((), QKV):
        plans = choice_of(attngen.define(dtype="bf16", head_dim=32), ARCHES["sm_80"], wanted=wanted).plans()
        assert len({(p.keyword, p.tile) for p in plans}) == len(set(map(id, plans)))


def test_the_sizes_of_a_call_decide() -> None:
    """On the emulated device, which has 2 SMs."""
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=32, mask="causal"), device="emulated")
    backward = compiled.gradients(QKV)
    sizes = {"batch": 2, "q_heads": 2, "kv_heads": 2, "q_len": 40, "kv_len": 40, "multiprocessors": 2}
    assert compiled.at(sizes).plan.block_q == 64 < compiled.plan.block_q
    assert backward.at(sizes).plan.block_kv == 64 < backward.plan.block_kv
    assert backward.at(sizes | {"q_len": 400, "kv_len": 400}) is backward


@pytest.mark.parametrize("wanted", [(), QKV, (*QKV, "bias")])
def test_programs_of_all_lengths_have_their_arrays_in_one_order(wanted: tuple[str, ...]) -> None:
    """torch's launches fill in addresses by position."""
    inputs = {"bias": ("bf16", ("heads", "q_len", "kv_len")), "ids": ("int32", ("batch", "kv_len"))}
    spec = attngen.define(dtype="bf16", head_dim=32, mask="same_document(ids)", score="s + bias[h, q, k]", inputs=inputs)
    programs = [emit(spec, p) for p in choice_of(spec, ARCHES["sm_90a"], wanted=wanted).plans()]
    assert len(programs) > 1
    orders = {tuple(t.argument for role in ("input", "output") for t in p.of_role(role)) for p in programs}
    assert len(orders) == 1
