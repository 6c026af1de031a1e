"""Winners of tuning are stored, found again, and used for calls of their sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.device.arrays import view
from attngen.device.emulated import EmulatedDevice
from attngen.device.tuning_cache import CACHE, Winner, bucket_of, found_for, is_open, remember, remembered
from attngen.emit.emitter import emit
from attngen.plan import ARCHES, PlanRefusal
from attngen.plan.facts import DETERMINISTIC
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.schedules import candidates, choose
from attngen.spec.attention import KernelRequest
from attngen.spec.gradient import QKV
from tests.harness import shipped, wrong_gradients

WINNER = Winner(KernelRequest("fused", 32, 32, 1, 2), 0.5, 0.6, "a GPU")


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
    assert remembered(spec, "sm_80", WINNER.kernel.schedule) == {}
    assert remember(spec, "sm_80", (10, 13), WINNER)
    assert remember(spec, "sm_80", (11, 13), replace(WINNER, milliseconds=0.4))
    both = {(10, 13): WINNER, (11, 13): replace(WINNER, milliseconds=0.4)}
    assert remembered(replace(spec, name="other"), "sm_80", WINNER.kernel.schedule) == both
    assert remembered(spec, "sm_80", "hopper") == {}
    assert remembered(spec, "sm_90a", WINNER.kernel.schedule) == {}
    assert remembered(shipped("alibi"), "sm_80", WINNER.kernel.schedule) == {}
    for entry in CACHE.entries():  # what is damaged was not found
        path = CACHE.directory / entry.name
        path.write_bytes(path.read_bytes()[:-5])
    assert remembered(spec, "sm_80", WINNER.kernel.schedule) == {}


def test_specs_that_say_their_schedule_are_left_alone() -> None:
    spec = shipped("gpt2")
    assert is_open(spec)
    assert is_open(replace(spec, kernel=KernelRequest("fused")))
    for schedule in (
        KernelRequest("fused", block_q=64, block_kv=64),
        KernelRequest(stages=1),
        KernelRequest(warps=4),
    ):
        assert not is_open(replace(spec, kernel=schedule))


def test_a_call_of_its_sizes_runs_as_tuned() -> None:
    spec = attngen.define(dtype="fp16", head_dim=32, mask="causal")
    device = EmulatedDevice()
    plain = attngen.compile(spec, kernel="fused", device=device)
    tuned = CompiledAttention(
        spec,
        plain.plan,
        plain.kernel,
        device,
        tuned={(7, 8): WINNER, (5, 6): replace(WINNER, kernel=KernelRequest("fused", 17, 17))},
    )
    for length, expected in ((100, 32), (20, plain.plan.block_q), (300, plain.plan.block_q)):  # (20: no plan has such tiles)
        problem = sample(spec, Shape(1, 2, 2, length, length))
        chosen = tuned.at({"batch": 1, "q_heads": 2, "q_len": length, "kv_len": length})
        assert chosen.plan.block_q == expected, length
        assert any(d.field == "tuned" for d in chosen.plan.decisions) == (length == 100)
        assert compare(tuned(problem.q, problem.k, problem.v), None, truth(spec, problem)).passed


@pytest.mark.usefixtures("_empty_cache")
def test_a_forward_and_each_backward_are_remembered_apart() -> None:
    spec, bucket = shipped("alibi"), (10, 13)
    winners = {
        wanted: replace(WINNER, milliseconds=float(number))
        for number, wanted in enumerate(((), ("q", "k", "v"), ("q", "k", "v", "slopes")), 1)
    }
    for wanted, winner in winners.items():
        assert remember(spec, "sm_80", bucket, winner, wanted)
    for wanted, winner in winners.items():
        assert remembered(spec, "sm_80", "fused", wanted) == {bucket: winner}
    assert remembered(spec, "sm_80", "fused", ("q",)) == {}
    in_order = replace(WINNER, milliseconds=4.0)
    assert remember(spec, "sm_80", bucket, in_order, ("q", "k", "v"), True)
    plan = choose(spec, ARCHES["sm_80"], "fused", direction="backward", wanted=("q", "k", "v"), deterministic=True)
    assert found_for(spec, plan) == {bucket: in_order}
    plan = choose(spec, ARCHES["sm_80"], "fused", direction="backward", wanted=("q", "k", "v"))
    assert found_for(spec, plan) == {bucket: winners["q", "k", "v"]}
    tiled = choose(spec, ARCHES["sm_80"], "tiled", direction="backward")
    assert found_for(spec, tiled) == {}


def test_a_spec_that_states_its_forwards_tile_leaves_the_backwards_open() -> None:
    spec = replace(shipped("gpt2"), kernel=KernelRequest("fused", 64, 64))
    assert not is_open(spec)
    assert is_open(spec, ("q", "k", "v"))


def test_gradients_of_a_call_of_its_sizes_run_as_tuned() -> None:
    spec = attngen.define(dtype="fp16", head_dim=32, mask="causal")
    kernel = attngen.compile(spec, kernel="fused", device=EmulatedDevice())
    usual = kernel.gradients(QKV)
    misfit = replace(WINNER, kernel=KernelRequest("fused", 17, 17))
    winner = replace(WINNER, kernel=KernelRequest("fused", 32, 32, 1, 1))
    tuned = replace(usual, tuned={(7, 8): winner, (5, 6): misfit})
    trained = replace(kernel, _backwards={(QKV, DETERMINISTIC): tuned})
    for length, expected in ((100, 32), (20, usual.plan.block_q), (300, usual.plan.block_q)):  # (20: no plan has such tiles)
        chosen = tuned.at({"batch": 1, "q_heads": 2, "q_len": length, "kv_len": length})
        assert chosen.plan.block_q == expected, length
        assert any(d.field == "tuned" for d in chosen.plan.decisions) == (length == 100)
        assert chosen.at({"batch": 1, "q_heads": 2, "q_len": length, "kv_len": length}) is chosen
    assert not wrong_gradients(trained, Shape(1, 2, 2, 100, 100))


def test_what_a_backward_reads_is_saved_by_a_forward_as_tuned() -> None:
    spec = attngen.define(dtype="fp16", head_dim=32, mask="causal")
    plain = attngen.compile(spec, kernel="fused", device=EmulatedDevice())
    saving = replace(plain, tuned={(7, 8): WINNER}).saving()
    assert saving.at({"batch": 1, "q_heads": 2, "q_len": 100, "kv_len": 100}).plan.block_q == 32
    problem = sample(spec, Shape(1, 2, 2, 100, 100))
    arrays = {name: view(getattr(problem, name), name) for name in QKV}
    as_planned = plain.saving().run(arrays, {})
    for name, found in saving.run(arrays, {}).items():
        np.testing.assert_allclose(found.astype(np.float64), as_planned[name].astype(np.float64), atol=2e-3)


BACKWARDS = (("sm_75", "fused", 3), ("sm_80", "fused", 10), ("sm_90a", "hopper", 1))


@pytest.mark.parametrize(("arch", "keyword", "least"), BACKWARDS)
def test_candidates_of_a_backward_are_planned_as_asked(arch: str, keyword: str, least: int) -> None:
    spec = attngen.define(dtype="fp16", head_dim=64, mask="causal")
    found = candidates(spec, ARCHES[arch], keyword, QKV)
    assert len(set(found)) == len(found) >= least
    planned = choose(spec, ARCHES[arch], keyword, direction="backward")
    assert KernelRequest(keyword, planned.block_q, planned.block_kv, planned.stages, planned.warps) in found
    for request in found:
        plan = choose(spec, ARCHES[arch], request, direction="backward")
        assert plan.schedule is planned.schedule
        assert (plan.tile.block_q, plan.tile.stages, plan.tile.warps) == (request.block_q, request.stages, request.warps)
        assert plan.own.kernels, request
    with pytest.raises(PlanRefusal, match="tile 48 x 48 does not fit"):
        choose(spec, ARCHES[arch], KernelRequest(keyword, 48, 48), direction="backward")


@pytest.mark.long
@pytest.mark.parametrize(("arch", "keyword", "least"), BACKWARDS)
def test_candidates_of_a_backward_compute_the_same_gradients(arch: str, keyword: str, least: int) -> None:
    spec = attngen.define(dtype="fp16", head_dim=32, mask="causal and q - k < 100")
    device = EmulatedDevice(arch=arch)
    kernel = attngen.compile(spec, kernel=keyword, device=device)
    for request in candidates(spec, ARCHES[arch], keyword, QKV):
        plan = choose(spec, ARCHES[arch], request, direction="backward")
        backward = CompiledBackward(spec, plan, device.compile(emit(spec, plan)), device)
        for shape in (Shape(1, 4, 2, 150, 130), Shape(1, 2, 2, 1, 7)):
            assert not wrong_gradients(replace(kernel, _backwards={(QKV, DETERMINISTIC): backward}), shape), (request, shape)


def test_candidates_fit_and_are_distinct() -> None:
    for dtype in ("bf16", "fp32"):
        for arch in ("sm_75", "sm_80", "sm_90a"):
            spec = attngen.define(dtype=dtype, head_dim=128, mask="causal")
            found = candidates(spec, ARCHES[arch])
            assert len(set(found)) == len(found) >= 4
            plan = choose(spec, ARCHES[arch], "fused")
            assert KernelRequest("fused", plan.block_q, plan.block_kv, plan.stages, plan.warps) in found
            for schedule in found:
                plan = choose(replace(spec, kernel=schedule), ARCHES[arch], "fused")
                assert (plan.block_q, plan.block_kv, plan.warps) == (schedule.block_q, schedule.block_kv, schedule.warps)
