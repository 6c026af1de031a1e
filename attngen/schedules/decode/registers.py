"""An estimate of the registers of a thread of the decode schedule, whose kernels ptxas has not counted yet."""

from __future__ import annotations

from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.tile import Tile
from attngen.plan.variants import gathers, of_pairs, pair_gathers, reads_pairs
from attngen.schedules.fused_mma.needs import (
    CAPTURED_REGISTERS,
    RANDOM_REGISTERS,
    operands,
    row_blocks,
    staged_of,
    summed,
    width_of_v,
)
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Gather, walk

OTHER_REGISTERS = 60  # addresses, row state, fragments of K or V
OTHER_SPLIT_REGISTERS = 95  # the same without V, where each fragment is two
OF_BLOCK_REGISTERS = 1  # an element that all pairs of a block share
SHARED_REGISTERS = 4  # more of them, beside a softmax, where scores or a sink read such an element
SCORE_REGISTERS = 4  # a softmax of scores that are computed from s, not s itself
DIVISOR_REGISTERS = 10  # divisors that are not known before the call, and their inverses
KEY_REGISTERS = 2  # the address of an element that a thread reads of one key


def registers(facts: SpecFacts, tile: Tile) -> int:
    """Registers that a thread needs without Q: output, scores, and the rest."""
    spec = facts.spec
    output, scores = row_blocks(tile) * spec.head_dim_v // 2, row_blocks(tile) * tile.block_kv // 2
    if operands(spec).split:
        output, scores = row_blocks(tile) * width_of_v(spec) // 2, scores * (2 if operands(spec).split == "tf32" else 1)
    captured = _captured_registers(facts, tile, scores)
    if not operands(spec).split:
        computed = SCORE_REGISTERS if spec.normalize == "softmax" and spec.score != S else 0
        drawn = RANDOM_REGISTERS if spec.dropout is not None else 0
        return output + scores + captured + computed + drawn + remainders(facts, tile) + OTHER_REGISTERS
    wide = max(0, tile.block_kv - 32) // 4 if operands(spec).split == "bf16" else 0  # fragments of K
    return output + scores + captured + wide + 16 * summed(tile) + OTHER_SPLIT_REGISTERS


def remainders(facts: SpecFacts, tile: Tile) -> int:
    """Registers of a thread for the remainders of distances that a mask divides by params, and for the divisors."""
    distances = facts.divided_distances(2 * row_blocks(tile), tile.block_kv)
    return distances + DIVISOR_REGISTERS if distances else 0


def _captured_registers(facts: SpecFacts, tile: Tile, scores: int) -> int:
    """Registers of a thread for elements of captured tensors and their addresses. A thread that reads the elements of one key
    holds them during Q K^T; weights without a softmax, and a sink, take one more each."""
    spec = facts.spec
    own = staged_of(facts, tile)
    elements = _elements(spec, scores)
    if operands(spec).split:
        return (CAPTURED_REGISTERS if spec.inputs else 0) + elements
    inputs = {g.input for g in gathers(spec) if of_pairs(g)}
    if not own.keys:
        return (CAPTURED_REGISTERS if inputs else _shared_registers(spec)) + elements
    others = inputs - {e.gather.input for e in own.elements}
    held = sum(KEY_REGISTERS + e.stored.bytes // 4 for e in own.keys)
    more = (spec.normalize != "softmax") + (spec.sink is not None)
    return (CAPTURED_REGISTERS if others else 0) + held + more + elements


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
