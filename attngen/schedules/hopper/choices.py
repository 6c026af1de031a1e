"""The choices of the Hopper schedule, each with the words for its value and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.plan.choices import Words, choice
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.schedules.hopper.needs import q_registers
from attngen.schedules.parts.wgmma import slabs

RowSums = Literal["products", "weights, the heaviest rounded", "weights"]
BesideLast = Literal["next scores", "next work tile", "nothing"]


def heavy(row_sums: RowSums) -> int:
    """Number of average keys whose weights together equal the weight at an adaptive threshold.

    A smaller number gives smaller errors and more rescaling; measured by `benchmarks/hopper.py --only plain,errors`. Sums of
    rounded weights tolerate a larger one, and so do long rows, whose other errors grow with the root of the number of keys.
    """
    return 64 if row_sums == "products" else 32


WHY_SUMS: dict[RowSums, tuple[str, str]] = {
    "products": ("by P V", "columns of ones beside V: threads add no weights, and the sum is that of the rounded weights of P"),
    "weights, the heaviest rounded": (
        "by threads",
        "of the weights, the heaviest of each lane as P rounds it: this rounding then moves O less",
    ),
    "weights": ("by threads", "of the weights before rounding"),
}
WHY_BESIDE: dict[BesideLast, tuple[str, str]] = {
    "next scores": (
        "the next work tile's Q K^T",
        "its Q is in registers by then, so the tensor cores work while O is stored",
    ),
    "next work tile": ("the next coordinates", "the latency of reading them is hidden"),
    "nothing": (
        "nothing",
        "tiles after a consumer's own are skipped first: the next work tile is published when all keys of this one are copied",
    ),
}
WHY_OWN = (
    "a tile has fewer keys than a block has rows, so some tiles have no key for a consumer's 64 rows: it skips these; "
    "consumers take turns with the rows, so that each has as much to do"
)


def _q(own: HopperPlan, facts: SpecFacts) -> Words:
    why = f"its fragments take {q_registers(facts.spec)} registers a thread"
    return ("in registers", f"{why}; its buffer is free for the next work tile") if own.q_in_registers else (IN_SHARED, why)


def _order(own: HopperPlan, facts: SpecFacts) -> Words | None:
    why = "the score falls from key to key: a row maximum that rose with each tile would rescale O each time"
    return ("from the first to the last", why) if own.from_first_tile and not facts.bounds.per_tile else None


def _sums(own: HopperPlan, facts: SpecFacts) -> Words | None:
    return WHY_SUMS[own.row_sums] if facts.spec.normalize == "softmax" else None


def _slack(own: HopperPlan, facts: SpecFacts) -> Words | None:
    value = f"a row's own, up to the weight of {heavy(own.row_sums)} keys, or more where there are many"
    why = "a score that would weigh more becomes the maximum: its weight is then 1, which rounding does not change"
    return (value, why) if own.adaptive_threshold else None


def _first_values(own: HopperPlan, facts: SpecFacts) -> Words | None:
    if own.q_in_registers:
        return None
    if own.values_after_queries:
        return "after Q", "Q and the first keys are needed first"
    return "at once", "Q of the slowest of more than two consumers would hold up the values of the others"


def _output(own: HopperPlan, facts: SpecFacts) -> Words:
    every, out = slabs(facts.spec.head_dim_v), own.output_slabs
    why = "of 64 columns; TMA copies them to global memory in the background" + "; there is no room for more" * (out < every)
    return f"{out} of {every} slabs a warp", why


IN_SHARED = "in shared memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperPlan(Own):
    """Warp specialization: one warpgroup copies, `consumers` others multiply 64 rows each."""

    consumers: int
    producer_registers: int  # per thread
    consumer_registers: int
    shift: float | None  # subtracted from the exponents (of 2) of all scores instead of a row maximum; None: there is one
    pair_slots: int  # tiles of an element of pairs that each consumer has in shared memory; 0: each pair reads its own
    rescales_last: bool = False  # O is rescaled after P is rounded: no branch stands between exponentials and conversions
    q_in_registers: bool = choice("Q", _q)
    # a work tile's tiles are visited from the first to the last, else from the last to the first
    from_first_tile: bool = choice("order of tiles", _order)
    # a consumer multiplies the tiles that have keys for its own rows, not all of the block's
    per_consumer_range: bool = choice("consumers' tiles", {True: ("each its own", WHY_OWN)})
    # the softmax denominator: by products of P with columns of ones beside V, or by each thread
    row_sums: RowSums = choice("row sums", _sums)
    # the score that forces a rescale depends on the weights of a row's first tile
    adaptive_threshold: bool = choice("slack", _slack)
    # what a consumer does beside the last P V of a work tile
    beside_last: BesideLast = choice("during the last P V", WHY_BESIDE)
    replaces_output: bool = choice(
        "first P V",
        {
            True: ("replaces O", "O need not be set to zero before it"),
            False: ("adds to O", "no register is left for a flag"),
        },
    )
    # the copies of a work tile's V wait for its Q
    values_after_queries: bool = choice("first copy of V", _first_values)
    # all lanes of the producer's first warp; else one thread copies
    warp_loads_keys: bool = choice(
        "keys", {True: ("by a warp", "its lanes classify tiles or read key vectors together, and one copies")}
    )
    # each warp of a consumer; else one thread of it
    warps_release: bool = choice(
        "stages released",
        {True: ("by each warp", "each waits for its own lanes' reads of the stage, or for a tile that it skips")},
    )
    # slabs of a warp's rows that are copied out at once
    output_slabs: int = choice("O in shared memory", _output)
