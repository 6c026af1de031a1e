"""Phases of mbarriers: who arrives, how many bytes are announced, when a phase ends, and who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from attngen.drawings.picture import LETTER, Picture, number, width_of

LANE, STEP, LEFT = 66.0, 30.0, 12.0


@dataclass(frozen=True, slots=True)
class Use:
    """An arrival at a barrier (`waits` is False), or a wait, by `threads` threads of `who`, in the order `at` of the run.

    `phase`: how many phases of the barrier have ended before. `number`: announced bytes of an arrival, the parity of a wait.
    """

    barrier: str
    who: str
    threads: int
    at: int
    waits: bool
    phase: int
    number: int

    @property
    def blocks(self) -> bool:
        """Whether a wait has to wait: the phase of its parity has not ended yet."""
        return self.waits and self.phase % 2 == self.number

    def words(self) -> str:
        several = f"{self.threads} threads of {self.who}" if self.threads > 1 else self.who
        if self.waits:
            until = "has ended, and so they go on" if not self.blocks else "ends"
            return f"{several}: wait until the phase of parity {self.number} {until}"
        return f"{several}: arrive in phase {self.phase}{f', and announce {self.number} bytes' if self.number else ''}"


def barriers_picture(title: str, uses: Sequence[Use]) -> Picture:
    """A band for each barrier, whose colour changes with each phase; arrivals above it, waits below."""
    says = (
        "From a traced run of one block on the emulated device: the first uses of the mbarriers that are used first. A column "
        "is a step, in the order of the run; another run may have another order. A band is an mbarrier, and its colour "
        "changes when a phase ends: when all arrivals and all announced bytes are there. ▼ arrives (with +n, it announces n "
        "bytes of copies). △ waits for the end of a phase, given by its parity, 0 or 1; ○ waits for one that has ended "
        "already, and goes on at once. Each is labelled by the role that does it."
    )
    drawn = Picture(title, says)
    roles = list(dict.fromkeys(use.who for use in uses))
    names = dict(zip(roles, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    lanes = sorted({use.barrier for use in uses}, key=_numbered)
    left = LEFT + max(width_of(lane) for lane in lanes)
    columns = {at: i for i, at in enumerate(sorted({use.at for use in uses}))}
    end = left + (len(columns) + 0.5) * STEP
    for i, lane in enumerate(lanes):
        y = i * LANE + 22.0
        drawn.text(left - 10.0, y + 13.0, lane, "", "end")
        mine = [use for use in uses if use.barrier == lane]
        changes = [(phase, columns[next(iter(group)).at]) for phase, group in groupby(mine, key=lambda use: use.phase)]
        begins = [0.0, *(column * STEP for _, column in changes[1:])]
        for (phase, _), begin, until in zip(changes, begins, [*begins[1:], end - left], strict=True):
            drawn.rect(left + begin, y, until - begin - 1.0, 18.0, f"c{phase % 2 * 2}", f"phase {phase}, parity {phase % 2}")
            if until - begin > 44.0:
                drawn.text(left + begin + 4.0, y + 13.0, f"phase {phase}", "tiny quiet")
        for use in mine:
            _mark(drawn, use, left + (columns[use.at] + 0.5) * STEP, y, names.get(use.who, "?"))
    x, y = 0.0, len(lanes) * LANE + 20.0
    for who in roles:
        words = f"{names.get(who, '?')}: {who}"
        if x and x + width_of(words) > end:
            x, y = 0.0, y + 18.0
        drawn.text(x, y, words, "quiet")
        x += width_of(words) + 3 * LETTER
    return drawn


def _numbered(barrier: str) -> tuple[str, int, str]:
    """Barriers of an array by their number in it."""
    name, _, rest = barrier.partition("[")
    at, _, kind = rest.partition("]")
    return name, int(at or 0), kind


def _mark(drawn: Picture, use: Use, x: float, y: float, name: str) -> None:
    drawn.rect(x - 9.0, y - 14.0, 18.0, 54.0, "none", use.words())
    if not use.waits:
        drawn.path(f"M{number(x - 5)} {number(y - 4)}h10l-5 8z", "ink")
        drawn.text(x, y - 7.0, name, "tiny", "middle")
        if use.number:
            drawn.text(x, y + 29.0, f"+{use.number}", "tiny quiet", "middle")
    elif use.blocks:
        drawn.path(f"M{number(x - 5)} {number(y + 28)}h10l-5 -8z", "stroke")
        drawn.text(x, y + 38.0, name, "tiny", "middle")
    else:
        drawn.path(f"M{number(x - 3.5)} {number(y + 24)}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0", "stroke")
        drawn.text(x, y + 38.0, name, "tiny", "middle")
