"""Derivatives of specs: classes of access, what has no gradient, and the reference against torch's autograd and differences."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import ArgumentError, AttentionSpec
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.reference.gradients import Loss, numpy_gradients, sample_loss
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose, schedules_for
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import GradientError, gradient_of, is_constant_in, wanted_gradients
from attngen.spec.names import BACKWARD_NAMES, TENSORS
from tests import tiers
from tests.harness import SPECS, shipped, small

# A score of one captured tensor, its dimensions, and the class of access.
READS = {
    "s + x[b, h, q, k]": ("batch, heads, q_len, kv_len", "pair"),
    "s + x[q, k]": ("q_len, kv_len", "pair"),
    "s * x[h, k]": ("heads, kv_len", "key"),
    "s + x[b, q] * 0.5": ("batch, q_len", "row"),
    "s + x[h] * (k - q)": ("heads", "head"),
    "s + x[b, h // 2, 3]": ("batch, heads, 4", "head"),
    "s * x": ("", "head"),
    "s + x[h, clamp(k - q, -5, 5) + 5]": ("heads, 11", "distance"),
    "s + x[min(abs(q - k), 8)]": ("9", "distance"),
    "s + x[where(k - q < 0, 0, 1)]": ("2", "distance"),
    "s + x[(q * k) % 7]": ("7", "data"),
    "s + x[ids[k], h]": ("4, heads", "data"),
    "s + x[k // 2]": ("kv_len", "data"),
    "s + x[q] - x[k]": ("kv_len", "data"),
}


def spec_of(score: str, dims: str, **changes: Any) -> AttentionSpec:
    ids = "input ids: int32[kv_len]" if "ids" in score else ""
    mask = "mask ids[k] < 4 and ids[k] >= 0" if ids else ""
    score = score.replace("ids[k]", "clamp(ids[k], 0, 3)")
    declared = f"input x: fp32[{dims}]" if dims else "input x: fp32[]"
    (spec,) = load_text(f"attention one {{ dtype fp32 head_dim 8 {ids} {declared} {mask} score {score} }}")
    return spec


@pytest.mark.parametrize("score", READS)
def test_the_class_of_access_follows_from_the_indices(score: str) -> None:
    dims, access = READS[score]
    assert gradient_of(spec_of(score, dims)).of("x").access == access


def test_what_has_a_gradient_and_what_has_none() -> None:
    text = """attention one {
        dtype fp32 head_dim 8
        input seen: fp32[heads]  input hidden: fp32[heads]  input ids: int32[kv_len]
        param temp: float  param size: int  param slope: float = 1.0
        scale 0.5 * slope
        mask hidden[h] > 0.5 and q - k < size and ids[k] > 0
        score s / temp + float(int(seen[h]))
    }"""
    (spec,) = load_text(text)
    assert wanted_gradients(spec) == ("q", "k", "v")
    assert wanted_gradients(spec, ["slope", "seen", "q"]) == ("q", "seen", "slope")
    assert gradient_of(spec).of("seen").contributions == (), "a valid gradient: 0"
    for name, reason in (
        ("hidden", "only the mask reads it"),
        ("ids", "its elements are int32, and only floats"),
        ("size", "its elements are int, and only floats"),
        ("scores", "no input or param of that name"),
    ):
        with pytest.raises(GradientError, match=f"`{name}` has no gradient: .*{reason}"):
            wanted_gradients(spec, [name])
    with pytest.raises(ArgumentError, match="no gradient is requested"):
        wanted_gradients(spec, [])


def test_what_results_do_not_depend_on_smoothly() -> None:
    """Its derivative is 0, which may be said where it is not computed. That of a scale of V or a table is not."""
    inputs = dict.fromkeys(("hidden", "size", "seen"), ("fp32", ("kv_len",))) | {"ids": ("int32", ("kv_len",))}
    tables = dict.fromkeys(("c", "z"), ("fp32", ("kv_len", 8)))
    spec = attngen.define(
        dtype="fp32", head_dim=16, inputs=inputs | tables, mask="hidden[k] > 0.0 and ids[k] > 0", score="s + seen[k]",
        v_scale="size[k] + hidden[k]", rotary="16 halves by c, z",
    )  # fmt: skip
    assert [n for n in (*inputs, *tables) if is_constant_in(spec, n)] == ["ids"]
    assert is_constant_in(replace(spec, v_scale=None), "hidden")
    for name, reason in (("size", "no schedule has gradients of a spec that scales V"), ("z", "the tables of a rotation")):
        with pytest.raises(GradientError, match=f"`{name}` has no gradient: {reason}"):
            wanted_gradients(spec, [name])


def test_names_of_a_backward_program_are_refused_with_words() -> None:
    spec = attngen.define(head_dim=16, score="s + delta[h]", inputs={"delta": ("fp32", ("heads",))})
    kernel = attngen.compile(spec, kernel="naive", device="emulated")
    problem = sample(spec, Shape(1, 2, 2, 3, 3))
    with pytest.raises(GradientError, match="`delta` is the name of a tensor or an argument of the backward; rename it"):
        kernel.backward(problem.q, problem.q, problem.k, problem.v, **problem.inputs)


def test_no_input_can_have_the_name_of_a_workspace() -> None:
    found: set[str] = set()
    slopes: dict[str, Any] = {"score": "s + x[h] * (k - q)", "inputs": {"x": ("fp32", ("heads",))}}
    for what in ({}, slopes, {"score": "s + s * s", "sink": "0.0"}, {"normalize": "sigmoid"}, {"dtype": "fp32"}):
        spec = attngen.define(**{"dtype": "bf16", "head_dim": 64, **what})
        for arch, deterministic in product(("sm_80", "sm_90a"), (True, False)):
            kernels = [choose(spec, ARCHES[arch], keyword) for keyword in schedules_for(spec, ARCHES[arch])]
            wanted = ("q", "k", "v", *(i.name for i in spec.inputs))
            kernels += [
                choose(spec, ARCHES[arch], keyword, wanted=wanted, deterministic=deterministic)
                for keyword in schedules_for(spec, ARCHES[arch], wanted)
            ]
            found.update(*(plan.workspaces for plan in kernels))
    assert {"S", "split_O", "dq_sums", "part_sums", "own_lse_rest"} <= found <= BACKWARD_NAMES | TENSORS


# --- the reference ----------------------------------------------------------------------------------------------------

PARAMS = {"mistral_window": {"size": 9}}
VARIANTS: dict[str, dict[str, Any]] = {
    "sink of rows": {
        "sink": "x[q] * 0.5 + y[h]", "lse": True, "mask": "k < q", "score": "softcap(2.0)",
        "inputs": {"x": ("fp32", ("q_len",)), "y": ("fp32", ("heads",))},
    },
    "two reads": {"score": "s * tanh(x[h, q]) + x[h, k] * y", "inputs": {"x": ("fp32", ("heads", 40)), "y": ("fp32", ())}},
    "sigmoid": {"normalize": "sigmoid", "score": "s + x[k, h]", "inputs": {"x": ("fp32", ("kv_len", "heads"))}},
    "constant score": {"score": "x[k]", "inputs": {"x": ("fp32", ("kv_len",))}},
}  # fmt: skip


def gradients_by_autograd(spec: AttentionSpec, problem: Sample, loss: Loss, wanted: list[str], params: Any) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    from attngen.reference.torch_oracle import to_torch, torch_attention

    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    tensors = {name: to_torch(array, "cpu") for name, array in arrays.items()}
    leaves = {name: tensors[name].double().requires_grad_() for name in wanted}
    tensors |= leaves
    q, k, v = (tensors.pop(name) for name in "qkv")
    output, lse = torch_attention(spec, q, k, v, inputs=tensors, params=params)
    total = (output * to_torch(loss.dout, "cpu").double()).sum()
    if loss.dlse is not None:
        assert lse is not None
        total = total + torch.where(torch.isfinite(lse), lse * to_torch(loss.dlse, "cpu").double(), 0.0).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: np.zeros(leaves[n].shape) if g is None else g.numpy() for n, g in zip(wanted, found, strict=True)}


@pytest.mark.parametrize("name", tiers.cases([*SPECS, *VARIANTS], quick=["gpt_oss_sinks", "sink of rows", "two reads"]))
def test_the_reference_equals_autograd(name: str) -> None:
    spec = small(name, "fp32") if name in SPECS else attngen.define(dtype="fp32", head_dim=16, **VARIANTS[name])
    params = PARAMS.get(name, {})
    problem = sample(spec, Shape(2, 4, 2, 13, 17))
    loss = sample_loss(spec, problem)
    inputs = {i.name for i in spec.inputs}
    wanted = ["q", "k", "v", *(one.name for one in gradient_of(spec).captured if one.name in inputs)]
    expected = gradients_by_autograd(spec, problem, loss, wanted, params)
    found = numpy_gradients(spec, problem, loss, tuple(wanted), params)
    for one in wanted:
        np.testing.assert_allclose(found[one].value, expected[one], rtol=1e-9, atol=1e-11, err_msg=one)


def test_the_gradient_of_a_param_equals_differences() -> None:
    (spec,) = load_text(
        """attention one {
            dtype fp32 head_dim 8 param a: float param c: float param d: float
            scale 0.5 * a score tanh(s / c) + d * c * (k - q) sink c * d output lse mask k <= q
        }"""
    )
    problem, params = sample(spec, Shape(1, 2, 1, 6, 7)), {"a": 1.3, "c": 0.7, "d": -0.2}
    loss = sample_loss(spec, problem)

    def value(**changed: float) -> float:
        result = numpy_attention(spec, problem, params | changed)
        assert result.lse is not None
        assert loss.dlse is not None
        return float((result.output * from_storage(loss.dout)).sum() + (result.lse * from_storage(loss.dlse)).sum())

    found = numpy_gradients(spec, problem, loss, tuple(params), params)
    for name, at in params.items():
        slope = (value(**{name: at + 1e-5}) - value(**{name: at - 1e-5})) / 2e-5
        assert found[name].value == pytest.approx(slope, rel=1e-7), name


def test_what_the_mask_excludes_leaves_no_trace() -> None:
    spec = shipped("gpt2", "fp32")
    problem = sample(spec, Shape(1, 1, 1, 5, 9))
    loss = sample_loss(spec, problem)
    clean = numpy_gradients(spec, problem, loss, ("q", "k", "v"))
    for array in (problem.k, problem.v):
        array[..., 5:, :] = np.nan
    found = numpy_gradients(spec, problem, loss, ("q", "k", "v"))
    for name in "qkv":
        np.testing.assert_allclose(found[name].value, clean[name].value, rtol=1e-13, atol=1e-15)
