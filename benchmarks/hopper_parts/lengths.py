"""Every tile that `TIMINGS` (attngen/schedules/hopper/tiles.py) may select by the lengths of a call, and the one selected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from cell import Call, Cell, Row, Tensors, rates, square
from words import markdown, most

import attngen
from attngen.bench.measure import measure_bursts
from attngen.plan.facts import facts_of
from attngen.plan.problem import Problem
from attngen.plan.tile import Tile
from attngen.schedules.hopper.plan import by_lengths, paces
from attngen.spec.attention import KernelRequest

HEAD_DIMS = (32, 64, 80, 96, 128, 160)
LENGTHS = (512, 1024, 4096, 16384)
FEW = (1, 12, 1024)  # batch, heads, length: fewer blocks of rows than multiprocessors
CELLS = [square("bf16", d, mask, s) for d in HEAD_DIMS for mask in (None, "causal") for s in LENGTHS]
CELLS += [Cell("bf16", d, mask, *FEW, FEW[-1]) for d in HEAD_DIMS for mask in (None, "causal")]
CELLS += [square("bf16", d, "causal and window(1024)", 4096) for d in HEAD_DIMS]
DISTANCE = "s - 0.1 * (q - k)"
CELLS += [replace(square("bf16", d, "causal", s), score=DISTANCE) for d in (64, 128) for s in LENGTHS if s != 512]


def rows(rounds: int) -> Iterator[Row]:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for cell in CELLS:
        tensors = cell.randn()
        tiles = [pace.tile for pace in paces(facts_of(cell.spec))]
        found = measure_bursts({name(tile): kernel(cell, tensors, tile) for tile in tiles}, rounds)
        choice = by_lengths(facts_of(cell.spec))
        assert choice is not None, cell.title
        taken = choice.fastest(Problem(cell.batch * cell.heads, cell.q_len, cell.kv_len, multiprocessors))
        yield {
            "case": cell.title + f" B{cell.batch} H{cell.heads}" * (cell.batch == FEW[0] and cell.q_len == FEW[-1]),
            "tflops": rates(cell.operations(tensors), found.medians()),
            "taken": name(taken),
            "lost": max(found.ratio(name(tile), name(taken)) - 1 if tile != taken else 0.0 for tile in tiles),
        }


def name(tile: Tile) -> str:
    return f"{tile.block_q} x {tile.block_kv}"


def kernel(cell: Cell, tensors: Tensors, tile: Tile) -> Call:
    schedule = KernelRequest("hopper", tile.block_q, tile.block_kv, tile.stages)
    return partial(attngen.compile(replace(cell.spec, kernel=schedule), kernel="hopper", device="cuda"), *tensors)


def table(rows: list[Row]) -> str:
    lines = (
        (r["case"], ", ".join(f"{tile}: {tflops:.0f}" for tile, tflops in r["tflops"].items()), r["taken"], f"{r['lost']:.1%}")
        for r in rows
    )
    text = markdown(("TFLOP/s", "by tile", "the plan takes", "which loses"), lines)
    return f"{text}\n\nThe most lost: {most(rows, lambda r: r['lost'])}."
