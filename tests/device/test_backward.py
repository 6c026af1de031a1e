"""Gradients on the emulated device, by every schedule that has a backward, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import PlanRefusal
from attngen.device.emulated import EmulatedDevice
from attngen.emit.manifest import from_manifest, to_manifest
from attngen.reference.compare_gradients import compare_gradients, gradient_truth
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.problems import Shape, sample
from attngen.schedules.backward import BACKWARD_SCHEDULES
from attngen.spec.dtypes import from_storage, round_to_storage
from attngen.spec.gradient import QKV, differentiable
from tests import tiers
from tests.harness import IN_16_BITS_AND_FP32, SMALL_PARAMS, compiled, gradients, small, wrong_gradients
from tests.hopper import HOPPER_SCHEDULES

# Those of Hopper compute 16 bits only, and have tests of their own.
SCHEDULES = tuple(dict.fromkeys(s.keyword for s in BACKWARD_SCHEDULES if s.keyword not in HOPPER_SCHEDULES))
ONE_IN_QUICK = tiers.cases(SCHEDULES, quick=["fused"])
SHARED = tiers.cases(SCHEDULES, quick=["naive"])  # for statements about equations and launches, whose text schedules share
# Naive has no tiles; its blocks have 128 rows, keys or elements.
LENGTHS = dict.fromkeys(SCHEDULES, ((7, 7), (100, 130))) | {"naive": ((7, 7), (130, 130), (13, 190))}


@pytest.mark.parametrize(
    ("name", "dtype"),
    tiers.cases(IN_16_BITS_AND_FP32, quick=[("retention", "fp32")], one_of=12),
)
def test_every_spec(name: str, dtype: str) -> None:
    spec, params = small(name, dtype, narrow=True), SMALL_PARAMS.get(name, {})
    for schedule in SCHEDULES:
        kernel = compiled(spec, schedule)
        for position, (q_len, kv_len) in enumerate(LENGTHS[schedule]):
            shape = Shape(batch=8 if q_len < 10 else 1, q_heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len)
            wanted = (*QKV, *differentiable(spec))
            assert not wrong_gradients(kernel, shape, wanted, seed=position, **params), (schedule, q_len, kv_len)


@pytest.mark.parametrize("schedule", ONE_IN_QUICK)
def test_the_order_of_threads_does_not_matter(schedule: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=16, mask="causal", score="softcap(5.0)", heads=(4, 2), lse=True)
    problem = sample(spec, Shape(1, 4, 2, 70, 90))
    found = [gradients(compiled(spec, schedule, seed=seed), problem, sample_loss(spec, problem)) for seed in (0, 1)]
    for name in "qkv":
        assert len({one[name].tobytes() for one in found}) == 1, name


@pytest.mark.parametrize("schedule", SHARED)
def test_of_a_number_and_nan_min_and_max_give_the_gradient_to_the_number(schedule: str) -> None:
    """log and sqrt of a negative score are NaN: O is that of the other operand, and so is the gradient."""
    scores = ("max(log(s), -3.0)", "min(1.0, sqrt(s))", "max(log(s), s)", "max(0.5 * s, s + 0.0 * sqrt(s))")
    score = f"where(h == 0, {scores[0]}, where(h == 1, {scores[1]}, where(h == 2, {scores[2]}, {scores[3]})))"
    kernel = compiled(attngen.define(dtype="fp32", head_dim=8, scale=1.0, score=score, normalize="none"), schedule)
    rows = np.zeros((2, 1, 4, 2, 8), np.float32)
    rows[0, :, :, 0, 0] = 1  # q, for which s is the first element of a key
    rows[1, :, :, :, 0] = -2.0, 0.25  # k
    q, k = rows[0][:, :, :1], rows[1]
    v = np.broadcast_to(np.eye(2, 8, dtype=np.float32), k.shape).copy()
    np.testing.assert_allclose(kernel(q, k, v)[0, :, 0, :2], [[-3, np.log(0.25)], [1, 0.5], [-2, 0.25], [-1, 0.25]], rtol=1e-6)
    found = kernel.backward(np.ones_like(q), q, k, v)["k"][0, :, :, 0]
    np.testing.assert_allclose(found, [[0, 4], [0, 1], [1, 1], [0.5, 1]], rtol=1e-6)


@pytest.mark.parametrize("schedule", SHARED)
def test_only_what_is_wanted_is_computed(schedule: str) -> None:
    spec = attngen.define(dtype="fp32", head_dim=16, mask="causal")
    problem, kernel = sample(spec, Shape(1, 2, 1, 20, 20)), compiled(spec, schedule)
    loss = sample_loss(spec, problem)
    every = gradients(kernel, problem, loss)
    assert list(every) == ["q", "k", "v"]
    for wanted in (("v",), ("q",), ("v", "k")):
        found = gradients(kernel, problem, loss, wanted)
        assert set(found) == set(wanted)
        assert all(np.array_equal(found[n], every[n]) for n in wanted)
    written = {t.name for t in kernel.gradients(("v",)).source.of_role("output")}
    assert written == {"dV"}


@pytest.mark.parametrize("schedule", ONE_IN_QUICK)
@pytest.mark.parametrize("normalize", tiers.cases(["softmax", "sigmoid", "none"], quick=["softmax"]))
def test_what_the_mask_excludes_leaves_no_trace(schedule: str, normalize: str) -> None:
    """NaN and infinity in keys, values, queries, gradients of O and biases that only excluded pairs read."""
    spec = attngen.define(
        dtype="fp32", head_dim=16, mask="q >= k and k < 20 and q < 30", score="softcap(3.0) + bias[q, k]", lse=True,
        inputs={"bias": ("fp32", ("q_len", "kv_len"))},
    )  # fmt: skip
    one = spec if normalize == "softmax" else replace(spec, normalize=normalize, lse=False)
    kernel = compiled(one, schedule)
    problem = sample(one, Shape(1, 2, 1, 40, 40))
    loss = sample_loss(one, problem)
    clean = gradients(kernel, problem, loss)
    problem.k[..., 20:30, :], problem.k[..., 30:, :] = np.nan, np.inf
    if "out" not in kernel.gradients().plan.saved:  # the forward's tiles of V multiply a weight of 0, and O is read
        problem.v[..., 20:30, :], problem.v[..., 30:, :] = np.inf, np.nan
    problem.q[..., 30:, :], loss.dout[..., 30:, :] = np.nan, np.inf
    problem.inputs["bias"][np.triu_indices(40, 1)] = np.nan
    found = gradients(kernel, problem, loss)
    for name in "qkv":
        assert np.array_equal(found[name], clean[name]), (normalize, name)
    assert not found["q"][..., 30:, :].any()
    assert not found["k"][..., 20:, :].any()


@pytest.mark.quick
@pytest.mark.parametrize("schedule", ONE_IN_QUICK)
def test_rows_without_keys_and_calls_without_rows(schedule: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=8, mask="k < q - 20", lse=True)
    kernel = compiled(spec, schedule)
    for batch, q_len, kv_len in ((0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 1, 1), (1, 40, 40)):
        problem = sample(spec, Shape(batch, 2, 2, q_len, kv_len))
        found = gradients(kernel, problem, sample_loss(spec, problem))
        assert not from_storage(found["q"])[:, :, :21].any()
        assert found["v"].shape == problem.v.shape


@pytest.mark.parametrize("schedule", ONE_IN_QUICK)
@pytest.mark.parametrize("dtype", tiers.cases(["fp16", "bf16", "fp32"], quick=["bf16"]))
def test_additive_masks_of_the_lowest_number(schedule: str, dtype: str) -> None:
    """Rows of which every key is at finfo.min have equal weights, as in torch; rows of which every key is at -inf have none."""
    spec = attngen.define(dtype=dtype, head_dim=16, score="s + extra[q, k]", inputs={"extra": (dtype, ("q_len", "kv_len"))})
    problem = sample(spec, Shape(2, 2, 2, 33, 40))
    lowest = {"fp16": -65504.0, "bf16": -3.3895e38, "fp32": -3.4028234e38}[dtype]
    extra = np.where(np.arange(40) > np.arange(33)[:, None] - 5, lowest, 0.0)
    extra[20:22] = -np.inf
    problem.inputs["extra"] = round_to_storage(extra, spec.dtype)
    assert not wrong_gradients(compiled(spec, schedule), problem)


@pytest.mark.parametrize("schedule", ONE_IN_QUICK)
def test_strides_and_layouts(schedule: str) -> None:
    """Q, K, V and dO as views, K broadcast over heads; a gradient lies in memory as its tensor does."""
    spec = attngen.define(dtype="fp16", head_dim=16, mask="causal")
    rng = np.random.default_rng(0)
    packed = round_to_storage(rng.standard_normal((2, 30, 3, 4, 16), dtype=np.float32), spec.dtype)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    k = np.broadcast_to(k[:, :1], k.shape)
    dout = np.broadcast_to(round_to_storage(rng.standard_normal(16), spec.dtype), q.shape)
    problem = replace(sample(spec, Shape(2, 4, 4, 30, 30)), q=q, k=k, v=v)
    found = gradients(compiled(spec, schedule), problem, Loss(dout))
    expected = gradient_truth(spec, problem, Loss(dout))
    assert all(one.passed for one in compare_gradients(found, expected).values())
    assert found["q"].swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("schedule", SHARED)
def test_scales_of_params_and_scores_that_do_not_read_s(schedule: str) -> None:
    scaled = attngen.define(dtype="fp32", head_dim=16, scale="0.1 * temperature", params={"temperature": ("float", None)})
    assert not wrong_gradients(compiled(scaled, schedule), Shape(1, 4, 2, 40, 50), temperature=1.7)
    constant = attngen.define(dtype="fp32", head_dim=16, score="x[k]", inputs={"x": ("fp32", ("kv_len",))})
    assert not wrong_gradients(compiled(constant, schedule), Shape(1, 4, 2, 40, 50))


def test_a_schedule_without_backward_is_refused() -> None:
    spec = attngen.define(dtype="fp16", head_dim=16)
    kernel = attngen.compile(spec, kernel="wgmma", device=EmulatedDevice(arch="sm_90a"))
    if "wgmma" not in SCHEDULES:
        with pytest.raises(PlanRefusal, match="the wgmma schedule has no backward"):
            kernel.gradients()


def test_arguments_of_a_call_are_checked() -> None:
    spec = attngen.define(dtype="fp32", head_dim=16)
    kernel, problem = compiled(spec, "naive"), sample(spec, Shape(1, 2, 1, 4, 5))
    dout = np.ones((1, 2, 4, 16), np.float32)

    def call(dout: Any, **named: Any) -> Any:
        return kernel.backward(dout, problem.q, problem.k, problem.v, **named)

    for bad, message in (
        ({"dout": dout[:, :1]}, r"`dout` is \[1, 1, 4, 16\]: dimension 1 is 1, expected q_heads = 2 as in `q`"),
        ({"dout": dout.astype(np.float16)}, "`dout` has elements of fp16; expected fp32"),
        ({"dout": dout, "dlse": dout[..., 0]}, "`dlse` was given, but the spec has no `output lse`"),
        ({"dout": dout, "wanted": ["x"]}, "`x` has no gradient"),
        ({"dout": dout, "stream": "0"}, "`stream` is '0'"),
    ):
        with pytest.raises(attngen.ArgumentError, match=message):
            call(**bad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_manifest_holds_all_of_it(schedule: str) -> None:
    program = compiled(small("retention"), schedule).gradients().source
    assert from_manifest(to_manifest(program), program.text) == program
    assert program.name == f"retention_{schedule}_backward"


# --- captured tensors and params --------------------------------------------------------------------------------------

EVERY_CLASS = {
    "score": """s * x[b, q, h] + tanh(s) * x_key[h, k] + x_pair[b, h, q, k] + x_head[h] * (k - q)
        + x_distance[h, clamp(k - q, -9, 9) + 9] + x_data[k // 3] * x_number + temp * x_head[h]""",
    "sink": "x_sink[h] * temp + x_row[q]",
    "scale": "0.25 * grow",
    "mask": "q - k < 20",
    "inputs": {
        "x": ("fp32", ("batch", "q_len", "heads")), "x_key": ("bf16", ("heads", "kv_len")),
        "x_pair": ("fp16", ("batch", "heads", "q_len", "kv_len")), "x_head": ("fp32", ("heads",)),
        "x_distance": ("fp32", ("heads", 19)), "x_data": ("fp32", ("kv_len",)), "x_number": ("fp32", ()),
        "x_sink": ("bf16", ("heads",)), "x_row": ("fp32", ("q_len",)),
    },
    "params": {"temp": ("float", None), "grow": ("float", None)},
}  # fmt: skip
EVERY_NAME = (*EVERY_CLASS["inputs"], *EVERY_CLASS["params"])


