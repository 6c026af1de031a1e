"""What a spec makes of the Hopper backward: which kernels there are, who adds up dQ, and how consumers divide their work."""

from __future__ import annotations

from attngen.plan.captured_staging import NOTHING, Staged, pair_elements
from attngen.plan.captured_sums import is_ds
from attngen.plan.code_size import operations
from attngen.plan.facts import SpecFacts
from attngen.plan.saved import Dq, needs_lse_rest
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, slabs
from attngen.spec.attention import AttentionSpec
from attngen.spec.operator import FLOAT_ONE

CONSUMERS = 2
WARPGROUP = 128  # threads
MOST_OF_BOTH = 128  # registers of dK and dV up to which a consumer has both
MAX_ADDED_HEAD_DIM = 128  # for each head size, if dQ is added up in global memory: a part of dQ needs registers too
HALVES_SLABS = (3, 2)  # slabs of Q and of V up to which dK^T and dV^T of HALVES_KEYS keys fit registers
HALVES_KEYS = 96  # keys of a block whose consumers have half of the pairs of a tile each
OF_ROWS = {"delta", "special_rows"}  # kernels of the numbers of rows


def dq_of(facts: SpecFacts) -> Dq:
    """Who adds up dQ: a kernel of its own; or blocks that hold keys, if its last bits may differ and registers suffice."""
    if "q" not in facts.wanted:
        return ""
    spec = facts.spec
    limit = MAX_ADDED_HEAD_DIM if spec.dropout is None else SLAB  # random bits take registers too
    fits = max(spec.head_dim, spec.head_dim_v) <= limit and slabs(spec.head_dim) == slabs(spec.head_dim_v)
    adds = "k" in facts.wanted and not facts.deterministic and spec.normalize == "softmax" and (fits or fits_halves(spec))
    return "additions" if adds else "own kernel"


def fits_halves(spec: AttentionSpec) -> bool:
    """Whether dK and dV of HALVES_KEYS keys fit the registers of two consumers, one each, beside half of S and dP."""
    of_qk, of_v = HALVES_SLABS
    narrow = slabs(spec.head_dim) == of_qk and slabs(spec.head_dim_v) <= of_v
    return splits_products(spec) and narrow and spec.dropout is None


def by_halves(facts: SpecFacts) -> bool:
    """Whether consumers of the kernel of keys have half of the pairs of a tile each."""
    return dq_of(facts) == "additions" and fits_halves(facts.spec)


def splits(facts: SpecFacts) -> bool:
    """Whether the consumers of the kernel of keys have different sums of the same pairs."""
    return splits_products(facts.spec) and not by_halves(facts)


def written_pairs(facts: SpecFacts) -> tuple[str, ...]:
    """The captured tensors whose gradient is dS as blocks that add to dQ have it in shared memory: in the type of Q, before any
    derivative. Without a mask, every element is written."""
    spec, gradient = facts.spec, facts.gradient
    assert gradient is not None
    every = spec.mask is None and spec.kernel.storage == "dense"
    if dq_of(facts) != "additions" or by_halves(facts) or not every or gradient.ds is not FLOAT_ONE:
        return ()
    return tuple(i.name for i in spec.inputs if i.name in facts.wanted and i.dtype is spec.dtype and is_ds(gradient.of(i.name)))


def staged(facts: SpecFacts) -> Staged:
    """The element of each pair of a tile that blocks of keys find in shared memory: of one tensor, for which there is room."""
    return (
        Staged(pairs=pair_elements(facts.spec).pairs[:1])
        if dq_of(facts) == "additions" and not by_halves(facts) and facts.spec.kernel.storage == "dense"
        else NOTHING
    )


def pair_slots(facts: SpecFacts) -> int:
    """The tiles of these elements: two if consumers do not wait for each other; with more than 64 rows, there is no room."""
    return len(staged(facts).pairs) * (2 if rows_of(facts) == WARPGROUP_ROWS else 1)


def rows_of(facts: SpecFacts) -> int:
    """The rows of a tile that a block of keys visits."""
    assert facts.gradient is not None
    fits = (
        facts.spec.dropout is None
        and slabs(facts.spec.head_dim) == 1
        and (operations(facts.gradient.ds) == 0 or facts.spec.head_dim % 16 > 0)
    )
    return 2 * WARPGROUP_ROWS if dq_of(facts) == "additions" and fits else WARPGROUP_ROWS


def keys_in_registers(facts: SpecFacts) -> bool:
    """Whether keys and values that a block holds stay in registers: with heads of one slab, 64 rows, no random bits."""
    spec = facts.spec
    narrow = max(spec.head_dim, spec.head_dim_v) <= SLAB and spec.dropout is None
    return "k" in facts.wanted and narrow and rows_of(facts) == WARPGROUP_ROWS


def kernels_of(facts: SpecFacts) -> tuple[str, ...]:
    needed = {
        "delta": facts.spec.normalize == "softmax",
        "special_rows": facts.spec.normalize != "softmax" and clears_special(facts.spec) and "k" in facts.wanted,
        "dk_dv": "k" in facts.wanted,
        "add_parts": "k" in facts.wanted and may_be_grouped(facts.spec),
        "dq": dq_of(facts) == "own kernel",
        "convert_dq": dq_of(facts) == "additions",
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def may_be_grouped(spec: AttentionSpec) -> bool:
    """Whether query heads may share keys."""
    return spec.q_heads is None or spec.q_heads != spec.kv_heads


def clears_special(spec: AttentionSpec) -> bool:
    """Whether NaN and infinity at pairs that the mask excludes are kept from the sums: pairs that it allows still have them."""
    return spec.mask is not None


def row_numbers(facts: SpecFacts) -> int:
    """The numbers of a row: lse in powers of 2, delta, and what is subtracted from large scores; without lse, one that is NaN
    if the row has NaN or infinity."""
    return 2 + needs_lse_rest(facts.spec) if facts.spec.normalize == "softmax" else 1


def splits_products(spec: AttentionSpec) -> bool:
    """Whether dK and dV of 64 keys are too much for one consumer of the kernel of keys."""
    return (spec.head_dim + spec.head_dim_v) // 2 > MOST_OF_BOTH
