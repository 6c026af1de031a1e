"""What follows from the values of a problem: scores, sinks, captured tensors, rows of NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngen.inspect.block_work import Case
from attngen.inspect.circumstances.row import (
    Circumstance,
    OfPlan,
    Scores,
    Test,
    forward,
    is_mixed,
    masked,
    persistent,
    rescales,
    subtracts_maxima,
    tiled,
)
from attngen.inspect.trial import Spoils, spoiled_row
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY, FULL
from attngen.plan.bounded_scores import RESCALE_EXPONENT
from attngen.reference.definition import is_power_of_2
from attngen.reference.problems import Array, broadcast_dims, captured_sinks
from attngen.spec.attention import AttentionSpec, Input
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import QKV

MUCH = 2.0**27  # numbers of fp32 of that size are 8 or more apart: its product with log2(e) is no exponent to compute with
OVERFLOW = 100.0  # a score whose exponential is infinite in fp32
NOTICED = 0.1  # a relative error of weights that no rounding hides
MOST_APART = 10.0  # scores of a row none of whose weights is 0 in 16 bits
OF_A_WARPGROUP = 64  # rows

# --- scores that are far apart


def _visited_maxima(case: Case) -> Array:
    """The largest scores of the rows of the first head in the tiles that one warp visits: [tiles, rows]."""
    return case.of_tiles(case.first_scores, -np.inf)[:: case.splits * case.plan.own.key_warps]


def _rise(maxima: Array) -> bool:
    """Whether a row's maximum of a tile exceeds those of the tiles before by RESCALE_EXPONENT powers of 2; [tiles, rows]."""
    before = np.maximum.accumulate(maxima)[:-1]
    with np.errstate(invalid="ignore"):  # tiles without pairs
        return bool(((maxima[1:] - before)[np.isfinite(before)] * np.log2(np.e) > RESCALE_EXPONENT).any())


def _rises(case: Case, both: bool = True) -> bool:
    """Whether the maximum of a row rises so that sums are rescaled, for a row of the first head if its tiles are visited from
    the first one on, and for one if from the last one on; or in one of these orders."""
    visited = _visited_maxima(case)
    return len(visited) > 1 and (all if both else any)((_rise(visited), _rise(visited[::-1])))


def _stays_huge(case: Case) -> bool:
    """Whether a row has weights that would overflow in a tile after that of its largest score, which exceeds MUCH."""
    visited = _visited_maxima(case)
    before = np.maximum.accumulate(visited)[:-1]
    return bool(((before > MUCH) & (visited[1:] > OVERFLOW) & (visited[1:] < before)).any())


def _fills_a_tile(case: Case) -> bool:
    """Whether a block of the first head visits several tiles, of which one is full: in partial ones scores are masked."""
    if not tiled(case.plan):
        return True
    kinds = case.kinds(0, 0)
    return bool(((kinds == FULL).any(1) & ((kinds != EMPTY).sum(1) > 1)).any())


def _are_negative(case: Case) -> bool:
    return bool((case.row_maxima < 0).all())


def _are_positive(case: Case) -> bool:
    scores = case.first_scores
    return bool((scores[np.isfinite(scores)] > 0).all())


def _are_mixed_in_pairs(case: Case) -> bool:
    """Whether of two rows that a thread of a fragment has, 8 apart, the first or the second has negative scores alone."""
    whole = len(case.row_maxima) // 16 * 16
    first, second = np.moveaxis(case.row_maxima[:whole].reshape(-1, 2, 8), 1, 0)
    return bool(((first < 0) & (second > 0)).any() and ((first > 0) & (second < 0)).any())


def _has_equal_maxima(case: Case) -> bool:
    """Whether scores are exact, and weights of a row differ by NOTICED or more if lse is one number of fp32."""
    if not is_power_of_2(case.numbers):
        return False
    scores, maxima = case.first_scores, case.row_maxima
    with np.errstate(divide="ignore", invalid="ignore"):  # rows without keys, or with NaN
        lse = maxima + np.log((scores == maxima[:, None]).sum(1).astype(np.float64))
        rest = np.abs(lse - lse.astype(np.float32))
    return bool((rest[np.isfinite(rest)] > NOTICED).any())


