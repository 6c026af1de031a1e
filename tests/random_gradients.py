"""Random gradients of random specs: the float64 reference against torch's autograd, and a backward against the reference.

    python -m tests.random_specs --gradients [--seed 0] [--minutes 10] [--kernel naive] [--gpu]

The specs and problems are those of `tests.random_draws`, shortened for the emulated device; which gradients are wanted, and
whether they must be deterministic, is drawn too.
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
from attngen.reference.compare import Comparison
from attngen.reference.compare_gradients import GradientTruth, compare_gradients, gradient_truth
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.problems import Sample, Shape
from attngen.schedules import schedules_for
from attngen.schedules.backward import BACKWARD_SCHEDULES
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.gradient import QKV, GradientError, differentiable
from attngen.spec.names import check_backward_names
from tests.harness import gradients
from tests.random_draws import Case, case, drawn_problem
from tests.special_numbers import special_numbers

KEYWORDS = tuple(dict.fromkeys(s.keyword for s in BACKWARD_SCHEDULES))
MOST_WORK = 80 * 80 * 64 * 4  # pairs times head size, of all heads: what the emulated device computes in seconds


@dataclass(frozen=True)
class GradientCase:
    case: Case
    spec: AttentionSpec
    schedule: str
    arch: str
    wanted: tuple[str, ...]
    deterministic: bool
    on_gpu: bool


def gradient_case(seed: int, kernel: str | None = None, on_gpu: bool = False) -> GradientCase | None:
    """The gradients of `seed`; None if its spec has none, or not by `kernel`."""
    r = random.Random(f"gradients {seed}")
    one = case(seed)
    spec = replace(one.spec(), kernel=KernelRequest())
    try:
        check_backward_names(spec)
    except GradientError:
        return None
    every = (*QKV, *differentiable(spec))
    some = tuple(n for n in every if r.random() < 0.6) or (r.choice(every),)
    wanted = QKV if r.random() < 0.3 else some
    arch = device_by_name("cuda").arch if on_gpu else r.choice(("sm_75", "sm_80", "sm_90a"))
    suitable = [s for s in schedules_for(spec, ARCHES[arch], wanted) if kernel in (None, s)]
    if not suitable:
        return None
    shape = one.shape if on_gpu else _shortened(one.shape, spec)
    return GradientCase(replace(one, shape=shape), spec, r.choice(suitable), arch, wanted, r.random() < 0.5, on_gpu)


def _shortened(shape: Shape, spec: AttentionSpec) -> Shape:
    """A shape of few pairs, whose lengths are in the same order."""
    work = shape.q_len * shape.kv_len * shape.q_heads * max(spec.head_dim, spec.head_dim_v)
    factor = min(1.0, (MOST_WORK / work) ** 0.5)
    lengths = (max(1, round(n * factor)) for n in (shape.q_len, shape.kv_len))
    return replace(shape, batch=1, **dict(zip(("q_len", "kv_len"), lengths, strict=True)))


def gradient_failure(one: GradientCase, seed: int = 0, place: Device | None = None) -> str:
    """What is wrong with the gradients of `one` on the device `place`, by default the one that was drawn; "" if nothing is.
    Raises the exceptions of attngen."""
    spec, problem = one.spec, drawn_problem(one.case, seed)
    params = {} if one.case.python_mask else one.case.by_word(one.case.params)
    loss = sample_loss(spec, problem, seed)
    device = place or ("cuda" if one.on_gpu else EmulatedDevice(arch=one.arch, checked=True, seed=seed % 5))
    kernel: CompiledAttention = attngen.compile(spec, kernel=one.schedule, device=device)
    saved = kernel.gradients(one.wanted, one.deterministic).plan.saved
    expected = gradient_truth(spec, problem, loss, one.wanted, params, saved)
    if not all(np.isfinite(exact).all() for exact in expected.exact.values()):
        return ""  # beyond the range of the problem's numbers
    if find_spec("torch") is not None:
        for name, ours in autograd(spec, problem, loss, one.wanted, params).items():
            finite = np.isfinite(ours)  # the oracle's autograd multiplies infinities that a `where` leaves out by 0
            ours, exact = ours[finite], expected.exact[name][finite]
            # Sums over keys may cancel: what is left is the rounding, in fp64, of terms of V's size
            least = 1e-9 * (1 + np.abs(ours).max(initial=0.0)) + 1e-13 * one.case.size_of_v
            if not np.allclose(ours, exact, rtol=1e-6, atol=least):
                return f"the reference's gradient of {name} is not torch's"
    found = gradients(kernel, problem, loss, one.wanted, one.deterministic, **params)
    wrong = [c for c in compare_gradients(found, expected).values() if not c.error <= 2 * c.allowed]
    if not wrong and spec.mask is not None and not set(QKV).isdisjoint(one.wanted):
        wrong = traces(one, kernel, problem, loss, expected, params, seed)
    return ", ".join(f"{c.error:.3g} > 2 * {c.allowed:.3g}: {c.wrong[0]}" for c in wrong)


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
    output, lse = torch_attention(spec, q, k, v, inputs=tensors, params=params)
    total = (output * to_torch(loss.dout, "cpu").double()).sum()
    if loss.dlse is not None:
        assert lse is not None
        total = total + torch.where(torch.isfinite(lse), lse * to_torch(loss.dlse, "cpu").double(), 0.0).sum()
    if not leaves or not total.requires_grad:
        return {name: np.zeros(leaf.shape) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: np.zeros(leaf.shape) if g is None else g.numpy() for (n, leaf), g in zip(leaves.items(), found, strict=True)}
