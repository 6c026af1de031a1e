"""PyTorch's own tests of FlexAttention with attngen's flex_attention in the place of what torch.compile makes of torch's.

    python -m tests.torch.pytorch_suite PATH [--kernels] [pytest's arguments...]

PATH is torch's test/inductor/test_flex_attention.py, of the tag of the torch that is installed: nothing is fetched. Calls that
torch.compile traces are attngen's; eager calls, which those tests compare with, stay torch's. Without a GPU, attention is
computed by torch's operations from the spec that a kernel would compute; with --kernels by the emulated device.

Prints how many cases pass, and the others with the reason why they cannot apply, or what they said.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
# What replaces the names that the file imports.
SWAPPED = """
import attngen.torch as _attngen
from attngen.torch import flex_operator as _operator
_torchs_flex_attention = flex_attention
def flex_attention(*args, **kwargs):
    if torch.compiler.is_dynamo_compiling():
        return _attngen.flex_attention(*args, **kwargs)
    return _torchs_flex_attention(*args, **kwargs)
if {by_torch} and not torch.cuda.is_available():
    from attngen.torch.math import by_torch as _by_torch
    _operator._calls.make = lambda tensors, others, call, deterministic=None: _by_torch(*call[:4], call[4:])
"""
# Cases that say nothing of results, by a pattern of their names.
NOT_OURS = {
    r"kernel_options|num_warps|num_stages|BLOCK_M|autotune|_tma|_backend|FLASH": "options of torch's own kernels",
    r"codegen|triton|inductor|epilogue|prologue|logging|fx_graph": "torch's compiler",
    r"fp8|float8": "element types that attngen lacks",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--kernels", action="store_true")
    given, rest = parser.parse_known_args()
    text = given.path.read_text()
    imports = list(re.finditer(r"^from torch\.nn\.attention\.flex_attention import \((?:.|\n)*?^\)\n", text, re.M))
    if not imports:
        print("the file does not import torch.nn.attention.flex_attention as expected", file=sys.stderr)
        return 2
    end = imports[-1].end()
    swapped = text[:end] + SWAPPED.format(by_torch=not given.kernels) + text[end:]
    with tempfile.TemporaryDirectory() as directory:
        file, report = Path(directory) / "test_swapped_flex_attention.py", Path(directory) / "report.xml"
        file.write_text(swapped)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file), *rest]
        subprocess.run(command, cwd=directory, env=_environment(), check=False)
        return _summary(report)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _summary(report: Path) -> int:
    """Prints the share of cases that pass. 1 if a case fails that says something of results."""
    counts: Counter[str] = Counter()
    others: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is not None:
            counts["skipped by the file itself"] += 1
        elif problem is None:
            counts["passed"] += 1
        else:
            reason = next((why for pattern, why in NOT_OURS.items() if re.search(pattern, name)), "")
            counts[reason or "failed"] += 1
            if not reason:
                others.append(f"{name}: {(problem.get('message') or '').splitlines()[0][:200]}")
    print("\n".join(others))
    for what, count in counts.most_common():
        print(f"{count:6} {what}")
    applies = counts["passed"] + counts["failed"]
    print(f"{counts['passed']} of {applies} that apply pass ({100 * counts['passed'] / max(1, applies):.1f}%)")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
