"""The drawings of a puzzle: of the student's file, or of the solution, in a traced run of the first case."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from attngen.device.emulated.tracing import LANES, AccessSite, Step, Watch
from attngen.diagnostics import ArgumentError
from attngen.drawings.banks import AT_ONCE, Access, accesses_picture
from attngen.drawings.barriers import barriers_picture
from attngen.drawings.fragments import fragments_of
from attngen.drawings.levels import Bars, bars_picture
from attngen.drawings.picture import Picture, stacked
from attngen.inspect.drawn import STEPS, uses_of
from attngen.puzzles.folder import Folder
from attngen.puzzles.puzzle import Case
from attngen.puzzles.running import Ran, compile_program, program_of, run_case
from attngen.puzzles.verdict import first_case

MOST_SITES = 4
SECTOR = 32
TEXT = 100  # characters of a statement


def drawn_puzzle(what: str, folder: Folder, text: str, whose: str) -> Picture:
    """The drawing `what`, a name of `attngen.drawings.catalogue`, of the kernel in `text`, which is `whose`, in words.

    Raises ArgumentError with the reason if a puzzle has nothing of the kind; EmulationError, CompilationError, DeviceError.
    """
    if what not in PICTURES:
        raise ArgumentError(f"{what} is drawn of specs; of puzzles there are {', '.join(PICTURES)}")
    return PICTURES[what](folder, text, f"Puzzle {folder.number}, {folder.puzzle.title}, {whose}")


def _ran(folder: Folder, text: str, watched: int) -> tuple[Case, Ran]:
    case = first_case(folder)
    threads = tuple(range(min(prod(case.threads), watched)))
    kernel = compile_program(program_of(folder, text, folder.name), watch=Watch(0, threads, STEPS))
    return case, run_case(kernel, case)


def _fragment(folder: Folder, text: str, title: str) -> Picture:
    pictures = fragments_of(folder.text)
    if not pictures:
        raise ArgumentError(f"puzzle {folder.number} has no fragments; puzzles 13, 14 and 18 have")
    says = " ".join(dict.fromkeys(picture.says for picture in pictures))
    return stacked(f"Puzzle {folder.number}, {folder.puzzle.title}: who holds which element", says, pictures)


def _bytes(folder: Folder, text: str, title: str) -> Picture:
    case, ran = _ran(folder, text, 0)
    sectors = SECTOR * sum(site.sectors for site in ran.traced.sites)
    counted = ran.counters
    arrays = [one for one in case.given.values() if isinstance(one, np.ndarray)]
    least = sum(one.nbytes for one in arrays) + sum(ran.written[name].nbytes for name in ran.written if name not in case.given)
    values = {
        "each array once": {"": float(least)},
        "global, requested": {"": float(sum(counted.bytes_read.values()) + sum(counted.bytes_written.values()))},
        "global, in sectors": {"": float(sectors)},
        "shared memory": {"": float(counted.shared_bytes_read + counted.shared_bytes_written)},
    }
    says = (
        f"With {case.what}: bytes that instructions request, and the sectors of 32 bytes that warps touch, which is what "
        "memory moves. More bytes in sectors than requested: accesses that are not coalesced. More than each array once: no "
        "reuse."
    )
    return bars_picture(f"{title}: bytes by level of memory", says, Bars(values, "bytes"))


def _swizzle(folder: Folder, text: str, title: str) -> Picture:
    _, ran = _ran(folder, text, LANES)
    steps: dict[AccessSite, list[Step]] = {}
    for step in ran.traced.steps:
        buffer = step.site.buffer
        if buffer is not None and buffer.is_shared and step.width:
            steps.setdefault(step.site, []).append(step)
    accesses = [_access(site, found) for site, found in steps.items() if site.wavefronts]
    if not accesses:
        raise ArgumentError(f"this kernel of puzzle {folder.number} does not access shared memory by lanes")
    accesses.sort(key=lambda one: -one.wavefronts)
    return accesses_picture(f"{title}: banks of shared memory", accesses[:MOST_SITES])


def _access(site: AccessSite, steps: list[Step]) -> Access:
    """The first access of the warp: of the lanes that are served together."""
    assert site.buffer is not None
    first = [step for step in steps if (step.epoch, step.order) == (steps[0].epoch, steps[0].order)]
    together = [step for step in first if step.thread < AT_ONCE // min(max(site.width, 4), 16)]
    lanes = tuple((step.thread, site.buffer.offset + step.offset, step.width) for step in together)
    where = f"line {site.place.line}, {site.what} {'to' if site.writes else 'from'} {site.buffer.label}"
    return Access(where, " ".join(site.place.text.split())[:TEXT], lanes)


def _barriers(folder: Folder, text: str, title: str) -> Picture:
    _, ran = _ran(folder, text, 1024)
    uses = uses_of(ran.traced.steps, lambda thread: f"warp {thread // LANES}")
    if not uses:
        raise ArgumentError(f"this kernel of puzzle {folder.number} uses no mbarrier; puzzles 16 to 19 do")
    return barriers_picture(f"{title}: phases of mbarriers", uses)


PICTURES: dict[str, Callable[[Folder, str, str], Picture]] = {
    "bytes": _bytes,
    "swizzle": _swizzle,
    "fragment": _fragment,
    "barriers": _barriers,
}
