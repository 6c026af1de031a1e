"""The error of dQ for keys with a large common component, and what it costs to avoid it.

    python benchmarks/common_component.py

Keys of a head are a common vector plus noise, as if activations are massive in a few channels. dQ = dS K: a row of dS sums to
0, so that the common vector cancels, but only before dS is rounded to 16 bits for the tensor cores. A first table has the
product alone, by torch on the CPU, of one head: the largest errors against float64, beside the largest dQ. A second one has
attngen's kernels, on a GPU if there is one, else emulated.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch

from attngen.torch import attention

Tensor = torch.Tensor
LENGTH, SIZE, CHANNELS = 256, 64, 4  # keys, head size, channels with a common component
COMPONENTS = (0.0, 10.0, 100.0, 1000.0)


def problem(component: float, heads: int = 1) -> tuple[Tensor, ...]:
    """q, k, v and dO [1, heads, LENGTH, SIZE] in bf16. q has small elements where keys have large ones."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn((1, heads, LENGTH, SIZE), generator=generator) for _ in range(4))
    k[..., :CHANNELS] += component
    q[..., :CHANNELS] /= max(component, 1.0)
    return tuple(t.bfloat16() for t in (q, k, v, d_out))


def d_scores(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Tensor:
    """dS of one head, in the precision of the arguments."""
    weights = torch.softmax(q @ k.mT * SIZE**-0.5, -1)
    d_weights = d_out @ v.mT
    return weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))


def products(component: float) -> dict[str, float]:
    """The largest error of dQ, by the way in which dS K is computed."""
    tensors = problem(component)
    exact = d_scores(*(t.double() for t in tensors)) @ tensors[1].double() * SIZE**-0.5
    q, k, v, d_out = (t.float() for t in tensors)
    unrounded = d_scores(q, k, v, d_out)
    rounded = unrounded.bfloat16().float()
    mean = k.mean(-2, keepdim=True)
    ways = {
        "fp32 dS": unrounded @ k,
        "bf16 dS": rounded @ k,
        "bf16 dS, minus row sum times mean key": rounded @ k - rounded.sum(-1, keepdim=True) * mean,
        "bf16 dS, keys minus mean key in bf16": rounded @ (k - mean).bfloat16().float(),
    }
    errors = {name: float((found.double() * SIZE**-0.5 - exact).abs().max()) for name, found in ways.items()}
    return {"largest dQ": float(exact.abs().max()), **errors}


def of_kernels(component: float, device: str) -> dict[str, float]:
    """The largest error of dQ of attngen's kernels; in the last way, the caller subtracts the mean key."""
    q, k, v, d_out = (t.to(device) for t in problem(component))

    def gradient(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        q = q.detach().requires_grad_()
        return torch.autograd.grad(attention(q, k, v, **how), q, d_out.to(q.dtype))[0].double()

    exact = gradient(q.double(), k.double(), v.double(), mode="math")
    centered = (k.float() - k.float().mean(-2, keepdim=True)).bfloat16()
    ways: dict[str, Callable[[], Tensor]] = {
        "math": lambda: gradient(q, k, v, mode="math"),
        "naive": lambda: gradient(q, k, v, mode="naive"),
        "fused": lambda: gradient(q, k, v, mode="fused"),
        "fused, keys minus mean key": lambda: gradient(q, centered, v, mode="fused"),
    }
    errors = {name: float((run() - exact).abs().max()) for name, run in ways.items()}
    return {"largest dQ": float(exact.abs().max()), **errors}


def show(title: str, rows: dict[float, dict[str, float]]) -> None:
    """Prints a line for each common component."""
    print(f"\n{title}")
    names = next(iter(rows.values()))
    print(" | ".join(["common component", *names]))
    for component, found in rows.items():
        print(" | ".join([f"{component:16.0f}", *(f"{found[name]:>{len(name)}.2g}" for name in names)]))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.simplefilter("ignore")
    show("dQ = dS K, errors by torch on the CPU", {c: products(c) for c in COMPONENTS})
    show(f"attngen's kernels on {device}, largest errors of dQ", {c: of_kernels(c, device) for c in COMPONENTS})


if __name__ == "__main__":
    main()
