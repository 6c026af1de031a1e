"""Libraries of `attngen package` of specs in other storages than dense, and of specs whose values are a part of the keys."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from attngen.language import load_text
from attngen.package.context import SpecContext
from attngen.package.functions import Request, packaged
from attngen.plan import ARCHES
from attngen.spec.attention import AttentionSpec, Storage
from attngen.spec.evaluate import on_numbers
from attngen.spec.gradient import differentiable, gradients_of_call
from attngen.spec.obligations import ObligationError, check_obligations, conditions_of_call
from tests.conftest import ROOT
from tests.harness import shipped
from tests.package.libraries import emulated, extension_prints, library_of, needs_compiler, output_of_tests, sizes_of_calls

PAGE = ROOT / "docs" / "package.md"
PROCESSORS = 64  # so many that keys of few rows are split over several blocks


def stored(spec: AttentionSpec, storage: Storage) -> AttentionSpec:
    return replace(spec, kernel=replace(spec.kernel, storage=storage))


@pytest.mark.parametrize("storage", [s for s in get_args(Storage) if s != "dense"])
def test_the_page_has_the_arguments_of_each_storage(storage: Storage) -> None:
    one = stored(shipped("gpt2"), storage)
    found = packaged(one, Request((ARCHES["sm_80"],), "naive", "forward"))
    made = SpecContext(found, dict.fromkeys(found.programs, "id"), [], ptx=False).made()
    arrays = {f"{a.name}[{', '.join(a.words)}]" for a in made.arguments if a.name not in ("v", "out")}
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{storage}` |")]
    _, *columns, _ = row.split(" |")
    sizes, listed, lengths = ({*re.findall("`([^`]*)`", column)} for column in columns)
    assert sizes == {*made.call.sizes}
    assert listed == {array.replace(", 64]", ", size]") for array in arrays}
    assert lengths == {length.name for length in made.call.longest}


@pytest.mark.parametrize("storage", ["packed", "paged"])
@pytest.mark.parametrize("spec", ["dense_bias", "packed_documents", "dilated"])
def test_conditions_are_those_of_python_for_every_length(spec: str, storage: Storage) -> None:
    one, random, refused = stored(shipped(spec), storage), Random(1), 0
    parts = [(shortest, on_numbers(*found)) for shortest, found in conditions_of_call(one) if found]
    for sizes in sizes_of_calls(60):
        params = {p.name: random.choice((-3, 0, 4)) for p in one.params}
        rows, keys = sizes["q_len"], sizes["kv_len"]
        held = all(
            all(holds({**sizes, **params})) for least, holds in parts if rows >= least[0] and keys >= least[1] and rows + keys
        )
        try:
            check_obligations(one, sizes, params)
        except ObligationError:
            assert not held, (sizes, params)
            refused += 1
        else:
            assert held, (sizes, params)
    assert refused or spec == "dense_bias"


PLAIN = "dtype fp16 head_dim 64 mask causal_bottom_right"
BIASED = f"{PLAIN} input bias: fp32[heads, kv_len] score s + bias[h, k]"
PAIRS = "dtype fp16 head_dim 64 mask causal input bias: fp32[heads, q_len, kv_len] score s + bias[h, q, k]"
ROTARY = f"{PLAIN} input cosines: fp32[positions, 16] input sines: fp32[positions, 16] rotary 32"
CACHE = """
    dtype q bf16 k fp8_e4m3 v fp8_e5m2 head_dim 64 mask causal_bottom_right input scales: fp32[batch, kv_heads]
    scaled k by scales[b, h * kv_heads // heads] scaled v by scales[b, h * kv_heads // heads]
"""
RUN = {  # statements, architecture, functions
    "packed": (f"{PAIRS} kernel auto {{ storage packed }}", "sm_80", ""),
    "packed_on_hopper": (f"{PLAIN} sink -1.0 kernel auto {{ storage packed }}", "sm_90a", ""),
    "padded": (f"{BIASED} kernel auto {{ storage padded }}", "sm_80", "forward"),
    "padded_on_hopper": (f"{PLAIN} and k % 3 < 2 kernel auto {{ storage padded }}", "sm_90a", "forward"),
    "paged": (f"{BIASED} kernel auto {{ storage paged }}", "sm_80", "forward"),
    "paged_on_hopper": (f"{PLAIN} kernel auto {{ storage paged page_size 32 }}", "sm_90a", "forward"),
    "packed_paged": (f"{PLAIN} kernel auto {{ storage packed_paged }}", "sm_80", "forward"),
    "packed_paged_on_hopper": (f"{PLAIN} kernel auto {{ storage packed_paged page_size 64 }}", "sm_90a", "forward"),
    "values": ("dtype fp16 head_dim 96 values k[32:96] mask causal_bottom_right", "sm_80", ""),
    "values_on_hopper": ("dtype fp16 head_dim 192 values k[64:128] mask causal_bottom_right", "sm_90a", ""),
    "values_in_pages": ("dtype fp16 head_dim 96 values k[32:96] kernel auto { storage paged }", "sm_80", "forward"),
    "rotary": (f"{ROTARY} halves by cosines, sines", "sm_80", ""),
    "packed_rotary": (f"{ROTARY} interleaved by cosines, sines kernel auto {{ storage packed }}", "sm_90a", ""),
    "fp8_cache": (CACHE, "sm_80", "forward"),
    "fp8_cache_in_pages": (f"{CACHE.replace('e5m2', 'e4m3')} kernel auto {{ storage paged }}", "sm_80", "forward"),
}


@needs_compiler
@pytest.mark.long(one_of=3)
@pytest.mark.parametrize("name", RUN)
def test_the_test_program_passes_on_the_emulated_device(name: str, tmp_path: Path, driver: Path) -> None:
    statements, arch, only = RUN[name]
    (spec,) = load_text(f"attention {name} {{ {statements} output lse }}")
    wanted = None if only else (*gradients_of_call(spec, None)[0], *differentiable(spec))
    made = library_of(spec, arches=(arch,), compile=emulated, only=only, wanted=wanted)
    output = output_of_tests(made, tmp_path, driver, arch, PROCESSORS)
    assert len(re.findall(r"^ok ", output, re.M)) >= 12
    assert ("backward dk" in output) == (not only)


ON_PYTHON = """
import numpy as np
import attngen_kernels
from tests.package.on_gpu import OnGpu, workspace_of

HEADS, ROWS, KEYS, PAGE = 2, [5, 0, 33], [40, 7, 33], 16
rng = np.random.default_rng(0)


def begins(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def attention(q, k, v):
    'The last row sees all keys.'
    scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8.0
    rows, keys = scores.shape[-2:]
    scores = np.where(np.tri(rows, keys, keys - rows, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300) @ v.astype(float)


def run(name, arrays, **numbers):
    arrays = {name: OnGpu(array) for name, array in arrays.items()}
    size = getattr(attngen_kernels, name + "_forward_workspace_bytes")(**arrays, **numbers)
    getattr(attngen_kernels, name + "_forward")(**arrays, **numbers, workspace=workspace_of(size), stream=0)


def refuses(error, name, arrays, **numbers):
    try:
        run(name, arrays, **numbers)
    except (TypeError, ValueError) as found:
        assert error in str(found), (error, found)
    else:
        raise AssertionError(error)


q, k, v = (rng.standard_normal((sum(n), HEADS, 64)).astype(np.float16) for n in (ROWS, KEYS, KEYS))
of_rows, of_keys = begins(ROWS), begins(KEYS)
parts = [
    [t[b[i] : b[i + 1]].swapaxes(0, 1) for t, b in ((q, of_rows), (k, of_keys), (v, of_keys))] for i in range(len(ROWS))
]
expected = np.concatenate([attention(*part).swapaxes(0, 1) for part in parts])

packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": of_rows, "cu_seqlens_k": of_keys, "out": np.full_like(q, np.nan)}
longest = {"max_q_len": max(ROWS), "max_kv_len": max(KEYS)}
run("packed", packed, **longest)
assert np.abs(packed["out"] - expected).max() < 4e-3
refuses("`max_kv_len` was not given, and has no default", "packed", packed, max_q_len=33)
for name, wrong, error in (
    ("cu_seqlens_k", of_keys[:3], "has size 3 in dimension 0; expected 4"),
    ("cu_seqlens_q", of_rows[:0], "has size 0 in dimension 0; expected 1"),
    ("cu_seqlens_q", of_rows.astype(np.int64), "has elements of another type"),
):
    refuses(f"`{name}` {error}", "packed", {**packed, name: wrong}, **longest)
refuses("negative", "packed", packed, max_q_len=-2, max_kv_len=40)

pages = [-(-n // PAGE) for n in KEYS]
table = np.full((3, 4), -1, np.int32)
pools = [np.full((sum(pages) + 2, HEADS, PAGE, 64), np.nan, np.float16) for _ in range(2)]
free = iter(range(sum(pages), 0, -1))
for b, count in enumerate(pages):
    table[b, :count] = [next(free) for _ in range(count)]
    for pool, part in zip(pools, parts[b][1:]):
        for i in range(KEYS[b]):
            pool[table[b, i // PAGE], :, i % PAGE] = part[:, i]
bias = np.zeros((HEADS, 64), np.float32)
used = np.array(KEYS, np.int32)
paged = {"q": q, "k": pools[0], "v": pools[1], "cu_seqlens_q": of_rows, "page_table": table, "seqused": used, "bias": bias}
paged["out"] = np.full_like(q, np.nan)
run("packed_paged", paged, max_q_len=33)
assert np.abs(paged["out"] - expected).max() < 4e-3
paged |= {"bias": bias[:, :40], "out": np.full_like(q, np.nan)}
run("packed_paged", paged, max_q_len=33, max_kv_len=40)
assert np.abs(paged["out"] - expected).max() < 4e-3
refuses("`bias` has size 40 in dimension 1; expected 64", "packed_paged", paged, max_q_len=33)
refuses("`bias` has size 40 in dimension 1; expected 41", "packed_paged", paged, max_q_len=33, max_kv_len=41)
wide = np.zeros((sum(pages) + 2, HEADS * PAGE * 64 + 8), np.float16)[:, :-8].reshape(-1, HEADS, PAGE, 64)
refuses("`k`: the stride of pages", "packed_paged", {**paged, "k": wide}, max_q_len=33, max_kv_len=40)
print("right")
"""


@needs_compiler
@pytest.mark.long
def test_the_python_extension_has_the_arguments_of_storages(tmp_path: Path, driver: Path) -> None:
    texts = (
        "attention packed { dtype fp16 head_dim 64 mask causal_bottom_right kernel fused { storage packed } }",
        "attention packed_paged { dtype fp16 head_dim 64 input bias: fp32[heads, kv_len] mask causal_bottom_right "
        "score s + bias[h, k] kernel hopper { storage packed_paged page_size 16 } }",
    )
    specs = [spec for text in texts for spec in load_text(text)]
    made = library_of(*specs, arches=("sm_90a",), only="forward", compile=emulated)
    assert extension_prints(made, ON_PYTHON, tmp_path, driver, "sm_90a") == "right\n"
