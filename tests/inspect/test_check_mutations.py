"""`attngen check` reports a kernel that lacks any one part of its spec or of its tile bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.device.emulated.device import EmulatedKernel
from attngen.emit.emitter import emit
from attngen.inspect.trials import Fixed, Trial, choose_trials
from attngen.plan import ARCHES, Plan
from attngen.reference.compare import Truth, compare, truth
from attngen.reference.problems import Sample, Shape
from attngen.schedules import choose
from attngen.spec.attention import HOPPER_SCHEDULES, AttentionSpec
from attngen.spec.expr import Type
from tests.harness import SPECS, call, shipped
from tests.inspect.mutants import mutants

FEW_HEADS = {"llama_gqa": (4, 2), "mistral_window": (4, 2), "gemma_softcap": (2, 1), "gpt_oss_sinks": (4, 2)}
HEAD_SIZES = {"unequal_heads": (24, 16)}


@dataclass
class Solved:
    """A problem and its reference result."""

    trial: Trial
    problem: Sample
    expected: Truth


def solved(spec: AttentionSpec, trial: Trial) -> Solved:
    problem = trial.problem(spec)
    return Solved(trial, problem, truth(spec, problem, trial.params))


def small(name: str) -> AttentionSpec:
    """A shipped spec with few and small heads, whose mutants and problems of a check are the same and take less time."""
    spec = shipped(name)
    head_dim, head_dim_v = HEAD_SIZES.get(name, (16, 16))
    q_heads, kv_heads = FEW_HEADS.get(name, (None, None))
    params = tuple(replace(p, default=200) if p.default == 4096 else p for p in spec.params)  # a window of few tiles
    return replace(spec, head_dim=head_dim, head_dim_v=head_dim_v, q_heads=q_heads, kv_heads=kv_heads, params=params)


def plan_of(spec: AttentionSpec, schedule: str) -> Plan:
    return choose(spec, ARCHES["sm_90a" if schedule in HOPPER_SCHEDULES else "sm_80"], schedule)


@cache
def device(schedule: str) -> EmulatedDevice:
    return EmulatedDevice(arch="sm_90a" if schedule in HOPPER_SCHEDULES else "sm_80")


def is_reported(spec: AttentionSpec, plan: Plan, kernel: EmulatedKernel, problems: list[Solved]) -> bool:
    compiled = CompiledAttention(spec, plan, kernel, device(plan.keyword))
    for one in problems:
        try:
            if not compare(*call(compiled, one.problem, **one.trial.params), one.expected).passed:
                return True
        except EmulationError:
            return True
    return False


def brute_force(spec: AttentionSpec, plan: Plan) -> list[Solved]:
    """Many problems beside those that a check chooses: lengths around multiples of the tiles, several values of every param."""
    rows, keys = (128, 128) if not plan.schedule.is_tiled else (plan.block_q, plan.block_kv)
    lengths = [(rows + keys + 1, rows + keys + 1), (2 * rows + 3, keys - 1), (rows - 1, 3 * keys)]
    values = [{p.name: n if p.type is Type.INT else p.default for p in spec.params} for n in (keys, rows + 7)]
    found = []
    for seed, (q_len, kv_len) in enumerate(lengths):
        for params in values if spec.params else [{}]:
            q_len = min(q_len, kv_len) if any("kv_len" in i.dims and "q_len" not in i.dims for i in spec.inputs) else q_len
            trial = Trial(Shape(2, 2, 1, q_len, kv_len), params, seed)
            found.append(solved(spec, trial))
    return found


def survivors(spec: AttentionSpec, schedule: str, of_bounds: bool) -> list[str]:
    """Mutants that the problems of a check let pass and others report."""
    plan = plan_of(spec, schedule)
    problems = [solved(spec, trial) for trial in choose_trials(spec, plan, Fixed()).trials]
    assert not is_reported(spec, plan, device(schedule).compile(emit(spec, plan)), problems)
    unseen = []
    for mutant in mutants(spec, plan, of_bounds):
        kernel = device(schedule).compile(mutant.source)
        if not is_reported(spec, plan, kernel, problems):
            unseen.append((mutant.what, kernel))
    more = brute_force(spec, plan) if unseen else []
    return [what for what, kernel in unseen if is_reported(spec, plan, kernel, more)]


OWN_BOUNDS = ("gpt2", "mistral_window", "packed_documents")  # solved for k, on both sides, and classified per tile


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_a_fused_kernel_without_any_one_part_is_reported(name: str) -> None:
    assert survivors(small(name), "fused", name in OWN_BOUNDS) == []


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["naive", "tiled", *HOPPER_SCHEDULES])
@pytest.mark.parametrize("name", ["mistral_window", "retention"])
def test_other_kernels_without_any_one_part_are_reported(name: str, schedule: str) -> None:
    assert survivors(small(name), schedule, of_bounds=False) == []
