"""Two blocks of FLUX.1 by diffusers, with attngen as the attention backend and with diffusers' own: errors and times.

    pip install 'attngen[diffusers]'
    python benchmarks/diffusers_attention.py [--rounds 15] [--small] [--write docs/coming_from.md]

A double and a single block with the widths of FLUX.1 (24 heads of 128), random weights in bf16, 4096 tokens of an image and 512
of a text. Errors are the largest against the same model in float64, relative to the largest element: of the output, and of the
gradients of the two inputs; they are measured with 512 and 64 tokens. Times are medians of the rounds, in which the backends
take turns, by CUDA events. `--small` has narrow blocks and no times, for a trial on a CPU, where attngen's device is emulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import shuffle
from statistics import median
from typing import Any

import diffusers
import torch
from diffusers import FluxTransformer2DModel
from markers import write_between
from words import markdown

import attngen.diffusers  # noqa: F401  # registers the backend "attngen"
from attngen.bench.sweep import where

BACKENDS = {"attngen": "attngen", "_native_flash": "FlashAttention-2", "_native_efficient": "memory-efficient"}
TOKENS, CHECKED = (4096, 512), (512, 64)  # an image's and a text's
WIDE = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
NARROW = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8), "joint_attention_dim": 32}
Tensors = dict[str, torch.Tensor]


def model_of(small: bool, device: str) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    sizes = NARROW if small else WIDE
    return FluxTransformer2DModel(num_layers=1, num_single_layers=1, **sizes).to(device, torch.bfloat16)


def inputs(model: FluxTransformer2DModel, tokens: tuple[int, int]) -> Tensors:
    """The arguments of a step; the tokens of the image and of the text have gradients."""
    image, text = tokens
    config, like = model.config, {"device": model.device, "dtype": model.dtype}
    return {
        "hidden_states": torch.randn(1, image, config.in_channels, **like).requires_grad_(),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, **like).requires_grad_(),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **like),
        "timestep": torch.full((1,), 0.5, **like),
        "img_ids": torch.stack([torch.arange(image, **like) * n % 64 for n in (0, 1, 3)], -1),
        "txt_ids": torch.zeros(text, 3, **like),
    }


def step(model: FluxTransformer2DModel, given: Tensors) -> list[torch.Tensor]:
    """The output and the gradients of the two inputs."""
    output = model(**given).sample
    leaves = [x for x in given.values() if x.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.square().mean(), leaves)]


def errors(model: FluxTransformer2DModel, backends: dict[str, str], tokens: tuple[int, int]) -> list[list[str]]:
    given = inputs(model, tokens)
    exact = deepcopy(model).double()
    exact.set_attention_backend("_native_math")
    right = step(exact, {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in given.items()})
    rows = []
    for backend, title in backends.items():
        model.set_attention_backend(backend)
        found = step(model, given)
        relative = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True)]
        rows.append([title, *(f"{e:.1e}" for e in relative)])
    return rows


def times(model: FluxTransformer2DModel, rounds: int) -> list[list[str]]:
    given = inputs(model, TOKENS)

    def forward() -> object:
        with torch.no_grad():
            return model(**given)

    calls: dict[str, Callable[[], object]] = {"forward": forward, "both": lambda: step(model, given)}
    taken: dict[tuple[str, str], list[float]] = {(b, c): [] for b in BACKENDS for c in calls}
    order = list(taken)
    for turn in range(rounds + 2):  # the first two compile and warm
        shuffle(order)
        for backend, call in order:
            model.set_attention_backend(backend)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[call]()
            end.record()
            torch.cuda.synchronize()
            if turn > 1:
                taken[backend, call].append(begin.elapsed_time(end))
    return [[title, *(f"{median(taken[backend, call]):.2f}" for call in calls)] for backend, title in BACKENDS.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="narrow blocks, no times; needs no GPU")
    parser.add_argument("--write", type=Path, help="the page whose table between the markers is replaced")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("no GPU: --small checks the numbers on the CPU")
    model: Any = model_of(options.small, device)
    backends = {b: title for b, title in BACKENDS.items() if device == "cuda" or b in ("attngen", "native")}
    head = ["largest relative error", "output", "gradient, image", "gradient, text"]
    place = where() if device == "cuda" else f"no GPU, torch {torch.__version__}"
    found = errors(model, backends, (40, 9) if options.small else CHECKED)
    texts = [f"{place}, diffusers {diffusers.__version__}", markdown(head, found)]
    if not options.small:
        texts.append(markdown(["two blocks", "forward, ms", "forward and gradients, ms"], times(model, options.rounds)))
    text = "\n\n".join(texts)
    print(text)
    if options.write:
        write_between(options.write, "diffusers_attention", text)


if __name__ == "__main__":
    main()
