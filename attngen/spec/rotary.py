"""Rotary position embeddings: rows of Q and K are rotated by angles that depend on their positions.

For a row x at position p, each pair (x[i], x[j]) of its first `dim` elements becomes

    (x[i] * c - x[j] * s, x[i] * s + x[j] * c)      c = cosines[p, n], s = sines[p, n]

where pair n is (n, n + dim / 2) of `halves` (GPT-NeoX, Llama) or (2 n, 2 n + 1) if `interleaved` (GPT-J). The result is rounded
to the type of Q and K, as if a caller had rotated them (Su et al. 2021, arXiv:2104.09864).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from attngen.spec.expr import Expr, Gather, Type, constant, gather, inputs_in, name, names_in
from attngen.spec.operator import add, sub

if TYPE_CHECKING:
    from attngen.spec.attention import AttentionSpec

Pairs = Literal["halves", "interleaved"]
ROTARY_MULTIPLE = 16  # divides `dim`: a part of a row has whole copies of 16 bytes in both of its halves
ROWS_AT_THE_END = sub(add(name("q", Type.INT), name("kv_len", Type.INT)), name("q_len", Type.INT))
KEYS_IN_ORDER = name("k", Type.INT)
IN_ORDER = (name("q", Type.INT), KEYS_IN_ORDER)  # positions counted from the first row and key


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of the first `dim` elements of rows of Q and K.

    `cosines` and `sines` name inputs [positions, dim / 2]. `q` and `k` are the positions of row q and key k, integer
    expressions; by default the last row stands at the last key.
    """

    dim: int
    pairs: Pairs
    cosines: str
    sines: str
    q: Expr = ROWS_AT_THE_END
    k: Expr = KEYS_IN_ORDER

    @property
    def tables(self) -> tuple[str, str]:
        return self.cosines, self.sines

    @property
    def positions(self) -> tuple[Expr, Expr]:
        """Those of rows and of keys."""
        return self.q, self.k

    @property
    def has_usual_positions(self) -> bool:
        """Whether keys stand at their numbers, and the last row at the last key."""
        return self.positions == (ROWS_AT_THE_END, KEYS_IN_ORDER)

    def elements(self) -> tuple[Gather, ...]:
        """The last element of each table that each position reads, as expressions."""
        last = constant(self.dim // 2 - 1)
        return tuple(gather(table, Type.FLOAT, (at, last)) for at in self.positions for table in self.tables)


def without_rotary(spec: AttentionSpec) -> AttentionSpec:
    """`spec` of rows that are rotated already: without the inputs and params that only the rotation reads."""
    if spec.rotary is None:
        return spec
    read = {*spec.rotary.tables} | inputs_in(*spec.rotary.positions) | names_in(*spec.rotary.positions)
    others = spec.expressions.values()
    unused = read - inputs_in(*others) - names_in(*others)
    return replace(
        spec,
        rotary=None,
        inputs=tuple(i for i in spec.inputs if i.name not in unused),
        params=tuple(p for p in spec.params if p.name not in unused),
    )
