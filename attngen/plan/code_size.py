"""How much code a mask or a score is: each pair of a thread has a copy of it, unless the code is a function that is called."""

from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Apply, Expr, Gather, walk

INLINED_UP_TO = 256  # operations: 128 copies take NVRTC some 3 s, and ten times as many operations minutes


def operations(*exprs: Expr | None) -> int:
    """The operators and reads of `exprs`, those that they share counted once."""
    return sum(isinstance(node, (Apply, Gather)) for node in walk(*(e for e in exprs if e is not None)))


def pair_operations(spec: AttentionSpec) -> int:
    """Of the mask or of the score, whichever has more."""
    return max(operations(spec.mask), operations(spec.score))
