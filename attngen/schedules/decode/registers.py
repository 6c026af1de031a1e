"""An estimate of the registers of a thread of the decode schedule, whose kernels ptxas has not counted yet."""

from __future__ import annotations

from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.tile import Tile
from attngen.plan.variants import gathers, of_pairs, pair_gathers, reads_pairs
from attngen.schedules.fused_mma.needs import CAPTURED_REGISTERS, operands, summed, width_of_v
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Gather, walk

OTHER_REGISTERS = 60  # addresses, row state, fragments of K or V
OTHER_SPLIT_REGISTERS = 95  # the same without V, where each fragment is two
OF_BLOCK_REGISTERS = 1  # an element that all pairs of a block share
SHARED_REGISTERS = 4  # more of them, beside a softmax, where scores or a sink read such an element
SCORE_REGISTERS = 4  # a softmax of scores that are computed from s, not s itself
DIVISOR_REGISTERS = 10  # divisors that are not known before the call, and their inverses


def registers(facts: SpecFacts, tile: Tile) -> int:
    """Registers that a thread needs without Q: output and scores of 16 rows, and the rest."""
    spec, split, scores = facts.spec, operands(facts.spec).split, tile.block_kv // 2
    if split:
        scores *= 2 if split == "tf32" else 1
        wide = max(0, tile.block_kv - 32) // 4 if split == "bf16" else 0  # fragments of K
        captured = (CAPTURED_REGISTERS if spec.inputs else 0) + _elements(spec, scores)
        return width_of_v(spec) // 2 + scores + captured + wide + 16 * summed(tile) + OTHER_SPLIT_REGISTERS
    captured = CAPTURED_REGISTERS if any(map(of_pairs, gathers(spec))) else _shared_registers(spec)
    computed = SCORE_REGISTERS if spec.normalize == "softmax" and spec.score != S else 0
    distances = facts.divided_distances(2, tile.block_kv)  # whose remainders a thread keeps
    divided = distances + DIVISOR_REGISTERS if distances else 0
    return spec.head_dim_v // 2 + scores + captured + _elements(spec, scores) + computed + divided + OTHER_REGISTERS


@remembered
def _shared_registers(spec: AttentionSpec) -> int:
    """Registers for elements that all pairs of a block share."""
    shared = {g for g in gathers(spec) if not of_pairs(g)}
    weighed = spec.normalize == "softmax" and any(
        isinstance(n, Gather) for e in (spec.score, spec.sink) if e is not None for n in walk(e)
    )
    return OF_BLOCK_REGISTERS * len(shared) + (SHARED_REGISTERS if weighed else 0)


def _elements(spec: AttentionSpec, scores: int) -> int:
    """Registers of a thread for elements of pairs: one per score, or in wide tiles one for some diagonals."""
    if reads_pairs(spec):
        return scores
    return max(0, scores - 32) // 3 if pair_gathers(spec) else 0
