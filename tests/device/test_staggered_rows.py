"""The two halves of a block's rows with tiles of their own, where rows begin and end at different keys."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES, choose
from attngen.plan.plan import Plan
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from tests import tiers
from tests.harness import call, compiled

# one stage and two, Q in shared memory and in registers
HEAD_DIMS = (64, 128)
BY_PARAM = {"params": {"w": 70}, "mask": "causal and q - k < w"}


def fused(arch: str = "sm_90a", **kwargs: object) -> Plan:
    return choose(attngen.define(**{"dtype": "bf16", "head_dim": 128, **kwargs}), ARCHES[arch], "fused")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "staggers"),
    [
        ("causal and window(300)", True),
        ("abs(q - k) <= 100", True),
        ("q // 64 == k // 64", False),
        ("causal", False),
        ("k >= q", False),
        (None, False),
    ],
)
def test_which_masks_stagger_rows(mask: str | None, staggers: bool) -> None:
    """Those under which both ends of a row's keys move with the row, by closed forms."""
    assert [fused(head_dim=d, mask=mask).staggered for d in HEAD_DIMS] == [staggers] * 2


def test_rows_stagger_where_as_many_blocks_have_room() -> None:
    """A third tile of K and of V: at head size 128 an SM of sm_80 would hold one block instead of two."""
    window = "causal and window(300)"
    assert not fused("sm_80", mask=window).staggered
    assert fused("sm_80", head_dim=64, mask=window).staggered
    assert fused("sm_80", head_dim=64, mask=window).shared_bytes < 80 * 1024


@pytest.mark.parametrize("length", tiers.cases([1, 64, 65, 129, 200, 450], quick=[1, 200]))
@pytest.mark.parametrize("w", tiers.cases([1, 63, 64, 65, 130, 1000], quick=[65]))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_of_every_width_and_length(head_dim: int, w: int, length: int) -> None:
    assert right(head_dim, length, length, **BY_PARAM, values={"w": w})


@pytest.mark.parametrize(("q_len", "kv_len"), tiers.cases([(70, 400), (400, 70), (300, 130), (130, 300)], quick=[(300, 130)]))
@pytest.mark.parametrize("align", tiers.cases(["start", "end"], quick=["end"]))
@pytest.mark.parametrize("head_dim", tiers.cases(HEAD_DIMS, quick=[64]))
def test_windows_of_unequal_lengths(head_dim: int, align: str, q_len: int, kv_len: int) -> None:
    shift = "q + kv_len - q_len" if align == "end" else "q"
    mask = f"k <= {shift} and {shift} - k < w"
    assert right(head_dim, q_len, kv_len, params={"w": 70}, mask=mask)


@pytest.mark.long
@pytest.mark.parametrize(
    "mask",
    [
        "abs(q - k) <= 100",
        "k >= 2 * q and k < 2 * q + 90",  # by rows, keys begin two tiles later
        "k >= 300 - q and k < 400 - q",  # and earlier
    ],
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_other_masks_with_keys_that_move_with_the_row(head_dim: int, mask: str) -> None:
    assert right(head_dim, 330, 410, mask=mask)


def right(head_dim: int, q_len: int, kv_len: int, values: dict[str, int] | None = None, **kwargs: object) -> bool:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, lse=True, **kwargs)  # type: ignore[arg-type]
    assert choose(spec, ARCHES["sm_90a"], "fused").staggered
    problem = sample(spec, Shape(1, 2, 1, q_len, kv_len))
    results = call(compiled(spec, "fused", "sm_90a"), problem, **(values or {}))
    assert np.isfinite(np.asarray(results[0], dtype=np.float32)).all()
    return compare(*results, truth(spec, problem, values or {})).passed
