"""How much code a mask or a score is: each pair of a thread has a copy of it, unless the code is a function that is called."""

from attngen.plan.captured_staging import Staged
from attngen.spec.attention import AttentionSpec
from attngen.spec.cost import cost
from attngen.spec.expr import Apply, Expr, Gather, walk
from attngen.spec.gradient import Gradient

INLINED_UP_TO = 100  # additions: NVRTC takes some 50 ms for each where a thread has 128 pairs
INLINED_ONCE_UP_TO = 400  # of a function of a row or a tile, of which a kernel has few copies
ALWAYS_INLINED = 8  # what costs less than a call


def operations(*exprs: Expr | None) -> int:
    """The operators and reads of `exprs`, those that they share counted once."""
    return sum(isinstance(node, (Apply, Gather)) for node in walk(*(e for e in exprs if e is not None)))


def is_inlined(*exprs: Expr | None) -> bool:
    """Whether a function of a row or a tile that computes `exprs` is copied to where it is called."""
    return cost(*exprs, inlined=True) <= INLINED_ONCE_UP_TO


def pair_cost(spec: AttentionSpec, elements: Staged, gradient: Gradient | None) -> int:
    """The cost of the mask and of the score, and of a derivative, as code that is inlined; elements of a key or a row are not
    read for each pair."""
    exprs = (spec.mask, spec.score, None if gradient is None else gradient.ds)
    return sum(cost(elements.named(e), inlined=True) for e in exprs if e is not None)
