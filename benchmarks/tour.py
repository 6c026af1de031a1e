"""The figures of the tour: memory traffic of each schedule, counted on the emulated device, and its speed on the GPU.

    python benchmarks/tour.py --only counts --write docs/tour/[1-9]*_*.md      needs no GPU
    python benchmarks/tour.py --only rates --write docs/tour/[1-9]*_*.md       needs a Hopper GPU

and then `python -m tests.tour`, since the notebook has the tables too.

Counts are exact. TFLOP/s are of median times by CUDA events, the L2 cache flushed before each call; they count the pairs that
the mask keeps, 4 * D operations each; shares are of an 8192^3 matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from markers import write_between

import attngen
from attngen.api import CompiledAttention
from attngen.device.select import device_by_name
from attngen.emit.emitter import emit
from attngen.inspect.tracing import Totals, trace_spec
from attngen.language import load_text
from attngen.plan import find_arch
from attngen.reference.problems import Shape
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV

TURING = "sm_75"  # its fused schedule multiplies on ordinary units
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 16, 4096, 64  # sizes for the rates


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel of a table: what to call it, the statements of its spec, and its schedule."""

    label: str
    statements: str = "mask causal"
    schedule: str = "fused"
    arch: str = "sm_80"
    wanted: tuple[str, ...] = ()  # gradients, of a backward
    deterministic: bool = True  # backward only

    def spec(self) -> AttentionSpec:
        """gpt2 with these statements: fp16 and heads of 64."""
        (spec,) = load_text(f"attention gpt2 {{\n dtype fp16\n head_dim {HEAD_DIM}\n {self.statements}\n}}")
        return spec


SCHEDULES = (
    Row("naive", schedule="naive"),
    Row("tiled", schedule="tiled"),
    Row("fused, ordinary units", arch=TURING),
    Row("fused, tensor cores"),
    Row("wgmma", schedule="wgmma", arch="sm_90a"),
    Row("hopper", schedule="hopper", arch="sm_90a"),
)
BACKWARDS = (
    Row("naive, backward", schedule="naive", wanted=QKV),
    Row("tiled, backward", schedule="tiled", wanted=QKV),
    Row("fused, ordinary units, backward", arch=TURING, wanted=QKV),
    Row("fused, tensor cores, backward", wanted=QKV),
    Row("fused, tensor cores, backward, dQ by additions", wanted=QKV, deterministic=False),
    Row("hopper, backward", schedule="hopper", arch="sm_90a", wanted=QKV),
    Row("hopper, backward, dQ by additions", schedule="hopper", arch="sm_90a", wanted=QKV, deterministic=False),
)
ALL = Row("every pair", "")
CAUSAL = Row("causal")
CAPPED = Row("causal, soft-cap", "mask causal\n score softcap(30.0)")
ALIBI = Row("causal, ALiBi", "input slopes: fp32[heads]\n mask causal\n score alibi(slopes)")
SINK = Row("causal, sink", "input sinks: fp32[heads]\n mask causal\n sink sinks[h]")


def window(size: int) -> Row:
    """A causal window."""
    return Row(f"window of {size}", f"mask causal and window({size})")


def documents(label: str, reach: str) -> Row:
    """Documents in one sequence."""
    return Row(label, f"input ids: int32[batch, kv_len]\n mask {reach}same_document(ids)")


def tile(q: int, kv: int) -> Row:
    """Causal, with a tile of one's own."""
    return Row(f"{q} x {kv}", f"mask causal\n kernel fused {{ tile {q} x {kv} }}")


@dataclass(frozen=True, slots=True)
class Chapter:
    """The tables of one chapter: rows that are counted, of which problem, and rows that are timed."""

    counted: tuple[Row, ...]
    shape: Shape
    timed: tuple[Row, ...] = ()


MASKS = (ALL, CAUSAL)
SCORES = (CAUSAL, CAPPED, ALIBI, SINK)
STEPS = (
    Row("fused", ""),
    Row("decode", "", schedule="decode"),
    Row("decode, copies by TMA", "", schedule="decode", arch="sm_90a"),
)
TILES = (tile(128, 64), tile(128, 32), tile(64, 64), tile(64, 32), tile(32, 64))


def square(length: int) -> Shape:
    """One head of one batch, with as many rows as keys."""
    return Shape(1, 1, 1, length, length)


CHAPTERS = {
    **{number: Chapter(SCHEDULES[:number], square(256), SCHEDULES[:number]) for number in range(1, 5)},
    5: Chapter((*MASKS, window(100), documents("documents, causal", "causal and ")), square(512), (*MASKS, window(512))),
    6: Chapter(SCORES, square(256), SCORES),
    7: Chapter(SCHEDULES, square(256), SCHEDULES),
    8: Chapter((*SCHEDULES[2:4], *BACKWARDS), square(256)),
    9: Chapter(STEPS, Shape(1, 8, 2, 1, 2048)),
    10: Chapter(TILES, square(512), TILES),
}


# --- counts


@cache
def counted(row: Row, shape: Shape) -> Totals:
    """What the problem of that shape asks for."""
    (trace,) = trace_spec(row.spec(), (row.schedule,), row.arch, shape, {}, wanted=row.wanted, deterministic=row.deterministic)
    return trace.totals


