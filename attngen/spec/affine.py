"""Affine forms of integers: sums and multiples by constants, taken apart."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.spec.expr import Apply, Const, Expr, constant, walk
from attngen.spec.operator import add, mul, neg, sub


@dataclass(frozen=True, slots=True)
class AffineForm:
    """`offset + sum of coefficient * leaf`."""

    coefficients: dict[Expr, int]
    offset: int = 0

    def shifted(self, by: int) -> AffineForm:
        return AffineForm(self.coefficients, self.offset + by)

    def scaled(self, by: int) -> AffineForm:
        return AffineForm({leaf: by * c for leaf, c in self.coefficients.items()}, by * self.offset)

    def plus(self, other: AffineForm) -> AffineForm:
        sums = dict(self.coefficients)
        for leaf, c in other.coefficients.items():
            sums[leaf] = sums.get(leaf, 0) + c
        return AffineForm({leaf: c for leaf, c in sums.items() if c}, self.offset + other.offset)

    def without(self, leaf: Expr) -> tuple[int, AffineForm]:
        """The coefficient of `leaf`, and the form without it."""
        rest = {other: c for other, c in self.coefficients.items() if other is not leaf}
        return self.coefficients.get(leaf, 0), AffineForm(rest, self.offset)

    def to_expr(self) -> Expr:
        """The form as an expression, positive terms first."""
        result: Expr | None = None
        for leaf, coefficient in sorted(self.coefficients.items(), key=lambda item: item[1] < 0):
            term = mul(constant(abs(coefficient)), leaf)
            if result is None:
                result = term if coefficient > 0 else neg(term)
            else:
                result = add(result, term) if coefficient > 0 else sub(result, term)
        if result is None:
            return constant(self.offset)
        return sub(result, constant(-self.offset)) if self.offset < 0 else add(result, constant(self.offset))


def difference(left: Expr, right: Expr) -> AffineForm:
    """`left - right`."""
    return affine_form(left).plus(affine_form(right).scaled(-1))


def affine_form(expr: Expr) -> AffineForm:
    """The affine form of an integer: sums and multiples are taken apart, everything else is a leaf."""
    forms: dict[Expr, AffineForm] = {}
    for node in walk(expr, through=_is_affine):
        match node:
            case Const(value=value):
                forms[node] = AffineForm({}, int(value))
            case Apply(op="add", args=(a, b)):
                forms[node] = forms[a].plus(forms[b])
            case Apply(op="sub", args=(a, b)):
                forms[node] = forms[a].plus(forms[b].scaled(-1))
            case Apply(op="neg", args=(a,)):
                forms[node] = forms[a].scaled(-1)
            case Apply(op="mul", args=(Const(value=c), a)) | Apply(op="mul", args=(a, Const(value=c))):
                forms[node] = forms[a].scaled(int(c))
            case _:
                forms[node] = AffineForm({node: 1})
    return forms[expr]


def _is_affine(node: Expr) -> bool:
    """Whether `node` is a sum, a difference or a multiple by a constant."""
    if not isinstance(node, Apply):
        return False
    return node.op in ("add", "sub", "neg") or (node.op == "mul" and any(isinstance(a, Const) for a in node.args))
