"""This checkout's kernels beside another checkout's, in the same rounds of one process.

    git worktree add --detach ../before REVISION
    python benchmarks/versions.py ../before [--only plain,variants] [--kernel hopper] [--rounds 9] [--json FILE]
    python benchmarks/versions.py ../before --only backward,deterministic [--kernel hopper]
    python benchmarks/versions.py ../before --only decode

The other checkout's package is copied under another name, so that both can be imported. `plain` has the cells of
`benchmarks/hopper.py`, `variants` those of `benchmarks/portable.py`, `scores` what neither has: scores whose cost a change of
the softmax may move, `sinks` learned sinks. `backward` has the gradients of q, k and v in the cells of
`benchmarks/backward.py`, in bf16, `deterministic` those that have the same bits in every run. `decode` has the cells of
`benchmarks/decode.py` and others, as `auto` plans them, with caches that L2 does not hold. A ratio above 1 says that this
checkout is faster; it is the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from backward_parts import backwards, leaves
from backward_parts.plain import CELLS as BACKWARD_CELLS
from cell import Row
from decode_parts import Cache, attngen_calls, in_graphs
from decode_parts.paged import SIDES, paged_calls
from decode_parts.plain import CELLS as CACHES
from decode_parts.variants import CELL, PLAIN
from decode_parts.variants import VARIANTS as DECODED
from decode_parts.variants import captured as of_shapes
from hopper_parts.plain import CELLS
from portable_parts.variants import VARIANTS, captured
from words import geometric_mean, markdown

import attngen
from attngen.bench.measure import measure_bursts

BEFORE = "attngen_before"
BACKWARDS = ("backward", "deterministic")
Case = tuple[str, dict[str, Any], tuple[int, int, int], dict[str, torch.Tensor]]  # title, keywords, (B, H, S), inputs
MORE_CACHES = (
    Cache(128, 2048), Cache(4, 32768), Cache(2, 1024), Cache(16, 2048), Cache(64, 8192, head_dim=64),
    Cache(16, 8192, head_dim=80), Cache(16, 8192, head_dim=192), Cache(64, 8192, head_dim=256), Cache(16, 8192, heads=8),
    Cache(1, 8192, dtype="fp32"),
)  # fmt: skip
DENSE = {"score": "s + bias[q, k]", "inputs": {"bias": ("bf16", ("q_len", "kv_len"))}}
ALIBI = {"score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}}
SINK = {"sink": "sinks[h]", "inputs": {"sinks": ("fp32", ("heads",))}}
SCORES: dict[str, dict[str, Any]] = {
    "s + (k - q)": {"score": "s + (k - q)"},
    "s + (q - k)": {"score": "s + (q - k)"},
    "s + 1e-6 * (q - k)": {"score": "s + 1e-6 * (q - k)"},
    "ALiBi, all pairs": ALIBI,
    "causal ALiBi": {"mask": "causal", **ALIBI},
    "soft-cap 50": {"mask": "causal", "score": "softcap(50.0)"},
    "additive mask": DENSE,
    "dense mask": {"mask": "allowed[q, k]", "inputs": {"allowed": ("bool", ("q_len", "kv_len"))}},
    "sink": {"mask": "causal", "sink": "1.5"},
    "causal, lse": {"mask": "causal", "lse": True},
}


def other_package(checkout: Path) -> ModuleType:
    """The package of `checkout`, imported as BEFORE with its templates and specs."""
    target = Path(tempfile.mkdtemp(prefix="attngen-versions-"))
    for source in (p for p in checkout.joinpath("attngen").rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        copy = target / BEFORE / source.relative_to(checkout / "attngen")
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = source.read_bytes()
        copy.write_bytes(data.replace(b"attngen", BEFORE.encode()) if source.suffix in (".py", ".attn") else data)
    for folder in ("templates", "specs"):
        (target / folder).symlink_to(checkout.resolve() / folder, target_is_directory=True)
    sys.path.insert(0, str(target))
    return importlib.import_module(BEFORE)


def cases(part: str) -> Iterator[Case]:
    if part in ("plain", *BACKWARDS):
        for cell in CELLS if part == "plain" else [c for c in BACKWARD_CELLS if c.dtype == "bf16"]:
            yield (
                cell.title,
                {"dtype": cell.dtype, "head_dim": cell.head_dim, "mask": cell.mask},
                (cell.batch, cell.heads, cell.q_len),
                {},
            )
    elif part == "sinks":
        for name, mask in {"sink": None, "sink, causal": "causal", "sink, window 128": "causal and window(128)"}.items():
            for head_dim in (64, 128, 256):
                keywords = {"dtype": "bf16", "head_dim": head_dim, "mask": mask, **SINK}
                heads = 2048 // head_dim
                yield f"{name} D{head_dim}", keywords, (4, heads, 4096), {"sinks": torch.randn(heads, device="cuda")}
    elif part == "variants":
        for name, (keywords, reads) in VARIANTS.items():
            yield name, {"dtype": "bf16", "head_dim": 128, **keywords}, (2, 16, 8192), captured(reads)
    else:
        for name, keywords in SCORES.items():
            length = 4096
            numbers = torch.randn(length, length, device="cuda")
            for head_dim in (64, 128, 256):
                slopes = 2.0 ** -torch.linspace(0.5, 8, 2048 // head_dim, device="cuda")
                captured_tensor = {"bias": numbers.bfloat16(), "allowed": numbers > 0, "slopes": slopes}
                inputs = {n: captured_tensor[n] for n in keywords.get("inputs", {})}
                yield (
                    f"{name} D{head_dim}",
                    {"dtype": "bf16", "head_dim": head_dim, **keywords},
                    (4, 2048 // head_dim, length),
                    inputs,
                )


def rows(part: str, before: ModuleType, kernel: str, rounds: int) -> Iterator[Row]:
    elements = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for title, keywords, (batch, heads, length), inputs in cases(part):
        sizes = (batch, heads, length, keywords["head_dim"])
        q, k, v = (torch.randn(sizes, device="cuda").to(elements[keywords["dtype"]]) for _ in range(3))
        calls: dict[str, Any] = {}
        if part in BACKWARDS:
            q, k, v = leaves((q, k, v))
        for name, package in (("now", attngen), ("before", before)):
            if part in BACKWARDS:
                layers = importlib.import_module(f"{package.__name__}.torch")
                layer = layers.Attention(package.define(**keywords), mode=kernel, deterministic=part == "deterministic")
                calls[name] = partial(layer, q, k, v)
            else:
                compiled = package.compile(package.define(**keywords), kernel=kernel, device="cuda")
                calls[name] = partial(compiled, q, k, v, **inputs)
        if part in BACKWARDS:
            calls = backwards(calls, (q, k, v))
        first, second = ((x[0] if isinstance(x, tuple) else x).float() for x in (calls["now"](), calls["before"]()))
        found = measure_bursts(calls, rounds)
        yield {
            "case": title,
            "ms": found.medians(),
            "ratio": found.ratio("now", "before"),
            "difference": float((first - second).abs().max()),
        }


def decode_rows(before: ModuleType, rounds: int) -> Iterator[Row]:
    packages = {"now": attngen, "before": before}
    dense = {c.title: ({}, c, {}) for c in (*CACHES, *MORE_CACHES)}
    variants = {n: (keywords, replace(CELL, **changes), shapes) for n, (keywords, changes, shapes, _) in DECODED.items()}
    del variants[PLAIN]
    for title, (keywords, cell, shapes) in (dense | variants).items():
        said = {"name": "decoded", "dtype": cell.dtype, "head_dim": cell.head_dim, **keywords}
        tensors, inputs = cell.tensors(), of_shapes(shapes)
        yield compared(
            title, {n: attngen_calls(one.define(**said), tensors, inputs, one) for n, one in packages.items()}, rounds
        )
    for cell in CACHES:
        tensors = cell.tensors()
        for title, how in SIDES.items():
            sides = {n: paged_calls(cell, tensors, *how, one) for n, one in packages.items()}
            yield compared(f"{cell.title}, {title}", sides, rounds)


def compared(title: str, sides: dict[str, list[Any]], rounds: int) -> Row:
    first, second = (calls[0]().float() for calls in sides.values())
    found = in_graphs(sides, rounds)
    return {
        "case": title,
        "ms": found.medians(),
        "ratio": found.ratio("now", "before"),
        "difference": float((first - second).abs().max()),
    }


def table(rows: list[Row]) -> str:
    lines = [(r["case"], f"{r['ms']['before']:.4f}", f"{r['ms']['now']:.4f}", f"{r['ratio']:.3f}") for r in rows]
    ratios = [r["ratio"] for r in rows]
    mean = f"Geometric mean {geometric_mean(ratios):.4f}, least {min(ratios):.3f}."
    return f"{markdown(('ms', 'before', 'now', 'before / now'), lines)}\n\n{mean}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the other checkout")
    parser.add_argument(
        "--only", default="plain,variants", help="of plain, variants, scores, sinks, backward, deterministic, decode"
    )
    parser.add_argument("--kernel", default="hopper")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    before, kept = other_package(options.checkout), {}
    torch.manual_seed(0)
    with torch.no_grad():
        for part in options.only.split(","):
            kept[part] = []
            decodes = part == "decode"
            found = decode_rows(before, options.rounds) if decodes else rows(part, before, options.kernel, options.rounds)
            for row in found:
                kept[part].append(row)
                print(json.dumps({"part": part, **row}), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(kept, indent=1))
            print(table(kept[part]), flush=True)


if __name__ == "__main__":
    main()
