"""Random gradients of random specs: the float64 reference against torch's autograd, and a backward against the reference.

    python -m tests.random_specs --gradients [--seed 0] [--minutes 10] [--kernel naive] [--gpu]

The specs are those of `tests.random_draws`, with lengths for the backward's own tiles; which gradients are wanted, and whether
they must be deterministic, is drawn too. In packed storage a gradient is the sum of what each sequence adds by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import Device
from attngen.device.select import device_by_name
from attngen.plan import ARCHES
from attngen.plan.facts import facts_of
from attngen.reference.compare import Comparison
from attngen.reference.compare_gradients import GradientTruth, compare_gradients, gradient_truth
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.problems import Sample
from attngen.reference.stored import of_lengths, packed, unpacked
from attngen.schedules import choose
from attngen.schedules.backward import BACKWARD_SCHEDULES
from attngen.schedules.registry import keywords_of
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.gradient import QKV, GradientError, differentiable, gradients_of_call
from attngen.spec.names import check_backward_names
from tests.harness import gradients, gradients_stored
from tests.random_draws import Array, Case, case, draw_calls, drawn_problem
from tests.random_lengths import MOST, Call
from tests.random_problems import arrays_of
from tests.special_numbers import special_numbers

KEYWORDS = tuple(dict.fromkeys(s.keyword for s in BACKWARD_SCHEDULES))


@dataclass(frozen=True)
class GradientCase:
    case: Case
    spec: AttentionSpec
    schedule: str
    arch: str
    wanted: tuple[str, ...]
    computed: tuple[str, ...]  # by kernels: that of V too, where it is a part of K
    deterministic: bool
    on_gpu: bool


def gradient_case(seed: int, kernel: str | None = None, on_gpu: bool = False) -> GradientCase | None:
    """The gradients of `seed`; None if its spec has none, or not by `kernel`."""
    r = random.Random(f"gradients {seed}")
    one = case(seed)
    if one.storage != "dense":  # others than packed have no gradients
        one = replace(one, storage="packed", page_size=None)
    spec = replace(one.spec(), kernel=KernelRequest(storage=one.storage))
    try:
        check_backward_names(spec)
    except GradientError:
        return None
    usual, _ = gradients_of_call(spec, None)
    every = (*usual, *differentiable(spec))
    some = tuple(n for n in every if r.random() < 0.6) or (r.choice(every),)
    wanted, deterministic = usual if r.random() < 0.3 else some, r.random() < 0.5
    arch = device_by_name("cuda").arch if on_gpu else r.choice(("sm_75", "sm_80", "sm_90a"))
    _, computed = gradients_of_call(spec, wanted)
    suitable = [s for s in keywords_of(facts_of(spec, computed, deterministic), ARCHES[arch]) if kernel in (None, s)]
    if not suitable:
        return None
    schedule = r.choice(suitable)
    plan = choose(spec, ARCHES[arch], schedule, wanted=computed, deterministic=deterministic)
    tables = [max(c.shape.q_len, c.shape.kv_len) for c in one.calls] if spec.rotary is not None else [MOST]
    one = replace(one, calls=draw_calls(r, one, plan, max(tables)))
    return GradientCase(one, spec, schedule, arch, wanted, computed, deterministic, on_gpu)


def gradient_failure(one: GradientCase, seed: int = 0, place: Device | None = None) -> str:
    """What is wrong with the gradients of `one` on the device `place`, by default the one that was drawn; "" if nothing is.
    Raises the exceptions of attngen."""
    device = place or ("cuda" if one.on_gpu else EmulatedDevice(arch=one.arch, checked=True, seed=seed % 5))
    kernel: CompiledAttention = attngen.compile(one.spec, kernel=one.schedule, device=device)
    for call in one.case.calls:
        try:
            wrong = _failure(one, call, kernel, seed)
        except Exception as error:
            error.add_note(str(call))
            raise
        if wrong:
            return f"{wrong}\n{call}"
    return ""


def _failure(one: GradientCase, call: Call, kernel: CompiledAttention, seed: int) -> str:
    """What is wrong with one of its problems."""
    spec, problem, params = one.spec, drawn_problem(one.case, seed, call), one.case.given(call)
    loss = sample_loss(spec, problem, seed)
    saved = kernel.gradients(one.computed, one.deterministic).plan.saved
    parts = (
        [(slice(None), *call.lengths[0])]
        if one.case.storage == "dense"
        else [(slice(b, b + 1), *lengths) for b, lengths in enumerate(call.lengths)]
    )
    alone = [(of_lengths(spec, problem, n, m), _of_batches(loss, at, n)) for at, n, m in parts]
    truths = [gradient_truth(spec, *of, one.computed, params, saved).of_call(spec, one.wanted) for of in alone]
    if not all(np.isfinite(exact).all() for of in truths for exact in of.exact.values()):
        return ""  # beyond the range of the problem's numbers
    if find_spec("torch") is not None and call is one.case.calls[0]:
        for of, expected in zip(alone, truths, strict=True):
            if wrong := not_torchs(one, of, expected, params):
                return wrong
    if one.case.storage == "dense":
        (expected,) = truths
        found = gradients(kernel, problem, loss, one.wanted, one.deterministic, **params)
        wrong = [c for c in compare_gradients(found, expected).values() if not c.error <= 2 * c.allowed]
        if not wrong and spec.mask is not None and not set(QKV).isdisjoint(one.wanted) and problem.q.size:
            wrong = traces(one, kernel, problem, loss, expected, params, seed)
        return ", ".join(map(_excess, wrong))
    arrays = arrays_of(one.case, call, spec, problem, seed) | {"dout": packed(loss.dout, call.rows), "dlse": None}
    if loss.dlse is not None:
        arrays["dlse"] = np.concatenate([of[:, :n] for of, n in zip(loss.dlse, call.rows, strict=True)], axis=1)
    found = gradients_stored(kernel, arrays, one.wanted, one.deterministic, **params)
    return _packed_failure(one, call, found, truths)


def _excess(c: Comparison) -> str:
    return f"{c.error:.3g} > 2 * {c.allowed:.3g}: {c.wrong[0]}"


def _of_batches(loss: Loss, batches: slice, rows: int) -> Loss:
    """The loss of some batches and of the first rows."""

    def chosen(array: Array) -> Array:
        result = np.zeros_like(array[:, :, :rows])
        result[batches] = array[batches, :, :rows]
        return result

    return Loss(chosen(loss.dout), None if loss.dlse is None else chosen(loss.dlse))


def _packed_failure(one: GradientCase, call: Call, found: dict[str, Array], truths: list[GradientTruth]) -> str:
    """What is wrong with gradients in packed storage, of which `truths` has the part of each sequence."""
    dims = {i.name: i.dims for i in one.spec.inputs}
    for name in one.wanted:
        if name in QKV:
            lengths = call.rows if name == "q" else call.keys
            for b, rows in enumerate(unpacked(found[name], lengths, 0)):
                part = GradientTruth(*({name: of[name]} for of in (truths[b].exact, truths[b].allowed, truths[b].axes)))
                part = replace(part, exact={name: part.exact[name][b : b + 1]})
                (c,) = compare_gradients({name: rows.swapaxes(0, 1)[None]}, part).values()
                if not c.error <= 2 * c.allowed:
                    return f"sequence {b}: {_excess(c)}"
            continue
        whole = np.zeros(np.shape(found[name]))
        for of, (n, m) in zip(truths, call.lengths, strict=True):
            ends = {"q_len": slice(n), "kv_len": slice(m)}
            whole[tuple(ends.get(str(dim), slice(None)) for dim in dims.get(name, ()))] += of.exact[name]
        total = GradientTruth({name: whole}, {name: sum(of.allowed[name] for of in truths)}, {name: truths[0].axes[name]})
        (c,) = compare_gradients(found, total).values()
        if not c.error <= 2 * c.allowed:
            return _excess(c)
    return ""


def traces(
    one: GradientCase, kernel: CompiledAttention, problem: Sample, loss: Loss, expected: GradientTruth, params: Any, seed: int
) -> list[Comparison]:
    """Gradients of q, k and v that are wrong when numbers that the mask hides from them are not finite."""
    special = special_numbers(one.spec, problem, loss.dout, params, seed)
    found = gradients(kernel, special.problem, replace(loss, dout=special.dout), one.wanted, one.deterministic, **params)
    names = [n for n in QKV if n in one.wanted]
    ours = special.left_out({n: found[n] for n in names}, expected.exact, one.spec)
    of_qkv = GradientTruth(*({n: of[n] for n in names} for of in (expected.exact, expected.allowed, expected.axes)))
    return [c for c in compare_gradients(ours, of_qkv).values() if not c.error <= 2 * c.allowed]


def not_torchs(one: GradientCase, of: tuple[Sample, Loss], expected: GradientTruth, params: Any) -> str:
    """Whether the reference's gradients are not those of torch's autograd."""
    for name, ours in autograd(one.spec, *of, one.wanted, params).items():
        finite = np.isfinite(ours)  # the oracle's autograd multiplies infinities that a `where` leaves out by 0
        ours, exact = ours[finite], expected.exact[name][finite]
        # Sums over keys may cancel: what is left is the rounding, in fp64, of terms of V's size
        least = 1e-9 * (1 + np.abs(ours).max(initial=0.0)) + 1e-13 * one.case.size_of_v
        if not np.allclose(ours, exact, rtol=1e-6, atol=least):
            return f"the reference's gradient of {name} is not torch's"
    return ""


def autograd(
    spec: AttentionSpec, problem: Sample, loss: Loss, wanted: tuple[str, ...], params: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """The gradients of tensors among `wanted`, by torch's autograd through the torch oracle in float64."""
    import torch

    from attngen.reference.torch_oracle import to_torch, torch_attention

    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    tensors = {name: to_torch(array, "cpu") for name, array in arrays.items()}
    leaves = {name: tensors[name].double().requires_grad_() for name in wanted if name in tensors}
    tensors |= leaves
    q, k, v = (tensors.pop(name) for name in "qkv")
    v = spec.values_of(k, None if spec.values else v)
    output, lse = torch_attention(spec, q, k, v, inputs=tensors, params=params)
    total = (output * to_torch(loss.dout, "cpu").double()).sum()
    if loss.dlse is not None:
        assert lse is not None
        total = total + torch.where(torch.isfinite(lse), lse * to_torch(loss.dlse, "cpu").double(), 0.0).sum()
    if not leaves or not total.requires_grad:
        return {name: np.zeros(leaf.shape) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: np.zeros(leaf.shape) if g is None else g.numpy() for (n, leaf), g in zip(leaves.items(), found, strict=True)}
