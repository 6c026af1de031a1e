"""Every tile of attngen/schedules/hopper/timings.txt that the lengths of a call may select, and the one selected."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from cell import Cell, Row, Tensors, rates, square
from words import geometric_mean, markdown

import attngen
from attngen.api import CompiledAttention
from attngen.bench.measure import measure_bursts
from attngen.plan.facts import facts_of
from attngen.plan.problem import Problem
from attngen.plan.tile import Tile
from attngen.schedules.hopper.plan import by_lengths, paces
from attngen.spec.attention import AttentionSpec, KernelRequest

HEAD_DIMS = (40, 64, 80, 96, 128, 160)
LENGTHS = (128, 256, 512, 1024, 4096, 16384)
FEW = [(1, heads, length) for heads in (8, 32, 96) for length in (256, 512, 1024)]  # batch, heads, length
CROSS = ((8, 8, 4096, 77), (64, 12, 197, 197))  # batch, heads, rows, keys: words for an image, patches of an image
WINDOWS = [f"causal and window({size})" for size in (256, 1024)]
DISTANCE = "s - 0.1 * (q - k)"
BURST = 4.0  # milliseconds of calls: most calls here are shorter than the flush before each
CELLS = [square("bf16", d, mask, s) for d in HEAD_DIMS for mask in (None, "causal") for s in LENGTHS]
CELLS += [Cell("bf16", d, mask, *few, few[-1]) for d in HEAD_DIMS for mask in (None, "causal") for few in FEW]
CELLS += [Cell("bf16", d, None, *sizes) for d in HEAD_DIMS for sizes in CROSS]
CELLS += [square("bf16", d, mask, 4096) for d in HEAD_DIMS for mask in WINDOWS]
CELLS += [replace(square("bf16", d, "causal", s), score=DISTANCE) for d in (64, 128) for s in LENGTHS]


def rows(rounds: int) -> Iterator[Row]:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = {cell.spec: [pace.tile for pace in paces(facts_of(cell.spec))] for cell in CELLS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = dict(pool.map(kernel, [(spec, tile) for spec, some in tiles.items() for tile in some]))
    for cell in CELLS:
        tensors: Tensors = cell.randn()
        calls = {name(tile): partial(compiled[cell.spec, tile], *tensors) for tile in tiles[cell.spec]}
        found = measure_bursts(calls, rounds, BURST)
        choice = by_lengths(facts_of(cell.spec))
        assert choice is not None, cell.title
        taken = name(choice.fastest(Problem(cell.batch * cell.heads, cell.q_len, cell.kv_len, multiprocessors)))
        yield {
            "case": f"{cell.title} B{cell.batch} H{cell.heads}",
            "of": (f"D{cell.head_dim}", f"{cell.mask or 'full'}{f' {cell.score}' if cell.score else ''}"),
            "tflops": rates(cell.operations(tensors), found.medians()),
            "taken": taken,
            "lost": max(found.ratio(tile, taken) - 1 if tile != taken else 0.0 for tile in calls),
        }


def name(tile: Tile) -> str:
    return f"{tile.block_q} x {tile.block_kv}"


def kernel(of: tuple[AttentionSpec, Tile]) -> tuple[tuple[AttentionSpec, Tile], CompiledAttention]:
    spec, tile = of
    stated = KernelRequest("hopper", tile.block_q, tile.block_kv, tile.stages)
    return of, attngen.compile(replace(spec, kernel=stated), kernel="hopper", device="cuda")


def table(rows: list[Row]) -> str:
    groups = defaultdict(list)
    for row in rows:
        groups[row["of"]].append(row)
    lines = []
    for (size, mask), some in groups.items():
        worst = max(some, key=lambda r: r["lost"])
        best = max(worst["tflops"], key=worst["tflops"].__getitem__)
        mean = geometric_mean([1 + r["lost"] for r in some]) - 1
        taken = ", ".join(dict.fromkeys(r["taken"] for r in some))
        what = f"{worst['lost']:.1%}: {worst['case']}, {best}" if worst["lost"] else ""
        lines.append((size, mask, str(len(some)), taken, f"{mean:.1%}", what))
    mean = geometric_mean([1 + r["lost"] for r in rows]) - 1
    titles = (
        "head size",
        "mask",
        "cases",
        "tiles that the plan takes",
        "lost to the fastest, mean",
        "at most, and which was the fastest",
    )
    return f"{markdown(titles, lines)}\n\nLost over all {len(rows)} cases: {mean:.1%} in the mean."
