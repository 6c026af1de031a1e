"""The order of blocks: groups of heads, last rows first."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

import attngen
from attngen.emit.emitter import emit
from attngen.emit.program import HeadsInL2, Program
from attngen.plan import ARCHES
from attngen.reference.problems import Shape
from attngen.schedules import choose
from tests.device import kernels
from tests.harness import emitted, run

SPEC = attngen.define(dtype="bf16", head_dim=256, mask="causal")
SCHEDULES = [("fused", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "arch", "q_heads", "kv_heads"), [*((*one, 97, 97) for one in SCHEDULES), (*SCHEDULES[2], 194, 97)]
)
def test_more_heads_than_a_section_has(schedule: str, arch: str, q_heads: int, kv_heads: int) -> None:
    """Two blocks of rows of each head, a section of 49 heads of K and V, and one of 48."""
    spec = attngen.define(dtype="bf16", head_dim=128, mask="causal")
    sizes = {"batch": 1, "q_heads": q_heads, "kv_heads": kv_heads, "kv_len": 130}
    assert sections_of(emitted(spec, schedule, arch))(sizes) == 49 * q_heads // kv_heads
    assert run(spec, schedule, Shape(1, q_heads, kv_heads, 130, 130), arch=arch).passed


@pytest.mark.parametrize(("head_dim", "least", "most"), [(32, 32, 256), (64, 32, 128), (128, 32, 64), (256, 16, 64)])
@pytest.mark.parametrize(("schedule", "arch"), SCHEDULES)
def test_how_many_heads_a_section_has(schedule: str, arch: str, head_dim: int, least: int, most: int) -> None:
    found = sections_of(emitted(attngen.define(dtype="bf16", head_dim=head_dim, mask="causal"), schedule, arch))
    assert found == HeadsInL2(2**25 // (4 * head_dim), least, most)


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads"), [(1, 1, 1), (1, 33, 33), (4, 25, 25), (3, 28, 7), (2, 96, 8), (1, 200, 100)]
)
@pytest.mark.parametrize("length", [130, 4096])
def test_sections_have_all_blocks_once_and_are_alike(batch: int, q_heads: int, kv_heads: int, length: int) -> None:
    """As `work_tile_of` numbers them: a short last section would begin with long rows when others are done."""
    source = emitted(SPEC, "fused", "sm_80")
    text = source.text
    section = sections_of(source)({"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "kv_len": length})
    start = text.index("struct WorkTile {")
    block_q = choose(SPEC, ARCHES["sm_80"], "fused").block_q
    q_blocks = -(-length // block_q)
    blocks = batch * q_heads * q_blocks
    body = """
    const int blocks = x[0], q_heads = x[1], length = x[2], section = x[3];
    for (int i = threadIdx.x; i < blocks; i += 32) {
        const WorkTile at = work_tile_of(i, blocks, q_heads, length, section);
        y[2 * i] = at.q_block, y[2 * i + 1] = at.b_idx * q_heads + at.h_idx;
    }"""
    places = np.full(2 * blocks, -1, np.float32)
    before = f"constexpr int BLOCK_Q = {block_q};\n" + text[start : text.index("\n}\n", start) + 3]
    sizes = np.array([blocks, q_heads, length, section], np.float32)
    kernels.run(body, {"x": sizes, "y": places}, before=before)
    order = [(int(q), int(head)) for q, head in places.reshape(-1, 2)]
    assert sorted(order) == [(q, head) for q in range(q_blocks) for head in range(batch * q_heads)]
    runs = [[head for _, head in part] for _, part in groupby(order, key=lambda at: at[0])]
    sections = [runs[i] for i in range(0, len(runs), q_blocks)]
    assert [head for section in sections for head in section] == [*range(batch * q_heads)]
    assert runs == [section for section in sections for _ in range(q_blocks)]
    sizes = [len(section) * kv_heads // q_heads for section in sections]
    assert max(sizes) - sizes[-1] < len(sizes), sizes
    assert all(size == sizes[0] for size in sizes[:-1])


@pytest.mark.parametrize(("head_dim", "length", "section"), [(64, 1024, 32), (64, 4096, 16), (128, 1024, 32), (128, 16384, 8)])
def test_sections_beside_sums_of_dq_have_no_more_than_l2_keeps(head_dim: int, length: int, section: int) -> None:
    spec, arch = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal"), ARCHES["sm_90a"]
    for deterministic in (False, True):
        source = emit(spec, choose(spec, arch, "hopper", direction="backward", deterministic=deterministic))
        (of_keys, *_) = (p.formula for e in source.kernels for p in e.parameters if p.binding == "section")
        assert of_keys is not None
        found = of_keys({"batch": 64, "q_heads": 8, "kv_heads": 8, "kv_len": length})
        assert found == section if not deterministic else found >= 32


@pytest.mark.parametrize(("schedule", "arch"), SCHEDULES)
def test_where_all_rows_have_the_same_keys_heads_that_share_them_follow_each_other(schedule: str, arch: str) -> None:
    sections = sections_of(emitted(attngen.define(dtype="bf16", head_dim=256), schedule, arch))
    assert [sections({"batch": 3, "q_heads": h, "kv_heads": 8, "kv_len": 4096}) for h in (8, 32)] == [1, 4]


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "section"), [(1, 8, 4096, 8), (4, 25, 4096, 34), (4, 28, 16, 56), (1, 1, 0, 1)]
)
def test_the_heads_of_a_section(batch: int, kv_heads: int, kv_len: int, section: int) -> None:
    """About as many as the keys leave room for, between the bounds, in sections as alike as can be."""
    sizes = {"batch": batch, "q_heads": kv_heads, "kv_heads": kv_heads, "kv_len": kv_len}
    assert HeadsInL2(2**17, 32, 64)(sizes) == section
    assert HeadsInL2(2**17, 32, 64)({**sizes, "q_heads": 4 * kv_heads}) == 4 * section


def sections_of(source: Program) -> HeadsInL2:
    (found,) = (p.formula for e in source.kernels for p in e.parameters if p.formula is not None)
    return found
