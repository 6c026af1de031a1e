"""What a wrong kernel may compute instead of a spec: the spec with one part left out or changed.

A problem exercises a part of a spec if the results of some alternative without that part differ (`attngen.reference.coverage`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.spec.attention import AttentionSpec
from attngen.spec.dropout import without_dropout
from attngen.spec.expr import Apply, Expr, ExpressionError, Gather, Name, Type, constant, rewrite, walk
from attngen.spec.operator import TABLE, ZERO, apply, is_comparison, mul, neg
from attngen.spec.print_attn import expression_to_text
from attngen.spec.rotary import Pairs, Rotary

MAX_ALTERNATIVES = 200  # per spec: each costs an evaluation of its mask and score
MAX_TEXT = 60  # characters of an expression in a sentence
NEIGHBOURS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}  # differ only if both sides are equal


@dataclass(frozen=True, slots=True)
class Alternative:
    """One change of a spec: `part` of the statement `keyword` becomes `change`."""

    keyword: str
    part: str
    change: str
    spec: AttentionSpec

    def __str__(self) -> str:
        return f"{self.keyword}: `{self.part}` {self.change}" if self.part else f"{self.keyword} {self.change}"

    @property
    def sentence(self) -> str:
        """What a kernel without the part would be, for a reader who has only seen the spec."""
        what, change = f"`{self.part}` in the {self.keyword}", self.change
        if not self.part:
            words = f"with twice the {self.keyword}" if change == "doubled" else f"without the {self.keyword}"
        elif change.startswith("always"):
            words = f"that takes {what} to be {change}"
        elif change.startswith("as"):
            words = f"that has {change.removeprefix('as ')} in the place of {what}"
        else:
            words = f"that compares {what} {change.replace('with', 'by')}"
        return f"a kernel {words} would pass"


def alternatives(spec: AttentionSpec, most: int = MAX_ALTERNATIVES) -> tuple[Alternative, ...]:
    """The first `most` alternatives of `spec`: each condition as always true and always false, each comparison of
    integers with the other answer at its boundary, each operator as one of its operands, b and h as 0, another scale, no sink,
    no dropout, no rotation or another.
    """
    found: dict[AttentionSpec, Alternative] = {}
    for one in _candidates(spec):
        if len(found) == most:
            break
        if one.spec != spec:
            found.setdefault(one.spec, one)
    return tuple(found.values())


def _candidates(spec: AttentionSpec) -> Iterator[Alternative]:
    yield Alternative("scale", "", "doubled", replace(spec, scale=mul(constant(2.0), spec.scale)))
    if spec.sink is not None:
        yield Alternative("sink", "", "left out", replace(spec, sink=None))
    if spec.dropout is not None:
        yield Alternative("dropout", "", "left out", without_dropout(spec))
    if spec.rotary is not None:
        yield from _rotations(spec, spec.rotary)
    for keyword in ("mask", "score", "sink"):
        root: Expr | None = getattr(spec, keyword)
        if root is None:
            continue
        for part, becomes, change in _changes(root):
            try:
                changed = rewrite(root, lambda node, part=part, becomes=becomes: becomes if node is part else None)  # type: ignore[misc]
            except ExpressionError:  # the changed expression has no meaning: it divides by zero
                continue
            if changed.type is root.type:
                yield Alternative(keyword, _text(part), change, replace(spec, **{keyword: changed}))  # type: ignore[arg-type]


def _rotations(spec: AttentionSpec, rotary: Rotary) -> Iterator[Alternative]:
    """Alternatives of a rotation. Those of both positions by the same number have the same scores, and are none."""
    yield Alternative("rotary", "", "left out", replace(spec, rotary=None))
    other: Pairs = "halves" if rotary.pairs == "interleaved" else "interleaved"
    yield Alternative("rotary", rotary.pairs, f"as `{other}`", replace(spec, rotary=replace(rotary, pairs=other)))
    swapped = replace(rotary, cosines=rotary.sines, sines=rotary.cosines)
    yield Alternative("rotary", rotary.cosines, f"as `{rotary.sines}`", replace(spec, rotary=swapped))
    first = replace(rotary, q=ZERO)
    yield Alternative("rotary", _text(rotary.q), "as `0`", replace(spec, rotary=first))


def _changes(root: Expr) -> Iterator[tuple[Expr, Expr, str]]:
    """(node of `root`, its replacement, the change in words)."""
    for node in walk(root):
        if node.type is Type.BOOL and (isinstance(node, Gather) or (isinstance(node, Apply) and is_comparison(node.op))):
            yield node, constant(True), "always true"
            yield node, constant(False), "always false"
        if isinstance(node, Name) and node.name in ("b", "h"):
            yield node, ZERO, "always 0"
        if isinstance(node, Apply):
            yield from _of_operator(node)


def _of_operator(node: Apply) -> Iterator[tuple[Expr, Expr, str]]:
    if node.op in NEIGHBOURS and node.args[0].type is Type.INT:
        other = NEIGHBOURS[node.op]
        infix = TABLE[other].infix
        assert infix is not None
        yield node, apply(other, *node.args), f"with `{infix.symbol}`"
    if node.op in ("and", "or") or is_comparison(node.op):  # their operands are changed one by one
        return
    operands = [arg for arg in node.args if arg.type is node.type]
    if node.op == "sub":
        operands[1] = neg(operands[1])
    if node.op in ("abs", "neg"):
        operands = [node.args[0], neg(node.args[0])]
    if node.op in ("float", "int"):
        return
    for operand in operands:
        yield node, operand, f"as `{_text(operand)}`"


def _text(expr: Expr) -> str:
    text = expression_to_text(expr)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
