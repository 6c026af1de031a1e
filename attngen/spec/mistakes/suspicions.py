"""Valid specs that are unlikely to be meant, W2: warnings."""

from __future__ import annotations

from typing import ClassVar

from attngen.diagnostics import Diagnostic
from attngen.spec.expr import Expr


class Suspicion(Diagnostic):
    """A warning: the spec is compiled all the same. `expr` is the part of the statement that it is about."""

    severity: ClassVar[str] = "warning"

    expr: Expr | None = None

    @property
    def advice(self) -> str:
        """The cure, and how to silence the warning in a text or in Python."""
        silenced = f"allow {self.code}" if self.span is not None else f'allow="{self.code}"'
        return f"{super().advice}; if it is meant, state `{silenced}`"


class AlwaysTrue(Suspicion):
    code: ClassVar[str] = "W201"
    title: ClassVar[str] = "the mask allows every pair"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "remove `mask`, or compare what differs between pairs, as in q >= k or ids[b, q] == ids[b, k]"

    why: str


class NeverTrue(Suspicion):
    code: ClassVar[str] = "W202"
    title: ClassVar[str] = "the mask allows no pair"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "state which pairs take part: a row without keys gives O = 0"

    why: str


class ScaledTwice(Suspicion):
    code: ClassVar[str] = "W203"
    title: ClassVar[str] = "the score is scaled twice"
    label: ClassVar[str] = "`s` is already multiplied by scale, {scale}"
    help: ClassVar[str] = "remove the factor, or state `scale 1.0` and keep it"

    scale: str


class WithoutProduct(Suspicion):
    code: ClassVar[str] = "W204"
    title: ClassVar[str] = "the score does not depend on Q and K"
    label: ClassVar[str] = "it does not contain `s`, the scaled product of row q and key k"
    help: ClassVar[str] = "add `s` to it"


class OneValue(Suspicion):
    code: ClassVar[str] = "W205"
    title: ClassVar[str] = "a condition of the {statement} is always {value}"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "remove it, or compare what differs between pairs, as in q >= k or ids[b, q] == ids[b, k]"

    value: str
    why: str


class BranchNeverTaken(Suspicion):
    code: ClassVar[str] = "W206"
    title: ClassVar[str] = "a branch of the {statement} is never taken"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "{cure}"

    why: str
    cure: str


class WithoutEffect(Suspicion):
    code: ClassVar[str] = "W207"
    title: ClassVar[str] = "a term of the score has no effect"
    label: ClassVar[str] = "{term} is the same for all keys of a row, and softmax(S + c) = softmax(S)"
    help: ClassVar[str] = "remove it, or let it differ between keys, as bias[h, k] or slopes[h] * (k - q) does"

    term: str


class RowWithoutKeys(Suspicion):
    code: ClassVar[str] = "W208"
    title: ClassVar[str] = "{what} {index} has no key, whatever the lengths are"
    label: ClassVar[str] = "{shown} is false for every key of {what} {index}"
    help: ClassVar[str] = "allow a key for it, as q >= k allows its own position: a row without keys gives O = 0"

    what: str
    index: int
    shown: str


class WithoutKeys(Suspicion):
    code: ClassVar[str] = "W209"
    title: ClassVar[str] = "the mask does not depend on the key"
    label: ClassVar[str] = "it does not contain `k`: a row has all keys or none"
    help: ClassVar[str] = "state which keys take part, as k < lengths[b] does"


class OneElement(Suspicion):
    code: ClassVar[str] = "W210"
    title: ClassVar[str] = "every pair reads the same element of a dimension of `{name}`"
    label: ClassVar[str] = "index {position}, {index}, is always {value}"
    help: ClassVar[str] = "read what differs between pairs, or write {value} as index {position}"

    name: str
    position: int
    index: str
    value: int


class UnusedDefinition(Suspicion):
    code: ClassVar[str] = "W211"
    title: ClassVar[str] = "{what} `{name}` is not used"
    label: ClassVar[str] = "no statement reads it"
    help: ClassVar[str] = "remove it, or read it in a statement"

    what: str
    name: str
