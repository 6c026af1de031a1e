"""Counters of kernels by Nsight Compute. The GPU's performance counters must be open to users."""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from markers import write_between

Counts = dict[str, str]  # by metric


def run(
    script: str,
    description: str | None,
    calls: Callable[[], None],
    kernel: str,
    metrics: Iterable[str],
    table: Callable[[Sequence[Counts]], str],
) -> None:
    """The command line of the benchmark at the path `script`: counts what `calls` launches, and writes the table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        calls()
        return
    text = table(counted(script, kernel, metrics))
    print(text)
    if options.write:
        write_between(options.write, Path(script).stem, text)


def counted(script: str, kernel: str, metrics: Iterable[str]) -> list[Counts]:
    """Of each launch of a kernel whose name matches the regular expression `kernel`, in order: its counts by metric.

    The launches are those of `script --calls`, which runs under ncu.
    """
    if shutil.which("ncu") is None:
        sys.exit("ncu was not found: Nsight Compute comes with the CUDA toolkit")
    command = ["ncu", "--csv", "--kernel-name", f"regex:{kernel}", "--metrics", ",".join(metrics)]
    done = subprocess.run([*command, sys.executable, script, "--calls"], capture_output=True, text=True, check=False)
    start = done.stdout.find('"ID"')
    if start < 0:
        sys.exit(f"ncu measured nothing:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[int, Counts] = {}
    for row in csv.DictReader(io.StringIO(done.stdout[start:])):
        found.setdefault(int(row["ID"]), {})[row["Metric Name"]] = row["Metric Value"]
    return [values for _, values in sorted(found.items())]
