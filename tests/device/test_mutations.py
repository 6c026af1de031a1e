"""Deleting any one barrier, or any wait for an asynchronous copy, from an emitted kernel must be noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from attngen import define
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulationError
from attngen.emit.program import Program
from attngen.inspect.ladder import ladder
from attngen.keywords import PORTABLE_SCHEDULES
from attngen.plan import ARCHES
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, KernelRequest
from tests.harness import call, compile_text, emitted, is_right, shipped, solved
from tests.hopper import HOPPER_SCHEDULES
from tests.left_out import first_finding, removable, unnoticed

SYNCHRONIZATION = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|cp_async_wait<\d>\(\);|(?<!void )cp_async_commit\(\);")
# Specs that between them have every skeleton and every branch of it that has barriers.
SPECS = ("gpt2", "cross_attention", "gemma_softcap", "sigmoid_attention", "retention", "packed_documents")


def synchronizations(source: Program) -> list[re.Match[str]]:
    return list(SYNCHRONIZATION.finditer(source.text))


def one_stage(name: str) -> AttentionSpec:
    spec = shipped(name)
    return replace(spec, kernel=replace(spec.kernel, schedule="fused", stages=1))


def finding(spec: AttentionSpec, kernels: Sequence[CompiledAttention]) -> str:
    """How kernels are noticed to be wrong: the kind of finding, or "" if they are not."""
    one_head = replace(spec, q_heads=None, kv_heads=None)
    lengths = (200,) if reads_positions(spec) else (200, 0)  # and without any tile
    problems = [solved(one_head, Shape(1, 1, 1, 200, kv_len)) for kv_len in lengths]
    return first_finding(partial(is_right, kernel, *problem) for problem in problems for kernel in kernels)


def reads_positions(spec: AttentionSpec) -> bool:
    """Whether a captured tensor is as long as the keys: with queries there are keys then, and with keys a tile."""
    return any("kv_len" in i.dims for i in spec.inputs)


def without_tiles(source: Program) -> range:
    """Where fused_mma synchronizes for blocks that visit no tile."""
    start = source.text.find("// O goes through")
    return range(start, source.text.find("for (int r", start)) if start > 0 else range(0)


@pytest.mark.long
@pytest.mark.parametrize("schedule", [schedule for schedule in PORTABLE_SCHEDULES if schedule != "naive"])  # naive has none
@pytest.mark.parametrize("name", SPECS)
def test_every_barrier_is_needed(name: str, schedule: str) -> None:
    spec = replace(shipped(name), q_heads=None, kv_heads=None)
    check_all(spec, schedule, emitted(spec, schedule))


@pytest.mark.long
def test_every_barrier_is_needed_with_one_stage() -> None:
    spec = one_stage("gpt2")
    assert choose(spec, ARCHES["sm_80"]).stages == 1
    check_all(spec, "fused", emitted(spec, "fused"))


@pytest.mark.long
def test_every_barrier_is_needed_with_key_vectors() -> None:
    request = KernelRequest("fused", block_q=128, block_kv=64, stages=1, warps=4)
    spec = replace(shipped("packed_documents"), q_heads=None, kv_heads=None, kernel=request)
    source = emitted(spec, "fused")
    assert "keys->document_of_k" in source.text
    check_all(spec, "fused", source)


def test_every_barrier_is_needed_without_tensor_cores() -> None:
    spec = replace(shipped("cross_attention"), q_heads=None, kv_heads=None)
    assert choose(spec, ARCHES["sm_75"], "fused").schedule.name == "fused_simt"
    check_all(spec, "fused", emitted(spec, "fused", "sm_75"))


def check_all(spec: AttentionSpec, schedule: str, source: Program) -> None:
    own_test = second_look(source)
    excluded = (own_test, *(without_tiles(source) if reads_positions(spec) else ()))
    places = [place for place in synchronizations(source) if place.start() not in excluded]
    program = removable(source, places)
    kernels = [compile_text(spec, schedule, program, seed) for seed in (0, 5)]
    assert unnoticed(source, places, kernels[0].kernel.library, lambda: finding(spec, kernels)) == []


def second_look(source: Program) -> int:
    """Where a block that has classified as many tiles as it has threads waits before it classifies the next; -1 if nowhere."""
    return source.text.find("__syncthreads();  // all threads have read the words")


def test_the_barrier_before_a_second_look_is_needed() -> None:
    """64 threads, so 1024 keys at once: none of these are the rows' own, and nothing else holds back who is done with them."""
    inputs = {"row_ids": ("int32", ("batch", "q_len")), "key_ids": ("int32", ("batch", "kv_len"))}
    spec = define(dtype="fp16", head_dim=16, mask="row_ids[b, q] == key_ids[b, k]", inputs=inputs)
    spec = replace(spec, kernel=KernelRequest("fused", block_q=32, block_kv=16, stages=1, warps=2))
    source = emitted(spec, "fused")
    problem = sample(spec, Shape(1, 1, 1, 40, 2100), 0)
    problem = replace(
        problem, inputs={"row_ids": np.ones((1, 40), np.int32), "key_ids": (np.arange(2100)[None] >= 1100).astype(np.int32)}
    )
    assert compare(*call(compile_text(spec, "fused", source, 0), problem), truth(spec, problem)).passed
    (place,) = [p for p in synchronizations(source) if p.start() == second_look(source)]
    text = f"{source.text[: place.start()]}if (begin < THREADS) {source.text[place.start() :]}"  # before the first look only
    with pytest.raises(EmulationError, match="race") as error:
        call(compile_text(spec, "fused", replace(source, text=text), 0), problem)
    assert "TILES" in str(error.value) or "visited" in str(error.value)


def test_the_ladder_has_no_other_synchronization() -> None:
    """The mutations cover every synchronization of these kernels. Those of decode and of the schedules of Hopper have
    mutations of their own."""
    for name, source in ladder().items():
        if set(name.removesuffix(".cu").split("_")) & {"decode", *HOPPER_SCHEDULES}:
            continue
        others = re.findall(r"__sync\w+\(|bar\.\w+|mbarrier\.\w+|cp\.async\.wait\w*", source.text)
        known = {"__syncthreads(", "__syncwarp(", "cp.async.wait_group"}
        assert set(others) <= known, name


def test_a_kernel_that_may_start_early_waits_for_the_kernels_before_it() -> None:
    source = emitted(shipped("gpt2"), "decode", "sm_90a")
    assert [entry.early for entry in source.kernels] == [True] * 2
    wait = "wait_for_kernels_before();"
    calls = [match.start() for match in re.finditer(re.escape(wait), source.text)]
    assert len(calls) == 2
    problem = solved(shipped("gpt2"), Shape(1, 1, 1, 4, 1100))
    for at, entry in zip(calls, source.kernels, strict=True):
        changed = replace(source, text=source.text[:at] + source.text[at + len(wait) :])
        with pytest.raises(EmulationError, match="touched before the kernels before this one") as raised:
            is_right(compile_text(shipped("gpt2"), "decode", changed, arch="sm_90a"), *problem)
        assert (raised.value.kind, raised.value.kernel) == ("early access", entry.name)