def _is_huge_below(case: Case) -> bool:
    is_huge = case.row_maxima > MUCH
    sees_all = case.of_tiles(case.allowed(0, 0, slice(0, len(is_huge))).astype(np.float32) * -1, -1.0)
    starts = range(0, len(is_huge) - 63, 64)
    return any(
        not is_huge[i : i + 32].any() and is_huge[i + 32 : i + 64].any() and bool((sees_all[:, i : i + 64] == -1).all(1).any())
        for i in starts
    )


def _saves_large_lse(plan: Plan) -> bool:
    return bool(plan.wanted) and "lse_rest" in plan.saved


def _in_tiles(test: Test, rise: bool = True) -> Test:
    """`test` of a problem with a full tile beside others, in which a maximum rises from tile to tile."""
    return lambda case: _fills_a_tile(case) and test(case) and (not rise or _rises(case, both=False))


def _of_scores(scores: Scores, name: str, what: str, needs: tuple[OfPlan, ...], test: Test, absent: str = "") -> Circumstance:
    return Circumstance(name, what, needs, test, absent, scores=scores)


SCORES = (
    _of_scores("steep", "rising_maximum", "a row whose maximum rises so far after its first tile that its sums are rescaled",
        (rescales,), _rises),
    _of_scores("steep", "large_scores", "a row whose weights would overflow if its maximum were not subtracted",
        (subtracts_maxima,), _in_tiles(lambda case: (case.row_maxima > OVERFLOW).any(), rise=False)),
    _of_scores("huge", "huge_scores", "rows whose largest score exceeds 2^27, beside others", (subtracts_maxima,),
        _in_tiles(lambda case: (case.row_maxima > MUCH).any() and (case.row_maxima < OVERFLOW).any(), rise=False)),
    _of_scores("huge", "huge_scores_below",
        "64 rows that see all keys of a tile, of which a row has a score that exceeds 2^27, and none of the first 32 has",
        (persistent, _saves_large_lse), _is_huge_below, "no tile is full"),
    _of_scores("huge", "huge_scores_again",
        "a row whose largest score exceeds 2^27, with smaller ones in a later tile whose weights would overflow", (rescales,),
        _stays_huge),
    _of_scores("negative", "low_scores", "a row whose scores all have exponentials of 0",
        (subtracts_maxima, lambda plan: not rescales(plan)),
        lambda case: ((case.row_maxima < -OVERFLOW) & np.isfinite(case.row_maxima)).any()),
    _of_scores("negative", "negative_scores", "a row whose scores are all negative, and whose maximum rises from tile to tile",
        (rescales,), _in_tiles(_are_negative)),
    _of_scores("positive", "positive_scores",
        "a row whose scores are all positive and far apart, and whose maximum rises from tile to tile", (rescales,),
        _in_tiles(_are_positive)),
    _of_scores("mixed", "mixed_scores",
        "rows whose scores are all negative, and rows whose scores are all positive, of one thread", (rescales,),
        _in_tiles(_are_mixed_in_pairs)),
    _of_scores("falling", "falling_scores", "a row whose scores are all negative and fall from tile to tile, all of a tile",
        (rescales,), _in_tiles(_are_negative, rise=False)),
    _of_scores("rising", "rising_scores", "a row whose scores are all negative and rise from tile to tile, all of a tile",
        (rescales,), _in_tiles(_are_negative, rise=False)),
    _of_scores("equal", "equal_maxima",
        "a row whose largest scores are equal, and so large that fp32 cannot hold the logarithm of their number beside them",
        (_saves_large_lse,), _has_equal_maxima, "the scale is no power of 2, so that scores are not exact"),
)  # fmt: skip

