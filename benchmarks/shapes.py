"""The attention of known models, by its shapes, beside the fastest of torch's backends and FlashAttention's packages.

    python benchmarks/shapes.py [--only bert,llama] [--rounds N] [--write docs/tables]

bf16, randn, on one GPU: `attngen.torch.attention` and `scaled_dot_product_attention` with each backend that takes the call
(cuDNN, FlashAttention-2, efficient), with the same arguments; masks and biases are tensors; and, where there are none, the
packages of FlashAttention that are installed, whose sides are named. Forward, and forward with backward.
Each call is a CUDA graph, so that short calls cost no host time; all sides in the same rounds, in random order; the L2 cache is
flushed before each call; ratios are medians of the ratios within each round, beside the backend with the least median.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from cell import Row, Tensors
from markers import write_between
from torch.nn.attention import SDPBackend, sdpa_kernel
from words import geometric_mean, least, markdown

import attngen.torch
from attngen.bench.measure import measure_bursts
from attngen.bench.peers import flash_functions, flash_versions
from attngen.bench.sweep import where

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
OURS = "attngen"
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Model:
    """One layer's attention. `mask` is "padding", a bool tensor [batch, 1, 1, kv_len] whose rows keep a quarter to all of the
    keys, or "bias", a tensor [1, heads, q_len, kv_len] in bf16; a model is trained if `trains`."""

    batch: int
    heads: int
    lengths: tuple[int, int]  # (queries, keys)
    head_dims: tuple[int, int]  # (Q and K, V)
    kv_heads: int = 0  # as `heads`
    is_causal: bool = False
    mask: str = ""
    trains: bool = True

    def randn(self) -> Tensors:
        (q_len, kv_len), (d, dv), kv_heads = self.lengths, self.head_dims, self.kv_heads or self.heads
        shapes = (self.batch, self.heads, q_len, d), (self.batch, kv_heads, kv_len, d), (self.batch, kv_heads, kv_len, dv)
        q, k, v = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
        return q, k, v

    def mask_tensor(self) -> torch.Tensor | None:
        q_len, kv_len = self.lengths
        if self.mask == "bias":
            return torch.randn(1, self.heads, q_len, kv_len, device="cuda").bfloat16()
        ends = torch.randint(kv_len // 4, kv_len + 1, (self.batch, 1, 1, 1), device="cuda")
        return torch.arange(kv_len, device="cuda") < ends if self.mask else None


MODELS = {
    "vit": Model(64, 12, (197, 197), (64, 64)),
    "vit-large": Model(32, 16, (577, 577), (64, 64)),
    "swin": Model(4096, 4, (49, 49), (32, 32)),
    "dit": Model(64, 16, (256, 256), (72, 72)),
    "sd": Model(8, 8, (4096, 4096), (40, 40), trains=False),
    "sd-cross": Model(8, 8, (4096, 77), (40, 40), trains=False),
    "sdxl": Model(4, 20, (1024, 1024), (64, 64), trains=False),
    "flux": Model(1, 24, (4608, 4608), (128, 128), trains=False),
    "bert": Model(32, 12, (512, 512), (64, 64), mask="padding"),
    "bert-128": Model(64, 12, (128, 128), (64, 64)),
    "whisper": Model(8, 20, (1500, 1500), (64, 64), trains=False),
    "t5": Model(16, 12, (512, 512), (64, 64), mask="bias", trains=False),
    "alphafold": Model(384, 4, (384, 384), (32, 32), mask="bias", trains=False),
    "gpt2": Model(16, 12, (1024, 1024), (64, 64), is_causal=True),
    "llama-512": Model(1, 32, (512, 512), (128, 128), kv_heads=8, is_causal=True),
    "llama": Model(1, 32, (4096, 4096), (128, 128), kv_heads=8, is_causal=True),
    "gemma": Model(1, 8, (4096, 4096), (256, 256), kv_heads=4, is_causal=True),
    "deepseek": Model(1, 16, (4096, 4096), (192, 128), is_causal=True, trains=False),
}


def sides(model: Model) -> dict[str, Callable[..., torch.Tensor]]:
    """attngen's function and torch's by each backend, of q, k and v."""
    same = {"attn_mask": model.mask_tensor(), "is_causal": model.is_causal, "enable_gqa": bool(model.kv_heads)}

    def by(backend: SDPBackend, *tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, **same)

    ours = partial(attngen.torch.attention, **same)
    packages = {} if model.mask else flash_functions()
    scale = 1 / math.sqrt(model.head_dims[0])
    flash = {name: partial(function, scale=scale, is_causal=model.is_causal) for name, function in packages.items()}
    return {OURS: ours, **{name: partial(by, backend) for name, backend in BACKENDS.items()}, **flash}


def trained(function: Callable[..., torch.Tensor], tensors: Tensors, gradient: torch.Tensor) -> Call:
    leaves = [t.detach().requires_grad_() for t in tensors]
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def in_graph(call: Call) -> Call | None:
    """A replay of `call`, or None if the backend does not take it."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            call()
    except Exception:  # whatever these libraries raise for what they do not support
        return None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def rows(name: str, rounds: int) -> list[Row]:
    """Of the forward, and of forward with backward."""
    model = MODELS[name]
    tensors, functions, found = model.randn(), sides(model), []
    calls: dict[str, dict[str, Call]] = {"forward": {n: partial(f, *tensors) for n, f in functions.items()}}
    if model.trains:
        gradient = torch.randn(*tensors[0].shape[:-1], model.head_dims[1], device="cuda").bfloat16()
        calls["training"] = {n: trained(f, tensors, gradient) for n, f in functions.items()}
    for what, of_sides in calls.items():
        graphs = {n: graph for n, call in of_sides.items() if (graph := in_graph(call)) is not None}
        measured = measure_bursts(graphs, rounds)
        ms = measured.medians()
        best = min((n for n in ms if n != OURS), key=lambda n: ms[n])
        found.append({"case": f"{name}, {what}", "ms": ms, "peer": best, "ratio": measured.ratio(OURS, best)})
    return found


def shape(model: Model) -> str:
    """`B1 H32 over 8, 4096 x 4096, D128 causal`."""
    heads = f"H{model.heads}" + (f" over {model.kv_heads}" if model.kv_heads else "")
    sizes = "/".join(map(str, dict.fromkeys(model.head_dims)))
    what = " causal" * model.is_causal + (f", {model.mask}" if model.mask else "")
    return f"B{model.batch} {heads}, {model.lengths[0]} x {model.lengths[1]}, D{sizes}{what}"


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        ours, best = (f"{1e3 * r['ms'][side]:.1f}" for side in (OURS, r["peer"]))
        lines.append((r["case"], shape(MODELS[r["case"].split(",")[0]]), ours, best, r["peer"], f"{r['ratio']:.2f}"))
    mean = geometric_mean([r["ratio"] for r in rows])
    text = markdown(("microseconds", "shape", "attngen", "fastest backend", "which", "ratio"), lines)
    return f"{text}\n\nGeometric mean {mean:.3f}, least {least(rows, lambda r: r['ratio'])}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="models, of %(default)s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    found: list[Row] = []
    for name in options.only.split(","):
        for row in rows(name, options.rounds):
            print(json.dumps(row), flush=True)
            found.append(row)
    peers = flash_versions({side for row in found for side in row["ms"]})
    text = f"{where()}{peers}, {options.rounds} rounds\n\n{table(found)}"
    print(text)
    if options.write:
        write_between(options.write, "shapes", text)


if __name__ == "__main__":
    main()
