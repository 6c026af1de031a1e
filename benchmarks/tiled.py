"""The three kernels of the tiled schedule one by one, at every tile, beside torch's own products and softmax.

    python benchmarks/tiled.py [--write docs/tables]

Median milliseconds by CUDA events, L2 flushed before each. Products are in TFLOP/s, the softmax in TB/s read and written;
masked pairs do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from markers import write_between
from torch.nn.attention import SDPBackend, sdpa_kernel

import attngen
from attngen.bench.measure import measure
from attngen.device.arrays import view
from attngen.schedules.tiled import plan as tiled

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kernels(spec: attngen.AttentionSpec, tensors: Tensors) -> dict[str, Callable[[], object]]:
    """Each kernel of `spec` by the end of its name, to be launched alone."""
    compiled = attngen.compile(spec, device="cuda")
    arrays = {name: view(tensor, name) for name, tensor in zip("qkv", tensors, strict=True)}
    bound = compiled.bind(arrays, {})
    stream = torch.cuda.current_stream().cuda_stream

    def alone(one):
        return lambda kept=bound: compiled.kernel.launch((one,), bound.memory, stream)

    found = {one.entry.name.removeprefix(f"{spec.name}_"): alone(one) for one in bound.launches}
    return found | {"all": lambda kept=bound: compiled.kernel.launch(bound.launches, bound.memory, stream)}


def unfused(tensors: Tensors, causal: bool) -> dict[str, Callable[[], object]]:
    """torch's own two products and softmax, and its math backend."""
    q, k, v = tensors
    s = q @ k.mT
    p = torch.softmax(s, -1)

    def math() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return {"scores": lambda: q @ k.mT, "softmax": lambda: torch.softmax(s, -1), "weighted_sum": lambda: p @ v, "all": math}


def rows(dtype: str, causal: bool, batch: int, heads: int, length: int, head_dim: int, rounds: int) -> list[str]:
    element = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=element) for _ in range(3))
    candidates = {("torch, unfused", name): call for name, call in unfused((q, k, v), causal).items()}
    for t in tiled.POSSIBLE:
        spec = attngen.define(
            dtype=dtype, head_dim=head_dim, mask="causal" if causal else None, kernel="tiled", tile=(t.block_q, t.block_kv),
            warps=t.warps,
        )  # fmt: skip
        name = f"{t.block_q} x {t.block_kv}, {t.warps} warps"
        candidates |= {(name, kernel): call for kernel, call in kernels(spec, (q, k, v)).items()}
    found = {key: timing.median for key, timing in measure(candidates, rounds).items()}
    pairs = batch * heads * (length * (length + 1) / 2 if causal else length * length)
    case = f"{dtype} {'causal' if causal else 'full'} B{batch} H{heads} D{head_dim} S{length}"

    def line(name: str) -> str:
        ms = {kernel: found[name, kernel] for kernel in ("scores", "softmax", "weighted_sum", "all")}
        products = [f"{ms[n]:.3f} ({2 * head_dim * pairs / (ms[n] * 1e9):.0f})" for n in ("scores", "weighted_sum")]
        softmax = f"{ms['softmax']:.3f} ({8 * pairs / (ms['softmax'] * 1e9):.1f})"
        return f"| {case} | {name} | {products[0]} | {softmax} | {products[1]} | {ms['all']:.3f} |"

    return [line(name) for name in dict.fromkeys(name for name, _ in candidates)]


CASES = (
    ("fp32", False, 4, 8, 2048, 64),
    ("fp32", True, 4, 8, 2048, 64),
    ("fp32", False, 4, 8, 512, 64),
    ("bf16", False, 4, 8, 4096, 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    lines = ["| | | scores, ms (TFLOP/s) | softmax, ms (TB/s) | weighted sum, ms (TFLOP/s) | all, ms |", "|---" * 6 + "|"]
    for case in CASES:
        lines += rows(*case, options.rounds)
        print("\n".join(lines[-1 - len(tiled.POSSIBLE) :]), flush=True)
    text = "\n".join([f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds}", "", *lines])
    if options.write:
        write_between(options.write, "tiled", text)


if __name__ == "__main__":
    main()
