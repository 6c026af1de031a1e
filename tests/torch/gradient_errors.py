"""Errors of gradients by kernels beside those of torch's operations at the same precision: every shipped spec.

    python -m tests.torch.gradient_errors [--gpu] [--only SPEC,...] [--dtype fp16,...] [--draws N]

Both are compared with float64, by the largest error of each gradient: of q, k, v and of each captured tensor. `math` is
mode="math", which computes with torch's operations, fp16 and bf16 in fp32, as torch's math backend does. A kernel's error may
be twice that, and one unit in the last place of the gradient's largest number. Without a GPU, kernels run on the emulated
device. Prints the worst gradient of each kernel, by the share of that bound, with errors relative to the gradient's largest
number; the exit code is 1 if one exceeds its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import attngen
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.torch_oracle import torch_gradients
from attngen.schedules.backward import BACKWARD_SCHEDULES
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import STORAGE_DTYPES, DType, from_storage
from attngen.spec.gradient import QKV, differentiable
from attngen.torch import Attention
from tests.harness import SMALL_PARAMS, SPECS, compiled, gradients, small
from tests.hopper import HOPPER_SCHEDULES

SHAPES = (Shape(2, 4, 2, 130, 190), Shape(1, 4, 4, 100, 100))
# `auto` on Hopper: the weights of captured tensors' gradients come from the lse of a forward that adds up rounded ones
SCHEDULES = (*dict.fromkeys(s.keyword for s in BACKWARD_SCHEDULES), "auto")
MANTISSA = {"fp16": 10, "bf16": 7, "fp32": 23}  # bits


def tensor_of(array: np.ndarray[Any, Any], dtype: DType, device: str) -> torch.Tensor:
    """A tensor of a storage array."""
    numbers = from_storage(array) if dtype.kind == "float" else array
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device, getattr(torch, dtype.torch))


def by_torch(
    spec: AttentionSpec,
    tensors: Mapping[str, torch.Tensor],
    params: Mapping[str, Any],
    dout: torch.Tensor,
    wanted: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """The gradients of mode="math"."""
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in tensors.items()}
    inputs = {n: t for n, t in leaves.items() if n not in QKV}
    found = Attention(spec, mode="math")(*(leaves[n] for n in QKV), **inputs, **params)
    output = found[0] if isinstance(found, tuple) else found
    grads = torch.autograd.grad(output, [leaves[n] for n in wanted], dout, allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(wanted, grads, strict=True)}


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max())


def unit(dtype: str, number: float) -> float:
    """In the last place of `number`."""
    return float(2.0 ** (np.floor(np.log2(number)) - MANTISSA[dtype]))


def rows(
    name: str, dtype: str, draws: int, device: str, schedules: Sequence[str] = SCHEDULES
) -> Iterator[tuple[str, str, float, float, float]]:
    """(schedule, gradient, error of the kernel, error of math, bound) of each gradient of each kernel of a spec. Errors and the
    bound are relative to the gradient's largest number."""
    spec, params = small(name, dtype, narrow=device == "cpu"), SMALL_PARAMS.get(name, {})
    wanted = (*QKV, *(n for n in differentiable(spec) if n in {i.name for i in spec.inputs}))
    types = dict.fromkeys(QKV, spec.dtype) | {i.name: i.dtype for i in spec.inputs}
    for position, shape in enumerate(SHAPES):
        for seed in range(draws):
            problem = sample(spec, shape, seed=1000 * position + seed)
            loss = Loss(sample_loss(spec, problem, seed).dout)
            tensors = {n: tensor_of(a, types[n], device) for n, a in given(problem).items()}
            dout = tensor_of(loss.dout, spec.dtype, device)
            exact = torch_gradients(spec, tensors, params, dout, wanted)
            math = by_torch(spec, tensors, params, dout, wanted)
            for schedule in schedules:
                if schedule in (*HOPPER_SCHEDULES, "auto") and dtype == "fp32":
                    continue
                arch = "sm_90a" if schedule == "auto" else None
                on_gpu = device == "cuda"
                kernel = attngen.compile(spec, kernel=schedule, device="cuda") if on_gpu else compiled(spec, schedule, arch)
                these = QKV if schedule in HOPPER_SCHEDULES else wanted  # it has no gradients of captured tensors
                found = gradients(kernel, problem, loss, these, **params)
                for one in these:
                    mine = torch.from_numpy(from_storage(found[one]).astype(np.float64)).to(device)
                    largest = max(float(exact[one].abs().max()), 1e-30)
                    errors = (largest_error(mine, exact[one]), largest_error(math[one], exact[one]))
                    bound = 2 * errors[1] + unit(types[one].name, largest)
                    yield schedule, one, *(x / largest for x in (*errors, bound))


def given(problem: Sample) -> dict[str, np.ndarray[Any, Any]]:
    return {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="kernels run on the GPU")
    parser.add_argument("--only", default=",".join(SPECS), help="names of shipped specs")
    parser.add_argument("--dtype", default=",".join(d.name for d in STORAGE_DTYPES), help="of Q, K, V and O")
    parser.add_argument("--draws", type=int, default=1, help="random problems for each shape")
    options = parser.parse_args()
    count, exceeded = 0, 0
    for name in options.only.split(","):
        for dtype in options.dtype.split(","):
            worst: dict[str, tuple[float, str, float, float]] = {}
            for schedule, one, mine, math, bound in rows(name, dtype, options.draws, "cuda" if options.gpu else "cpu"):
                count, exceeded = count + 1, exceeded + (mine > bound)
                worst[schedule] = max(worst.get(schedule, (-1.0, "", 0.0, 0.0)), (mine / bound, one, mine, math))
            for schedule, (share, one, mine, math) in worst.items():
                print(
                    f"{name:18} {dtype} {schedule:7} d{one:9} error {mine:.2e}, math {math:.2e}: {share:.2f} of the bound",
                    flush=True,
                )
    print(f"{count} gradients, {exceeded} exceed the bound")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
