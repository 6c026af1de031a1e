"""Where attngen is first, and where it is not: the table at the head of docs/performance.md, from the measured tables.

    python benchmarks/first_in_each_cell.py

A cell is a row of a table of docs/tables that has attngen's figure and a peer's. attngen is first where it is at least as fast
as each peer of the row, to the figures that the table prints. Reasons for the other cells are `WHY`, below.
tests/bench/test_first_in_each_cell.py checks that the page is current, and that each reason has its cell and each cell its
reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markers import read_between, write_between
from words import geometric_mean, markdown

from attngen.bench.peers import FLASH_PACKAGES

DOCS = Path(__file__).parent.parent / "docs"
PAGE, MEASURED = DOCS / "performance.md", DOCS / "tables"
FLASH = tuple(FLASH_PACKAGES)
MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class Table:
    """A measured table: the marker of its command, the title of its cells, the columns of attngen and of its peers."""

    marker: str
    title: str
    peers: Sequence[str]
    ours: str = "attngen"
    is_time: bool = False  # less is better


TABLES = (
    Table("hopper plain", "forward, plain and causal", ("cuDNN", *FLASH)),
    Table("hopper grouped", "forward, grouped heads and other lengths", ("cuDNN",)),
    Table("hopper variants", "forward, masks and scores, D128", ("FlexAttention",)),
    Table("hopper wide", "forward, heads of 320 to 512", ("torch efficient", "torch math"), "hopper"),
    Table("backward plain", "backward, plain and causal", ("torch cuDNN", *FLASH)),
    Table("backward grouped", "backward, grouped heads", ("torch cuDNN", *FLASH)),
    Table("backward latent", "backward, heads of 192 with values of 128", ("torch cuDNN", *FLASH)),
    Table("backward variants", "backward, masks and scores, D128", ("FlexAttention",)),
    Table("backward captured", "backward with gradients of captured tensors", ("FlexAttention",)),
    Table("backward wide", "backward, heads of 320 to 512", ("torch efficient", "torch math")),
    Table("backward deterministic", "backward, the same bits in every run", ("torch cuDNN", *FLASH)),
    Table("backward training", "training steps of a small GPT", ("torch cuDNN",)),
    Table("decode plain", "decoding", ("FlexAttention", "torch cuDNN", "torch flash", *FLASH), is_time=True),
    Table("shapes", "one layer of known models", ("fastest backend",), is_time=True),
    Table("portable plain", "portable kernels, plain and causal", ("FlashAttention-2",)),
    Table("portable variants", "portable kernels, masks and scores, D128", ("FlexAttention",)),
    Table("backward portable", "portable backward", ("torch flash", "torch efficient")),
)

# Why attngen is not first, by the marker of the table and a pattern of its cells.
WHY: Mapping[tuple[str, str], str] = {
    (
        "hopper variants",
        "every 4th key",
    ): "FlexAttention is compiled for one step; here the step is a number of the call, so each pair divides.",
    (
        "backward plain",
        ".* D(64|128) .*",
    ): "Additions to dQ: FlashAttention-4 adds from shared memory by a warp of its own. Here threads add from registers, "
    "which was faster in our own trials; larger tiles, transposed products and a third consumer were not.",
    (
        "backward deterministic",
        ".*",
    ): "cuDNN's sums have any order. Two kernels compute seven products; blocks that add to dQ in a fixed order must wait.",
    (
        "decode plain",
        "bf16 D128 B(16|64) S8k",
    ): "Keys are read at 96 to 98% of the rate at which a sum reads memory; no other copy, tile, stage or split was faster.",
    (
        "shapes",
        "bert-128, .*",
    ): "A block computes one tile: nothing runs beside its softmax. Copies of Q and V that begin earlier changed nothing.",
    (
        "shapes",
        "vit, training",
    ): "As fast as cuDNN, within the noise of a run.",
    (
        "shapes",
        "llama-512, .*",
    ): "As many blocks of 128 rows as multiprocessors, each with at most four tiles; in training, delta is a separate kernel.",
    (
        "portable plain",
        ".* D256 full .*",
    ): "At most 5%. Persistent blocks that take rows from a counter gained 2% here, and lost 5% in causal rows at D128.",
    (
        "portable variants",
        "full",
    ): "FlexAttention's products are compiled to wgmma on this GPU; the portable kernel uses only mma.sync.",
    (
        "portable variants",
        "every 4th .*",
    ): "FlexAttention is compiled for one step; here the step is a number of the call, so each pair divides.",
    (
        "backward portable",
        "bf16 D256 .*",
    ): "Shared memory: a warp has registers for 16 rows or keys, so a fragment serves only one product.",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A row of a table: its first column, and how many times as fast as the fastest peer of the row attngen is."""

    name: str
    ratio: float
    peer: str


def cells(table: Table) -> list[Cell]:
    """The cells of a table, of the first columns that have the names of attngen and of its peers."""
    found, head = [], []
    for line in read_between(MEASURED, table.marker).splitlines():
        if not line.startswith("|"):
            head = []
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = row
            continue
        ours = _number(row[head.index(table.ours)]) if table.ours in head else None
        peers = {p: n for p in table.peers if p in head and (n := _number(row[head.index(p)])) is not None}
        if ours is None or not peers:
            continue
        peer = (min if table.is_time else max)(peers, key=lambda p: peers[p])
        ratio = peers[peer] / ours if table.is_time else ours / peers[peer]
        found.append(Cell(row[0], ratio, peer))
    return found


def _number(text: str) -> float | None:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else None


def behind(table: Table) -> list[Cell]:
    return [cell for cell in cells(table) if cell.ratio < 1]


def reasons(table: Table, cell: Cell) -> list[str]:
    return [why for (marker, pattern), why in WHY.items() if marker == table.marker and re.fullmatch(pattern, cell.name)]


def text() -> str:
    """The table, and below it the cells in which attngen is not first, with the reasons."""
    lines, others = [], []
    for table in TABLES:
        found = cells(table)
        ratios = [cell.ratio for cell in found]
        worst = min(found, key=lambda cell: cell.ratio)
        first = sum(ratio >= 1 for ratio in ratios)
        peers = [p for p in table.peers if p in read_between(MEASURED, table.marker)]
        lines.append(
            (
                table.title,
                ", ".join(peers),
                f"{first} of {len(found)}",
                f"{geometric_mean(ratios):.2f}",
                f"{worst.ratio:.2f} ({worst.name})",
            )
        )
        for why in dict.fromkeys(why for cell in behind(table) for why in reasons(table, cell)):
            others.append(f"- {table.title}: {_named([c for c in behind(table) if why in reasons(table, c)])}. {why}")
    head = markdown(("what", "beside", "first", "geometric mean", "least"), lines)
    return f"{head}\n\nNot first:\n\n" + "\n".join(others)


def _named(found: Sequence[Cell]) -> str:
    """The cells and their ratios, or, of many, how many there are and the least ratio."""
    names = [f"{cell.name} {cell.ratio:.3f}" for cell in sorted(found, key=lambda cell: cell.ratio)]
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} cells, the least {names[0]}"


if __name__ == "__main__":
    write_between(PAGE, "first_in_each_cell", text())
