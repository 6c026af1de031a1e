"""A report as a picture: TFLOP/s over the length, a panel for each element type, head size and mask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.bench.report import Report
from attngen.device.arrays import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Line:
    """The line of a candidate, the same in every picture."""

    colour: str  # from the Okabe-Ito palette, which colour-blind readers can tell apart
    label: str
    dash: str = "-"


LINES = {
    "attngen hopper": Line("#d55e00", "attngen hopper"),
    "attngen wgmma": Line("#d55e00", "attngen wgmma", ":"),
    "attngen fused": Line("#e69f00", "attngen fused"),
    "attngen tiled": Line("#e69f00", "attngen tiled", "--"),
    "attngen naive": Line("#e69f00", "attngen naive", ":"),
    "torch cuDNN": Line("#0072b2", "cuDNN (torch)"),
    "FlashAttention-4": Line("#000000", "FlashAttention-4", "--"),
    "FlashAttention-3": Line("#000000", "FlashAttention-3"),
    "torch flash": Line("#56b4e9", "FlashAttention-2 (torch)"),
    "FlexAttention": Line("#cc79a7", "FlexAttention"),
    "torch efficient": Line("#009e73", "efficient (torch)"),
    "torch math": Line("#999999", "math (torch)"),
}


def check_format(path: Path) -> None:
    """Raises ArgumentError if `draw` does not write files like `path`."""
    if path.suffix not in FORMATS:
        raise ArgumentError(f"a plot is written as {', '.join(FORMATS)}, not as {path.suffix or 'a file without a suffix'}")


def draw(report: Report, path: Path) -> None:
    """Write the picture to `path`, whose suffix selects the format. Raises ArgumentError as `check_format` does."""
    check_format(path)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    import matplotlib.pyplot as plt

    panels = sorted({(r.dtype, r.head_dim, not r.masked, r.heads) for r in report.results})
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.4 * columns, 3.1 * rows + 1.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey="row")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _panel(axis, report, *panel)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length (queries and keys)")
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    ordered = [line.label for line in LINES.values() if line.label in handles]
    figure.legend([handles[n] for n in ordered], ordered, loc="lower center", frameon=False, ncols=2 * columns)
    what = (
        f"attention `{report.spec}`, {report.what}, {report.tokens} tokens a call, operations of the pairs that the mask keeps"
    )
    how = f"{report.where}; median of {report.rounds}, L2 flushed before each call"
    figure.suptitle(f"{what}\n{how}", fontsize=9)
    legend = 0.25 * -(-len(ordered) // (2 * columns)) + 0.1  # inches
    figure.tight_layout(rect=(0, legend / size[1], 1, 1))
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _panel(axis: Axes, report: Report, dtype: str, head_dim: int, full: bool, heads: str) -> None:
    lengths: set[int] = set()
    shown = [r for r in report.results if (r.dtype, r.head_dim, not r.masked, r.heads) == (dtype, head_dim, full, heads)]
    for name, line in LINES.items():
        found = sorted((r.length, r.tflops) for r in shown if r.candidate == name)
        if found:
            lengths |= {n for n, _ in found}
            width = 2.4 if name.startswith("attngen") else 1.3
            axis.plot(
                *zip(*found, strict=True), f"o{line.dash}", color=line.colour, label=line.label, linewidth=width, markersize=4,
                clip_on=False,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(
        f"{dtype}, head size {head_dim}, {heads} heads, {'without the mask' if full else 'with its mask'}", fontsize=10
    )
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
