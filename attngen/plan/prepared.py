"""Rows that a kernel before the others prepares: what those read in place of the tensors of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from attngen.plan.facts import SpecFacts, facts_of
from attngen.plan.memo import remembered
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.dtypes import FP8_DTYPES, FP16
from attngen.spec.expr import names_in


@dataclass(frozen=True, slots=True)
class OutOfPages(KernelRequest):
    """That of a call whose keys a kernel has copied from their pages, if they have any: they lie as padded sequences."""

    @property
    def is_paged(self) -> bool:
        return False


def has_bytes(spec: AttentionSpec) -> bool:
    """Whether K and V have 8 bits, and Q and O more."""
    q, k, v, o = spec.dtypes.values()
    return {k, v} <= {*FP8_DTYPES} and q not in FP8_DTYPES and o is q


def with_converted_keys(spec: AttentionSpec) -> AttentionSpec:
    """`spec` with keys and values of the type of Q, in no pages: in workspaces they lie as those of padded sequences."""
    stated = {field.name: getattr(spec.kernel, field.name) for field in fields(KernelRequest)}
    return replace(spec, k_dtype=None, v_dtype=None, kernel=OutOfPages(**(stated | {"page_size": None})))


@remembered
def facts_of_converted(facts: SpecFacts) -> SpecFacts:
    """The facts of that spec."""
    return facts_of(with_converted_keys(facts.spec), facts.wanted, facts.deterministic)


def converted_types(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """The limits of schedules whose keys and values of 8 bits are converted before, and which multiply by a scale of V."""
    if spec.is_mixed and not has_bytes(spec):
        yield "dtype", "beside tensors of one type it has K and V of 8 bits, with Q and O of one other"
    if scales_keys(spec) and spec.dtype is FP16:
        yield "scaled v", "weights times scales of V that differ from key to key exceed the range of fp16"


def scales_keys(spec: AttentionSpec) -> bool:
    """Whether the scale of V differs from key to key."""
    return spec.v_scale is not None and "k" in names_in(spec.v_scale)