# --- sinks


def _sinks(case: Case) -> Array:
    """The sinks that captured tensors have; none of a problem without rows."""
    found = [from_storage(case.problem.inputs[name]).ravel() for name in captured_sinks(case.spec)]
    return np.concatenate(found) if case.q_len and case.batch else np.empty(0)


def _has_no_sink(case: Case) -> bool:
    return bool((_sinks(case) == -np.inf).any())


def _captures_sinks(plan: Plan) -> bool:
    return bool(captured_sinks(plan.facts.spec))


SINKS = (
    Circumstance("huge_sink", "a sink near the largest number", (_captures_sinks, forward),
        lambda case: (_sinks(case) > 1e38).any(), without_pairs=True),
    Circumstance("sink_of_nan", "a sink of NaN", (_captures_sinks, forward), lambda case: np.isnan(_sinks(case)).any(),
        without_pairs=True),
    Circumstance("no_sink_nor_key_of_row", "a sink of -inf, of a row without keys beside rows with some",
        (_captures_sinks, forward, masked), lambda case: _has_no_sink(case) and is_mixed(case.allowed(0, 0).any(1), case.q_len),
        "each row has a key"),
    Circumstance("no_sink_nor_key", "a sink of -inf, of rows without keys", (_captures_sinks, forward),
        lambda case: not case.kv_len and _has_no_sink(case), without_pairs=True),
)  # fmt: skip

# --- captured tensors


def _is_number(declared: Input) -> bool:
    """Whether a captured tensor has integers that do not lie along a sequence: lengths, limits or indices."""
    return declared.dtype.kind == "int" and not {"q_len", "kv_len"} & {*declared.dims}


def _exceeds_keys(case: Case) -> bool:
    numbers = (case.problem.inputs[declared.name] for declared in case.spec.inputs if _is_number(declared))
    return any(int(array.max(initial=0)) > case.kv_len for array in numbers)


def is_broadcast(spec: AttentionSpec) -> bool:
    """Whether a captured tensor may have one element along a dimension that has several."""
    return any(dim in broadcast_dims(spec) for declared in spec.inputs for dim in declared.dims)


def _has_one_element(case: Case) -> bool:
    return any(
        size == 1 and case.sizes[str(dim)] > 1
        for declared in case.spec.inputs
        for dim, size in zip(declared.dims, case.problem.inputs[declared.name].shape, strict=True)
        if dim in broadcast_dims(case.spec)
    )


CAPTURED = (
    Circumstance("number_beyond_keys", "a captured number that is larger than kv_len",
        (lambda plan: any(map(_is_number, plan.facts.spec.inputs)),), _exceeds_keys,
        "calls with such a number are refused, as it is an index", by_values=True),
    Circumstance(
        "broadcast",
        "a captured tensor with one element for all batches or heads",
        # For gradients of a tensor with an element for each pair the caller takes another plan
        (lambda plan: is_broadcast(plan.facts.spec) and not plan.written_pairs,),
        _has_one_element,
    ),
)  # fmt: skip

# --- scores far below 0, at the ends of rows and keys


def _reads_lse(plan: Plan) -> bool:
    return bool(plan.wanted) and "lse" in plan.saved


def _has_low_ends(case: Case) -> bool:
    """Whether the last block of rows and tile of keys are not full, and scores so low that exp(0 - lse) overflows."""
    ragged = case.q_len % case.tile[0] and case.kv_len % case.tile[1]
    return bool(ragged) and bool((case.row_maxima < -OVERFLOW).all() and np.isfinite(case.row_maxima[-1]))