def counts_table(chapter: Chapter) -> str:
    """One batch, by kernel."""
    shape = chapter.shape
    head = "| | global bytes read | written | shared bytes read | written | wavefronts | conflicts | barriers | matrix MFLOP |"
    lines = [head, "|---" + "|---:" * 8 + "|"]
    for row in chapter.counted:
        t = counted(row, shape)
        numbers = (t.global_read, t.global_written, t.shared_read, t.shared_written, t.wavefronts, t.conflicts, t.barriers)
        cells = [f"{n:,}" for n in numbers] + [f"{t.mma_operations / 1e6:.2f}"]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    lengths = f"{shape.q_len} rows and keys, one head"
    if shape.q_heads > 1:
        lengths = f"{shape.q_len} row and {shape.kv_len} keys, {shape.q_heads} query heads over {shape.kv_heads}"
    about = f"fp16, heads of {HEAD_DIM}, {lengths}; exact counts of the emulated device"
    return "\n".join([f"{about}.", "", *lines])


# --- rates


def timed(rows: Mapping[str, Row], rounds: int) -> Iterator[tuple[str, float, float]]:
    """(key, milliseconds, TFLOP/s) of every row, with q, k, v of randn."""
    import torch

    import attngen.torch  # noqa: F401  (calls with its tensors cost the host least)
    from attngen.bench.measure import measure
    from attngen.reference.torch_oracle import allowed_pairs

    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, device="cuda", dtype=torch.float16) for _ in range(3))
    calls: dict[str, Any] = {}
    pairs: dict[str, int] = {}
    for key, row in rows.items():
        spec, kernel = row.spec(), compiled(row)
        inputs = {i.name: torch.linspace(0.1, 1.0, HEADS, device="cuda") for i in spec.inputs}
        pairs[key] = allowed_pairs(spec, q, k, inputs)
        calls[key] = lambda kernel=kernel, inputs=inputs: kernel(q, k, v, **inputs)
    for key, found in measure(calls, rounds).items():
        yield key, found.median, 4 * HEAD_DIM * pairs[key] / (found.median * 1e9)


def compiled(row: Row) -> CompiledAttention:
    """The row's kernel as planned for the GPU; the one of ordinary units as planned for Turing, and compiled for the GPU."""
    if row.arch != TURING:
        return attngen.compile(row.spec(), kernel=row.schedule, device="cuda")
    device = device_by_name("cuda")
    arch = find_arch(TURING)
    assert arch is not None
    plan = choose(row.spec(), arch, row.schedule)
    source = replace(emit(row.spec(), plan), arch=device.arch)
    return CompiledAttention(row.spec(), plan, device.compile(source), device)


def rates_tables(rounds: int) -> dict[int, str]:
    """The table of each chapter; every kernel is measured once."""
    import torch

    from attngen.bench.measure import ceilings

    rows = {key(row): row for chapter in CHAPTERS.values() for row in both(chapter.timed)}
    top = ceilings(torch.float16).matmul
    found = {name: (ms, tflops) for name, ms, tflops in timed(rows, rounds)}
    about = (
        f"{torch.cuda.get_device_name()}: fp16, batch {BATCH}, {HEADS} heads of {HEAD_DIM}, {LENGTH} rows and keys; median of "
    )
    about += f"{rounds}. Shares are of a matrix product measured in the same run: {top:.0f} TFLOP/s."
    return {number: rates_table(about, chapter, found, top) for number, chapter in CHAPTERS.items() if chapter.timed}


def rates_table(about: str, chapter: Chapter, found: Mapping[str, tuple[float, float]], top: float) -> str:
    """Milliseconds, TFLOP/s and share of `top` TFLOP/s; of schedules with the causal mask and without one."""
    lines = [about, "", "| | ms | TFLOP/s | share |", "|---|---:|---:|---:|"]
    for row in both(chapter.timed):
        ms, tflops = found[key(row)]
        lines.append(f"| {row.label} | {ms:.3f} | {tflops:.1f} | {tflops / top:.1%} |")
    return "\n".join(lines)


def key(row: Row) -> str:
    """What tells a kernel from the others."""
    return f"{row.schedule} {row.arch} {row.statements}"


def both(rows: tuple[Row, ...]) -> list[Row]:
    """Schedules of the ladder also without their mask; other rows as they are."""
    if not set(rows) & set(SCHEDULES):
        return list(rows)
    return [replace(row, label=f"{row.label}, {m.label}", statements=m.statements) for m in MASKS for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("counts", "rates"), required=True)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", type=Path, nargs="+", help="chapters whose tables between the markers are replaced")
    options = parser.parse_args()
    tables = {n: counts_table(c) for n, c in CHAPTERS.items()} if options.only == "counts" else rates_tables(options.rounds)
    for number, text in tables.items():
        print(f"chapter {number}\n\n{text}\n", flush=True)
    for page in options.write or ():
        write_between(page, "tour", tables[int(page.name.split("_")[0])], options.only)


if __name__ == "__main__":
    main()
