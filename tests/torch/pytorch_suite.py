"""PyTorch's own tests of FlexAttention with attngen's flex_attention in the place of what torch.compile makes of torch's.

    python -m tests.torch.pytorch_suite PATH [--each N] [--kernels] [--length N] [pytest's arguments...]

PATH is torch's test/inductor/test_flex_attention.py: nothing is fetched. Calls that torch.compile traces are attngen's, and
so are masks; eager calls, which those tests compare with, stay torch's. Calls in fp64 say mode="math". `--each` runs at most so
many cases of each test, chosen at random, the same in every run. Without a GPU, tensors are on the CPU, gradients are tested
too, and attention is computed by torch's operations from the spec that a kernel would compute; with --kernels by the emulated
device. Sequences are then `--length` long (256), except in cases whose numbers are those of 2048.

Prints how many cases pass, and the others with the reason why they cannot apply, or what they said.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
# Attention by torch's operations in the place of kernels.
BY_TORCH = """
from attngen.torch import flex_operator as _operator
from attngen.torch.math import by_torch as _by_torch
_operator._calls.make = lambda tensors, others, call, deterministic=None: _by_torch(*call[:4], call[4:])
_operator._calls.repeat = lambda tensors, others: None
"""
# What replaces the names that the file imports.
SWAPPED = """
import attngen.torch as _attngen
from attngen.torch import BlockMask, and_masks, create_block_mask, or_masks
_torchs_flex_attention = flex_attention
def flex_attention(*args, **kwargs):
    if torch.compiler.is_dynamo_compiling():
        if (args or (kwargs["query"],))[0].dtype is torch.float64:  # of which there are no kernels
            kwargs["kernel_options"] = {"mode": "math"}
        return _attngen.flex_attention(*args, **kwargs)
    return _torchs_flex_attention(*args, **kwargs)
if not torch.cuda.is_available():
    _torchs_compile = torch.compile
    def _compile(*args, backend="aot_eager", mode=None, **kwargs):  # inductor would compile what stands for the kernels
        return _torchs_compile(*args, backend="aot_eager" if backend == "inductor" else backend, **kwargs)
    torch.compile = _compile
    # torch's own kernels have no gradients on the CPU, its operations have
    _theirs = torch.nn.attention.flex_attention
    _theirs._validate_device = lambda query, key, value: None
    # nor have they largest scores, which its operations have
    _torchs_options = _theirs._apply_kernel_options
    def _options(query, key, value, return_lse, options, return_aux=None):
        largest = return_aux is not None and return_aux.max_scores
        aux = AuxRequest(lse=return_aux.lse) if largest else return_aux
        return {**_torchs_options(query, key, value, return_lse, options, aux), "OUTPUT_MAX": largest}
    _theirs._apply_kernel_options = _options
"""
# What a line of the file becomes on a machine without GPU, by patterns.
ON_THE_CPU = {
    r'"cuda(:\d)?"': '"cpu"',
    r"\.cuda\(\)": ".cpu()",
    r"\.is_cuda\b": ".is_cpu",
    r"test_inference_only = True": "test_inference_only = False",
    r"@supports_learnable_bias\n": "",
    r"(?m)^@running_on_a100_only\n": "",
    r"(?m)^    @running_on_a100_only\n": "",
    # the gradient of an element that all pairs read: torch's CPU sums it in 16 bits, that of the reference in fp64 too
    r"gate_score\[h\]\.to\(torch\.float32\)": "gate_score.to(torch.float32)[h]",
    r"skipCPUIf\(True, [^)]*\)\(test_func\)": "test_func",
}
# A conftest.py that keeps some cases of each test, after pytest's own selection.
FEWER = """
import random
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    tests, draw = {{}}, random.Random(0)
    for item in items:
        test = next(name for name in {names} if item.name.startswith(name))
        tests.setdefault(test, []).append(item)
    kept = {{item for cases in tests.values() for item in draw.sample(cases, min({each}, len(cases)))}}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
