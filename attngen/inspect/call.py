"""A call whose cost is asked for before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attngen.inspect.work import Work, tile_kinds, work
from attngen.plan import Plan
from attngen.reference.problems import Array, Sample, Shape, without_values
from attngen.spec.attention import AttentionSpec


def defaults(spec: AttentionSpec) -> dict[str, int | float]:
    """Every param's default, or 1 if it has none."""
    return {p.name: 1 if p.default is None else p.default for p in spec.params}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a plan: one batch, and one head unless the spec states heads. Params left out have their defaults, and
    captured tensors sample values."""

    spec: AttentionSpec
    plan: Plan
    q_len: int
    kv_len: int
    params: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, int | float]:
        return {**defaults(self.spec), **self.params}

    @property
    def names(self) -> dict[str, int | float]:
        """All sizes and params."""
        return {**self._shape.sizes(self.spec), **self.numbers}

    @property
    def _shape(self) -> Shape:
        return Shape(batch=1, q_heads=1, kv_heads=1, q_len=self.q_len, kv_len=self.kv_len)

    @property
    def problem(self) -> Sample:
        """Its tensors; Q, K and V have a shape alone."""
        return without_values(self.spec, self._shape)

    def tiles(self, rows: int = 0) -> Array | None:
        """See `tile_kinds`, of head 0."""
        return tile_kinds(self.plan, self.problem, self.names, rows=rows)

    def work(self) -> Work:
        return work(self.spec, self.plan, self.problem, self.names)
