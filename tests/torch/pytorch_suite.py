"""PyTorch's own tests of attention with attngen's functions in the place of torch's.

    python -m tests.torch.pytorch_suite PATH [--each N] [--torch] [--kernels] [--length N] [pytest's arguments...]

PATH is a file of torch's repository: nothing is fetched, and the file is chosen by its name. Written for those of 2.12.1.

    test/inductor/test_flex_attention.py    flex_attention and BlockMask
    test/inductor/test_flex_decoding.py     flex_attention with few rows, and with keys in pages (PagedAttention)
    test/test_varlen_attention.py           varlen_attn and varlen_attn_out of packed sequences

Of flex_attention, the calls that torch.compile traces are attngen's, and so are masks; eager calls, which those tests compare
with, stay torch's. Calls in fp64 say mode="math". Without a GPU, tensors are on the CPU, gradients are tested too, and
attention is computed by torch's operations from the spec that a kernel would compute; with --kernels by the emulated device.
Sequences are then `--length` long (256), except in cases whose numbers are those of another length. Where a case expects a
text or a limit of torch's own kernels beside numbers, its numbers alone are tested.

varlen_attn is attngen's in all calls. torch's tests of it are for a GPU; without one, the emulated device computes it, for
sequences of half that length and fewer heads.

Prints how many cases pass, and the others with the reason why they cannot apply, or what they said. With --torch, torch's own
functions stay: a case that fails then says something of another version of torch, not of attngen.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
# Attention by torch's operations in the place of kernels.
BY_TORCH = """
from attngen.torch import flex_operator as _operator
from attngen.torch.math import by_torch as _by_torch
_operator._front.call = lambda tensors, key, describe, arguments, *_: _by_torch(*arguments)
"""
# Before that, with --torch too: of how many tensors, and of how many other parts, this version's masks consist for pytrees; and
# a comparison with eager calls, whose products in fp32 are TF32's on a GPU.
FLEX_BEFORE = """
_close = functools.partial(torch.testing.assert_close, atol=1e-2, rtol=1e-2)
_torchs_parts = [len(part) for part in create_block_mask(noop_mask, 1, 1, 128, 128, "cpu")._flatten()]
"""
# What replaces the names that a file of FlexAttention imports.
FLEX = """
import attngen.torch as _attngen
from attngen.torch import BlockMask, and_masks, create_block_mask, or_masks
_torchs_flex_attention = flex_attention
def flex_attention(*args, **kwargs):
    if torch.compiler.is_dynamo_compiling():
        if (args or (kwargs["query"],))[0].dtype is torch.float64:  # of which there are no kernels
            kwargs["kernel_options"] = {"mode": "math"}
        return _attngen.flex_attention(*args, **kwargs)
    return _torchs_flex_attention(*args, **kwargs)
"""
# torch's own functions on a machine without GPU.
COMPILE_ON_THE_CPU = """
_torchs_compile = torch.compile
def _compile(*args, backend="aot_eager", mode=None, **kwargs):  # inductor would compile what stands for the kernels
    return _torchs_compile(*args, backend="aot_eager" if backend == "inductor" else backend, **kwargs)
torch.compile = _compile
"""
FLEX_ON_THE_CPU = (
    COMPILE_ON_THE_CPU
    + """
# torch's own kernels have no gradients on the CPU, its operations have
_theirs = torch.nn.attention.flex_attention
_theirs._validate_device = lambda query, key, value: None
# nor have they largest scores, which its operations have
_torchs_options = _theirs._apply_kernel_options
def _options(query, key, value, return_lse, options, return_aux=None):
    largest = return_aux is not None and return_aux.max_scores
    aux = _theirs.AuxRequest(lse=return_aux.lse) if largest else return_aux
    return {**_torchs_options(query, key, value, return_lse, options, aux), "OUTPUT_MAX": largest}
