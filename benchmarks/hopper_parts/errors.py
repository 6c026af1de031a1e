"""The largest error against float64, beside cuDNN's on the same inputs; and the cost of row maxima that change along the keys.

Inputs are randn (with q times 8 for "logits x 8"), or `sloping`, with which the scores of a row grow or fall along the keys.
The kernel visits the tiles of keys from the last to the first. If scores fall along the keys, its row maximum grows and the
accumulators are rescaled; if they grow, the first visited tile has the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from cell import CUDNN, Cell, Row, Tensors, beside_cudnn, kernel, square
from words import markdown, most

from attngen.bench.measure import measure_bursts
from attngen.bench.peers import torch_peers
from attngen.reference.torch_oracle import torch_attention
from hopper_parts import plain

TIMES_CUDNN, SLOWER = 1.2, 1.15
MIDDLE = [square("bf16", d, m, 4096) for d in (64, 128, 256) for m in (None, "causal")]
LONG = [Cell("bf16", d, None, 1, 2048 // d, 256, 65536) for d in (64, 128, 256)]
MASKED = [Cell("bf16", d, "causal_bottom_right", 4, 2048 // d, 2048, 1024) for d in (64, 128, 256)]
OCTAVES = (2.0, 16.0)  # by which the maximum changes in 128 keys: less and more than a kernel may let pass without rescaling
WAYS = ("growing", "falling")  # along the keys


def rows(rounds: int) -> Iterator[Row]:
    for cell in (*plain.CELLS, *LONG):
        yield errors(cell.title, cell, cell.randn())
    for cell in MIDDLE:
        q, k, v = cell.randn()
        yield errors(f"{cell.title}, logits x 8", cell, (8 * q, k, v))
    for cell in MASKED:
        yield masked_rows(cell)
    for cell in MIDDLE:
        yield from sloping_rows(cell, rounds)


def errors(case: str, cell: Cell, tensors: Tensors) -> Row:
    truth, _ = torch_attention(cell.spec, *tensors)
    found = {name: largest(call(), truth) for name, call in beside_cudnn(cell, tensors).items()}
    return compared(case, found)


def compared(case: str, errors: dict[str, float]) -> Row:
    return {"case": case, "errors": errors, "ratio": errors["attngen"] / errors[CUDNN]}


def largest(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error; infinity where there is a NaN."""
    return float((found.double() - truth).abs().nan_to_num(nan=math.inf).max())


def masked_rows(cell: Cell) -> Row:
    """More queries than keys, aligned at the end: the first rows keep no key, and the others are cuDNN's causal ones."""
    q, k, v = cell.randn()
    empty = cell.q_len - cell.kv_len
    truth, _ = torch_attention(cell.spec, q, k, v)
    output = kernel(cell, (q, k, v))()
    causal = torch_peers(replace(cell, mask="causal").spec, q[:, :, empty:].contiguous(), k, v, only=[CUDNN])[CUDNN]
    found = {"attngen": largest(output, truth), CUDNN: largest(causal(), truth[:, :, empty:])}
    zero = bool((output[:, :, :empty] == 0).all())
    return compared(f"{cell.title}, {empty} rows masked", found) | {"zero": zero}


def sloping_rows(cell: Cell, rounds: int) -> Iterator[Row]:
    """Errors for each slope; then the times of them all beside randn's, in the same rounds."""
    sloped = {f"{o:.0f} octaves in 128 keys, {way}": sloping(cell, o, way) for way in WAYS for o in OCTAVES}
    for name, tensors in sloped.items():
        yield errors(f"{cell.title}, {name}", cell, tensors)
    found = measure_bursts({n: kernel(cell, t) for n, t in {"randn": cell.randn(), **sloped}.items()}, rounds)
    ms = found.medians()
    for name in sloped:
        both = {"randn": ms["randn"], "sloping": ms[name]}
        yield {"case": f"{cell.title}, {name}", "ms": both, "slower": found.ratio("randn", name)}


def sloping(cell: Cell, octaves: float, way: str) -> Tensors:
    """randn, but that all queries are one vector, on which the projections of the keys grow or fall linearly with their index:
    the factor exp(score) by `octaves` powers of two in 128 keys."""
    q, k, v = cell.randn()
    direction = torch.randn(cell.head_dim, device="cuda")
    direction /= direction.norm()
    length = math.sqrt(cell.head_dim)  # as randn's, so that q . k / sqrt(head_dim) is k's projection
    growth = octaves / 128 * math.log(2) * torch.arange(cell.kv_len, device="cuda")
    slope = {"growing": growth, "falling": growth.flip(0)}[way]
    return (
        (length * direction).to(q.dtype).expand_as(q).contiguous(),
        (k.float() + slope[:, None] * direction).to(k.dtype),
        v,
    )


def table(rows: list[Row]) -> str:
    return "\n\n".join((error_table([r for r in rows if "errors" in r]), slope_table([r for r in rows if "ms" in r])))


def error_table(rows: list[Row]) -> str:
    lines = ((r["case"], f"{r['errors']['attngen']:.1e}", f"{r['errors'][CUDNN]:.1e}", f"{r['ratio']:.2f}") for r in rows)
    text = markdown(("largest error", "attngen", "cuDNN", "ratio"), lines)
    zero = "all are" if all(r["zero"] for r in rows if "zero" in r) else "not all are"
    seen = f"{most(rows, lambda r: r['ratio'])}; {zero}"
    return f"{text}\n\nGoal: at most {TIMES_CUDNN} of cuDNN's; masked rows are 0. Measured: {seen}."


def slope_table(rows: list[Row]) -> str:
    lines = ((r["case"], f"{r['ms']['sloping']:.3f}", f"{r['ms']['randn']:.3f}", f"{r['slower']:.3f}") for r in rows)
    text = markdown(("ms", "attngen", "randn", "ratio"), lines)
    seen = most(rows, lambda r: r["slower"])
    return f"{text}\n\nGoal: growing and falling maxima at most {SLOWER} of randn's time. Measured: {seen}."