def every_class(**changes: Any) -> attngen.AttentionSpec:
    return attngen.define(**{"dtype": "fp32", "head_dim": 16, "lse": True, **EVERY_CLASS, **changes})


@pytest.mark.parametrize("schedule", ONE_IN_QUICK)
def test_captured_tensors_of_every_class_and_params(schedule: str) -> None:
    spec = every_class()
    kernel = compiled(spec, schedule)
    problem = sample(spec, Shape(2, 4, 2, 33, 47))
    problem.inputs["x_head"] *= 0.05
    loss, numbers = sample_loss(spec, problem), {"temp": 0.7, "grow": 1.2}
    found = gradients(kernel, problem, loss, ("q", *EVERY_NAME), **numbers)
    expected = gradient_truth(spec, problem, loss, ("q", *EVERY_NAME), numbers, kernel.gradients(("q", *EVERY_NAME)).plan.saved)
    assert [one for one in compare_gradients(found, expected).values() if not one.passed] == []
    assert {n: found[n].shape for n in ("x_number", "temp")} == {"x_number": (), "temp": ()}
    assert found["x_key"].dtype == problem.inputs["x_key"].dtype
    others = gradients(compiled(spec, schedule, seed=1), problem, loss, ("q", *EVERY_NAME), **numbers)
    assert all(np.array_equal(others[n], found[n]) for n in found), "the same bits in any order of threads"


