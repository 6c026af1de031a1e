"""The last tile of a block multiplied for the lower half of its rows alone, where the upper half has no key of it."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES, choose
from attngen.plan.plan import Plan
from attngen.reference.problems import Shape, sample
from tests import tiers
from tests.harness import call, compiled, run

DOCUMENTS = {"mask": "causal and same_document(ids)", "inputs": {"ids": ("int32", ("batch", "kv_len"))}}
ODD = "causal and (q - k) % 3 != 1"  # has no closed form, so that its tiles are classified one by one
DIAGONAL = {"params": {"w": 70}, "mask": "k <= q + w and (q - k) % 3 != 1"}


def fused(arch: str = "sm_90a", **kwargs: object) -> Plan:
    return choose(attngen.define(**{"dtype": "bf16", "head_dim": 64, **kwargs}), ARCHES[arch], "fused")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "halves"),
    [
        (ODD, True),
        ("prefix(100) or causal", True),
        ("k <= q + 70 and q != k", True),
        ("(q - k) % 3 != 1", False),  # all rows have the same last key
        ("k >= q and q != k", False),
        ("causal", False),  # by measurement
        ("causal and window(300)", False),  # its halves have tiles of their own
        (None, False),
    ],
)
def test_which_masks_halve_the_last_tile(mask: str | None, halves: bool) -> None:
    """Those under which rows further down see later keys, by the end's closed form, and whose tiles are classified."""
    assert fused(mask=mask).half_tile == halves


def test_wide_heads_halve_the_last_tile_of_masks_that_read_tensors() -> None:
    assert not fused(head_dim=128, mask="prefix(100) or causal").half_tile
    assert fused(head_dim=128, **DOCUMENTS).half_tile
    assert not fused(head_dim=256, **DOCUMENTS).half_tile  # 16 rows a warp
    assert not fused(dtype="fp32", mask=ODD).half_tile


@pytest.mark.parametrize("length", tiers.cases([1, 63, 64, 65, 128, 129, 192, 193, 300], quick=[1, 128, 193]))
@pytest.mark.parametrize("head_dim", tiers.cases([64, 48, 16], quick=[64]))  # of the second some threads store nothing
def test_rows_of_every_length(head_dim: int, length: int) -> None:
    assert right(head_dim, length, length, mask=ODD)


UNEQUAL = [(70, 400), (400, 70), (300, 130), (130, 300), (300, 128), (300, 192)]


@pytest.mark.parametrize(("q_len", "kv_len"), tiers.cases(UNEQUAL, quick=[(300, 130)]))
@pytest.mark.parametrize("w", tiers.cases([-130, -64, -1, 0, 1, 63, 64, 500], quick=[-130, 1]))
def test_diagonals_anywhere(w: int, q_len: int, kv_len: int) -> None:
    """The diagonal may leave out whole blocks, begin beside the first row, or lie behind all keys."""
    assert right(64, q_len, kv_len, values={"w": w}, **DIAGONAL)


@pytest.mark.long
@pytest.mark.parametrize(
    "mask",
    [
        "k <= 2 * q and q != k",  # the lower half has two tiles for itself, of which the first is as any other
        "k <= 4 * q + 3 and q != k",
        "2 * k <= q and q != k",  # a tile of both halves at the end
        "q + k <= 200 and q != k",  # rows further down see fewer keys
        "prefix(100) or causal",
        "causal and (k < 30 or k > q - 20)",
        "causal and (q - k) % 3 == 0",
        "causal and q != k + 64",
        "causal and q != k",
        "causal and (q // 64 - k // 64) % 2 == 1",  # the last tile is empty
    ],
)
def test_other_masks_whose_ends_move_with_the_row(mask: str) -> None:
    assert right(64, 330, 410, mask=mask)


@pytest.mark.parametrize(
    "score", tiers.cases(["alibi(slopes)", "softcap(20.0)", "s - 0.01 * abs(q - k)"], quick=["alibi(slopes)"])
)
def test_scores_of_the_lower_half_alone(score: str) -> None:
    inputs = {"inputs": {"slopes": ("fp32", ("heads",))}} if "slopes" in score else {}
    assert right(64, 200, 200, mask=ODD, score=score, **inputs)


LENGTHS = [(64, 64), (65, 65), (128, 128), (193, 193), (300, 300), (200, 330)]


@pytest.mark.parametrize("head_dim", tiers.cases([128, 112, 104], quick=[112]))
@pytest.mark.parametrize(("q_len", "kv_len"), tiers.cases(LENGTHS, quick=[(65, 65), (200, 330)]))
def test_documents_of_every_length(head_dim: int, q_len: int, kv_len: int) -> None:
    assert right(head_dim, q_len, kv_len, **DOCUMENTS)


def test_documents_that_end_among_the_rows_of_the_lower_half() -> None:
    """The last tile has the keys of no row of the upper half, or of one; one before it has none at all."""
    for ends in ([64, 200], [100, 128], [127], [128], [129, 190, 191]):
        ids = np.searchsorted(np.array(ends), np.arange(256), side="right").astype(np.int32)
        assert right(128, 256, 256, ids=ids[None], **DOCUMENTS), ends


@pytest.mark.parametrize("arch", tiers.cases(["sm_80", "sm_90a"], quick=["sm_90a"]))
def test_bits_are_those_of_whole_tiles(arch: str) -> None:
    """What is left out is weights of 0 alone: rows have the bits that blocks of 64 rows give them, which have no half tile."""
    halved, whole = (attngen.define(dtype="bf16", head_dim=64, mask=ODD, kernel="fused", tile=(rows, 64)) for rows in (128, 64))
    assert choose(halved, ARCHES[arch], "fused").half_tile
    assert choose(whole, ARCHES[arch], "fused").half_tile is False
    problem = sample(halved, Shape(1, 1, 1, 256, 256))
    both = [call(compiled(s, "fused", arch), problem)[0] for s in (halved, whole)]
    assert np.array_equal(*(np.asarray(o) for o in both))


def right(
    head_dim: int,
    q_len: int,
    kv_len: int,
    values: dict[str, int] | None = None,
    ids: np.ndarray | None = None,
    **kwargs: object,
) -> bool:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, lse=True, **kwargs)  # type: ignore[arg-type]
    assert choose(spec, ARCHES["sm_90a"], "fused").half_tile
    problem = sample(spec, Shape(1, 2, 1, q_len, kv_len))
    if ids is not None:
        problem.inputs["ids"] = ids
    return run(spec, "fused", problem, arch="sm_90a", **(values or {})).passed
