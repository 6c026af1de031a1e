"""The tile of three consumers beside the preferred one, where attngen/plan/hopper.py has one in `WIDE`: which does it take?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from cell import Call, Cell, Row, Tensors, rates, square
from words import markdown, most

import attngen
from attngen.bench.measure import measure_bursts
from attngen.plan.hopper import WIDE, preferred_tiles, wide_is_faster
from attngen.plan.problem import Problem
from attngen.plan.tiling import Tile
from attngen.spec.attention import Schedule

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CELLS = [square("bf16", d, mask, s) for d in WIDE for mask in (None, "causal") for s in LENGTHS]


def rows(rounds: int) -> Iterator[Row]:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for cell in CELLS:
        tensors = cell.randn()
        usual, wide = preferred_tiles(cell.spec)[0], WIDE[cell.head_dim].tile
        found = measure_bursts({name(tile): kernel(cell, tensors, tile) for tile in (usual, wide)}, rounds)
        problem = Problem(cell.batch * cell.heads, cell.q_len, cell.kv_len, multiprocessors)
        taken = wide if wide_is_faster(cell.spec, problem) else usual
        other = usual if taken is wide else wide
        tflops = rates(cell.operations(tensors), found.medians())
        yield {
            "case": cell.title,
            "tflops": {"usual": tflops[name(usual)], "wide": tflops[name(wide)]},
            "ratio": found.ratio(name(wide), name(usual)),
            "taken": name(taken),
            "lost": max(0.0, found.ratio(name(other), name(taken)) - 1),
        }


def name(tile: Tile) -> str:
    return f"{tile.block_q} x {tile.block_kv}"


def kernel(cell: Cell, tensors: Tensors, tile: Tile) -> Call:
    schedule = Schedule("hopper", tile.block_q, tile.block_kv, tile.stages)
    return partial(attngen.compile(replace(cell.spec, schedule=schedule), kernel="hopper", device="cuda"), *tensors)


def table(rows: list[Row]) -> str:
    lines = (
        (
            r["case"],
            f"{r['tflops']['usual']:.0f}",
            f"{r['tflops']['wide']:.0f}",
            f"{r['ratio']:.3f}",
            r["taken"],
            f"{r['lost']:.1%}",
        )
        for r in rows
    )
    text = markdown(("TFLOP/s", "usual tile", "wide tile", "ratio", "the plan takes", "which loses"), lines)
    return f"{text}\n\nThe most lost: {most(rows, lambda r: r['lost'])}."
