"""How many keys a row visits, by the closed forms of its mask: what a choice of tiles by lengths needs to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attngen.plan.facts import fact
from attngen.plan.tiles import Q_HI, Q_LO, TileBounds
from attngen.spec.evaluate import Numbers, on_numbers
from attngen.spec.expr import inputs_in, names_in

LENGTHS = ("q_len", "kv_len")


def keys_of_rows(bounds: TileBounds, rows: Sequence[int], q_len: int, kv_len: int) -> tuple[int, ...]:
    """The number of keys that each of `rows` visits; empty if the closed forms read more than lengths, or have no value."""
    hull = _hull_of_lengths(bounds)
    if hull is None:
        return ()
    try:
        ends = [hull({"q_len": q_len, "kv_len": kv_len, Q_LO.name: row, Q_HI.name: row}) for row in rows]
    except ArithmeticError:  # a division by a length of 0
        return ()
    return tuple([max(end - begin, 0) for begin, end in ends])


@fact
def _hull_of_lengths(bounds: TileBounds) -> Callable[[Numbers], tuple[int, ...]] | None:
    forms = (bounds.kv_begin, bounds.kv_end)
    known = {*LENGTHS, Q_LO.name, Q_HI.name}
    return on_numbers(*forms) if names_in(*forms) <= known and not inputs_in(*forms) else None
