"""flash-attention's own tests with attngen's functions in the place of its own.

    python -m tests.torch.flash_attention_suite PATH [--each N] [--longest N] [--kernels] [pytest's arguments...]

PATH is flash-attention's tests/test_flash_attn.py: nothing is fetched, and its package is not needed (einops is). Of each
test's grid, `--each` random points run (8; 0 for all), the same in every run, with sequences of at most `--longest` (no limit
on a GPU, else 256). Without a GPU, batches and repetitions are two, and tensors are on the CPU: attention of dense tensors is
computed by torch's operations from the spec that a kernel would compute, or with --kernels by the emulated device, as that of
packed ones always is.

attngen returns no probabilities: a test of dropout gets the weights that were dropped, computed from the generator's state. Its
share is in 256ths, so that 0.17 is 44 / 256 here. The test of a cache also runs with `cache_batch_idx`,
which its grid leaves out. Prints how many cases pass, and the others with the reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.torch.pytorch_suite import environment, has_gpu, summary

# What replaces the file's imports.
SWAPPED = """
import functools, itertools, random
import attngen.torch as _attngen
from attngen.spec.dropout import STEPS as _STEPS, bytes_of_pairs as _bytes_of_pairs
from attngen.torch import flash_attn as _module

USE_TRITON_ROCM = False
_drawn = []
_generator_state = _module.generator_state
def _recorded(*args):
    _drawn.append(_generator_state(*args))
    return _drawn[-1]
_module.generator_state = _recorded

def _swapped(name):
    function = getattr(_attngen, name)
    dense = "varlen" not in name and "kvcache" not in name
    @functools.wraps(function)
    def call(*args, **named):
        if dense and {by_torch} and not torch.cuda.is_available():
            named["mode"] = "math"
        _drawn.clear()
        result = function(*args, **named)
        if not _drawn or not named.get("return_attn_probs"):
            return result
        number = next(n for n, a in enumerate(args) if isinstance(a, float))
        if dense:
            rows, keys = args[0].shape[1], args[number - 1].shape[1]
            batch = args[0].shape[0]
        else:
            lengths = 1 if "qkvpacked" in name else 2  # numbers of rows and of keys, after as many cu_seqlens
            rows, keys, batch = args[number - lengths], args[number - 1], len(args[number - lengths - 1]) - 1
        heads, device = result[0].shape[-2], result[0].device
        at = (torch.arange(n, device=device).view([-1 if a == axis else 1 for a in range(4)])
              for axis, n in enumerate((batch, heads, rows, keys)))
        dropped = _bytes_of_pairs(*_drawn[0].unbind(), *at) < round(args[number] * _STEPS)
        return result[0], result[1], torch.where(dropped, -1.0, 1.0)
    return call

for _name in ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
              "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"):
    globals()[_name] = _swapped(_name)

def unpad_input(tensor, kept):
    lengths = kept.sum(-1, dtype=torch.int32)
    at = kept.flatten().nonzero().flatten()
    return tensor.flatten(0, 1)[at], at, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max()), lengths

def pad_input(rows, at, batch, length):
    return rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, at, rows).unflatten(0, (batch, length))

def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, **_):
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).view(-1, 1) + torch.arange(x.shape[1], device=x.device)
    c, s = (t[offsets].unsqueeze(2).float() for t in (cos, sin))
    size = 2 * cos.shape[-1]
    rotated = x[..., :size].float()
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    parts = (a * c - b * s, a * s + b * c)
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([joined.to(x.dtype), x[..., size:]], -1)

def _grid(names, values, **_):
    def mark(function):
        function.__dict__.setdefault("grid", []).append((names.replace(" ", "").split(","), list(values)))
        return function
    return mark

def _is_short(names, value):
    sizes = value if isinstance(value, tuple) else (value,)
    return not names[0].startswith("seqlen") or isinstance(value, bool) or max(sizes) <= {longest}

def pytest_generate_tests(metafunc):
    grid = getattr(metafunc.function, "grid", [])
    if not grid:
        return
    names = [name for group, _ in grid for name in group]
    axes = [[v for v in values if _is_short(group, v)] or values[:1] for group, values in grid]
    count, draw = math.prod(map(len, axes)), random.Random(metafunc.function.__name__)
    points = itertools.product(*axes) if not 0 < {each} < count else (
        [draw.choice(axis) for axis in axes] for _ in range({each}))
    rows = [[v for value, (group, _) in zip(point, grid) for v in (value if len(group) > 1 else [value])] for point in points]
    metafunc.parametrize(names, rows, ids=["-".join(str(v).replace("torch.", "") for v in row) for row in rows])
"""
# Probabilities, of which attngen returns none: the reference's own.
AT_THE_END = """
def normalize_flash_attn_S(_, q, k, v, rows=None, keys=None, bias=None, is_dropout=False, causal=False, window_size=(-1, -1)):
    return attention_ref(q, k, v, rows, keys, bias, causal=causal, window_size=window_size)[1]
"""
NOT_OURS = {
    r"generator_arg|num_splits|block_table_bounds": "arguments and checks of flash-attention's own extension",
}


def main() -> int:
    gpu = has_gpu()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--each", type=int, default=8, help="random points of each test's grid; 0 for all; default 8")
    parser.add_argument("--longest", type=int, default=1 << 30 if gpu else 256, help="longest sequence")
    parser.add_argument("--kernels", action="store_true", help="dense tensors by the emulated device, without a GPU")
    given, rest = parser.parse_known_args()
    text = given.path.read_text()
    if "from flash_attn import" not in text:
        print("the file does not import flash_attn as expected", file=sys.stderr)
        return 2
    swapped = SWAPPED
    for name, value in {"by_torch": not given.kernels, "longest": given.longest, "each": given.each}.items():
        swapped = swapped.replace(f"{{{name}}}", str(value))
    text = re.sub(r"(?m)^from flash_attn.* import (?:\([^)]*\)|[^(\n]*)\n", "", text)
    text = text.replace("\nMAX_HEADDIM", f"\n{swapped}\nMAX_HEADDIM", 1).replace("@pytest.mark.parametrize", "@_grid")
    text = text.replace('"dropout_p", [0.0, 0.17]', f'"dropout_p", [0.0, {44 / 256}]') + AT_THE_END
    text = re.sub(r'(?m)^(@_grid\("has_batch_idx", )\[False\]\)$', r"\1[False, True])", text)
    if not gpu:
        text = re.sub(r'torch\.cuda\.get_device_capability\("cuda"\)', "(9, 0)", text).replace('"cuda"', '"cpu"')
        text = re.sub(r"(?m)^    batch_size = \d+\b", "    batch_size = 2", text)
        text = re.sub(r"(?m)^    for (\w+) in range\(\d+\):$", r"    for \1 in range(2):", text)  # repetitions
    with tempfile.TemporaryDirectory() as directory:
        file, report = Path(directory) / "test_swapped_flash_attn.py", Path(directory) / "report.xml"
        file.write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file), *rest]
        subprocess.run(command, cwd=directory, env=environment(), check=False)
        return summary(ElementTree.parse(report).iter("testcase"), NOT_OURS)


if __name__ == "__main__":
    sys.exit(main())
