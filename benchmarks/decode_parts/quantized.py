"""Keys and values of 8 bits beside 16-bit queries: each variant beside the same one with K and V of 16 bits.

K and V have scales of each head of keys, unless a row says otherwise. Errors are the largest against float64, of the elements
as they are stored, in the first sequence, relative to the largest element of O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from cell import Row
from words import markdown

import attngen
from attngen.reference.torch_oracle import torch_attention
from attngen.spec.attention import AttentionSpec
from decode_parts import Cache, Tensors, attngen_calls, in_graphs, read_rate
from decode_parts.paged import paged_calls

CELLS = (Cache(1, 8192), Cache(1, 65536), Cache(1, 131072), Cache(16, 8192), Cache(64, 8192))
CELL = Cache(16, 8192)
NARROW = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
WIDE, QUANTIZED, PAGES = "16 bits", "8 bits", "8 bits, pages of 64"
PAGED = (64, True, True, False)  # pages of 64 keys, heads inside, stated
GOAL = 280.0  # us at B64 S8k
SHARE = 0.85  # share of the plain one's rate
SCALED: dict[str, Any] = {
    "k_scale": "k_scales[h // 4]", "v_scale": "v_scales[h // 4]",
    "inputs": {"k_scales": ("fp32", ("heads_kv",)), "v_scales": ("fp32", ("heads_kv",))},
}  # fmt: skip
OF_KEYS = {"keys": ("fp32", ("batch", "heads_kv", "kv_len"))}
BY_KEYS = {"v_scale": "keys[b, h // 4, k]", "inputs": {"k_scales": SCALED["inputs"]["k_scales"], **OF_KEYS}}
OF_SCALES = {*SCALED["inputs"], *OF_KEYS}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no scales": ({"k_scale": None, "v_scale": None, "inputs": {}}, {}),
    "e5m2": ({"element": "fp8_e5m2"}, {}),
    "fp16 queries": ({}, {"dtype": "fp16"}),
    "soft-cap 20": ({"score": "softcap(20)"}, {}),
    "ALiBi": ({"score": "alibi(slopes)", "inputs": {**SCALED["inputs"], "slopes": ("fp32", ("heads",))}}, {}),
    "slopes by formula": ({"score": "s + pow(2.0, -0.25 * (h + 1)) * (k - q)"}, {}),
    "sink": ({"sink": "1.5"}, {}),
    "scales of keys": (BY_KEYS, {}),
    "4 rows": ({"mask": "causal_bottom_right"}, {"rows": 4}),
    "D64": ({}, {"head_dim": 64}),
    "D256": ({}, {"head_dim": 256}),
    "D512": ({}, {"head_dim": 512}),
    "D512, scales of keys": (BY_KEYS, {"head_dim": 512}),
}  # fmt: skip


def rows(rounds: int) -> Iterator[Row]:
    rate = read_rate()
    for cell in CELLS:
        yield beside(cell.title, cell, {}, rounds) | {"read_rate": rate}
    for title, (keywords, changes) in VARIANTS.items():
        yield beside(title, replace(CELL, **changes), keywords, rounds) | {"read_rate": rate}


def beside(title: str, cell: Cache, keywords: Mapping[str, Any], rounds: int) -> Row:
    """Microseconds of 16 bits, of 8, and of 8 in pages where the variant has no scales; TB/s of 8; both errors."""
    wide, quantized = specs(cell, keywords)
    element = quantized.dtypes["k"].name
    tensors = cell.tensors()
    narrow = [(q, *(t.to(NARROW[element]) for t in kv)) for q, *kv in tensors]
    sizes = {"q_heads": cell.heads, "heads_kv": cell.kv_heads, "batch": cell.batch, "kv_len": cell.keys}
    inputs = {i.name: torch.rand([sizes[str(d)] for d in i.dims], device="cuda") + 0.5 for i in quantized.inputs}
    of_wide = {i.name: inputs[i.name] for i in wide.inputs}
    sides = {WIDE: attngen_calls(wide, tensors, of_wide), QUANTIZED: attngen_calls(quantized, narrow, inputs)}
    errors = {
        WIDE: error(wide, sides[WIDE][0](), tensors[0], of_wide),
        QUANTIZED: error(quantized, sides[QUANTIZED][0](), narrow[0], inputs),
    }
    if not inputs:
        types = {tensor: dtype.name for tensor, dtype in quantized.dtypes.items() if tensor != "o"}
        sides[PAGES] = paged_calls(cell, narrow, *PAGED, dtype=types)
    us = {name: 1e3 * t for name, t in in_graphs(sides, rounds).medians().items()}
    del tensors, narrow, sides
    torch.cuda.empty_cache()
    return {"case": title, "us": us, "tb_s": cell.bytes_of(cell.keys) / 2 / (us[QUANTIZED] * 1e6), "errors": errors}


def specs(cell: Cache, keywords: Mapping[str, Any]) -> tuple[AttentionSpec, AttentionSpec]:
    """A variant with K and V of 16 bits, without scales, and of 8."""
    given = {**SCALED, "name": "cache", "head_dim": cell.head_dim, **keywords}
    element = given.pop("element", "fp8_e4m3")
    own = {n: e for n, e in given["inputs"].items() if n not in OF_SCALES}  # inputs of the variant itself
    unscaled = {n: e for n, e in given.items() if n not in SCALED}
    types = {"q": cell.dtype, "k": element, "v": element}
    return attngen.define(**unscaled, inputs=own, dtype=cell.dtype), attngen.define(**given, dtype=types)


def error(spec: AttentionSpec, found: torch.Tensor, tensors: Tensors, inputs: Mapping[str, torch.Tensor]) -> float:
    """The largest against float64 in the first sequence, relative to the largest element of O."""
    first = {i.name: inputs[i.name][:1] if "batch" in i.dims else inputs[i.name] for i in spec.inputs}
    exact, _ = torch_attention(spec, *(t[:1] for t in tensors), inputs=first)
    return float((found[:1].double() - exact).abs().max() / exact.abs().max())


def table(rows: list[Row]) -> str:
    plain = next(r["tb_s"] for r in rows if r["case"] == CELL.title)
    lines = []
    for r in rows:
        us, errors = r["us"], r["errors"]
        share = f"{r['tb_s'] / plain:.1%}" if r["case"] in VARIANTS else "-"
        pages = f"{us[PAGES]:.1f}" if PAGES in us else "-"
        lines.append((
            r["case"], f"{us[WIDE]:.1f}", f"{us[QUANTIZED]:.1f} ({r['tb_s']:.2f})", pages, share,
            f"{errors[WIDE]:.1e}", f"{errors[QUANTIZED]:.1e}",
        ))  # fmt: skip
    columns = ("us (TB/s)", WIDE, QUANTIZED, PAGES, "of the plain one's rate", f"error, {WIDE}", f"error, {QUANTIZED}")
    goal = f"{CELLS[-1].title} at most {GOAL:.0f} us; each variant at least {SHARE:.0%} of the plain one's rate ({CELL.title})"
    return f"{markdown(columns, lines)}\n\nRead rate {rows[0]['read_rate']:.2f} TB/s. Goal: {goal}."