def test_auto_leaves_captured_tensors_to_a_program_of_their_own() -> None:
    """Where hopper has the other gradients: both programs together are right, in the order of `wanted`."""
    spec, wanted = small("alibi", "bf16"), ("slopes", "q", "k", "v")
    kernel = compiled(spec, "auto", "sm_90a")
    assert kernel.gradient_parts(wanted) == (("q", "k", "v"), ("slopes",))
    assert kernel.gradient_parts(("slopes",)) == (("slopes",),)
    assert compiled(spec, "fused", "sm_90a").gradient_parts(wanted) == (wanted,)
    assert compiled(spec, "auto", "sm_80").gradient_parts(wanted) == (wanted,)
    programs = [kernel.gradients(part) for part in kernel.gradient_parts(wanted)]
    assert [one.plan.keyword for one in programs] == ["hopper", "fused"]
    problem = sample(spec, Shape(1, 4, 2, 70, 90))
    loss = sample_loss(spec, problem)
    found = gradients(kernel, problem, loss, wanted)
    assert list(found) == ["q", "k", "v", "slopes"]
    for one in programs:
        expected = gradient_truth(spec, problem, loss, one.plan.wanted, {}, one.plan.saved)
        assert [c for c in compare_gradients({n: found[n] for n in one.plan.wanted}, expected).values() if not c.passed] == []


