"""The fused_mma backward: its tiles, its barriers and its registers; tests of all schedules have the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from attngen import define
from attngen.backward import CompiledBackward
from attngen.device.arrays import view
from attngen.device.cuda.compiler import compile_text
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.plan import ARCHES, Plan
from attngen.plan.tile import Tile
from attngen.reference.compare_gradients import GradientTruth, compare_gradients, gradient_truth
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.schedules.fused_mma import backward_plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from attngen.spec.gradient import QKV, differentiable, gradient_argument
from tests import tiers
from tests.harness import compiled, gradients, shipped, spills, wrong_gradients
from tests.left_out import first_finding, removable, unnoticed

LENGTHS = (Shape(1, 1, 1, 33, 200), Shape(2, 4, 2, 65, 130), Shape(1, 2, 2, 300, 40))
MASKS = {
    "none": {},
    "causal": {"mask": "causal"},
    "bottom_right": {"mask": "k <= q + kv_len - q_len - 3"},
    "window": {"mask": "causal and q - k < 20"},
    "dilated": {"mask": "(q - k) % 3 == 0 and k < 90"},
}
SCORES = {
    "softcap": {"score": "softcap(5.0)"},
    "alibi": {"score": "s + slopes[h] * (k - q)", "inputs": {"slopes": ("fp32", ("q_heads",))}},
    "no_s": {"score": "x[k]", "inputs": {"x": ("fp32", ("kv_len",))}},
    "factor": {"score": "2.0 * s"},
    "sink": {"sink": "0.5"},
    "sigmoid": {"normalize": "sigmoid", "score": "s - 1.0"},
    "no_normalization": {"normalize": "none", "mask": "causal", "score": "s * s"},
}
HEADS = ((64, 64), (128, 128), (80, 80), (40, 24), (16, 72), (192, 128))


@pytest.mark.quick
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(HEADS, quick=[(40, 24)], one_of=2))
@pytest.mark.parametrize("dtype", tiers.cases(["fp16", "bf16", "fp32"], quick=["fp16"]))
def test_head_sizes_and_lengths(head_dim: int, head_dim_v: int, dtype: str) -> None:
    """dQ is added up in global memory; in rows of low scores the weights of keys past the end would overflow."""
    spec = define(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True)
    kernel = compiled(spec, "fused")
    plan = kernel.gradients(deterministic=False).plan
    wide = dtype == "fp32" and head_dim > 128  # no registers for sums of which each number is two
    assert (plan.schedule.name, plan.own.dq) == ("fused_mma_backward", "own kernel" if wide else "additions")
    for seed, shape in enumerate(LENGTHS):
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=False), shape
    assert not wrong_gradients(kernel, of_low_scores(spec, Shape(1, 1, 1, 100, 70)), deterministic=False)


def of_low_scores(spec: AttentionSpec, shape: Shape) -> Sample:
    """A problem whose scores are far below 0, the score of the zeros past the end."""
    problem = sample(spec, shape)
    q, k = np.abs(from_storage(problem.q)) + 8.0, -np.abs(from_storage(problem.k)) - 2.0
    return replace(problem, q=round_to_storage(q, spec.dtype), k=round_to_storage(k, spec.dtype))


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEADS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_head_sizes_and_lengths_of_two_kernels(head_dim: int, head_dim_v: int, dtype: str) -> None:
    kernel = compiled(define(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", lse=True), "fused")
    for seed, shape in enumerate(LENGTHS):
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=True), shape


@pytest.mark.parametrize("dtype", tiers.cases(["fp16", "bf16", "fp32"], quick=["bf16"]))
@pytest.mark.parametrize("q_len", tiers.cases([1, 200], quick=[1]))
def test_one_key_has_gradients_of_rounding_errors_alone(dtype: str, q_len: int) -> None:
    """Its weight is 1 whatever its score: dP and delta are sums of the same terms in different orders, P = exp(s - s)."""
    assert not wrong_gradients(
        compiled(define(dtype=dtype, head_dim=32), "fused"), Shape(1, 2, 1, q_len, 1), deterministic=True
    )


@pytest.mark.long
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_masks(mask: str, dtype: str) -> None:
    kernel = compiled(define(dtype=dtype, head_dim=32, **MASKS[mask]), "fused")
    one_row = (Shape(1, 2, 1, 1, 200),) if mask == "none" else ()
    for seed, shape in enumerate((*LENGTHS, Shape(1, 6, 2, 70, 150), *one_row)):
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=dtype == "fp32"), shape


@pytest.mark.long
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_scores(score: str, dtype: str) -> None:
    kernel = compiled(define(dtype=dtype, head_dim=32, **SCORES[score]), "fused")
    for seed, shape in enumerate((Shape(1, 2, 1, 70, 150), Shape(1, 2, 2, 130, 33))):
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=dtype == "fp32"), shape


def of_tile(
    spec: AttentionSpec, tile: Tile, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_80", deterministic: bool = True
) -> Plan:
    """The plan of all gradients for a tile that is not the preferred one."""
    monkeypatch.setattr(backward_plan, "tiles", lambda facts, arch: (tile,))
    # a spec of its own name: plans are remembered
    own = replace(spec, name=f"{spec.name}_{tile.block_q}_{tile.stages}_{tile.warps}")
    wanted = (*QKV, *differentiable(spec))
    return choose(own, ARCHES[arch], "fused", direction="backward", wanted=wanted, deterministic=deterministic)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a backward, the forward's results among them, and the gradients in float64."""

    arrays: dict[str, Any]
    truth: GradientTruth


