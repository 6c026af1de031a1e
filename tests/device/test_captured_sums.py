"""Gradients of captured tensors by schedules that keep no scores in memory: every class of access, any order of threads."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import AttentionSpec
from attngen.backward import CompiledBackward
from attngen.device.cuda.compiler import compile_text as compile_cubin
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.plan.captured_sums import term_sums
from attngen.plan.facts import facts_of
from attngen.reference.compare_gradients import gradient_truth
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import compiled, gradients, spills, wrong_gradients

SHAPE = Shape(2, 4, 2, 37, 70)
# Architectures by the schedule that they have: on ordinary units, and on tensor cores.
ARCH, TENSOR_CORES = "sm_75", "sm_80"
SCHEDULES = {ARCH: "fused_simt_backward", TENSOR_CORES: "fused_mma_backward"}
X = {"x": ("fp32", ("kv_len",))}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("rows", {"score": "alibi(x)", "inputs": {"x": ("fp32", ("heads",))}}),
    "another head": ("rows", {"score": "s * x[h] + x[h + 1]", "inputs": {"x": ("fp32", (5,))}}),
    "param": ("rows", {"score": "s * x", "params": {"x": ("float", 0.7)}}),
    "scale": ("rows", {"scale": "0.1 * x", "score": "softcap(5.0)", "params": {"x": ("float", 1.3)}}),
    "row": ("rows", {"score": "softcap(5.0) + x[q]", "inputs": {"x": ("fp16", ("q_len",))}}),
    "sink": ("rows", {"sink": "x[h]", "inputs": {"x": ("bf16", ("heads",))}}),
    "score and sink": ("rows", {"score": "s * x[h]", "sink": "x[h] * x[h]", "inputs": {"x": ("fp32", ("heads",))}}),
    "key": ("keys", {"score": "s * x[b, k] + x[b, k]", "inputs": {"x": ("bf16", ("batch", "kv_len"))}}),
    "pair": ("pairs", {"score": "s + x[h, q, k]", "inputs": {"x": ("fp16", ("heads", "q_len", "kv_len"))}}),
    "distance": ("words", {"score": "s + x[clamp(q - k, 0, 30)]", "inputs": {"x": ("fp32", (31,))}}),
    "data": (
        "words",
        {"score": "s + x[h, clamp(i[k], 0, 19)]", "inputs": {"x": ("fp32", ("heads", 20)), "i": ("int32", ("kv_len",))}},
    ),
    "rows and keys": ("words", {"score": "s + x[q] - x[k]", "inputs": X}),
    "sink of a row": ("words", {"score": "s + x[k]", "sink": "x[q] + x[0]", "inputs": X}),
    "not differentiable": ("", {"score": "s + floor(x[h])", "inputs": {"x": ("fp32", ("heads",))}}),
}
QUICK = ["score and sink", "data"]


def spec_of(case: str, **more: Any) -> AttentionSpec:
    return attngen.define(**{"dtype": "fp32", "head_dim": 16, "mask": "causal", **CASES[case][1], **more})


@pytest.mark.parametrize("case", tiers.cases(list(CASES), quick=QUICK))
def test_every_class_of_access(case: str) -> None:
    spec, place = spec_of(case), CASES[case][0]
    assert {s.place for s in term_sums(facts_of(spec, ("x",)))} == ({place} if place else set())
    assert_right_in_any_order_of_threads(spec, ARCH)


ON_TENSOR_CORES = {f"{case}, {dtype}": (case, dtype) for case in CASES for dtype in ("fp16", "fp32")}


@pytest.mark.parametrize("name", tiers.cases(list(ON_TENSOR_CORES), one_of=8))
def test_every_class_of_access_on_tensor_cores(name: str) -> None:
    case, dtype = ON_TENSOR_CORES[name]
    assert_right_in_any_order_of_threads(spec_of(case, dtype=dtype), TENSOR_CORES)


def assert_right_in_any_order_of_threads(spec: AttentionSpec, arch: str) -> None:
    """The gradients are right, and that of the captured tensor has the same bits in two orders."""
    kernel, wanted = compiled(spec, "fused", arch), ("q", "k", "v", "x")
    assert kernel.gradients(wanted).plan.schedule.name == SCHEDULES[arch]
    assert not wrong_gradients(kernel, SHAPE, wanted)
    problem = sample(spec, SHAPE)
    loss = sample_loss(spec, problem)
    found = [gradients(one, problem, loss, wanted) for one in (kernel, compiled(spec, "fused", arch, seed=1))]
    assert len({np.asarray(one["x"]).tobytes() for one in found}) == 1


OF_ALL = {"slopes": ("fp32", ("heads",)), "table": ("fp32", ("heads", 31)), "sinks": ("fp32", ("heads",))}


@pytest.mark.parametrize(("arch", "dtype"), tiers.cases(product(SCHEDULES, ["fp16", "bf16"]), quick=[(ARCH, "bf16")]))
def test_sums_do_not_have_the_rounding_of_o(arch: str, dtype: str) -> None:
    """Allowed are the errors of fp32 alone, although Q, K, V and O have 16 bits."""
    spec = attngen.define(
        dtype=dtype, head_dim=16, mask="causal", inputs=OF_ALL, sink="sinks[h]", lse=True,
        score="s + slopes[h] * (k - q) + table[h, clamp(q - k, 0, 30)]",
    )  # fmt: skip
    kernel, wanted = compiled(spec, "fused", arch), tuple(OF_ALL)
    assert kernel.gradients(wanted).plan.own.delta == "sums over keys"
    for seed in range(3):
        problem = sample(spec, SHAPE, seed)
        exact = gradient_truth(spec, problem, sample_loss(spec, problem, seed), wanted)
        assert not wrong_gradients(kernel, problem, wanted, exact, seed)


@pytest.mark.parametrize(
    ("wanted", "delta"), [(("x",), "sums over keys"), (("q", "sinks"), "O and dO"), (("q", "k"), "O and dO"), (("v",), "")]
)
def test_delta_is_a_sum_over_keys_where_its_error_would_show(wanted: tuple[str, ...], delta: str) -> None:
    inputs = {"x": ("fp32", ("heads",)), "sinks": ("fp16", ("heads",))}
    spec = attngen.define(dtype="fp16", head_dim=64, score="s * x[h]", sink="sinks[h]", inputs=inputs)
    for arch in (ARCH, TENSOR_CORES):
        plan = choose(spec, ARCHES[arch], "fused", direction="backward", wanted=wanted)
        assert (plan.own.delta, "out" in plan.saved) == (delta, delta == "O and dO")


@pytest.mark.parametrize("arch", tiers.cases(list(SCHEDULES), quick=[TENSOR_CORES]))
def test_gradients_of_sinks_alone_visit_no_keys(arch: str) -> None:
    spec = attngen.define(dtype="fp16", head_dim=16, mask="causal", sink="sinks[h]", inputs={"sinks": ("fp16", ("heads",))})
    kernel = compiled(spec, "fused", arch)
    assert "while (tile < tile_end)" not in kernel.gradients(("sinks",)).source.text
    assert not wrong_gradients(kernel, SHAPE, ("sinks",))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_large_sinks_have_the_rounding_of_the_forward(dtype: str) -> None:
    """Forward and backward divide a sink by the scale: the product with it differs from the sink by more than 1."""
    inputs = {"sinks": (dtype, ("heads",))}
    spec = attngen.define(dtype="bf16", head_dim=128, mask="causal", sink="sinks[h]", lse=True, inputs=inputs)
    kernel, problem = compiled(spec, "fused", TENSOR_CORES), sample(spec, SHAPE)
    loss, scale = sample_loss(spec, problem), np.float32(128**-0.5)
    large = (np.arange(0x4C00, 0x4D00, dtype=np.uint32) << 16).view(np.float32)  # numbers of bf16 above 2^25
    sinks = large[large / scale * scale != large][:4]
    problem.inputs["sinks"][...] = round_to_storage(sinks, spec.input("sinks").dtype)
    found = from_storage(gradients(kernel, problem, loss, ("sinks",))["sinks"])
    assert loss.dlse is not None
    assert np.allclose(found, loss.dlse.sum((0, 2)), rtol=1e-2)  # they have all of the weight


@pytest.mark.parametrize("arch", tiers.cases(list(SCHEDULES), quick=[TENSOR_CORES]))
def test_pairs_of_their_own_write_the_gradient_itself(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the tensor is broadcast, which only the call says: then their terms are in a workspace."""
    bound, bind = [], CompiledBackward.bind
    monkeypatch.setattr(CompiledBackward, "bind", lambda self, *call: bound.append(bind(self, *call)) or bound[-1])
    spec = attngen.define(
        dtype="fp16", head_dim=16, score="s * x[b, h, q, k]",
        inputs={"x": ("fp32", ("batch", "heads", "q_len", "kv_len"))},
    )  # fmt: skip
    kernel, found = compiled(spec, "fused", arch), {}
    for shape in ((2, 4, 33, 47), (1, 4, 33, 47), (2, 1, 1, 47), (2, 4, 33, 1)):
        problem = sample(spec, Shape(2, 4, 2, 33, 47))
        problem.inputs["x"] = np.ascontiguousarray(problem.inputs["x"][tuple(slice(n) for n in shape)])
        assert not wrong_gradients(kernel, problem, ("x",))
        assert bound[-1].arrays["pairs_of_x"].shape == ((0, 0, 0, 0) if shape == (2, 4, 33, 47) else (2, 4, 33, 47))
        found[shape] = gradients(kernel, problem, sample_loss(spec, problem), ("x",))["x"].shape
    assert all(of == shape for shape, of in found.items())


