"""The pictures of docs/figures: drawings of kernels, concepts, and charts of the measured tables.

`python -m tests.figures` writes them, or those whose names are given. tests/test_figures.py checks that they are current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from attngen.drawings.concepts import attention_picture, machine_picture, panels_picture
from attngen.drawings.levels import Bars, bars_picture
from attngen.drawings.picture import Picture
from attngen.emit.emitter import emit
from attngen.inspect.call import Call
from attngen.inspect.drawn import drawn_spec, tile_map
from attngen.inspect.ladder import TOUR, planned
from attngen.plan import ARCHES
from attngen.puzzles.drawn import drawn_puzzle
from attngen.puzzles.folder import find_folder
from attngen.schedules import choose
from tests.conftest import ROOT
from tests.harness import shipped

FIGURES = ROOT / "docs" / "figures"
TABLES = ROOT / "docs" / "tables"
HOPPER = "sm_90a"


def drawn(what: str, name: str, schedule: str, arch: str = "sm_80", length: int = 1024, **params: int) -> Picture:
    """A drawing of a shipped spec; of gpt2 with the tour's plan."""
    in_tour = name == "gpt2" and (schedule, arch) in TOUR
    spec, plan = planned(name, schedule, arch) if in_tour else (shipped(name), choose(shipped(name), ARCHES[arch], schedule))  # type: ignore[arg-type]
    return drawn_spec(what, Call(spec, plan, length, length, params))


def conflicts() -> Picture:
    """The bank conflicts of a transposition without padding."""
    folder = find_folder("6")
    text = folder.solution.replace("[TILE + 1]", "[TILE]")
    assert text != folder.solution
    return drawn_puzzle("swizzle", folder, text, "without padding")


def front() -> Picture:
    """README's first picture."""
    spec, plan = shipped("mistral_window"), choose(shipped("mistral_window"), ARCHES["sm_80"], "fused")
    text = emit(spec, plan, "none").text
    bounds = re.search(r"KvRange kv_range\(.*?^}", text, re.M | re.S)
    pairs = re.search(r"^ *if \(partial\) \{.*?^        }", text, re.M | re.S)
    assert bounds is not None
    assert pairs is not None
    first, *others = bounds[0].splitlines()
    test = [line for line in pairs[0].splitlines() if not line.startswith("#")]
    cuda = "\n".join([re.sub(r"\(.*\)", "(...)", first), *others, "...", *(line.removeprefix("        ") for line in test)])
    found = tile_map(Call(spec, plan, 1024, 1024, {"size": 300}))
    assert found is not None
    written = (ROOT / "specs" / "mistral_window.attn").read_text()
    lines = [line for line in written.splitlines() if not line.startswith("#")]
    short = "\n".join(re.sub(r"^    ", "  ", re.sub(r"\s+#.*", "", line)) for line in lines)
    says = (
        "A causal window, as a user writes it, and what attngen makes of it: the mask is solved for the first and the last "
        "key of a block of rows, so that empty tiles are never loaded, and pairs are tested in partial tiles only. Here for "
        "1024 rows and a window of 300; the kernel takes any length and any window."
    )
    return panels_picture(short, cuda, found, "From a spec to CUDA", says)


# --- charts of measured tables


def table(marker: str) -> tuple[str, list[str], list[list[str]]]:
    """What was measured (the line before the table), its head, and its rows, of the first table between the markers."""
    text = "".join(page.read_text() for page in sorted(TABLES.glob("*.md")))
    found = re.search(rf"<!-- {re.escape(marker)}: begin .*?-->\n(.*?)\n<!-- {re.escape(marker)}: end -->", text, re.S)
    assert found is not None, marker
    first = re.search(r"^\|.*?(?=\n\n|\Z)", found[1], re.M | re.S)
    assert first is not None, marker
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in first[0].splitlines()]
    return found[1].splitlines()[0], lines[0], lines[2:]


def chart(
    marker: str, title: str, columns: Mapping[str, str], rows: str, unit: str, labels: str = r"(.*)", cell: str = ""
) -> Picture:
    """Bars of some columns (name of the column: words) of the rows that match a pattern, and have a cell."""
    about, head, lines = table(marker)
    values = {}
    for line in lines:
        if re.search(rows, line[0]) and (not cell or cell in line):
            numbers = {words: re.match(r"[\d.]+", line[head.index(name)]) for name, words in columns.items()}
            found = re.search(labels, line[0])
            assert found is not None
            values[found[1]] = {words: float(n[0]) for words, n in numbers.items() if n is not None}
    assert values, marker
    return bars_picture(
        title, f"{about}. From the table “{marker}” of the measurements.", Bars(values, unit, colours=("blue", "grey", "amber"))
    )


