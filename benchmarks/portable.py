"""The portable fused kernel (mma.sync, sm_80 and later) beside torch's FlashAttention-2 and FlexAttention.

    python benchmarks/portable.py [--write docs/performance.md]

Three tables: plain attention, fp16 and bf16, 16384 tokens, heads 2048 / D; head sizes between the powers of two, beside what
their share of D = 128's work predicts; and the variants that FlexAttention is used for. Times by CUDA events, L2 flushed
before each call, candidates in random order, medians, of variants those of bursts and of the ratios within each round; TFLOP/s
of the pairs that the mask keeps; errors are the largest against float64.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from markers import write_between

import attngen
from attngen.bench.measure import measure, measure_bursts
from attngen.bench.peers import flex_peer, torch_peers
from attngen.bench.sweep import where
from attngen.reference.torch_oracle import allowed_pairs, torch_attention

TOKENS = 16384
PEERS = ("torch flash", "torch cuDNN")
PLAIN = [(t, d, m, s) for t in ("bf16", "fp16") for d in (64, 128, 256) for m in (None, "causal") for s in (1024, 4096, 16384)]
BETWEEN = [(d, mask) for d in (80, 96, 160, 192) for mask in (None, "causal")]
# name: (keywords of attngen.define, the captured tensor)
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, ""),
    "causal": ({"mask": "causal"}, ""),
    "ALiBi": ({"mask": "causal", "score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}}, "slopes"),
    "soft-cap 20": ({"mask": "causal", "score": "softcap(20.0)"}, ""),
    "soft-cap 20, precision high": ({"mask": "causal", "score": "softcap(20.0)", "precision": "high"}, ""),
    "window 1024": ({"mask": "causal and window(1024)"}, ""),
    "documents of 1024": (
        {"mask": "causal and same_document(ids)", "inputs": {"ids": ("int32", ("batch", "kv_len"))}},
        "ids",
    ),
    "prefix 1024": ({"mask": "prefix(1024) or causal"}, ""),
    "relative bias": ({"score": "relative_bias(table, 1024)", "inputs": {"table": ("fp32", ("heads", 2049))}}, "table"),
}


def captured(name: str) -> dict[str, torch.Tensor]:
    """The tensor that a variant reads, for B2 H16 S8192."""
    if name == "slopes":
        return {name: 2.0 ** (-0.5 * torch.arange(1, 17, device="cuda"))}
    if name == "ids":
        return {name: (torch.arange(8192, dtype=torch.int32, device="cuda") // 1024).expand(2, 8192).contiguous()}
    return {name: torch.randn(16, 2049, device="cuda")} if name else {}


def plain(dtype: str, head_dim: int, mask: str | None, length: int, rounds: int) -> dict[str, Any]:
    """One cell: milliseconds, TFLOP/s and error of each candidate."""
    element = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    shape = (TOKENS // length, 2048 // head_dim, length, head_dim)
    q, k, v = (torch.randn(shape, device="cuda").to(element) for _ in range(3))
    spec = attngen.define(dtype=dtype, head_dim=head_dim, mask=mask)
    compiled = attngen.compile(spec, kernel="fused", device="cuda")
    calls = {"attngen": lambda: compiled(q, k, v), **torch_peers(spec, q, k, v, only=PEERS)}
    one = (slice(0, 1), slice(0, 2))  # errors of one batch's first two heads
    truth, _ = torch_attention(spec, q[one], k[one], v[one])
    errors = {name: float((call()[one].double() - truth).abs().max()) for name, call in calls.items()}
    found = {name: t.median for name, t in measure(calls, rounds).items()}
    pairs = shape[0] * shape[1] * (length * (length + 1) / 2 if mask else length * length)
    tflops = {name: 4 * head_dim * pairs / (ms * 1e9) for name, ms in found.items()}
    title = f"{dtype} D{head_dim} {mask or 'full'} S{length}"
    return {"case": title, "schedule": compiled.plan.schedule, "ms": found, "tflops": tflops, "errors": errors}


def plain_table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| TFLOP/s | attngen | FlashAttention-2 | ratio | cuDNN | error | of FlashAttention-2 |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios = []
    for c in cells:
        t, e = c["tflops"], c["errors"]
        ratios.append(t["attngen"] / t["torch flash"])
        lines.append(
            f"| {c['case']} | {t['attngen']:.0f} | {t['torch flash']:.0f} | {ratios[-1]:.2f} | {t.get('torch cuDNN', 0):.0f} "
            f"| {e['attngen']:.1e} | {e['torch flash']:.1e} |"
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    lines.append(f"\nGeometric mean of the ratios {mean:.3f}, the least {min(ratios):.3f}.")
    return "\n".join(lines)


def between_table(cells: list[dict[str, Any]], at_128: dict[str, float]) -> str:
    """Milliseconds beside those of D = 128 times the share of its work."""
    lines = ["| S4096, bf16 | ms | predicted from D128 | ratio | FlashAttention-2, ms |", "|---|---|---|---|---|"]
    for c in cells:
        _, size, mask, _ = c["case"].split()
        d = int(size[1:])
        heads = 2048 // d
        predicted = at_128[mask] * (d * heads) / 2048
        ms = c["ms"]
        lines.append(
            f"| D{d} {mask}, {heads} heads | {ms['attngen']:.3f} | {predicted:.3f} | {ms['attngen'] / predicted:.2f} "
            f"| {ms['torch flash']:.3f} |"
        )
    return "\n".join(lines)


def variant_rows(rounds: int, kernel: str = "fused") -> Iterator[dict[str, Any]]:
    """One variant after the other, each in the same rounds as the kernel without it: `share` is of that rate."""
    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda").bfloat16() for _ in range(3))
    plain: dict[bool, tuple[Any, int]] = {}  # by whether there is a mask, full or causal: the call and its operations
    for name, (keywords, reads) in VARIANTS.items():
        spec = attngen.define(name="variant", dtype="bf16", head_dim=128, **keywords)
        inputs = captured(reads)
        ours = partial(attngen.compile(spec, kernel=kernel, device="cuda", captures=inputs), q, k, v)
        operations = 4 * 128 * allowed_pairs(spec, q, k, inputs)
        base, base_operations = plain.setdefault(spec.mask is not None, (ours, operations))
        calls = {"attngen": ours, "plain": base, **flex_peer(spec, q, k, v, inputs, {}, print)}
        difference = float((ours().float() - calls["FlexAttention"]().float()).abs().max())
        found = measure_bursts(calls, rounds)
        ms = found.medians()
        yield {
            "case": name,
            "ms": ms,
            "tflops": {c: operations / (ms[c] * 1e9) for c in ("attngen", "FlexAttention")},
            "share": found.ratio("attngen", "plain") * operations / base_operations,
            "ratio": found.ratio("attngen", "FlexAttention"),
            "difference": difference,
        }


def variant_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| TFLOP/s, B2 H16 S8192 D128 bf16 | attngen | of its own plain rate | FlexAttention | ratio |", "|---" * 5 + "|"]
    for r in rows:
        t = r["tflops"]
        lines.append(f"| {r['case']} | {t['attngen']:.0f} | {r['share']:.0%} | {t['FlexAttention']:.0f} | {r['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose tables between the markers are replaced")
    options = parser.parse_args()
    cells = []
    for case in PLAIN:
        cells.append(plain(*case, options.rounds))
        print(json.dumps(cells[-1]), flush=True)
    at_128 = {m: c["ms"]["attngen"] for c in cells for m in ("full", "causal") if c["case"] == f"bf16 D128 {m} S4096"}
    between = [plain("bf16", d, mask, 4096, options.rounds) for d, mask in BETWEEN]
    variants = []
    for row in variant_rows(options.rounds):
        variants.append(row)
        print(json.dumps(row), flush=True)
    tables = [plain_table(cells), between_table(between, at_128), variant_table(variants)]
    text = "\n\n".join([f"{where()}, median of {options.rounds}; schedule {cells[0]['schedule']}", *tables])
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"plain": cells, "between": between, "variants": variants}, indent=1))
    if options.write:
        write_between(options.write, "portable", text)


if __name__ == "__main__":
    main()