def call_of(spec: AttentionSpec, plan: Plan, shape: Shape) -> Call:
    problem = sample(spec, shape)
    loss = sample_loss(spec, problem)
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    saved = compiled(spec, "fused").saving().run({n: view(array, n) for n, array in inputs.items()}, {})
    truth = gradient_truth(spec, problem, loss, plan.wanted)
    return Call(inputs | {n: saved[n] for n in plan.saved} | {"dout": loss.dout}, truth)


def backward_of(spec: AttentionSpec, plan: Plan, program: Program, seed: int) -> CompiledBackward:
    """A program as a backward, whose text may be modified."""
    device = EmulatedDevice(checked=True, seed=seed, arch=plan.arch.name)
    return CompiledBackward(spec, plan, device.compile(program), device)


def run(backward: CompiledBackward, calls: list[Call]) -> list[dict[str, Any]]:
    """The gradients of each call; what a program does not write stays NaN."""
    results = []
    for call in calls:
        arrays = dict(call.arrays)
        for name in backward.plan.wanted:
            arrays[gradient_argument(name)] = np.empty_like(arrays[name])
            arrays[gradient_argument(name)].view(np.uint8)[...] = 0xFF
        results.append(backward.run({n: view(array, n) for n, array in arrays.items()}, {}))
    return results


def are_right(found: list[dict[str, Any]], calls: list[Call]) -> bool:
    compared = (compare_gradients(f, c.truth).values() for f, c in zip(found, calls, strict=True))
    return all(one.passed for gradients in compared for one in gradients)


def finding(backwards: list[CompiledBackward], calls: list[Call], right: list[dict[str, Any]]) -> str:
    """How backwards are noticed to be wrong: the kind of finding, or "" if they are not. Every run has the same bits."""

    def is_same(backward: CompiledBackward) -> bool:
        found = zip(run(backward, calls), right, strict=True)
        return all(f[n].tobytes() == r[n].tobytes() for f, r in found for n in backward.plan.wanted)

    return first_finding(partial(is_same, backward) for backward in backwards)