_theirs._apply_kernel_options = _options
"""
)
# What replaces the names that the file of packed sequences imports.
VARLEN = """
from attngen.torch import varlen_attn, varlen_attn_out
"""
# What a line of any file becomes on a machine without GPU, by patterns.
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
    r"\bbias1\[q_idx\] \+ bias2\[kv_idx\]": "bias1.to(torch.float32)[q_idx] + bias2[kv_idx]",
    r"\bbias\[q_idx\] \+ bias\[kv_idx\]": "bias.to(torch.float32)[q_idx] + bias.to(torch.float32)[kv_idx]",
    r"skipCPUIf\(True, [^)]*\)\(test_func\)": "test_func",
    r"SKIP_UT_ON_CPU = True": "SKIP_UT_ON_CPU = False",
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


@dataclass(frozen=True)
class Suite:
    """What is known of one file. Patterns are regular expressions, and what replaces them is as of `re.sub`."""

    imports: str  # the last import, after which the names are replaced
    names: str  # what replaces them
    before: str = ""  # what comes before that, with --torch too
    on_the_cpu: str = ""  # and what follows it without a GPU
    changes: Mapping[str, str] = field(default_factory=dict)  # patterns of texts and limits of torch's own kernels
    # Sizes that are longer than a machine without a GPU needs, by patterns, with "LENGTH" for the length
    shorter: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int | None] = field(default_factory=dict)  # sizes of global names; None: the length
    # Cases that keep the sizes of the file, by pytest's -k, and the global names that are smaller all the same
    long: str = ""
    long_sizes: Mapping[str, int] = field(default_factory=dict)
    not_ours: Mapping[str, str] = field(default_factory=dict)  # cases that say nothing of results, by patterns of their names
    not_ours_on_the_cpu: Mapping[str, str] = field(default_factory=dict)


OPTIONS = "options and limits of torch's own kernels"
TEXTS = "texts and limits of torch's compiler"
LIMITS = {
    # kernels for reductions inside a score, and for heads of less than 16 elements, which torch lacks and attngen has
    r"(?m)^    @expectedFailure  # (If we capture|tl\.dot).*\n": "",
}
FLEX_ATTENTION = Suite(
    imports=r"(?m)^from torch\.nn\.attention\.flex_attention import \((?:.|\n)*?^\)\n",
    names=FLEX,
    before=FLEX_BEFORE,
    on_the_cpu=FLEX_ON_THE_CPU,
    changes=LIMITS
    | {
        # the parts of a mask of torch 2.12, which are as many as its names
        r"len\(BlockMask\._TENSOR_ATTRS\)": "_torchs_parts[0]",
        r"len\(BlockMask\._CONTEXT_ATTRS\)": "_torchs_parts[1]",
        # on a machine with a GPU, cases on the CPU would be those of torch's C++ kernels
        r'\("cuda", "cpu"\)|\(\s+"cuda",\s+"cpu",\s+\)': '("cuda",)',
        r'(?m)^ +FileCheck\(\)\.check_regex\("triton_tem_fused_flex_attention[^"]*"\)\.run\(\s*code\[\d\]\s*\)\n': "",
        r"self\.assertIn\(\s+expected_flag, str\(code\),[^)]*\)": "_close(out, sdpa_partial(*tensors))",
        r"_, code = run_and_get_code\(func, q, k, v, _identity\)\n(?:.*\n){1,3}?.*code\[0\]\s+\)\n": (
            "_close(func(q, k, v, _identity), 2 * flex_attention(q, k, v, return_lse=True)[1])\n"
        ),
        r'with self\.assertRaisesRegex\(\s+[\w.]*InductorError,\s+r?"(NYI: emb|Mixed q|NotImplementedError: torch\.comp)'
        r"[^)]*\):\s+(\w+)\((.*)\)\n": r"_close(\2(\3), flex_attention(\3))\n",
        r'with self\.assertRaisesRegex\(\s+[\w.]*InductorError, "Query length must[^)]*\):\s+(.*)\n': (
            r"self.assertEqual(\1.shape, query.shape)\n"
        ),
        r'with self\.assertRaisesRegex\(\s+[\w.]*InductorError,\s+"Using multiple indexing[^)]*\):': "if True:",
        r"with self\.assertRaisesRegex\(RuntimeError, expected_error_message\):\s+torch\.compile\(flex_attention\)\((.*)\)\n": (
            r"_close(torch.compile(flex_attention)(\1), flex_attention(\1))\n"
        ),
        r'InductorError,(\s+"Backward pass with mixed)': r"Exception,\1",  # raised by torch's compiler, or by its tracer
        # a BlockMask of all pairs; attngen's backward needs no lists of rows
        r'with self\.assertRaisesRegex\(\s+RuntimeError,\s+"BlockMask q_indices is None[^)]*\):\s+(flex_compile\(.*\))\n': (
            r"found, wanted = \1, torch.nn.functional.scaled_dot_product_attention(q, k, v); "
            r"found, wanted = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, wanted)); "
            r"_close(found, wanted)\n"
        ),
    },
    shorter={
        r"(?<=automatic_dynamic_test\(score_mod, dtype, )S=1024\b": "S=LENGTH",
        r"\(1, 8, 1024, 64\)": "(1, 2, LENGTH, 64)",
        r"\(8, 8, 1024, 64\)": "(2, 2, LENGTH, 64)",
        r"\b1, 8, 1024, 64, device": "1, 2, LENGTH, 64, device",
        r"\b(noop_mask, 1, 1|_causal_mask, None, None), 1024, 1024\b(?=, device=device\)?\n)": r"\1, LENGTH, LENGTH",
        r"torch\.randn\(1024, ": "torch.randn(LENGTH, ",
        r"\(1, 2, 4096, 64\)": "(1, 2, 2 * LENGTH, 64)",
        r"B, H, N, D = 100, 12, 128, 64": "B, H, N, D = 10, 2, 128, 64",
        r"torch\.ones\(8, 1024, 512": "torch.ones(2, LENGTH, 512",
    },
    sizes={"S": None},
    long="mask_mod_combiners or njt_causal",
    long_sizes={"B": 1, "H": 2},
    not_ours={
        r"kernel_options|num_stages|BLOCK_M|_tma|_backend|FLASH|invalid_block_size": OPTIONS,
        r"codegen|triton|epilogue|prologue|logging|fx_graph|freezes_layout|graph_correctness": TEXTS,
        r"pytree_flatten_with_keys": "keys of a mask's numbers and functions, which torch 2.13's masks lack too",
        r"create_block_mask_no_recompile": "counts graphs that make lists; attngen makes none until they are read",
        r"mixed_dtypes_fails": "eager calls alone, which are torch's",
        r"(?<!backward_)stride_ordering_mode_\w+_permute_order4": "rows that are not innermost, which torch 2.13 lacks too",
    },
    not_ours_on_the_cpu={
        r"mixed_device|wrong_device": "two devices (no GPU is here)",
        r"cuda_graphable": "CUDA graphs (no GPU is here)",
        r"(?<!backward_)stride_ordering_mode_inductor_permute_order2_shape0": (
            "the stride of a dimension of one element, of torch's operations that stand for a kernel"
        ),
    },
)
FLEX_DECODING = Suite(
    imports=FLEX_ATTENTION.imports,
    names=FLEX,
    before=FLEX_BEFORE,
    on_the_cpu=FLEX_ON_THE_CPU,
    changes=FLEX_ATTENTION.changes,
    not_ours={
        r"_tma": OPTIONS,
    },
)
VARLEN_ATTENTION = Suite(
    imports=r"(?m)^from torch\.nn\.attention\.varlen import .*\n",
    names=VARLEN,
    before="""
