"""transformers' own tests of masks and of attention, with "attngen" in the place of "sdpa", flash-attention and FlexAttention.

    python -m tests.torch.transformers_suite PATH [--each N] [--kernels] [pytest's arguments...]

PATH is a checkout of transformers, of the version that is installed: nothing is fetched, and its package is not used. Masks
that a test expects as a tensor are those of `attngen.transformers`, evaluated for all pairs. Models are tiny and random: eager
attention against attngen's, of padded and of packed sequences, in forward passes, in training and in generate. `--each` runs at
most so many cases of each test of a model, the same in every run. Without a GPU, attention is computed by torch's operations
from the spec that a kernel would compute; with --kernels by the emulated device.

Prints how many cases pass, and the others with the reason why they cannot apply, or what they said.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.torch.pytorch_suite import BY_TORCH, FEWER, environment, has_gpu, summary

MODELS = ("gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt_oss", "t5", "modernbert", "qwen3")
MASKS = "tests/utils/test_masking_utils.py"
# Files that those of a model import.
SHARED = (
    "tests/*.py", "tests/generation/*.py", "tests/models/__init__.py", "tests/utils/__init__.py",
    "tests/utils/test_configuration_utils.py", MASKS, "utils/test_module/*.py",
)  # fmt: skip
# Tests by parts of their names: those of attention implementations that attngen can stand for.
ATTENTION = (
    "MaskTest or eager_matches_sdpa or eager_matches_fa2 or flash_attn_2_inference or flash_attn_2_equivalence or "
    "padding_matches_padding_free or continue_generate_with_position_ids or flex_attention_with_grads or "
    "flash_attn_2_from_config or without_graph_break"
)
# Tests of transformers alone, which no implementation of attention takes part in.
WITHOUT = "flash_attention_3 or flash_attn_3 or eager_padding or mask_eager or skip_eager or find_packed or kernels_inference"
IMPLEMENTATIONS = r'"(sdpa|flash_attention_2|flex_attention)"'
# Marks of tests that need flash-attention's package or a GPU, or run seldom.
MARKS = r"(?m)^ *@(require_flash_attn|require_torch_accelerator|require_torch_gpu|slow|is_flaky\(\))\n"
REPLACED = {"tests/test_pipeline_mixin.py": "class PipelineTesterMixin:\n    pass\n"}  # pipelines need much, and are not tested
CONFTEST = """
import attngen.transformers
import torch
from torch.nn.attention.flex_attention import create_mask
from transformers import AttentionMaskInterface

def all_pairs(*args, **kwargs):
    mask = attngen.transformers.mask(*args, **kwargs)
    batch, heads, rows, keys = mask.shape
    device = kwargs["cache_position"].device if "cache_position" in kwargs else kwargs["device"]
    return create_mask(mask.mask_mod, batch, heads, rows, keys, device=device)

AttentionMaskInterface.register("all_pairs", all_pairs)
"""
NOT_OURS = {
    r"attention_mask_None_without_graph_break": "torch 2.13 loses attributes after FlexAttention's operator, torch's own too",
    r"GptOss.*padding_matches_padding_free": "eager attention's logits of padded and of packed tokens differ by as much",
    r"nonpacked_sequence_mask_skip": "sdpa makes no tensor of a causal mask; attngen never makes one",
    r"GptOss.*inference_equivalence": "flaky in bf16, says transformers too: a rounding sends a token to another expert",
    r"output_attentions": "no kernel has the weights as an output: a refusal that says so, where sdpa warns and is eager",
    r"ModernBert.*eager_matches_sdpa": "before transformers 5, ModernBERT has a table of its own, which lacks others",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--each", type=int, default=0, help="cases of each test of a model; default 0, all of them")
    parser.add_argument("--kernels", action="store_true", help="compute by the emulated device where there is no GPU")
    given, rest = parser.parse_known_args()
    masks, modeling = given.path / MASKS, [f"tests/models/{model}/test_modeling_{model}.py" for model in MODELS]
    if not masks.exists():
        print(f"{masks} is missing", file=sys.stderr)
        return 2
    files = {f.relative_to(given.path) for pattern in SHARED for f in given.path.glob(pattern)}
    files |= {Path(modeled).parent / "__init__.py" for modeled in modeling} | set(map(Path, modeling))
    with tempfile.TemporaryDirectory() as directory:
        root, report, tests = Path(directory), Path(directory) / "report.xml", set()
        for file in files:
            text = re.sub(MARKS, "", (given.path / file).read_text())
            text = REPLACED.get(str(file), text)
            if str(file) == MASKS:
                text = text.replace('"sdpa"', '"all_pairs"')
            text = re.sub(IMPLEMENTATIONS, '"attngen"', text)
            tests |= set(re.findall(r"def (test_\w+)", text))
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        conftest = CONFTEST + ("" if given.kernels or has_gpu() else BY_TORCH)
        if given.each:
            conftest += FEWER.format(names=sorted(tests, key=len, reverse=True), each=given.each)
        (root / "conftest.py").write_text(conftest)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-k", f"({ATTENTION}) and not ({WITHOUT})", MASKS, *modeling, *rest]
        subprocess.run(command, cwd=root, env=environment(), check=False)
        return summary(ElementTree.parse(report).iter("testcase"), NOT_OURS)


if __name__ == "__main__":
    sys.exit(main())