"""
# Sizes that are longer than a machine without a GPU needs, by patterns, with "LENGTH" for the length.
SHORTER = {
    r"\bS=1024\b": "S=LENGTH",
    r"\(1, 8, 1024, 64\)": "(1, 2, LENGTH, 64)",
    r"\(8, 8, 1024, 64\)": "(2, 2, LENGTH, 64)",
    r"\b1, 8, 1024, 64, device": "1, 2, LENGTH, 64, device",
    r"\b(noop_mask, 1, 1|_causal_mask, None, None), 1024, 1024\b(?=, device=device\)?\n)": r"\1, LENGTH, LENGTH",
    r"torch\.randn\(1024, ": "torch.randn(LENGTH, ",
    r"\(1, 2, 4096, 64\)": "(1, 2, 2 * LENGTH, 64)",
    r"B, H, N, D = 100, 12, 128, 64": "B, H, N, D = 10, 2, 128, 64",
    r"torch\.ones\(8, 1024, 512": "torch.ones(2, LENGTH, 512",
}
# Cases whose numbers are those of 2048 rows, which then have one batch and two heads.
OF_2048 = "mask_mod_combiners or njt_causal"
# Cases that say nothing of results, by a pattern of their names.
NOT_OURS = {
    r"kernel_options|num_stages|BLOCK_M|_tma|_backend|FLASH|invalid_block_size": "options and limits of torch's own kernels",
    r"codegen|triton|epilogue|prologue|logging|fx_graph|cant_lower|symmetric_bias": "texts and limits of torch's compiler",
    r"fp8|float8": "an element type that attngen lacks",
    r"captured_reduction": "expects that torch fails; attngen computes it",
    r"backward_error_with_none_q_indices": "expects a limit of torch's backward; attngen's needs no lists of rows",
    r"create_block_mask_no_recompile": "counts graphs that make lists; attngen makes none until they are read",
    r"mixed_dtypes_fails": "eager calls alone, which are torch's",
    r"(?<!backward_)stride_ordering_mode_\w+_permute_order4": "rows that are not innermost, which torch 2.13 lacks too",
}
NOT_OURS_ON_THE_CPU = {
    r"mixed_device|wrong_device": "two devices (no GPU is here)",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--each", type=int, default=0, help="cases of each test; default 0, all of them")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--length", type=int, default=256, help="of sequences without a GPU; default 256")
    given, rest = parser.parse_known_args()
    text = given.path.read_text()
    imports = list(re.finditer(r"^from torch\.nn\.attention\.flex_attention import \((?:.|\n)*?^\)\n", text, re.M))
    if not imports:
        print("the file does not import torch.nn.attention.flex_attention as expected", file=sys.stderr)
        return 2
    end = imports[-1].end()
    swapped = text[:end] + SWAPPED + ("" if given.kernels or has_gpu() else BY_TORCH) + text[end:]
    runs: list[tuple[str, list[str]]] = [(swapped, [])]
    if not has_gpu():
        for pattern, instead in ON_THE_CPU.items():
            swapped = re.sub(pattern, instead, swapped)
        for pattern, instead in SHORTER.items():
            swapped = re.sub(pattern, instead.replace("LENGTH", str(given.length)), swapped)
        short, few = _sized(swapped, {"S": given.length}), _sized(swapped, {"B": 1, "H": 2})
        runs = [(short, [])] if "-k" in rest else [(short, ["-k", f"not ({OF_2048})"]), (few, ["-k", OF_2048])]
    cases: list[ElementTree.Element] = []
    for changed, selected in runs:
        with tempfile.TemporaryDirectory() as directory:
            file, report = Path(directory) / "test_swapped_flex_attention.py", Path(directory) / "report.xml"
            file.write_text(changed)
            if given.each:
                names = sorted(set(re.findall(r"def (test_\w+)", changed)), key=len, reverse=True)
                (Path(directory) / "conftest.py").write_text(FEWER.format(names=names, each=given.each))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging"]
            command += [f"--junitxml={report}", str(file), *selected, *rest]
            subprocess.run(command, cwd=directory, env=environment(), check=False)
            cases += ElementTree.parse(report).iter("testcase")
    return summary(cases, NOT_OURS if has_gpu() else NOT_OURS | NOT_OURS_ON_THE_CPU)


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _sized(text: str, sizes: dict[str, int]) -> str:
    for name, size in sizes.items():
        text = re.sub(rf"(?m)^{name} = \d+$", f"{name} = {size}", text)
    return text


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def summary(cases: Iterable[ElementTree.Element], not_ours: Mapping[str, str]) -> int:
    """Prints the share of cases that pass. 1 if a case fails that says something of results."""
    counts: Counter[str] = Counter()
    others: list[str] = []
    for case in cases:
        name = case.get("name", "")
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is not None:
            counts["skipped by the file itself"] += 1
        elif problem is None:
            counts["passed"] += 1
        else:
            where = f"{case.get('classname', '')}::{name}"
            reason = next((why for pattern, why in not_ours.items() if re.search(pattern, where)), "")
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
