"""Packed sequences beside flash-attention's function of them, as torch's `varlen_attn` or flash-attn itself has it.

    python benchmarks/varlen.py [--rounds N]

bf16, randn, 16 query heads of 128 or 32 of 64, as many key/value heads; forward, and forward with backward in any order. All
sides in the same rounds, in random order; ratios are medians of the ratios within each round. TFLOP/s count two products
forward and seven forward with backward, for each pair that the mask keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import varlen

from attngen.bench.measure import measure_bursts
from attngen.torch import flash_attn_func, flash_attn_varlen_func

BATCHES = {
    "8 of 2048": (2048,) * 8,
    "1 of 16384": (16384,),
    "64 of 256": (256,) * 64,
    "4096 to 16": (4096, 3000, 2500, 2000, 1500, 1000, 700, 500, 400, 300, 200, 100, *(16,) * 11),
}


def sides(lengths: tuple[int, ...], size: int, causal: bool) -> tuple[dict[str, Callable[..., Any]], tuple[torch.Tensor, ...]]:
    """The functions to compare, and their tensors."""
    heads, total, longest = 2048 // size, sum(lengths), max(lengths)
    begins = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    tensors = tuple(torch.randn(3, total, heads, size, device="cuda", dtype=torch.bfloat16))
    packed = (begins, begins, longest, longest)
    window = (-1, 0) if causal else (-1, -1)
    found: dict[str, Callable[..., Any]] = {
        "attngen": lambda q, k, v: flash_attn_varlen_func(q, k, v, *packed, causal=causal),
        "torch": lambda q, k, v: varlen.varlen_attn(q, k, v, *packed, window_size=window),
    }
    if len(set(lengths)) == 1:
        shape = (len(lengths), longest, heads, size)
        found["attngen, dense"] = lambda q, k, v: flash_attn_func(*(t.view(shape) for t in (q, k, v)), causal=causal).flatten(
            0, 1
        )
    try:
        import flash_attn

        found["flash-attn"] = lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, *packed, causal=causal)
    except ImportError:
        pass
    return found, tensors


def trained(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """A call of `function` with the gradients of its sum."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    gradient = torch.randn_like(tensors[0])

    def step() -> Any:
        return torch.autograd.grad(function(*leaves), leaves, gradient)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, lengths in BATCHES.items():
        for size in (64, 128):
            for causal in (False, True):
                functions, tensors = sides(lengths, size, causal)
                pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
                for what, products in (("forward", 2), ("with backward", 7)):
                    calls = {
                        side: (lambda f=f, t=tensors: f(*t)) if products == 2 else trained(f, tensors)  # type: ignore[misc]
                        for side, f in functions.items()
                    }
                    found = measure_bursts(calls, rounds)
                    work = 2 * products * pairs * 2048
                    speeds = ", ".join(f"{side} {work / (ms * 1e9):.0f}" for side, ms in found.medians().items())
                    print(
                        f"{name:<11} D{size:<4}{'causal' if causal else 'full':<7}{what:<14} TFLOP/s: {speeds}; "
                        f"over torch {found.ratio('attngen', 'torch'):.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
