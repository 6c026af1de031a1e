"""The tiled backward: tiles that no kernel writes and none reads, captured gradients, its barriers."""

from __future__ import annotations

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text as compile_cubin
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.reference.problems import Shape
from attngen.schedules import choose
from tests import tiers
from tests.device.test_captured_sums import CASES, spec_of
from tests.device.test_fused_simt_backward import MASKS
from tests.device.test_mutations import SYNCHRONIZATION
from tests.harness import compiled, unnoticed_in_gradients, wrong_gradients

SIZES = [(64, 64), (40, 72), (72, 40), (128, 16)]


@pytest.mark.parametrize("name", tiers.cases(list(MASKS), quick=["tested tile by tile"]))
def test_empty_tiles_are_neither_written_nor_read(name: str) -> None:
    """The emulated device reports reads of unwritten memory. Lengths are not multiples of the tile."""
    spec = attngen.define(dtype="fp32", head_dim=16, score="softcap(5.0)", **MASKS[name])
    for q_len, kv_len in ((200, 200),) if name == "documents" else ((200, 150), (60, 130)):
        assert not wrong_gradients(compiled(spec, "tiled", seed=3), Shape(1, 4, 2, q_len, kv_len)), (q_len, kv_len)


@pytest.mark.parametrize("case", tiers.cases(list(CASES), quick=["score and sink"], one_of=3))
def test_captured_gradients(case: str) -> None:
    mask = "q >= k and (k < 16 or q - k < 20)"
    for normalize in ("softmax", "none") if CASES[case][1].get("sink") is None else ("softmax",):
        kernel = compiled(spec_of(case, mask=mask, normalize=normalize), "tiled")
        assert not wrong_gradients(kernel, Shape(1, 4, 2, 70, 90), ("q", "x")), normalize


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(SIZES, quick=[(40, 72)]))
def test_nothing_is_spilled(head_dim: int, head_dim_v: int, arch: str) -> None:
    spec = attngen.define(dtype="fp16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal", score="softcap(5.0)")
    for resources in compile_cubin(emit(spec, choose(spec, ARCHES[arch], "tiled", direction="backward"))).resources():
        assert resources.spill_store_bytes == resources.stack_bytes == 0, resources


@pytest.mark.long
def test_every_barrier_is_needed() -> None:
    spec = attngen.define(dtype="fp32", head_dim=32, mask="q >= k and (k < 16 or q - k < 20)")
    assert unnoticed_in_gradients(compiled(spec, "tiled"), SYNCHRONIZATION, Shape(1, 2, 1, 130, 200)) == []
