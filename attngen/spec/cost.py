"""How long compilers take for an expression: a number of additions, each of which takes NVRTC some 0.2 ms.

The `cost` column of the operator table says what one operator is. Code that is not inlined calls a function for the dearest
operators, whose code is then in a file once, so that only the call is left of their cost. A spec whose expressions cost more
than `MOST` is refused: what it accepts compiles in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attngen.spec import mistakes
from attngen.spec.expr import Apply, Const, Expr, Gather, walk
from attngen.spec.operator import TABLE

MOST = 8_000  # for the mask, the score, the sink, positions and captured tensors
MOST_OF_BACKWARD = 8_000  # for these and the derivatives that a backward computes
MOST_OF_CALL = 500  # for the scale, which each kernel computes where it needs it
CALLED_FROM = 50  # the cost from which on an operator is called, in code that is not inlined
OF_CALL = 8
OF_READ, OF_INDEX = 12, 6  # for an element of a captured tensor, and each of its indices
OF_TENSOR = 40  # per captured tensor: the parameters of each kernel, its accessor
OF_GRADIENT = 200  # per place where one is read: the code that adds up its gradient
BY_CONSTANT = 7  # for a division by a constant, which is multiplications


def cost(*exprs: Expr | None, inlined: bool = False) -> int:
    """The cost of expressions that one function computes: what they share counts once."""
    return sum(cost_of(node, inlined) for node in walk(*(e for e in exprs if e is not None)))


def cost_as_tree(expr: Expr) -> int:
    """The cost of `expr` as inlined code without temporaries: what occurs twice counts twice."""
    known: dict[Expr, int] = {}
    for node in walk(expr):
        known[node] = cost_of(node, inlined=True) + sum(known[a] for a in node.args)
    return known[expr]


def cost_of(node: Expr, inlined: bool = False) -> int:
    """The cost of `node` itself, without its operands."""
    if isinstance(node, Gather):
        return OF_READ + OF_INDEX * len(node.args)
    if not isinstance(node, Apply):
        return 0
    if is_called(node.op) and not inlined:
        return OF_CALL
    if node.op in ("floordiv", "mod", "div") and isinstance(node.args[1], Const):
        return BY_CONSTANT
    return TABLE[node.op].cost


def is_called(op: str) -> bool:
    """Whether code that is not inlined calls a function for `op`."""
    return TABLE[op].cost >= CALLED_FROM


def dearest(exprs: Iterable[Expr]) -> tuple[str, int, int]:
    """The operator that costs most in `exprs`, which are computed one by one: its name, how often it occurs, its cost; of reads
    of captured tensors, the name is ""."""
    costs: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for expr in exprs:
        for node in walk(expr):
            if (own := cost_of(node)) > 0:
                op = node.op if isinstance(node, Apply) else ""
                costs[op] += own
                counts[op] += 1
    ((op, most),) = costs.most_common(1)
    return op, counts[op], most


def too_much_code(
    statement: str, what: str, exprs: list[Expr], most: int, total: int, tensors: int = 0, backward: bool = False
) -> mistakes.TooMuchCode:
    """The mistake of a statement that has most of a cost `total`: `exprs` are computed by it, one function each, and the spec
    captures `tensors`. `backward`: they are gradients of captured tensors too. The label names what costs most."""
    op, count, own = dearest(exprs)
    infix = TABLE[op].infix if op else None
    part = f"{own} of them for {f'`{infix.symbol if infix else op}`, ' if op else 'reads of captured tensors, '}{count} times"
    if OF_TENSOR * tensors > own:
        part = f"{OF_TENSOR * tensors} of them for {tensors} captured tensors"
    cure = "compute parts of it beforehand, and read them from a captured tensor"
    if statement == "scale":
        cure = "compute it beforehand, and pass it as a param"
    elif backward:
        cure = "request fewer gradients of captured tensors, or compute parts of it beforehand and read them from one"
    return mistakes.TooMuchCode(statement=statement, what=what, cost=total, most=most, part=part, cure=cure)
