"""Errors of 131072 keys of 8 bits, beside those of a kernel whose wgmma adds up all tiles in its own sums, of some 14 bits.

`needle`: one key for each row has a score so far above the others that it has most of the weight. `common`: values have a
common component of 1, as the sum of a row's weights has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from cell import Row
from words import markdown

import attngen
from attngen.api import CompiledAttention
from attngen.reference.torch_oracle import torch_attention
from hopper_parts.products_of_8_bits import BYTES

KEYS, ROWS, SIZE = 131072, 128, 128
KINDS = ("randn", "needle", "flat", "common", "needle, common")
TWO, ONE = "two levels", "one level"
# of the text of the kernel: P V of a tile is added to O by wgmma
IN_ONE_LEVEL = {
    "wgmma_pv(frag.products, frag.P[step], v_tile + VTile::k_major_step(step), step > 0)": (
        "wgmma_pv(frag.O, frag.P[step], v_tile + VTile::k_major_step(step), true)"
    ),
    "wgmma_received(frag.products);": "wgmma_received(frag.O);",
    "frag.O[i] += frag.products[i];": ";",
}


def in_one_level(kernel: CompiledAttention) -> CompiledAttention:
    """The kernel with the sums of all tiles in the accumulators of wgmma."""
    text = kernel.source.text
    for own, other in IN_ONE_LEVEL.items():
        assert own in text, own
        text = text.replace(own, other)
    return CompiledAttention(kernel.spec, kernel.plan, kernel.device.compile(replace(kernel.source, text=text)), kernel.device)


def numbers(kind: str) -> list[torch.Tensor]:
    """q, k and v of one head."""
    q, k, v = (torch.randn(1, 1, n, SIZE, device="cuda") for n in (ROWS, KEYS, KEYS))
    if "needle" in kind:
        k[0, 0, torch.randperm(KEYS, device="cuda")[:ROWS]] = 1.25 * q[0, 0]
    if kind == "flat":
        q *= 0.05
    if "common" in kind:
        v += 1
    return [t.to(torch.float8_e4m3fn) for t in (q, k, v)]


def rows(rounds: int) -> Iterator[Row]:
    kernel = attngen.compile(attngen.define(dtype=BYTES, head_dim=SIZE), kernel="hopper", device="cuda")
    kernels = {TWO: kernel, ONE: in_one_level(kernel)}
    for kind in KINDS:
        given = numbers(kind)
        exact, _ = torch_attention(kernel.spec, *given)
        errors = {name: float((one(*given).double() - exact).abs().max()) for name, one in kernels.items()}
        yield {"case": kind, "errors": errors, "largest": float(exact.abs().max())}


def table(rows: list[Row]) -> str:
    lines = [(r["case"], *(f"{r['errors'][name]:.1e}" for name in (TWO, ONE)), f"{r['largest']:.1e}") for r in rows]
    return markdown((f"largest error, {KEYS} keys", TWO, ONE, "largest of O"), lines)