@pytest.mark.parametrize("schedule", SHARED)
def test_gradients_of_broadcast_tensors_are_sums(schedule: str) -> None:
    spec = every_class()
    problem = sample(spec, Shape(2, 4, 2, 9, 13))
    first = {"x_pair": np.s_[:1, :, :1], "x_key": np.s_[:, :1], **dict.fromkeys(("x_distance", "x_sink", "x_data"), np.s_[:1])}
    for name, array in problem.inputs.items():
        problem.inputs[name] = np.ascontiguousarray(array[first[name]]) if name in first else array
    problem.inputs["x_head"] *= 0.05
    loss, numbers = sample_loss(spec, problem), {"temp": 0.7, "grow": 1.2}
    kernel = compiled(spec, schedule)
    found = gradients(kernel, problem, loss, EVERY_NAME, **numbers)
    assert all(found[n].shape == array.shape for n, array in problem.inputs.items())
    expected = gradient_truth(spec, problem, loss, EVERY_NAME, numbers, kernel.gradients(EVERY_NAME).plan.saved)
    assert [one for one in compare_gradients(found, expected).values() if not one.passed] == []


@pytest.mark.parametrize("schedule", SHARED)
@pytest.mark.parametrize("normalize", tiers.cases(["sigmoid", "none"], quick=["none"]))
def test_captured_tensors_without_a_softmax(schedule: str, normalize: str) -> None:
    wanted = tuple(n for n in EVERY_NAME if n not in ("x_sink", "x_row"))
    inputs = {n: t for n, t in EVERY_CLASS["inputs"].items() if n in wanted}
    spec = every_class(normalize=normalize, sink=None, lse=False, inputs=inputs)
    problem = sample(spec, Shape(1, 2, 1, 33, 47))
    problem.inputs["x_head"] *= 0.05
    loss, numbers = sample_loss(spec, problem), {"temp": 0.7, "grow": 1.2}
    kernel = compiled(spec, schedule)
    found = gradients(kernel, problem, loss, wanted, **numbers)
    expected = gradient_truth(spec, problem, loss, wanted, numbers, kernel.gradients(wanted).plan.saved)
    assert [one for one in compare_gradients(found, expected).values() if not one.passed] == []


@pytest.mark.parametrize("schedule", SHARED)
def test_a_tensor_that_is_read_through_steps_has_gradient_zero(schedule: str) -> None:
    spec = attngen.define(
        dtype="fp32",
        head_dim=16,
        score="s + floor(x[h]) + float(int(y))",
        inputs={"x": ("fp32", ("heads",)), "y": ("fp32", ())},
    )
    problem = sample(spec, Shape(1, 2, 1, 5, 6))
    found = gradients(compiled(spec, schedule), problem, sample_loss(spec, problem), ("x", "y"))
    assert not found["x"].any()
    assert not found["y"].any()


@pytest.mark.parametrize("schedule", SHARED)
def test_the_gradient_of_a_param_is_fp32_whatever_the_elements_are(schedule: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=16, score="s * temp", params={"temp": ("float", 0.7)})
    assert not wrong_gradients(compiled(spec, schedule), Shape(1, 2, 1, 20, 30), ("temp",), temp=0.7)
