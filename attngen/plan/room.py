"""Whether a thread has registers enough for a tile: by a table of what ptxas found, or by an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch


@dataclass(frozen=True, slots=True)
class Estimated:
    """What must be live in a thread at once, by estimate."""

    need: int
    have: int | None = None  # if threads have different numbers of them; None: the registers of an SM, shared evenly

    def lacks(self, arch: Arch, threads: int) -> str:
        """Why they do not suffice in a block of so many threads, in words; empty if they do."""
        limit = self.have or min(arch.max_registers_per_thread, arch.registers_per_sm // threads)
        return f"needs about {self.need} registers a thread; the limit is {limit}" if self.need > limit else ""


@dataclass(frozen=True, slots=True)
class Counted:
    """Head sizes: the widest of which ptxas spills nothing (`attngen.plan.register_table`), and what counts of the spec's."""

    widest: int
    size: int

    @property
    def suffices(self) -> bool:
        return self.size <= self.widest

    def lacks(self, arch: Arch, threads: int) -> str:
        """Why registers do not suffice, in words; empty if they do."""
        if self.suffices:
            return ""
        most = self.widest
        return f"has registers for head sizes up to {most}" if most else "has too few registers for this mask or score"


Room = Estimated | Counted
PLENTY = Estimated(0)