@pytest.mark.long
@pytest.mark.parametrize("case", [*QUICK, "distance", "rows and keys"])
@pytest.mark.parametrize("others", [(), ("q",), ("k",), ("v",)])
def test_captured_gradients_need_no_others(case: str, others: tuple[str, ...]) -> None:
    assert not wrong_gradients(compiled(spec_of(case), "fused", TENSOR_CORES), SHAPE, (*others, "x"))


@pytest.mark.parametrize("arch", tiers.cases(list(SCHEDULES), quick=[ARCH]))
@pytest.mark.parametrize("case", tiers.cases(["head", "row", "key", "pair", "data"], quick=["pair"]))
def test_a_broadcast_tensor_has_a_gradient_of_its_own_shape(case: str, arch: str) -> None:
    spec = spec_of(case, normalize="sigmoid")
    problem = sample(spec, SHAPE)
    whole = problem.inputs["x"]
    for axis, dim in enumerate(spec.input("x").dims):
        if isinstance(dim, str):
            one = {**problem.inputs, "x": np.ascontiguousarray(np.take(whole, [0], axis))}
            assert not wrong_gradients(compiled(spec, "fused", arch), replace(problem, inputs=one), ("x",)), axis


@pytest.mark.parametrize("arch", tiers.cases(list(SCHEDULES), quick=[ARCH]))
@pytest.mark.parametrize("case", tiers.cases(["head", "sink", "key", "pair", "data"], quick=["sink"]))
def test_rows_without_keys_and_calls_without_rows(case: str, arch: str) -> None:
    kernel = compiled(spec_of(case, mask="k < q - 20"), "fused", arch)
    for q_len, kv_len in ((40, 40), (5, 0), (0, 5), (1, 1)):
        assert not wrong_gradients(kernel, Shape(1, 4, 2, q_len, kv_len), ("x",)), (q_len, kv_len)


