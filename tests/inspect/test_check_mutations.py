"""`attngen check` reports a kernel that lacks any one part of its spec or of its tile bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.device.emulated.device import EmulatedKernel
from attngen.device.protocol import CompilationError
from attngen.emit.emitter import emit
from attngen.inspect.checking import Kernel, check_exercised
from attngen.inspect.known import FEW_DRAWS, Known
from attngen.inspect.trial import Fixed, Trial
from attngen.inspect.trials import choose_trials
from attngen.plan import ARCHES, Plan
from attngen.reference.compare import MOST_DRAWS, compare
from attngen.reference.problems import Shape
from attngen.schedules import choose, default_arch
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type
from tests import tiers
from tests.harness import SPECS, call, shipped
from tests.hopper import HOPPER_SCHEDULES
from tests.inspect.mutants import mutants

FEW_HEADS = {"llama_gqa": (4, 2), "mistral_window": (4, 2), "gemma_softcap": (2, 1), "gpt_oss_sinks": (4, 2)}
HEAD_SIZES = {"unequal_heads": (24, 16)}


def small(name: str) -> AttentionSpec:
    """A shipped spec with few and small heads, whose mutants and problems of a check are the same and take less time."""
    spec = shipped(name)
    head_dim, head_dim_v = HEAD_SIZES.get(name, (16, 16))
    q_heads, kv_heads = FEW_HEADS.get(name, (None, None))
    params = tuple(replace(p, default=200) if p.default == 4096 else p for p in spec.params)  # a window of few tiles
    return replace(spec, head_dim=head_dim, head_dim_v=head_dim_v, q_heads=q_heads, kv_heads=kv_heads, params=params)


def plan_of(spec: AttentionSpec, schedule: str) -> Plan:
    return choose(spec, ARCHES[default_arch(schedule)], schedule)


@cache
def device(schedule: str) -> EmulatedDevice:
    return EmulatedDevice(arch=default_arch(schedule))


def is_reported(spec: AttentionSpec, plan: Plan, kernel: EmulatedKernel, problems: list[Known]) -> bool:
    compiled = CompiledAttention(spec, plan, kernel, device(plan.keyword))
    for number, one in enumerate(problems):
        try:
            found = call(compiled, one.sample, **one.trial.params)
        except EmulationError:
            found = None
        if found is None or not (any(compare(*found, one.truth(plan, draws)).passed for draws in (FEW_DRAWS, MOST_DRAWS))):
            problems.insert(0, problems.pop(number))  # it is likely to report the next mutant too
            return True
    return False


def brute_force(spec: AttentionSpec, plan: Plan) -> list[Known]:
    """Many problems beside those that a check chooses: lengths around multiples of the tiles, several values of every param."""
    rows, keys = (128, 128) if not plan.schedule.is_tiled else (plan.block_q, plan.block_kv)
    lengths = [(rows + keys + 1, rows + keys + 1), (2 * rows + 3, keys - 1), (rows - 1, 3 * keys)]
    values = [{p.name: n if p.type is Type.INT else p.default for p in spec.params} for n in (keys, rows + 7)]
    found = []
    for seed, (q_len, kv_len) in enumerate(lengths):
        for params in values if spec.params else [{}]:
            q_len = min(q_len, kv_len) if any("kv_len" in i.dims and "q_len" not in i.dims for i in spec.inputs) else q_len
            trial = Trial(Shape(2, 2, 1, q_len, kv_len), params, seed)
            found.append(Known(spec, trial))
    return found


def survivors(spec: AttentionSpec, schedule: str, of_bounds: bool) -> list[str]:
    """Mutants that the problems of a check let pass and others report."""
    plan = plan_of(spec, schedule)
    problems = [Known(spec, trial) for trial in choose_trials(spec, plan, Fixed()).trials]
    assert not is_reported(spec, plan, device(schedule).compile(emit(spec, plan)), problems)
    unseen = []
    for mutant in mutants(spec, plan, of_bounds):
        kernel = device(schedule).compile(mutant.source)
        if not is_reported(spec, plan, kernel, problems):
            unseen.append((mutant.what, kernel))
    more = brute_force(spec, plan) if unseen else []
    return [what for what, kernel in unseen if is_reported(spec, plan, kernel, more)]


OWN_BOUNDS = ("gpt2", "mistral_window", "packed_documents")  # solved for k, on both sides, and classified per tile


@pytest.mark.parametrize("name", tiers.cases(SPECS, one_of=12))
def test_a_fused_kernel_without_any_one_part_is_reported(name: str) -> None:
    assert survivors(small(name), "fused", name in OWN_BOUNDS) == []


@pytest.mark.parametrize(
    ("name", "schedule"),
    tiers.cases(product(["mistral_window", "retention"], ["naive", "tiled", *HOPPER_SCHEDULES]), one_of=6),
)
def test_other_kernels_without_any_one_part_are_reported(name: str, schedule: str) -> None:
    assert survivors(small(name), schedule, of_bounds=False) == []


OTHER = {"q": "k", "k": "v", "v": "o", "o": "q"}  # the tensor whose stride is taken instead


def changed_lines(text: str) -> Iterator[tuple[str, str]]:
    """Texts of a fused kernel that does not rescale what it summed, in one place, joins a part without its weight, or takes
    another tensor's stride once; each with the line."""
    for match in re.finditer(r"^.*$", text, re.MULTILINE):
        line, code = match[0], match[0].split("//")[0]
        changed = [line.replace(one, one.split("*=")[0]) for one in re.findall(r"\S+ \*= [^;]*alpha[^;]*", code)]
        changed += [line.replace("__any_sync(0xffffffff, exceeds)", "exceeds"), line.replace("+= weight *", "+=")]
        for stride in re.finditer(r"(?<!long )\b([qkvo])(_stride_s)\b", code if "long long" not in code else ""):
            changed.append(line[: stride.start()] + OTHER[stride[1]] + stride[2] + line[stride.end() :])
        yield from ((line.strip(), text[: match.start()] + one + text[match.end() :]) for one in changed if one != line)


@pytest.mark.parametrize(
    ("schedule", "arch", "most"),
    tiers.cases(
        [
            ("fused", "sm_80", 8),
            ("fused", "sm_75", 6),
            ("wgmma", "sm_90a", 3),
            ("hopper", "sm_90a", 2),
            ("decode", "sm_80", 11),
        ],
        one_of=5,
    ),
)
def test_a_kernel_that_does_not_rescale_or_takes_the_stride_of_another_tensor_is_reported(
    schedule: str, arch: str, most: int
) -> None:
    spec, kernel = shipped("gpt2"), Kernel(schedule, EmulatedDevice(arch=arch))
    seen = {}
    for line, text in changed_lines(emit(spec, choose(spec, ARCHES[arch], schedule)).text):
        try:
            seen[line, text] = not all(one.comparison.passed for one in check_exercised(spec, [kernel], Fixed(), text))
        except EmulationError:
            seen[line, text] = True
        except CompilationError:  # a kernel of this file that has no such stride
            continue
    assert [line for (line, _), is_seen in seen.items() if not is_seen] == []
    assert len(seen) >= most
