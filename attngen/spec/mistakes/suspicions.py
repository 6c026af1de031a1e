"""Valid specs that are unlikely to be meant, W2: warnings."""

from __future__ import annotations

from typing import ClassVar

from attngen.diagnostics import Diagnostic


class Suspicion(Diagnostic):
    """A warning: the spec is compiled all the same."""

    severity: ClassVar[str] = "warning"


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
    help: ClassVar[str] = "remove the factor of 1 / sqrt(head_dim), or state `scale 1.0` and keep it"

    scale: str


class WithoutProduct(Suspicion):
    code: ClassVar[str] = "W204"
    title: ClassVar[str] = "the score does not depend on Q and K"
    label: ClassVar[str] = "it does not contain `s`, the scaled product of row q and key k"
    help: ClassVar[str] = "add `s` to it, or ignore this warning if weights are to depend on positions alone"