@pytest.mark.parametrize("arch", tiers.cases(list(SCHEDULES), quick=[ARCH]))
def test_excluded_pairs_leave_no_trace(arch: str) -> None:
    spec = attngen.define(
        dtype="fp32", head_dim=16, mask="q >= k", score="s * x[h] * extra[q, k]",
        inputs={"x": ("fp32", ("heads",)), "extra": ("fp32", ("q_len", "kv_len"))},
    )  # fmt: skip
    kernel, problem = compiled(spec, "fused", arch), sample(spec, Shape(1, 2, 1, 40, 40))
    loss = sample_loss(spec, problem)
    clean = gradients(kernel, problem, loss, ("x", "extra"))
    problem.inputs["extra"][np.triu_indices(40, 1)] = np.nan
    found = gradients(kernel, problem, loss, ("x", "extra"))
    assert np.array_equal(found["x"], clean["x"])
    assert np.array_equal(found["extra"], clean["extra"])
    assert not np.triu(found["extra"], 1).any()


# Also in fp32 on tensor cores, and at the largest head sizes
WIDE = ["score and sink", "another head", "pair", "distance", "not differentiable"]
RESOURCES = {
    f"{case}, {dtype}, {head_dim}, {arch}": (case, dtype, head_dim, arch)
    for case in CASES
    for dtype, head_dim, arch in (
        ("fp32", 64, ARCH), ("bf16", 128, TENSOR_CORES),
        *([("fp32", 64, TENSOR_CORES), ("fp32", 128, TENSOR_CORES), ("fp16", 256, TENSOR_CORES)] if case in WIDE else []),
    )
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", tiers.cases(list(RESOURCES), one_of=9))
def test_nothing_is_spilled(name: str) -> None:
    """Two numbers at most where the sums of dK, dV or dQ leave nearly no register."""
    case, dtype, head_dim, arch = RESOURCES[name]
    most = 8 if (dtype, head_dim) in {("fp32", 128), ("fp16", 256)} else 0
    spec = spec_of(case, head_dim=head_dim, dtype=dtype)
    plan = choose(spec, ARCHES[arch], "fused", direction="backward", wanted=("q", "k", "v", "x"))
    assert plan.schedule.name == SCHEDULES[arch]
    for resources in compile_cubin(emit(spec, plan)).resources():
        assert not spills(resources, most)


def test_a_head_size_without_room_for_the_sums_is_left_to_ordinary_units() -> None:
    spec = spec_of("head", head_dim=256)
    plan = choose(spec, ARCHES[TENSOR_CORES], "fused", direction="backward", wanted=("q", "k", "v", "x"))
    assert plan.schedule.name == "fused_simt_backward"
    assert "registers a thread" in plan.decisions[0].because


def test_sums_in_words_are_rounded_once() -> None:
    """Terms of all magnitudes that cancel: the sum is the float nearest to the exact one, whatever their order."""
    spec = attngen.define(
        dtype="fp32", head_dim=8, normalize="none", score="s + x[clamp(i[k], 0, 2)]",
        inputs={"x": ("fp32", (3,)), "i": ("int32", ("kv_len",))},
    )  # fmt: skip
    kernel, rng = compiled(spec, "fused", ARCH), np.random.default_rng(0)
    problem = sample(spec, Shape(1, 1, 1, 1, 200))
    terms = np.float32(rng.standard_normal(100) * 2.0 ** rng.integers(-140, 120, 100))
    terms = rng.permutation(np.concatenate([terms, -terms[:99], [np.float32(1e-45)]]).astype(np.float32))
    problem.v[:], problem.inputs["i"][:] = 0.0, 1  # dS is dO . V
    problem.v[0, 0, :, 0] = terms
    dout = np.zeros((1, 1, 1, 8), np.float32)
    dout[..., 0] = 1.0
    arrays = problem.q, problem.k, problem.v
    found = kernel.backward(dout, *arrays, wanted=("x",), **problem.inputs)["x"]
    assert found[1] == np.float32(math.fsum(map(float, terms)))
    assert found[0] == found[2] == 0.0
    for value in (np.inf, -np.inf, np.nan):
        problem.v[0, 0, 5, 0] = value
        assert np.array_equal(kernel.backward(dout, *arrays, wanted=("x",), **problem.inputs)["x"][1], value, equal_nan=True)


@pytest.mark.parametrize("layout", ["words", "odd row", "odd address", "turned"])
def test_two_neighbouring_pairs_are_one_word_where_they_are_aligned(layout: str) -> None:
    """The kernel of rows reads and writes them at once, in full tiles; else one after the other."""
    inputs = {"x": ("fp16", ("batch", "heads", "q_len", "kv_len"))}
    spec = attngen.define(dtype="fp16", head_dim=16, score="s + x[b, h, q, k]", inputs=inputs)
    problem = sample(spec, Shape(1, 2, 1, 129, 137 if layout == "odd row" else 138))
    x = problem.inputs["x"]
    room = np.zeros((*x.shape[:-1], x.shape[-1] + 2), x.dtype)
    places = {"odd address": room[..., 1:-1], "turned": np.zeros(x.shape[::-1], x.dtype).T}
    problem.inputs["x"] = places.get(layout, x)
    problem.inputs["x"][...] = x
    assert not wrong_gradients(compiled(spec, "fused", TENSOR_CORES), problem, ("q", "x"))