SYNCHRONIZATION = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|cp_async_wait<\d>\(\);|(?<!void )cp_async_commit\(\);")
SECOND_LOOK = "__syncthreads();  // all threads have read the words"  # needed only with more tiles than a block has threads
# Sums of rows, split operands, no softmax, tiles that are classified one by one; and gradients of captured tensors.
SYNCHRONIZED = {
    "gpt2": shipped("gpt2"),
    "split": define(dtype="fp32", head_dim=32, mask="causal"),
    "retention": shipped("retention"),
    "classified": define(dtype="fp16", head_dim=16, mask="(q - k) % 50 < 20 and q >= k"),
    "distance": define(
        dtype="fp16", head_dim=16, mask="causal", score="s * x[clamp(q - k, 0, 30)] + x[clamp(k - q, -20, 0) + 20]",
        inputs={"x": ("fp32", (31,))},
    ),
    "sink and key": define(
        dtype="fp16", head_dim=16, mask="causal", score="s * x[k]", sink="y[h]",
        inputs={"x": ("fp32", ("kv_len",)), "y": ("fp32", ("heads",))},
    ),
}  # fmt: skip
# Two query heads for a head of keys; keys without a row that reads them, and rows without keys: blocks without tiles.
SHAPES = (Shape(1, 2, 1, 200, 200), Shape(1, 1, 1, 30, 200), Shape(1, 1, 1, 200, 0))


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_every_barrier_is_needed(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SYNCHRONIZED[name]
    plan = of_tile(spec, Tile(32, 32, stages, 2), monkeypatch)
    program = emit(spec, plan)
    calls = [call_of(spec, plan, shape) for shape in SHAPES]
    right = run(backward_of(spec, plan, program, 0), calls)
    places = [p for p in SYNCHRONIZATION.finditer(program.text) if not program.text.startswith(SECOND_LOOK, p.start())]
    mutant = removable(program, places)
    mutants = [backward_of(spec, plan, mutant, seed) for seed in (0, 5)]
    assert unnoticed(program, places, mutants[0].kernel.library, lambda: finding(mutants, calls, right)) == []


# Warps that have keys of their own, two and four that share them, the last with dQ in chunks; additions of one number, or four.
ADDED = {
    "alone": (define(dtype="fp16", head_dim=32, mask="(q - k) % 50 < 20 and q >= k"), Tile(64, 64, 1, 2), "sm_80"),
    "two": (define(dtype="bf16", head_dim=32, mask="causal"), Tile(64, 64, 2, 4), "sm_90a"),
    "four": (define(dtype="fp16", head_dim=128, mask="causal"), Tile(64, 32, 1, 4), "sm_80"),
    "split": (define(dtype="fp32", head_dim=32, mask="causal"), Tile(64, 64, 2, 2), "sm_90a"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADDED)
def test_every_barrier_of_additions_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tile, arch = ADDED[name]
    plan = of_tile(spec, tile, monkeypatch, arch, deterministic=False)
    assert plan.own.dq == "additions"
    program = emit(spec, plan)
    calls = [call_of(spec, plan, shape) for shape in SHAPES]
    places = [p for p in SYNCHRONIZATION.finditer(program.text) if not program.text.startswith(SECOND_LOOK, p.start())]
    mutant = removable(program, places)
    mutants = [backward_of(spec, plan, mutant, seed) for seed in (0, 5)]

    def is_right(backward: CompiledBackward) -> bool:
        return are_right(run(backward, calls), calls)

    def noticed() -> str:
        return first_finding(partial(is_right, backward) for backward in mutants)

    assert unnoticed(program, places, mutants[0].kernel.library, noticed) == []


@pytest.mark.long
@pytest.mark.parametrize("tile", [Tile(128, 128, 1, 4), Tile(64, 64, 2, 4), Tile(64, 64, 1, 2), Tile(16, 16, 2, 1)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_tile_in_every_order_of_threads(tile: Tile, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = define(dtype=dtype, head_dim=32, mask="(q - k) % 5 != 1 and q >= k", score="softcap(5.0)")
    plan = of_tile(spec, tile, monkeypatch)
    calls = [call_of(spec, plan, Shape(1, 4, 2, 150, 170))]
    found = [run(backward_of(spec, plan, emit(spec, plan), seed), calls) for seed in (0, 1, 2)]
    assert are_right(found[0], calls)
    for name in QKV:
        assert len({one[name].tobytes() for (one,) in found}) == 1, name


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_what_is_not_finite_reaches_the_pairs_that_see_it(dtype: str) -> None:
    """Elements that are not finite are left out of the products of a partial tile too."""
    spec = define(dtype=dtype, head_dim=16, mask="causal", lse=True)
    kernel = compiled(spec, "fused")
    problem = sample(spec, Shape(1, 1, 1, 40, 40))
    loss = sample_loss(spec, problem)
    clean = gradients(kernel, problem, loss)
    for bad in (np.nan, np.inf):
        dout = loss.dout.copy()
        dout[..., 20, 3] = round_to_storage(np.float32(bad), spec.dtype)
        found = {n: from_storage(a) for n, a in gradients(kernel, problem, replace(loss, dout=dout)).items()}
        expected = {n: from_storage(a) for n, a in clean.items()}
        assert not np.isfinite(found["v"][..., :21, 3]).any()
        for columns in (slice(0, 3), slice(4, 16)):
            assert np.array_equal(found["v"][..., columns], expected["v"][..., columns])
        assert np.array_equal(found["v"][..., 21:, :], expected["v"][..., 21:, :])
        rows = np.arange(40) != 20
        assert np.array_equal(found["q"][..., rows, :], expected["q"][..., rows, :])
        assert np.isnan(found["q"][..., 20, :]).all()
        assert np.array_equal(found["k"][..., 21:, :], expected["k"][..., 21:, :])


@pytest.mark.parametrize(
    ("dtype", "arch"),
    tiers.cases([("bf16", "sm_80"), ("fp16", "sm_90a"), ("fp32", "sm_80"), ("fp32", "sm_90a")], one_of=2),
)
@pytest.mark.parametrize(("head_dim", "dq"), [(64, "additions"), (80, "additions"), (128, "additions"), (128, "own kernel")])
def test_nothing_is_spilled(dtype: str, head_dim: int, dq: str, arch: str) -> None:
    spec = define(dtype=dtype, head_dim=head_dim, mask="causal")
    plan = choose(spec, ARCHES[arch], "fused", direction="backward", deterministic=dq == "own kernel")
    assert (plan.schedule.name, plan.own.dq) == ("fused_mma_backward", dq)
    for entry in compile_text(emit(spec, plan)).resources():
        assert not spills(entry)


@pytest.mark.parametrize("wanted", [("q",), ("v",), ("k",), ("k", "v"), QKV])
def test_what_is_not_wanted_is_not_launched(wanted: tuple[str, ...]) -> None:
    spec = define(dtype="fp16", head_dim=64)
    plan = choose(spec, ARCHES["sm_80"], "fused", direction="backward", wanted=wanted)
    launched = [entry.name.removeprefix(f"{spec.name}_backward_") for entry in emit(spec, plan).kernels]
    expected = {("q",): ["delta", "dq"], ("v",): ["dv"], ("k",): ["delta", "dk"], ("k", "v"): ["delta", "dk_dv"]}
    expected[QKV] = ["delta", "dk_dv", "convert_dq"]
    assert launched == expected[wanted]