def _sees_unfilled(case: Case) -> bool:
    """Whether a block of rows of the first head would visit a full tile, if keys filled the last one."""
    rows, keys = case.tile
    sees_all: Any = case.allowed(0, 0)[:, case.kv_len // keys * keys :].all(1)
    return any(block.all() for block in np.split(sees_all, range(rows, len(sees_all), rows)))


LOW = (
    _of_scores("negative", "low_ends",
        "a last block of rows and a last tile of keys that are not full, of scores whose exponentials are 0",
        (_reads_lse, tiled), _has_low_ends),
    _of_scores("negative", "low_unfilled",
        "a block of rows that sees each key of a last tile which keys do not fill, of scores whose exponentials are 0",
        (_reads_lse, tiled), lambda case: _has_low_ends(case) and _sees_unfilled(case)),
)  # fmt: skip

# --- rows of NaN


def _reads_around_infinities(plan: Plan) -> bool:
    """Whether kernels skip numbers that are not finite, one by one, where a weight is 0."""
    spec = plan.facts.spec
    usual = spec.normalize == "softmax" and spec.dropout is None
    return plan.wants("v") and usual and not plan.schedule.is_warp_specialized


def _clears_rows(plan: Plan) -> bool:
    """Whether kernels keep rows and keys that are not finite from the products of tiles, where the mask excludes pairs."""
    spec = plan.facts.spec
    usual = spec.normalize in ("softmax", "sigmoid") and spec.dropout is None
    return persistent(plan) and masked(plan) and usual and {*QKV} <= {*plan.wanted}


def _has_weights(case: Case) -> bool:
    """Whether the row that is spoiled has more than 8 keys, and no key's weight is 0 in 16 bits."""
    row = spoiled_row(case.q_len)
    scores = case.first_scores[row]
    finite = scores[np.isfinite(scores)]
    return (
        finite.size > 8
        and len(finite) == int(case.allowed(0, 0)[row].sum())
        and float(finite.max() - finite.min()) < MOST_APART
    )


def _spoiled_keys(case: Case) -> Array:
    """The keys that the spoiled row of the first head sees."""
    row = spoiled_row(case.q_len)
    seen: Array = case.allowed(0, 0, slice(row, row + 1))[0]
    return seen


def _spoils_some_keys(case: Case) -> bool:
    return is_mixed(_spoiled_keys(case), case.tile[1])


def _spoils_a_first_row(case: Case) -> bool:
    """Whether the spoiled row is one of the first 8 of 16, and has no score that is not NaN."""
    row = spoiled_row(case.q_len)
    return row % 16 < 8 and bool(np.isnan(case.first_scores[row][_spoiled_keys(case)]).all())


def _spoils_inside(case: Case) -> bool:
    key = spoiled_row(case.kv_len)
    is_before = key // case.tile[1] < (case.kv_len - 1) // case.tile[1]
    return is_before and is_mixed(case.allowed(0, 0)[:, key], OF_A_WARPGROUP)


def _of_spoiled(spoils: Spoils, name: str, what: str, needs: tuple[OfPlan, ...], test: Test, absent: str = "") -> Circumstance:
    return Circumstance(name, what, needs, lambda case: case.setting.spoils == spoils and test(case), absent, by_values=True)


SPOILED = (
    _of_spoiled("dout", "infinite_dout",
        "a row of dO that is not finite, with more than 8 keys, all of whose weights are not 0, and rows after it",
        (_reads_around_infinities, tiled), _has_weights),
    _of_spoiled("row of dO", "row_of_dout_of_nan", "a row of dO of NaN that sees some keys of a tile and not others",
        (_clears_rows,), lambda case: _has_weights(case) and _spoils_some_keys(case),
        "a row sees all keys of each tile, or none"),
    _of_spoiled("row of Q", "row_of_q_of_nan",
        "a row of Q of NaN, one of the first 8 of 16, that sees some keys of a tile and not others", (_clears_rows,),
        lambda case: _spoils_some_keys(case) and _spoils_a_first_row(case), "a row sees all keys of each tile, or none"),
    _of_spoiled("row of K", "row_of_k_of_nan",
        "a key of NaN, in a tile before the last one, that some rows of a block see and others do not", (_clears_rows,),
        _spoils_inside, "all rows of a block see a key, or none does"),
)  # fmt: skip
