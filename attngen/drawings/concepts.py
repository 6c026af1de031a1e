"""Pictures for a first reading: one row of attention with numbers, the parts of a GPU, a spec beside its CUDA and tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attngen.drawings.picture import Picture, number, width_of
from attngen.drawings.tiles import TileMap, tiles_picture
from attngen.plan.arch import Arch

CODE = 6.62  # pixels of a letter of code
PANEL = 320.0  # width of the tiles beside text


@dataclass(frozen=True, slots=True)
class Row:
    """One query row over a few keys: vectors of a head, and which keys the mask allows."""

    query: tuple[float, ...]
    words: tuple[str, ...]
    keys: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]
    allowed: tuple[bool, ...]

    @property
    def scores(self) -> list[float]:
        """Scaled by 1 / sqrt(head size); -inf where the mask forbids the pair."""
        scale = 1 / math.sqrt(len(self.query))
        dots = [scale * sum(a * b for a, b in zip(self.query, key, strict=True)) for key in self.keys]
        return [s if ok else -math.inf for s, ok in zip(dots, self.allowed, strict=True)]

    @property
    def weights(self) -> list[float]:
        most = max(self.scores)
        powers = [math.exp(s - most) for s in self.scores]
        return [p / sum(powers) for p in powers]

    @property
    def output(self) -> list[float]:
        columns = zip(*self.values, strict=True)
        return [sum(w * v for w, v in zip(self.weights, column, strict=True)) for column in columns]


EXAMPLE = Row(
    query=(1, 0, 2, 1),
    words=("the", "cat", "sat", "down"),
    keys=((0, 1, 1, 0), (2, 1, 1, 2), (1, 0, 1, 1), (2, 2, 2, 0)),
    values=((1, 0, 0, 1), (0, 2, 1, 0), (2, 0, 1, 1), (1, 1, 0, 2)),
    allowed=(True, True, True, False),
)


def attention_picture(row: Row = EXAMPLE, query: int = 2) -> Picture:
    """How one row of O is made, from left to right."""
    says = (
        f"The token “{row.words[query]}” attends. Its query is compared with the key of each token by a dot product, scaled "
        f"by 1 / sqrt({len(row.query)}). The causal mask forbids “{row.words[-1]}”, which comes later. Softmax makes weights "
        "of the scores, which add up to 1. The output is the sum of the values, each times its weight. Other rows are "
        "computed in the same way."
    )
    drawn = Picture("One row of attention", says)
    cell, high = 26.0, 34.0

    def vector(x: float, y: float, values: Sequence[float], css: str) -> None:
        for i, value in enumerate(values):
            drawn.rect(x + i * cell, y, cell - 1.0, 22.0, css)
            words = f"{value:g}" if value == round(value) else f"{value:.2f}"
            drawn.text(x + (i + 0.5) * cell - 0.5, y + 15.0, words, "small", "middle")

    wide = len(row.query) * cell
    x_key, top = 76.0, 64.0
    x_score, x_weight, x_value = x_key + wide + 24.0, x_key + wide + 96.0, x_key + wide + 246.0
    drawn.text(0.0, 19.0, f"query of “{row.words[query]}”", "head")
    vector(x_key + 60.0, 3.0, row.query, "c2")
    heads = ((x_key, "key K"), (x_score, "score S"), (x_weight, "weight P"), (x_value, "value V"))
    for x, words in heads:
        drawn.text(x, top - 10.0, words, "head")
    for i, word in enumerate(row.words):
        y = top + i * high
        drawn.text(x_key - 10.0, y + 15.0, word, "", "end")
        vector(x_key, y, row.keys[i], "c0" if row.allowed[i] else "empty")
        score, weight = row.scores[i], row.weights[i]
        drawn.text(x_score + 6.0, y + 15.0, f"{score:.1f}" if row.allowed[i] else "-inf")
        drawn.rect(x_weight, y, 130.0, 22.0, "empty")
        drawn.rect(x_weight, y, 130.0 * weight, 22.0, "amber")
        drawn.text(x_weight + 136.0 - 34.0, y + 15.0, f"{weight:.2f}", "small")
        vector(x_value, y, row.values[i], "c1" if row.allowed[i] else "empty")
    y = top + len(row.words) * high + 12.0
    drawn.text(x_value - 10.0, y + 15.0, "output O = sum of P * V", "head", "end")
    vector(x_value, y, row.output, "c4")
    return drawn


# An H200 SXM: NVIDIA's data sheet, and the H100 whitepaper for multiprocessors and L2.
MULTIPROCESSORS, L2_MB, GLOBAL_GB = 132, 50, 141


def machine_picture(arch: Arch) -> Picture:
    """The levels of memory, and what runs where."""
    says = (
        f"{arch.gpu}. A kernel is a grid of blocks. Each block runs on one multiprocessor (SM), which can have several at a "
        "time. A block consists of warps of 32 threads, its lanes, which execute one instruction together. Each thread has "
        "registers of its own, the threads of a block share the shared memory of their SM, and all SMs share L2 and global "
        "memory. The lower, the larger and the slower."
    )
    drawn = Picture("Where threads run and where data is", says)
    for i, x in enumerate((0.0, 250.0, 560.0)):
        if i == 2:
            drawn.text(x - 38.0, 92.0, "...", "title", "middle")
        drawn.rect(x, 0.0, 230.0, 186.0, "empty")
        drawn.text(x + 8.0, 16.0, f"SM {(0, 1, MULTIPROCESSORS - 1)[i]}", "head")
        for warp in range(4):
            y = 26.0 + warp * 20.0
            drawn.text(x + 8.0, y + 11.0, f"warp {warp}", "small quiet")
            for lane in range(32):
                drawn.rect(
                    x + 56.0 + lane * 5.2,
                    y,
                    4.4,
                    14.0,
                    "teal",
                    f"lane {lane} of warp {warp}: thread {32 * warp + lane}",
                )
        drawn.rect(x + 8.0, 110.0, 214.0, 30.0, "blue")
        drawn.text(x + 115.0, 129.0, f"registers, {arch.registers_per_sm * 4 // 1024} KiB", "on-bar", "middle")
        drawn.rect(x + 8.0, 146.0, 214.0, 32.0, "green")
        drawn.text(x + 115.0, 166.0, f"shared memory, {arch.shared_per_sm // 1024} KiB, 32 banks", "on-bar", "middle")
        drawn.path(f"M{number(x + 115)} 186v14", "way")
    drawn.rect(0.0, 200.0, 790.0, 30.0, "violet")
    drawn.text(395.0, 219.0, f"L2 cache, {L2_MB} MB", "on-bar", "middle")
    drawn.path("M395 230v12", "way")
    drawn.rect(0.0, 242.0, 790.0, 34.0, "grey")
    rate = f"{arch.bandwidth_tb_s:g} TB/s, in sectors of 32 bytes"
    drawn.text(395.0, 263.0, f"global memory, {GLOBAL_GB} GB, {rate}", "on-bar", "middle")
    return drawn


def panels_picture(spec: str, cuda: str, tiles: TileMap, title: str, says: str) -> Picture:
    """A spec, lines of the CUDA that is emitted for it, and the walk over tiles, side by side."""
    drawn = Picture(title, says)
    x, bottom = 0.0, 0.0
    for head, text in (("the spec", spec), ("the CUDA for it (excerpt)", cuda)):
        lines = text.rstrip().splitlines()
        drawn.text(x, 12.0, head, "head")
        for i, line in enumerate(lines):
            drawn.text(x, 34.0 + 16.0 * i, line, "code")
        x += max(width_of(line, CODE) for line in lines) + 30.0
        bottom = max(bottom, 34.0 + 16.0 * len(lines))
    walk = tiles_picture(tiles, "the tiles that it visits", PANEL)
    drawn.place(walk, x, 0.0)
    drawn.height = max(drawn.height, bottom)
    return drawn
