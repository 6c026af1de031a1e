"""Forwards and backwards whose scale is an argument of the kernel, beside the same with the scale as a constant.

    python benchmarks/scales.py [--rounds 7]

Needs a GPU. A ratio below 1 says that the constant is faster; it is the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from backward_parts import backwards, leaves
from words import markdown

import attngen
from attngen.bench.measure import measure_bursts
from attngen.torch import Attention

SCALE = 0.1
SIZES = ((64, 4096), (128, 4096), (128, 1024))  # head size and length, of 4 * 2048 / head size heads


def measured(kernel: str, head_dim: int, length: int, mask: str | None, backward: bool, rounds: int) -> tuple[str, ...]:
    described = {"dtype": "bf16", "head_dim": head_dim, "mask": mask}
    constant = attngen.define(**described, scale=SCALE)
    argument = attngen.define(**described, scale="t", params={"t": "float"})
    shape = (4, 2048 // head_dim, length, head_dim)
    tensors = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if backward:
        tensors = leaves(tensors)
        layers = {"constant": Attention(constant, mode=kernel), "argument": partial(Attention(argument, mode=kernel), t=SCALE)}
        calls = backwards({name: partial(layer, *tensors) for name, layer in layers.items()}, tensors)
    else:
        kernels = {
            name: attngen.compile(spec, kernel=kernel) for name, spec in (("constant", constant), ("argument", argument))
        }
        calls = {
            "constant": partial(kernels["constant"], *tensors),
            "argument": partial(kernels["argument"], *tensors, t=SCALE),
        }
    found = measure_bursts(calls, rounds)
    direction = "backward" if backward else "forward"
    times = found.medians()
    title = f"{kernel} {direction}, D{head_dim} {mask or 'full'} S{length}"
    ratio = found.ratio("argument", "constant")
    return title, f"{times['constant']:.4f}", f"{times['argument']:.4f}", f"{ratio:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for kernel, backward in (("hopper", False), ("fused", False), ("hopper", True)):
        for head_dim, length in SIZES:
            for mask in (None, "causal"):
                rows.append(measured(kernel, head_dim, length, mask, backward, options.rounds))
                print(*rows[-1], flush=True)
    print(markdown(("ms", "constant", "argument", "constant / argument"), rows))


if __name__ == "__main__":
    main()
