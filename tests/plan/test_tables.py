"""Masks that read a table indexed by blocks: tiles are classified by the elements of the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attngen
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.block_map import EMPTY
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.tables import MOST
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from tests.harness import call
from tests.plan.brute_force import SOLVED, allowed_pairs, assert_never_wrong

HEADS, BLOCKS = 2, 60
DECLARED = (
    f"input keep: bool[heads, {BLOCKS}, {BLOCKS}]  input level: int32[{BLOCKS}, {BLOCKS}]  input weight: fp32[{BLOCKS}]  "
    f"input flags: bool[{BLOCKS}]  param block: int  "
)
TERMS = (
    "keep[h, q // 8, k // 8]",
    "keep[h, q // block, k // block]",
    "keep[h, (q + 3) // 8, k // 16]",
    "keep[h, min(q // 4, 9), (k // 8) % 3]",
    "keep[h, (q_len - 1 - q) // 8, (kv_len - 1 - k) // block]",
    "level[q // 16, k // 8] > 1",
    "level[q // block, k // 4] != level[k // 4, q // block]",
    "not (level[q // 8, k // 8] == 2)",
    "weight[k // 8] > 0.0",
    "not (weight[k // block] > 0.5)",
    "weight[q // 8] <= weight[k // 8]",
    "flags[q // 8]",
    "flags[k // 8] == flags[q // 8]",
    "q // block >= level[3, k // 8]",
    "k >= 4 * level[q // 8, 2]",
    "where(flags[q // 16], k % 3 == 0, keep[h, q // 16, k // 16])",
)
BESIDE = ("k >= 0", "causal", "k < 20", "q - k < 12", "k % 3 == 0")


def spec_of(mask: str, dtype: str = "fp16") -> AttentionSpec:
    used = "  ".join(d.strip() for d in DECLARED.split("  ") if d.strip() and d.split(":")[0].split()[-1] in mask)
    (spec,) = load_text(f"attention t {{ dtype {dtype} head_dim 64 {used} mask {mask} }}")
    return spec


def tables(rng: np.random.Generator, share: float) -> dict[str, np.ndarray]:
    """Runs of equal elements, so that tiles of all kinds occur; some weights are NaN."""
    keep = rng.random((HEADS, BLOCKS, BLOCKS)) < share
    level = rng.integers(0, 4, (BLOCKS, BLOCKS)).astype(np.int32) * (rng.random((BLOCKS, BLOCKS)) < share)
    weight = np.where(rng.random(BLOCKS) < 0.1, np.nan, rng.choice([-1.0, 0.0, 1.0], BLOCKS)).astype(np.float32)
    return {"keep": keep, "level": level.astype(np.int32), "weight": weight, "flags": rng.random(BLOCKS) < share}


def both(spec: AttentionSpec, names: dict, arrays: dict, tile: tuple[int, int], solve="k") -> tuple[np.ndarray, np.ndarray]:
    """The tiles as classified, never wrongly, and as they are."""
    assert spec.mask is not None
    allowed, read = allowed_pairs(spec.mask, names, arrays), {i.name: arrays[i.name] for i in spec.inputs}
    assert_never_wrong(mask_bounds(spec, None, solve), allowed, tile, names, read)
    return assert_never_wrong(mask_bounds(spec, tile, solve), allowed, tile, names, read)


def sizes(q_len: int, kv_len: int, block: int = 8, h: int = 1) -> dict[str, int]:
    return {"b": 0, "h": h, "q_len": q_len, "kv_len": kv_len, "block": block, "batch": 1, "q_heads": HEADS, "kv_heads": HEADS}


@pytest.mark.long
@given(
    st.lists(st.sampled_from(TERMS), min_size=1, max_size=2),
    st.sampled_from(("and", "or")),
    st.sampled_from(BESIDE),
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from((1, 2, 5, 8, 16)),
    st.sampled_from(((8, 4), (16, 16), (8, 24), (32, 8))),
    st.integers(0, 2**32 - 1),
)
def test_no_tile_is_called_full_or_empty_wrongly(terms, op, beside, q_len, kv_len, block, tile, seed) -> None:
    rng = np.random.default_rng(seed)
    spec = spec_of(f" {op} ".join(f"({term})" for term in (*terms, beside)))
    arrays = tables(rng, rng.choice([0.1, 0.5, 0.9]))
    for solve in SOLVED:
        both(spec, sizes(q_len, kv_len, block), arrays, tile, solve)


@pytest.mark.parametrize("term", ["keep[h, q // 8, k // 8]", "keep[h, q // block, k // block]", "level[q // 16, k // 8] > 1"])
@pytest.mark.parametrize("tile", [(8, 8), (8, 4), (4, 8), (16, 16), (32, 32), (12, 20)])
def test_tiles_of_whole_blocks_are_known_exactly(term: str, tile: tuple[int, int]) -> None:
    """A tile that lies in a block, or holds up to MOST of them along each axis; the last ones end within a block."""
    arrays = tables(np.random.default_rng(0), 0.5)
    arrays["keep"][1, 2:6, 2:6], arrays["level"][1:4, 3:9] = True, 2
    for q_len, kv_len in ((64, 64), (61, 43), (5, 64)):
        for solve in SOLVED:
            found, exact = both(spec_of(term), sizes(q_len, kv_len), arrays, tile, solve)
            assert np.array_equal(found, exact)
        assert tile[0] // 8 <= MOST


def test_a_causal_mask_with_a_table_visits_what_the_table_keeps() -> None:
    arrays = tables(np.random.default_rng(0), 0.25)
    spec = spec_of("causal and keep[h, q // 8, k // 8]")
    found, exact = both(spec, sizes(64, 64), arrays, (8, 8))
    visited = np.tril(arrays["keep"][1, :8, :8])
    assert np.array_equal(found != EMPTY, visited)
    assert np.array_equal(found, exact)


def test_tables_of_every_pair_stay_as_they_were() -> None:
    """Dense masks and biases, and tables that are not indexed by blocks along both axes."""
    for text in (
        "keep: bool[heads, q_len, kv_len]  mask causal and keep[h, q, k]",
        "keep: bool[q_len, 9] mask keep[q, k // 64]",
    ):
        (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 input {text} }}")
        bounds = mask_bounds(spec)
        assert not bounds.spans
        assert "keep" not in repr((bounds.may, bounds.must, bounds.begin, bounds.end))


@pytest.mark.parametrize(
    ("schedule", "arch"),
    [("tiled", "sm_80"), ("fused", "sm_75"), ("fused", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a")],
)
def test_kernels_read_within_the_table_and_are_right(schedule: str, arch: str) -> None:
    """In checked mode: elements of the last block, of which there are fewer rows and keys than a tile has."""
    text = "input keep: bool[heads, 4, n]  input level: int32[n]  param block: int = 50"
    mask = "causal and keep[h, q // 64, k // block] and level[k // 40] >= q // 90"
    (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 {text} mask {mask} }}")
    problem: Sample = sample(spec, Shape(1, 2, 2, 200, 200))
    rng = np.random.default_rng(1)
    problem.inputs["keep"] = rng.random((2, 4, 5)) < 0.6
    problem.inputs["level"] = rng.integers(0, 3, 5).astype(np.int32)
    compiled = attngen.compile(spec, kernel=schedule, device=EmulatedDevice(checked=True, arch=arch), arch=arch)
    assert "keep_at(in, h_idx, " in emit(spec, choose(spec, ARCHES[arch], schedule)).text.split("classify(")[1]
    assert compare(*call(compiled, problem), truth(spec, problem)).passed
