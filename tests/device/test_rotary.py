"""Rotary embeddings by every schedule, forward and backward: positions, pairs, packed sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.arrays import ArgumentError
from attngen.device.emulated import EmulatedDevice
from attngen.reference.alternatives import alternatives
from attngen.reference.compare import max_error, truth
from attngen.reference.compare_gradients import gradient_truth
from attngen.reference.coverage import Exercise
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import begins_of, stored, unpacked
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import QKV, GradientError
from tests import tiers
from tests.harness import compiled, run, wrong_gradients

SCHEDULES = (
    ("naive", "sm_80", "fp32"), ("tiled", "sm_80", "fp16"), ("fused", "sm_75", "bf16"), ("fused", "sm_80", "fp32"),
    ("fused", "sm_80", "bf16"), ("wgmma", "sm_90a", "bf16"), ("hopper", "sm_90a", "fp16"), ("decode", "sm_80", "bf16"),
)  # fmt: skip


def rotated(dtype: str, dim: int = 32, pairs: str = "halves", at: str = "", **more: Any) -> AttentionSpec:
    """A spec with tables of any number of positions; `more` are keywords of `attngen.define`."""
    tables = dict.fromkeys(("cosines", "sines"), ("bf16" if dtype == "fp32" else "fp32", ("positions", dim // 2)))
    inputs = {**tables, **more.pop("inputs", {})}
    settings = {"head_dim": 48, "head_dim_v": 40, "mask": "causal_bottom_right", **more}
    return attngen.define(dtype=dtype, rotary=f"{dim} {pairs} by cosines, sines {at}", inputs=inputs, **settings)


@pytest.mark.parametrize(("schedule", "arch", "dtype"), tiers.cases(SCHEDULES, quick=[("fused", "sm_80", "bf16")]))
def test_results_and_gradients(schedule: str, arch: str, dtype: str) -> None:
    """Part of a row or all of it, in both pairings, with grouped heads; rows fewer than keys."""
    spec = rotated(dtype) if dtype == "fp16" else rotated(dtype, 48, "interleaved")
    shape = Shape(2, 4, 2, 5 if schedule == "decode" else 70, 133)
    shape = with_free_sizes(spec, shape, {})
    found = run(spec, schedule, shape, arch=arch)
    assert found.passed, found
    if schedule not in ("decode", "wgmma"):
        assert not wrong_gradients(compiled(spec, schedule, arch), shape)


@pytest.mark.long
def test_one_of_the_gradients() -> None:
    for dtype in ("fp32", "bf16"):
        spec = rotated(dtype)
        shape = with_free_sizes(spec, Shape(1, 2, 1, 40, 50), {})
        for wanted in (("q",), ("k",), ("v",)):
            assert not wrong_gradients(compiled(spec, "fused"), shape, wanted)


LENGTHS = ((3, 5), (0, 4), (20, 70), (5, 0), (66, 90), (4, 2))  # rows and keys; of the last, rows without a key of their own


@pytest.mark.parametrize("schedule", tiers.cases(["fused", "hopper", "decode"], quick=[]))
def test_positions_within_packed_sequences(schedule: str) -> None:
    """Of results and gradients; heads lie inside of rows, with other strides than the rotated copies have."""
    spec = rotated("bf16", head_dim_v=48)
    arch = "sm_90a" if schedule == "hopper" else "sm_80"
    device = EmulatedDevice(checked=True, arch=arch)
    kernel = attngen.compile(spec, kernel=schedule, storage="packed", device=device)
    rows, keys = ([n[i] for n in LENGTHS] for i in (0, 1))
    whole = sample(spec, Shape(len(LENGTHS), 2, 1, max(rows), max(keys), {"positions": max(keys)}))
    given = stored(kernel.spec, whole, rows, keys)
    parts = [
        Sample(whole.q[b : b + 1, :, :n], whole.k[b : b + 1, :, :m], whole.v[b : b + 1, :, :m], whole.inputs)
        for b, (n, m) in enumerate(LENGTHS)
    ]
    outputs = unpacked(from_storage(kernel(**given)), rows, 0)
    for b, (part, n) in enumerate(zip(parts, rows, strict=True)):
        expected = truth(spec, part)
        assert outputs[b].shape[0] == n
        assert max_error(outputs[b].swapaxes(0, 1)[None], expected.reference.output) <= expected.allowed, b
    if schedule == "decode":
        return
    losses = [sample_loss(spec, part, b) for b, part in enumerate(parts)]
    dout = np.concatenate([loss.dout[0].swapaxes(0, 1) for loss in losses])
    found = {name: from_storage(array) for name, array in kernel.backward(dout, **given).items()}
    saved = kernel.gradients().plan.saved
    for b, (part, loss, n, m) in enumerate(zip(parts, losses, rows, keys, strict=True)):
        exact = gradient_truth(spec, part, loss, QKV, saved=saved)
        begins = {"q": begins_of(rows)[b], "k": begins_of(keys)[b], "v": begins_of(keys)[b]}
        for name, length in (("q", n), ("k", m), ("v", m)):
            of_sequence = found[name][begins[name] : begins[name] + length].swapaxes(0, 1)[None]
            assert max_error(of_sequence, exact.exact[name]) <= exact.allowed[name], (b, name)


@pytest.mark.parametrize(
    ("schedule", "arch", "dtype"), tiers.cases(SCHEDULES, quick=[("naive", "sm_80", "fp32"), ("fused", "sm_80", "bf16")])
)
def test_positions_by_a_tensor_and_a_param(schedule: str, arch: str, dtype: str) -> None:
    """Positions that the call gives: those of documents, and a distance that all rows are apart. Nothing else reads them."""
    at = "at clamp(places[b, q], 0, positions - 1), clamp(places[b, k] + shift, 0, positions - 1)"
    places = {"places": ("int32", ("batch", "kv_len"))}
    spec = rotated(dtype, at=at, inputs=places, params={"shift": "int"}, mask="causal")
    problem = sample(spec, Shape(2, 2, 1, 5 if schedule == "decode" else 40, 50, {"positions": 30}))
    for shift in (0, 3):
        found = run(spec, schedule, problem, arch=arch, shift=shift)
        assert found.passed, (shift, found)


def test_every_part_of_the_statement_shows() -> None:
    """In the problem of a check, each alternative of the rotation has another result."""
    spec = rotated("fp16")
    shape = with_free_sizes(spec, Shape(1, 2, 1, 40, 50), {})
    others = [one for one in alternatives(spec) if one.keyword == "rotary"]
    assert len(others) == 4
    assert list(Exercise(spec, sample(spec, shape), {}).noticed(others)) == others


def test_what_a_call_must_say() -> None:
    spec = rotated("fp32", kernel="naive")
    kernel = compiled(spec, "naive")
    problem = sample(spec, Shape(1, 2, 1, 8, 12, {"positions": 12}))

    def call(**changed: Any) -> None:
        given = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs, **changed}
        kernel(**given)

    cosines, sines = (problem.inputs[n] for n in ("cosines", "sines"))
    for changed, message in (
        ({"cosines": cosines[:11], "sines": sines[:11]}, "can be 4 to 11, but the dimension"),
        ({"k": problem.k[:, :, :7], "v": problem.v[:, :, :7]}, "can be -1 to 6"),
        ({"cosines": cosines[:0], "sines": sines[:0]}, "`cosines` has no row"),
        ({"cosines": np.repeat(cosines, 2, 1)[:, ::2]}, "stride"),
        ({"q": np.repeat(problem.q, 2, 3)[..., ::2]}, "stride"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(**changed)
    with pytest.raises(GradientError, match="the tables of a rotation have no gradients"):
        kernel.gradients(("cosines",))


def test_rows_without_keys() -> None:
    """Whose positions are before the tables: of the kernels, nothing is read outside of these."""
    spec = rotated("fp32", kernel="naive")
    problem = sample(spec, Shape(1, 2, 1, 3, 0, {"positions": 1}))
    assert not compiled(spec, "naive")(problem.q, problem.k, problem.v, **problem.inputs).any()


def test_one_text_for_both_ways_to_write_it() -> None:
    (read,) = attngen.language.load_text(attngen.to_text(rotated("bf16", at="at q, k")))
    assert read == rotated("bf16", at="at q, k")
    assert replace(read, rotary=None) != read
