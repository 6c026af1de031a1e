"""What Nsight Compute counts of kernels. The GPU's owner must have opened its counters to users."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Iterable


def counted(script: str, kernel: str, metrics: Iterable[str]) -> list[dict[str, str]]:
    """Of each launch of a kernel whose name matches the regular expression `kernel`, in order: its counts by metric.

    The launches are those of `script --calls`, which runs under ncu.
    """
    command = ["ncu", "--csv", "--kernel-name", f"regex:{kernel}", "--metrics", ",".join(metrics)]
    done = subprocess.run([*command, sys.executable, script, "--calls"], capture_output=True, text=True, check=False)
    start = done.stdout.find('"ID"')
    if start < 0:
        sys.exit(f"ncu measured nothing:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[int, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(done.stdout[start:])):
        found.setdefault(int(row["ID"]), {})[row["Metric Name"]] = row["Metric Value"]
    return [values for _, values in sorted(found.items())]
