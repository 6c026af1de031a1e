"""The order of blocks: sections of heads, of which the last rows come first."""

from __future__ import annotations

import re

import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice
from attngen.plan import ARCHES, choose
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from tests.problems import call, emitted

SPEC = attngen.define(dtype="bf16", head_dim=256, mask="causal")
RUNGS = [("fused", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a")]


@pytest.mark.parametrize(("rung", "arch"), RUNGS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(70, 70), (140, 70)])
def test_more_heads_than_a_section_has(rung: str, arch: str, q_heads: int, kv_heads: int) -> None:
    """Two blocks of rows of each head, a whole section of 64 heads of K and V, and one of 6."""
    source = emitted(SPEC, rung, arch)
    (most,) = re.findall(r"MOST_HEADS = (\d+);", source.text)
    assert kv_heads > int(most) == 64
    problem = sample(SPEC, Shape(1, q_heads, kv_heads, 130, 130))
    device = EmulatedDevice(arch=arch)
    compiled = CompiledAttention(SPEC, choose(SPEC, ARCHES[arch], rung), device.compile(source), device)
    assert compare(*call(compiled, problem), truth(SPEC, problem)).passed


@pytest.mark.parametrize(("head_dim", "least", "most"), [(32, 32, 256), (64, 32, 128), (128, 32, 64), (256, 16, 64)])
@pytest.mark.parametrize(("rung", "arch"), RUNGS)
def test_how_many_heads_a_section_has(rung: str, arch: str, head_dim: int, least: int, most: int) -> None:
    text = emitted(attngen.define(dtype="bf16", head_dim=head_dim, mask="causal"), rung, arch).text
    assert [*re.findall(r"(?:LEAST|MOST)_HEADS = (\d+);", text)] == [str(least), str(most)]


@pytest.mark.parametrize(("rung", "arch"), RUNGS)
def test_where_all_rows_have_the_same_keys_heads_follow_each_other(rung: str, arch: str) -> None:
    assert "_HEADS" not in emitted(attngen.define(dtype="bf16", head_dim=256), rung, arch).text
