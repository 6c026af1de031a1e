"""Heads of more than 256 columns by mma.sync: the warps of a block share its tiles, each with columns of O of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES, Problem
from attngen.plan.plan import PlanRefusal
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import compared, compile_text, compiled, emitted, is_right, run, solved, wrong_gradients
from tests.left_out import first_finding, removable, unnoticed

SYNCHRONIZATION = re.compile(r"__syncthreads\(\);|cp_async_wait<[^>]+>\(\);|mbarrier_wait\(full[^;]*\);")
WIDE = attngen.define(dtype="bf16", head_dim=512, mask="causal_bottom_right", lse=True)
LATENT = attngen.define(dtype="fp16", head_dim=576, values=(64, 576), mask="causal_bottom_right", sink="0.5", lse=True)
ODD = attngen.define(dtype="fp16", head_dim=264, head_dim_v=8, score="s - 0.1 * float(h)", mask="k > q - 30")
SPLIT = attngen.define(dtype="fp32", head_dim=320, head_dim_v=328, mask="k <= q + 40", normalize="sigmoid")
DOCUMENTS = attngen.define(
    dtype="bf16", head_dim=320, head_dim_v=512, mask="ids[b, k] == rows[b, q] or k < 3 * h",
    inputs={"ids": ("int32", ("batch", "kv_len")), "rows": ("int32", ("batch", "q_len"))},
)  # fmt: skip
PACKED = attngen.define(
    dtype="fp16", head_dim=320, head_dim_v=264, mask="q - k < 20 and k - q < 30", sink="0.5", storage="packed"
)
DROPPING = attngen.define(dtype="bf16", head_dim=272, mask="causal", dropout=0.3)
# Units of rows, which all warps of a block know; values that are read in the tiles of keys, from within a chunk of 32 bytes on
SCALED = attngen.define(
    dtype={"q": "bf16", "k": "fp8_e5m2", "v": "fp8_e5m2"}, head_dim=272, head_dim_v=304, mask="causal_bottom_right", sink="0.5",
    lse=True, inputs={"ks": ("fp32", ("batch", "kv_heads")), "vs": ("bf16", ("batch", "kv_len"))},
    k_scale="ks[b, h // (heads // kv_heads)]", v_scale="vs[b, k]",
)  # fmt: skip
NARROW = attngen.define(
    dtype={"q": "fp16", "k": "fp8_e5m2", "v": "fp8_e5m2"}, head_dim=560, values=(48, 560), mask="k > q - 30", k_scale=0.5,
    v_scale=2.0, normalize="sigmoid",
)  # fmt: skip
SPECS = {"wide": WIDE, "latent": LATENT, "odd": ODD, "split": SPLIT, "ids": DOCUMENTS}
# batch, query heads, key/value heads, rows, keys: about the sizes of tiles, without keys, and of more than a block of rows
SHAPES = (Shape(1, 2, 1, 5, 70), Shape(2, 4, 2, 1, 129), Shape(1, 1, 1, 33, 33), Shape(1, 2, 2, 3, 0), Shape(1, 1, 1, 66, 97))


@pytest.mark.parametrize("arch", tiers.cases(["sm_80", "sm_90a"], quick=["sm_90a"]))
@pytest.mark.parametrize(
    "spec", tiers.cases([*SPECS.values(), SCALED, NARROW], quick=[LATENT, SCALED]), ids=[*SPECS, "scaled", "narrow"]
)
def test_decode(spec: AttentionSpec, arch: str) -> None:
    for shape in SHAPES:
        found = run(spec, "decode", shape, arch=arch)
        assert found.passed, (shape, found)


@pytest.mark.parametrize("arch", tiers.cases(["sm_80", "sm_90a"], quick=["sm_80"]))
@pytest.mark.parametrize("spec", tiers.cases([*SPECS.values(), DROPPING], quick=[WIDE]), ids=[*SPECS, "dropout"])
def test_fused(spec: AttentionSpec, arch: str) -> None:
    for shape in SHAPES:
        found = run(spec, "fused", shape, arch=arch)
        assert found.passed, (shape, found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_values_that_are_columns_of_keys_are_copied_once(arch: str) -> None:
    """The kernel of splits reads no V: from its tile of K, it has both."""
    split = next(k for k in emitted(LATENT, "decode", arch).kernels if k.name.endswith("split"))
    assert not [p.name for p in split.parameters if p.of == "V"]
    assert not [b for b in choose(LATENT, ARCHES[arch], "decode").buffers if b.name == "V"]


def test_rotated_keys_are_other_numbers_than_values() -> None:
    angles = ("fp32", ("positions", 32))
    of_angles = {"rotary": "64 halves by cosines, sines", "inputs": {"cosines": angles, "sines": angles}}
    rotated = attngen.define(dtype="bf16", head_dim=576, values=(0, 512), **of_angles)
    assert [b.name for b in choose(rotated, ARCHES["sm_80"], "decode").buffers if b.name in "KV"] == ["K", "V"]


@pytest.mark.parametrize("spec", tiers.cases([WIDE, LATENT, SCALED], quick=[WIDE, LATENT]), ids=["wide", "latent", "scaled"])
def test_a_row_with_nan_is_nan(spec: AttentionSpec) -> None:
    for kv_len in (30, 300):
        problem = sample(spec, Shape(1, 1, 1, 7, kv_len))
        q = from_storage(problem.q)
        q[0, 0, 3, 5], q[0, 0, 5, 0] = np.nan, np.inf
        found = compared(compiled(spec, "decode"), replace(problem, q=round_to_storage(q, spec.dtype)))
        assert found.passed, (kv_len, found)


@pytest.mark.parametrize(("group", "rows", "block_q"), [(1, 1, 16), (16, 1, 16), (8, 4, 32), (16, 4, 64), (128, 1, 64)])
def test_a_block_has_as_many_rows_as_share_keys(group: int, rows: int, block_q: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=576, values=(0, 512))
    plan = choose(spec, ARCHES["sm_90a"], problem=Problem(4 * group, rows, 4096, 132, group))
    assert (plan.keyword, plan.block_q) == ("decode", block_q)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": {"q": "bf16", "k": "fp8_e4m3", "v": "fp8_e4m3"}},
        {"dtype": "bf16", "inputs": {"vs": ("fp32", ("kv_len",))}, "v_scale": "vs[k]"},
    ],
    ids=["8 bits", "scales of keys"],
)
def test_calls_of_many_rows_take_no_wgmma_that_lacks_what_the_spec_says(settings: dict[str, Any]) -> None:
    spec = attngen.define(head_dim=576, values=(0, 512), **settings)
    plan = choose(spec, ARCHES["sm_90a"], problem=Problem(128, 1, 4096, 132, 128))
    assert (plan.schedule.name, plan.block_q) == ("decode", 64)
    stated = choose(replace(spec, q_heads=128, kv_heads=1), ARCHES["sm_90a"], "decode")
    assert (stated.schedule.name, stated.block_q) == ("decode", 64)


MANY_ROWS: dict[str, dict[str, Any]] = {
    "16 bits": {"dtype": "bf16"},
    "8 bits": {"dtype": {"q": "bf16", "k": "fp8_e5m2", "v": "fp8_e5m2"}},
    "scales": {
        "dtype": {"q": "fp16", "k": "fp8_e5m2", "v": "fp8_e5m2"},
        "inputs": {"vs": ("fp32", ("heads", "kv_len"))}, "v_scale": "vs[h, k]",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "heads"), tiers.cases([(kind, heads) for kind in MANY_ROWS for heads in (32, 64)], quick=[("16 bits", 64)])
)
def test_blocks_of_many_rows(kind: str, heads: int) -> None:
    spec = attngen.define(head_dim=320, head_dim_v=512, heads=(heads, 1), kernel="decode", **MANY_ROWS[kind])
    for arch in ("sm_80", "sm_90a"):
        assert choose(spec, ARCHES[arch]).block_q == heads
        found = run(spec, "decode", Shape(1, heads, 1, 2, 70), arch=arch)
        assert found.passed, found


@pytest.mark.parametrize(
    ("dtype", "schedule", "arch", "words"),
    [
        ("fp32", "decode", "sm_89", "smallest tile needs .* KiB"),
        ("fp16", "fused", "sm_75", "sm_75 has no cp.async"),
        ("bf16", "wgmma", "sm_90a", "256"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(dtype: str, schedule: str, arch: str, words: str) -> None:
    with pytest.raises(PlanRefusal, match=words):
        choose(attngen.define(dtype=dtype, head_dim=512), ARCHES[arch], schedule)


@pytest.mark.parametrize(
    ("spec", "arch"),
    tiers.cases([(WIDE, "sm_90a"), (WIDE, "sm_80"), (PACKED, "sm_80"), (DOCUMENTS, "sm_80")], quick=[(WIDE, "sm_90a")]),
)
def test_backward(spec: AttentionSpec, arch: str) -> None:
    kernel = compiled(spec, "fused", arch)
    assert kernel.gradients(("q", "k", "v"), False).plan.schedule.name == "fused_mma_backward"
    for shape in (Shape(1, 2, 1, 70, 70), Shape(2, 2, 2, 5, 97), Shape(1, 1, 1, 33, 1)):
        if spec is not DOCUMENTS or shape.q_len <= shape.kv_len:
            assert not wrong_gradients(kernel, shape), shape


def test_gradients_that_it_does_not_compute_are_those_of_tiled() -> None:
    """In a fixed order, of other normalizations and of wider heads."""
    qkv = ("q", "k", "v")
    assert choose(WIDE, ARCHES["sm_80"], wanted=qkv).keyword == "fused"
    assert choose(WIDE, ARCHES["sm_80"], wanted=qkv, deterministic=True).keyword == "tiled"
    for spec in (SPLIT, LATENT):
        assert choose(spec, ARCHES["sm_80"], wanted=qkv).keyword == "tiled"


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "schedule", "arch"),
    [(LATENT, "decode", "sm_80"), (LATENT, "decode", "sm_90a"), (LATENT, "fused", "sm_80"), (SCALED, "decode", "sm_90a")],
)
def test_each_wait_is_needed(spec: AttentionSpec, schedule: str, arch: str) -> None:
    """Without any one of the barriers and waits, a race is found or a result is wrong."""
    source = emitted(spec, schedule, arch)
    places = list(SYNCHRONIZATION.finditer(source.text))
    kernels = [compile_text(spec, schedule, removable(source, places), seed, arch) for seed in (0, 5)]
    problems = [solved(spec, Shape(1, 1, 1, 2, kv_len)) for kv_len in (260, 0)]

    def finding() -> str:
        return first_finding(partial(is_right, kernel, *problem) for problem in problems for kernel in kernels)

    assert unnoticed(source, places, kernels[0].kernel.library, finding) == []
