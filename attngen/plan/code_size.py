"""How much code a mask or a score is: each pair of a thread has a copy of it, unless the code is a function that is called."""

from attngen.plan.captured_staging import Staged
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.cost import cost, cost_of
from attngen.spec.expr import Apply, Expr, Gather, walk
from attngen.spec.gradient import Gradient

INLINED_UP_TO = 100  # additions: NVRTC takes some 50 ms for each where a thread has 128 pairs
INLINED_ONCE_UP_TO = 400  # additions, for a function of a row or a tile: a kernel has few copies of it
ALWAYS_INLINED = 8  # what costs less than a call
ROW, KEY = "q", "k"
ROWS_OF_THREAD = 2  # at least: so many of its pairs have a key in common


def operations(*exprs: Expr | None) -> int:
    """The operators and reads of `exprs`, those that they share counted once."""
    return sum(isinstance(node, (Apply, Gather)) for node in walk(*(e for e in exprs if e is not None)))


def is_inlined(*exprs: Expr | None) -> bool:
    """Whether a function of a row or a tile that computes `exprs` is copied to where it is called."""
    return cost(*exprs, inlined=True) <= INLINED_ONCE_UP_TO


def pair_cost(spec: AttentionSpec, elements: Staged, gradient: Gradient | None) -> int:
    """The cost of mask, score and derivative as inlined code; elements of a key or a row are not read for each pair."""
    exprs = (spec.mask, spec.score, None if gradient is None else gradient.ds)
    return sum(cost_of_pairs(elements.named(e)) for e in exprs if e is not None)


def cost_of_pairs(expr: Expr) -> int:
    """The cost of `expr` as code of which each pair of a thread has a copy. What depends on a row alone is in a thread once for
    all of the row's pairs, what depends on a key alone once for those of the key: compilers find what is common."""
    total = 0.0
    for node in walk(expr):
        of = {ROW, KEY} & node.names if not node.inputs and S.name not in node.names else {ROW, KEY}
        if of != {ROW}:
            total += cost_of(node, inlined=True) / (ROWS_OF_THREAD if of == {KEY} else 1)
    return round(total)
