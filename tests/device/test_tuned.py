"""What tuning found is kept, found again, and used for calls of the sizes that it is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice
from attngen.device.tuned import CACHE, Winner, bucket_of, is_open, remember, remembered
from attngen.plan import ARCHES, candidates, choose
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import Schedule
from tests.harness import shipped

WINNER = Winner(Schedule("fused", 32, 32, 1, 2), 0.5, 0.6, "a GPU")


@pytest.fixture
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))


def test_buckets_are_powers_of_two() -> None:
    def of(batch: int, q_heads: int, q_len: int, kv_len: int):
        return bucket_of({"batch": batch, "q_heads": q_heads, "q_len": q_len, "kv_len": kv_len})

    assert of(1, 8, 1024, 1024) == of(2, 8, 512, 513) == (10, 13)
    assert of(1, 8, 1024, 1025) == (11, 13)
    assert of(1, 8, 1025, 1024) == (10, 14)
    assert of(0, 8, 0, 0) == (0, 0)


@pytest.mark.usefixtures("_empty_cache")
def test_what_is_remembered_is_of_a_variant_and_an_architecture() -> None:
    spec = shipped("gpt2")
    assert remembered(spec, "sm_80", WINNER.schedule.rung) == {}
    assert remember(spec, "sm_80", (10, 13), WINNER)
    assert remember(spec, "sm_80", (11, 13), replace(WINNER, milliseconds=0.4))
    both = {(10, 13): WINNER, (11, 13): replace(WINNER, milliseconds=0.4)}
    assert remembered(replace(spec, name="other"), "sm_80", WINNER.schedule.rung) == both
    assert remembered(spec, "sm_80", "hopper") == {}
    assert remembered(spec, "sm_90a", WINNER.schedule.rung) == {}
    assert remembered(shipped("alibi"), "sm_80", WINNER.schedule.rung) == {}
    for entry in CACHE.entries():  # what is damaged was not found
        path = CACHE.directory / entry.name
        path.write_bytes(path.read_bytes()[:-5])
    assert remembered(spec, "sm_80", WINNER.schedule.rung) == {}


def test_specs_that_say_their_schedule_are_left_alone() -> None:
    spec = shipped("gpt2")
    assert is_open(spec)
    assert is_open(replace(spec, schedule=Schedule("fused")))
    for schedule in (Schedule("tiled"), Schedule("fused", block_q=64, block_kv=64), Schedule(stages=1), Schedule(warps=4)):
        assert not is_open(replace(spec, schedule=schedule))


def test_a_call_of_its_sizes_runs_as_tuned() -> None:
    spec = attngen.define(dtype="fp16", head_dim=32, mask="causal")
    device = EmulatedDevice()
    plain = attngen.compile(spec, kernel="fused", device=device)
    tuned = CompiledAttention(
        spec,
        plain.plan,
        plain.kernel,
        device,
        tuned={(7, 8): WINNER, (5, 6): replace(WINNER, schedule=Schedule("fused", 17, 17))},
    )
    for length, expected in ((100, 32), (20, plain.plan.block_q), (300, plain.plan.block_q)):  # (20: no plan has such tiles)
        problem = sample(spec, Shape(1, 2, 2, length, length))
        views = {name: attngen.device.arrays.view(getattr(problem, name.lower()), name) for name in "QKV"}
        chosen = tuned.at(views)
        assert chosen.plan.block_q == expected, length
        assert any(d.field == "tuned" for d in chosen.plan.decisions) == (length == 100)
        assert compare(tuned(problem.q, problem.k, problem.v), None, truth(spec, problem)).passed


def test_candidates_fit_and_are_distinct() -> None:
    for dtype in ("bf16", "fp32"):
        for arch in ("sm_75", "sm_80", "sm_90a"):
            spec = attngen.define(dtype=dtype, head_dim=128, mask="causal")
            found = candidates(spec, ARCHES[arch])
            assert len(set(found)) == len(found) >= 4
            plan = choose(spec, ARCHES[arch], "fused")
            assert Schedule("fused", plan.block_q, plan.block_kv, plan.stages, plan.warps) in found
            for schedule in found:
                plan = choose(replace(spec, schedule=schedule), ARCHES[arch], "fused")
                assert (plan.block_q, plan.block_kv, plan.warps) == (schedule.block_q, schedule.block_kv, schedule.warps)