PLATFORM_SUPPORTS_CK_SDPA = False  # kernels of another vendor
""",
    on_the_cpu=COMPILE_ON_THE_CPU,
    changes={
        # names that torch 2.11 lacks
        r"(?m)^(from torch\.nn\.attention\.varlen import varlen_attn), varlen_attn_out\n": (
            r"\1\ntry:\n    from torch.nn.attention.varlen import varlen_attn_out\nexcept ImportError:\n    pass\n"
        ),
        r"(?m)^    PLATFORM_SUPPORTS_CK_SDPA,\n": "",
        # one of torch's own backends: attngen has no others, and pages of any size
        r'\["fa2"\] \+ \(\["fa3"\] if \w+ else \[\]\) \+ \(\["fa4"\] if \w+ else \[\]\)': '["fa2"]',
        r'if backend == "fa2" and page_size % 256 != 0:': "if False:",
        # page sizes are constants of kernels: 4 of them in 2 types are more graphs than torch.compile makes of a function
        r"attn_fn = torch\.compile\(varlen_attn,": "torch._dynamo.reset(); attn_fn = torch.compile(varlen_attn,",
        # two schedules, one of which splits the keys: their weights of 16 bits are rounded at other scales
        r"self\.assertEqual\((output_paged|output_cached), output_reference\)": (
            r"self.assertEqual(\1, output_reference, atol=4e-3, rtol=0.016)"
        ),
    },
    shorter={
        r"(?m)^    PLATFORM_SUPPORTS_FLASH_ATTENTION,\n": "",
        r"not PLATFORM_SUPPORTS_FLASH_ATTENTION,": "False,",
        r"max_seq_len=1024,(\s+)embed_dim=1024": r"max_seq_len=LENGTH // 2,\1embed_dim=256",
        r"max_seq_len=512, embed_dim=1024, num_heads=16": "max_seq_len=LENGTH // 2, embed_dim=128, num_heads=2",
        r"num_heads = 16\n(\s+)num_kv_heads = 4 if": r"num_heads = 4\n\1num_kv_heads = 2 if",
        r"seq_len = 512\n(\s+)num_heads_q, num_heads_k = 16, 4": r"seq_len = LENGTH // 2\n\1num_heads_q, num_heads_k = 4, 2",
        r"target_seq_len = 512\n(\s+)extra_seq_len = 1024": r"target_seq_len = LENGTH\n\1extra_seq_len = 2 * LENGTH",
    },
    not_ours={r"custom_op": "torch's own operators"},
)
SUITES = {
    "test_flex_attention.py": FLEX_ATTENTION,
    "test_flex_decoding.py": FLEX_DECODING,
    "test_varlen_attention.py": VARLEN_ATTENTION,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--each", type=int, default=0, help="cases of each test, chosen at random, the same in every run")
    parser.add_argument("--torch", action="store_true", help="without attngen")
    parser.add_argument("--kernels", action="store_true", help="by the emulated device, without a GPU")
    parser.add_argument("--length", type=int, default=256, help="of sequences without a GPU; default 256")
    given, rest = parser.parse_known_args()
    suite = SUITES.get(given.path.name)
    if suite is None:
        print(f"{given.path.name} is not one of {', '.join(SUITES)}", file=sys.stderr)
        return 2
    text = given.path.read_text()
    imports = list(re.finditer(suite.imports, text))
    if not imports:
        print(f"{given.path} does not import torch's attention as expected", file=sys.stderr)
        return 2
    gpu, end = has_gpu(), imports[-1].end()
    names = suite.before + ("" if given.torch else suite.names)
    if not gpu:
        names += suite.on_the_cpu + ("" if given.kernels or given.torch else BY_TORCH)
    text = _changed(text[:end] + names + text[end:], suite.changes)
    runs: list[tuple[str, list[str]]] = [(text, [])]
    if not gpu:
        shorter = {pattern: instead.replace("LENGTH", str(given.length)) for pattern, instead in suite.shorter.items()}
        text = _changed(_changed(text, ON_THE_CPU), shorter)
        short = _sized(text, {name: size or given.length for name, size in suite.sizes.items()})
        runs = [(short, [])]
        if suite.long and "-k" not in rest:
            runs = [(short, ["-k", f"not ({suite.long})"]), (_sized(text, suite.long_sizes), ["-k", suite.long])]
    cases: list[ElementTree.Element] = []
    for changed, selected in runs:
        with tempfile.TemporaryDirectory() as directory:
            file, report = (
                Path(directory) / f"test_swapped_{given.path.name.removeprefix('test_')}",
                Path(directory) / "report.xml",
            )
            file.write_text(changed)
            if given.each:
                tests = sorted(set(re.findall(r"def (test_\w+)", changed)), key=len, reverse=True)
                (Path(directory) / "conftest.py").write_text(FEWER.format(names=tests, each=given.each))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging"]
            command += [f"--junitxml={report}", str(file), *selected, *rest]
            subprocess.run(command, cwd=directory, env=environment(), check=False)
            cases += ElementTree.parse(report).iter("testcase")
    return summary(cases, suite.not_ours if gpu else {**suite.not_ours, **suite.not_ours_on_the_cpu})


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _changed(text: str, patterns: Mapping[str, str]) -> str:
    for pattern, instead in patterns.items():
        text = re.sub(pattern, instead, text)
    return text


def _sized(text: str, sizes: Mapping[str, int]) -> str:
    return _changed(text, {rf"(?m)^{name} = \d+$": f"{name} = {size}" for name, size in sizes.items()})


def environment() -> dict[str, str]:
    """The environment of a run. torch compiles in each process of pytest's alone: pools of compilers would be many with -n."""
    import os

    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, "PYTHONPATH": path}


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
