"""A report as a picture: TFLOP/s over the length, a panel for each element type, head size and mask."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from attngen.bench.report import Report
from attngen.device.arrays import ArgumentError

FORMATS = (".png", ".svg", ".pdf")

# A colour for each candidate, the same in every picture; of the Okabe-Ito palette, which colour-blind readers can tell apart.
COLOURS = {
    "attngen fused": "#d55e00",
    "attngen tiled": "#e69f00",
    "attngen naive": "#f0c674",
    "torch cuDNN": "#0072b2",
    "torch flash": "#56b4e9",
    "torch efficient": "#009e73",
    "torch math": "#999999",
    "FlexAttention": "#cc79a7",
}


def check_drawable(path: Path) -> None:
    """Raises ArgumentError where `draw` could not write `path`: no matplotlib, or a format that it does not have."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("a plot needs matplotlib: pip install 'attngen[bench]'")
    if path.suffix not in FORMATS:
        raise ArgumentError(f"a plot is written as {', '.join(FORMATS)}, not as {path.suffix or 'a file without a suffix'}")


def draw(report: Report, path: Path) -> None:
    """Write the picture to `path`, whose suffix says the format. Raises ArgumentError as `check_drawable` does."""
    check_drawable(path)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    import matplotlib.pyplot as plt

    panels = sorted({(r.dtype, r.head_dim, not r.masked, r.heads) for r in report.results})
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns + 1.6, 3.6 * rows + 0.9), squeeze=False, sharex=True, sharey="row"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _panel(axis, report, *panel)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s, of pairs that the mask keeps")
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    ordered = [name for name in COLOURS if name in handles]
    figure.legend([handles[n] for n in ordered], ordered, loc="center right", frameon=False)
    what = f"attention `{report.spec}`, forward, {report.tokens} tokens a call"
    how = f"median of {report.rounds} timings, the L2 cache flushed before each"
    figure.suptitle(f"{what}\n{report.where}; {how}", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - 1.6 / (5.2 * columns + 1.6), 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Any, report: Report, dtype: str, head_dim: int, full: bool, heads: str) -> None:
    lengths: set[int] = set()
    shown = [r for r in report.results if (r.dtype, r.head_dim, not r.masked, r.heads) == (dtype, head_dim, full, heads)]
    for name, colour in COLOURS.items():
        found = sorted((r.length, r.tflops) for r in shown if r.candidate == name)
        if found:
            lengths |= {n for n, _ in found}
            width = 2.4 if name == "attngen fused" else 1.3
            axis.plot(
                *zip(*found, strict=True), "o-", color=colour, label=name, linewidth=width, markersize=4, clip_on=False
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequence length (queries and keys)")
    axis.set_title(
        f"{dtype}, head size {head_dim}, {heads} heads, {'without the mask' if full else 'with its mask'}", fontsize=10
    )
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
