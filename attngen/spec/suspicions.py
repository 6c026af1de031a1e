"""What is unlikely to be meant in a valid spec: warnings. `attngen.spec.check` finds what is wrong.

Every warning states a fact that holds for all lengths, params and tensors of a call: what is only likely is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

from attngen.spec import mistakes
from attngen.spec.affine import affine_form
from attngen.spec.attention import INDICES, AttentionSpec, S
from attngen.spec.conditions import Conditions
from attngen.spec.dtypes import FP8_DTYPES
from attngen.spec.expr import Apply, Const, Expr, ExpressionError, Gather, Name, Type, constant, name, rewrite, walk
from attngen.spec.mistakes import Suspicion
from attngen.spec.obligations import MAX_PART
from attngen.spec.print_attn import expression_to_text
from attngen.spec.scales import default_scale

MAX_NODES = 400  # nodes of an expression that is looked at
SAME = 1e-6  # relative: two factors that a person means as one
SCALES = ("scale", "sm_scale", "softmax_scale", "qk_scale", "scaling", "scale_factor")  # params that are a scale by their name
LARGE = 1e4  # constants of this magnitude exclude pairs, as -inf does
FEW = 4  # keys of a row that are looked at one by one

H, Q, K = (name(index, Type.INT) for index in ("h", "q", "k"))


def suspicions(spec: AttentionSpec, functions: Container[str] = ()) -> Iterator[Suspicion]:
    """The warnings about `spec`, except those that it allows.

    `functions` are the statements that Python functions stand for. A function is often general, as that of a tree behind a
    prefix of n keys, and a condition of one value is then due to a number that it closes over, as `k < n` with n = 0 is: there,
    only comparisons of a value with itself are reported.
    """
    return (found for found in _all(spec, functions) if found.code not in spec.allow)


def _all(spec: AttentionSpec, functions: Container[str]) -> Iterator[Suspicion]:
    known = Conditions(spec)
    for statement, expr in spec.expressions.items():
        if expr.size <= MAX_NODES:
            try:
                of_parts = _of_itself if statement in functions else _of_conditions
                if statement == "mask" and (value := known.value(expr)) is not None:
                    yield from _of_one_value(expr, value, known)
                    continue
                yield from of_parts(statement, expr, known)
                yield from _of_rows(spec, expr, known) if statement == "mask" else ()
                yield from _of_indices(spec, statement, expr, known)
            except ExpressionError:  # an integer that might not fit 64 bits is a mistake
                continue
    if "s" not in spec.score.names:
        yield mistakes.WithoutProduct(statement="score", expr=spec.score)
        return
    factor = _repeated_scale(spec)
    if factor is not None:
        yield mistakes.ScaledTwice(statement="score", expr=factor, scale=f"{default_scale(spec.head_dim):g}")
    if spec.normalize == "softmax" and spec.sink is None and not spec.lse:
        for term in dict.fromkeys(_terms(spec.score)):
            if not {"s", "k"} & term.names and not _excludes(term):
                yield mistakes.WithoutEffect(statement="score", expr=term, term=_shown(term))


def _of_one_value(mask: Expr, value: bool, known: Conditions) -> Iterator[Suspicion]:
    """A mask that has one value. `true` is meant."""
    if not isinstance(mask, Const):
        kind = mistakes.AlwaysTrue if value else mistakes.NeverTrue
        yield kind(statement="mask", expr=_cause(mask, known), why=_why(mask, known))


def _of_rows(spec: AttentionSpec, mask: Expr, known: Conditions) -> Iterator[Suspicion]:
    """Rows that have no key, or all keys or none."""
    if "q" in mask.names and "k" not in mask.names:
        yield mistakes.WithoutKeys(statement="mask", expr=mask)
    heads = () if spec.q_heads is None else (0, spec.q_heads - 1)
    for what, index, at in (("query", Q, 0), *(("head", H, head) for head in heads)):
        if index.name in mask.names and (expr := _of_no_key(mask, index, at, known)) is not None:
            yield mistakes.RowWithoutKeys(statement="mask", expr=expr, what=what, index=at, shown=_shown(expr))
            return


def _of_no_key(mask: Expr, index: Expr, at: int, known: Conditions) -> Expr | None:
    """The first condition that allows no key of the row, or head, whose `index` is `at`: one of those that must all be true, or
    the mask; None if there is none."""

    def is_empty(condition: Expr) -> bool:
        return _is_empty(_with(condition, index, at), known)

    if not is_empty(mask):
        return None
    rest, parts = [mask], []
    while rest:
        node = rest.pop()
        if isinstance(node, Apply) and node.op == "and":
            rest.extend(reversed(node.args))
        else:
            parts.append(node)
    return next(filter(is_empty, parts), mask)


def _with(condition: Expr, index: Expr, at: int) -> Expr:
    return rewrite(condition, lambda node: constant(at) if node is index else None)


def _is_empty(row: Expr, known: Conditions) -> bool:
    """Whether the mask of one row, or of one head, allows no key, or only keys that are looked at one by one, which it does
    not."""
    if known.value(row) is False:
        return True
    first, last = known.range_under(K, row)
    if not 0 <= last - first < FEW:
        return False
    return all(known.value(_with(row, K, k)) is False for k in range(int(first), int(last) + 1))


def _of_conditions(statement: str, expr: Expr, known: Conditions) -> Iterator[Suspicion]:
    """Conditions in `expr` that have one value: operands of `and` and `or`, and those that choose a branch. Of nested ones the
    outermost is reported."""
    rest = [expr]
    seen: set[Expr] = set()
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.type is Type.BOOL and not isinstance(node, Const) and (value := known.value(node)) is not None:
            yield mistakes.OneValue(statement=statement, expr=_cause(node, known), value=_truth(value), why=_why(node, known))
        elif isinstance(node, Apply) and node.op == "where" and (value := known.value(node.args[0])) is not None:
            taken = node.args[1 if value else 2]
            why = _why(node.args[0], known)
            yield mistakes.BranchNeverTaken(statement=statement, expr=node, why=why, cure=_cure(taken))
            rest.append(taken)
        else:
            rest.extend(reversed(node.args))


def _of_itself(statement: str, expr: Expr, known: Conditions) -> Iterator[Suspicion]:
    """Comparisons of a value with itself."""
    for node in walk(expr):
        if _compares_itself(node) and (value := known.value(node)) is not None:
            yield mistakes.OneValue(statement=statement, expr=node, value=_truth(value), why=_why(node, known))


def _compares_itself(node: Expr) -> bool:
    return isinstance(node, Apply) and node.type is Type.BOOL and len(node.args) == 2 and node.args[0] is node.args[1]


def _truth(value: bool | None) -> str:
    return "true" if value else "false"


def _of_indices(spec: AttentionSpec, statement: str, expr: Expr, known: Conditions) -> Iterator[Suspicion]:
    """Indices of tensors that have one value although they are made of b, h, q or k. Stated heads are no reason: `h // 8` of 8
    heads is an index of any number of heads."""
    for node in walk(expr):
        if not isinstance(node, Gather):
            continue
        for position, index in enumerate(node.args):
            if isinstance(index, Name) or not {*INDICES} & index.names or (spec.q_heads and "h" in index.names):
                continue
            form = affine_form(index)
            low, high = known.range_of(index) if form.coefficients else (form.offset, form.offset)
            if low == high:
                yield mistakes.OneElement(
                    statement=statement, expr=node, name=node.input, position=position, index=_shown(index), value=int(low)
                )


def _cause(condition: Expr, known: Conditions) -> Expr:
    """The first part of `condition` that decides its value."""
    value = known.value(condition)
    return next(node for node in walk(condition) if node.type is Type.BOOL and known.value(node) is value)


def _why(condition: Expr, known: Conditions) -> str:
    cause = _cause(condition, known)
    if _compares_itself(cause):
        return f"{_shown(cause)} compares a value with itself"
    return f"{_shown(cause)} is {_truth(known.value(cause))} for every pair"


def _shown(expr: Expr) -> str:
    text = expression_to_text(expr)
    return f"`{text}`" if len(text) <= MAX_PART else "it"


def _cure(taken: Expr) -> str:
    """What to write instead of a `where` of which only one branch is taken."""
    text = expression_to_text(taken)
    return f"write {text}" if len(text) <= MAX_PART else "keep the other branch alone"


def _repeated_scale(spec: AttentionSpec) -> Expr | None:
    """The product of the score that has the scale twice: of `s`, or a sum with it, and 1 / sqrt(head_dim), which is the scale
    too, or a param that is called a scale or has that default. None if the score multiplies by sqrt(head_dim) as well, as a
    soft-cap of that size does. Other factors are temperatures."""
    usual = default_scale(spec.head_dim)
    of_elements = spec.dtypes["k"] in FP8_DTYPES  # a factor of s is then the scale of the elements of K
    if of_elements or not (isinstance(spec.scale, Const) and math.isclose(spec.scale.value, usual, rel_tol=SAME)):
        return None
    found = None
    for node in walk(spec.score):
        if not isinstance(node, Apply) or node.op not in ("mul", "div"):
            continue
        for other, operand in (node.args, reversed(node.args)) if node.op == "mul" else (node.args,):
            factor = _number(spec, operand, is_divisor=node.op == "div")
            if factor is not None and math.isclose(factor * usual, 1, rel_tol=SAME):
                return None
            is_sum = isinstance(other, Apply) and other.op in ("add", "sub") and S in other.args
            is_scale = isinstance(operand, Name) and operand.name in SCALES
            if (other is S or is_sum) and (is_scale or (factor is not None and math.isclose(factor, usual, rel_tol=SAME))):
                found = found or node
    return found


def _number(spec: AttentionSpec, factor: Expr, is_divisor: bool) -> float | None:
    """The number that `factor` multiplies by: a constant, or the default of a param."""
    value = factor.value if isinstance(factor, Const) else None
    if isinstance(factor, Name):
        value = next((p.default for p in spec.params if p.name == factor.name), None)
    if value is None or (is_divisor and not value):
        return None
    return 1 / value if is_divisor else float(value)


def _terms(score: Expr) -> Iterator[Expr]:
    """The terms of a score that is a sum; of each branch if a condition chooses."""
    rest = [score]
    seen: set[Expr] = set()
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        match node:
            case Apply(op="add" | "sub" | "neg", args=args) if "s" in node.names:
                rest.extend(reversed(args))
            case Apply(op="where", args=(condition, first, second)) if "s" in node.names and _is_of_row(
                condition, first, second
            ):
                rest += [second, first]
            case _:
                yield node


def _is_of_row(condition: Expr, first: Expr, second: Expr) -> bool:
    """Whether a term of a branch is added to all keys of a row that take part: the condition is one of rows, or the other
    branch excludes a pair."""
    return not {"s", "k"} & condition.names or any(isinstance(e, Const) and e.value == -math.inf for e in (first, second))


def _excludes(term: Expr) -> bool:
    """Whether a term may exclude a row: -inf, or a number that takes its place."""
    return any(isinstance(node, Const) and node.type is Type.FLOAT and not abs(node.value) < LARGE for node in walk(term))