def models() -> Picture:
    """How many times as fast as the fastest backend, by model."""
    about, head, lines = table("shapes")
    at = head.index("ratio")
    values = {line[0].removesuffix(", forward"): {"": float(line[at])} for line in lines if line[0].endswith(", forward")}
    says = f"{about}. Forward of one layer's attention of each model; 1 is the fastest of torch's backends."
    return bars_picture(
        "Times as fast as the fastest of torch's backends", says, Bars(values, "times as fast", colours=("blue",))
    )


PLAIN = {"attngen": "attngen", "cuDNN": "cuDNN"}
BESIDE_FLASH = {**PLAIN, "FlashAttention-4": "FlashAttention-4"}
CHARTS: dict[str, Callable[[], Picture]] = {
    "chart_hopper": partial(
        chart, "hopper plain", "Forward on Hopper, bf16, TFLOP/s", BESIDE_FLASH, "^bf16", "TFLOP/s", "bf16 (.*)"
    ),
    "chart_portable": partial(
        chart, "portable plain", "Forward of the portable kernel, bf16, TFLOP/s",
        {"attngen": "attngen, fused", "FlashAttention-2": "FlashAttention-2"}, "^bf16", "TFLOP/s", "bf16 (.*)",
    ),
    "chart_decode": partial(
        chart, "decode plain", "Decoding, microseconds a call (less is better)",
        {"attngen": "attngen", "torch cuDNN": "cuDNN", "torch flash": "FlashAttention-2 of torch"}, "", "us",
    ),
    "chart_models": models,
    "chart_backward": partial(
        chart, "backward plain", "Backward, bf16, TFLOP/s",
        {"attngen": "attngen", "torch cuDNN": "cuDNN", "FlashAttention-4": "FlashAttention-4"},
        "^bf16", "TFLOP/s", "bf16 (.*)",
    ),
    "chart_fp32": partial(
        chart, "full_precision", "fp32, milliseconds a call (less is better)",
        {"attngen, ms": "attngen", "efficient, ms": "torch, efficient", "math, ms": "torch, math"}, "S(1024|2048|4096)$", "ms",
    ),
    "chart_several_gpus": partial(
        chart, "context_parallel", "Context parallelism, forward, TFLOP/s", PLAIN, "", "TFLOP/s", cell="forward",
    ),
}  # fmt: skip

# Quick ones are computed from plans; the others run on the emulated device, or compile.
QUICK: dict[str, Callable[[], Picture]] = {
    **CHARTS,
    "front": front,
    "attention": attention_picture,
    "machine": partial(machine_picture, ARCHES[HOPPER]),
    "tiles_causal": partial(drawn, "tiles", "gpt2", "fused", length=512),
    "tiles_window": partial(drawn, "tiles", "mistral_window", "fused", size=200),
    "tiles_documents": partial(drawn, "tiles", "packed_documents", "fused", length=512),
    "fragments": partial(drawn, "fragment", "gpt2", "fused"),
    "sums_of_wgmma": partial(drawn, "fragment", "gpt2", "wgmma", HOPPER),
    "banks_padded": partial(drawn, "swizzle", "gpt2", "fused"),
    "banks_swizzled": partial(drawn, "swizzle", "gpt2", "hopper", HOPPER),
}
TRACED: dict[str, Callable[[], Picture]] = {
    "bytes": partial(drawn, "bytes", "gpt2", "fused", HOPPER, 256),
    "bank_conflicts": conflicts,
    "blocks": partial(drawn, "blocks", "gpt2", "hopper", HOPPER, 2048),
    "pipeline_fused": partial(drawn, "timeline", "gpt2", "fused"),
    "pipeline_wgmma": partial(drawn, "timeline", "gpt2", "wgmma", HOPPER),
    "pipeline_hopper": partial(drawn, "timeline", "gpt2", "hopper", HOPPER),
    "barriers": lambda: drawn_puzzle("barriers", find_folder("16"), find_folder("16").solution, "the solution"),
    "barriers_hopper": partial(drawn, "barriers", "gpt2", "hopper", HOPPER),
}
ALL = QUICK | TRACED


def path_of(name: str) -> Path:
    return FIGURES / f"{name}.svg"


def main(names: list[str]) -> None:
    """Writes the pictures called `names`, or all."""
    for name in names or ALL:
        path_of(name).write_text(ALL[name]().svg())


if __name__ == "__main__":
    main(sys.argv[1:])
