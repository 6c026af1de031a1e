"""Gradients of captured tensors in packed storage, of every class of access: the sum of what each sequence has by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.emulated import EmulatedDevice
from attngen.reference.compare_gradients import gradient_truth
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import QKV, access_of, differentiable, gradient_of
from tests import tiers

LENGTHS = ((3, 5), (0, 4), (20, 70), (5, 0), (66, 17))
LONGEST = Shape(len(LENGTHS), 2, 1, 68, 80, {"tokens": sum(keys for _, keys in LENGTHS)})  # lengths that no sequence exceeds
SCORE = "s * (1.0 + of_key[b, k]) + of_pair[h, q, k] + of_row[q] + slopes[h] * weight + by_distance[h, clamp(k - q, -7, 8) + 7]"
SPEC = attngen.define(
    dtype="fp16", head_dim=16, mask="q - k < 40", sink="sinks[b, h]",
    score=SCORE + " + of_token[clamp(begins[b] + k, 0, tokens - 1)] + of_block[q // 16, k // 16]",
    inputs={
        "of_key": ("fp32", ("batch", "kv_len")), "of_pair": ("fp16", ("heads", "q_len", "kv_len")),
        "of_row": ("fp32", ("q_len",)),
        "slopes": ("fp32", ("heads",)), "by_distance": ("bf16", ("heads", 16)), "sinks": ("fp32", ("batch", "heads")),
        "begins": ("int32", ("batch",)), "of_token": ("fp32", ("tokens",)), "of_block": ("fp32", (5, 7)),
    },
    params={"weight": "float"},
)  # fmt: skip


def packed(arrays: list[Any]) -> Any:
    """[total, heads, size] of the rows of each sequence."""
    return np.concatenate([one[0].swapaxes(0, 1) for one in arrays])


def of_sequence(whole: Sample, spec: Any, b: int) -> Sample:
    """The problem of sequence `b`: the part of each captured tensor that its indices reach."""
    q_len, kv_len = LENGTHS[b]
    parts = {"batch": slice(b, b + 1), "q_len": slice(q_len), "kv_len": slice(kv_len)}
    inputs = {i.name: whole.inputs[i.name][tuple(parts.get(str(d), slice(None)) for d in i.dims)] for i in spec.inputs}
    q, k, v = (array[b : b + 1, :, :n] for array, n in ((whole.q, q_len), (whole.k, kv_len), (whole.v, kv_len)))
    return Sample(q, k, v, inputs)


def test_the_spec_has_every_class() -> None:
    classes = {access_of(c.element) for one in gradient_of(SPEC).captured for c in one.contributions}
    assert classes == {"pair", "key", "row", "head", "distance", "data"}


@pytest.mark.parametrize("schedule", tiers.cases(["naive", "tiled", "fused", "fused fp32"], quick=["naive"]))
def test_what_a_sequence_adds(schedule: str) -> None:
    schedule, _, dtype = schedule.partition(" ")
    spec = SPEC if not dtype else replace(SPEC, dtype=attngen.define(dtype=dtype).dtype)
    wanted, params = (*QKV, *differentiable(spec)), {"weight": 0.7}
    kernel = attngen.compile(spec, kernel=schedule, storage="packed", device=EmulatedDevice(checked=True))
    saved = kernel.gradients(wanted).plan.saved
    whole = sample(spec, LONGEST)
    begins = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in zip(*LENGTHS, strict=True)]
    whole.inputs["begins"] = begins[1][:-1]
    sequences = [of_sequence(whole, spec, b) for b in range(len(LENGTHS))]
    losses = [sample_loss(spec, one, b) for b, one in enumerate(sequences)]
    found = kernel.backward(
        packed([one.dout for one in losses]), *(packed([getattr(one, n) for one in sequences]) for n in QKV),
        cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], max_q_len=LONGEST.q_len, max_kv_len=LONGEST.kv_len,
        wanted=wanted, **whole.inputs, **params,
    )  # fmt: skip
    truths = [gradient_truth(spec, *of, wanted, params, saved) for of in zip(sequences, losses, strict=True)]
    for name in wanted:
        if name in QKV:
            expected = packed([one.exact[name] for one in truths])
        else:
            dims = {i.name: i.dims for i in spec.inputs}.get(name, ())
            expected = np.zeros(np.shape(found[name]))
            for b, one in enumerate(truths):
                q_len, kv_len = LENGTHS[b]
                parts = {"batch": slice(b, b + 1), "q_len": slice(q_len), "kv_len": slice(kv_len)}
                expected[tuple(parts.get(str(d), slice(None)) for d in dims)] += one.exact[name]
        error = np.abs(from_storage(np.asarray(found[name])).astype(np.float64) - expected).max()
        assert error <= sum(one.allowed[name] for one in truths), (name, error)
        assert np.abs(expected).max() > 100 * error, name
