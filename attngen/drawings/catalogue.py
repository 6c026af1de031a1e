"""What there is to draw: the names of `attngen draw`, in the order in which they help to read a kernel."""

from __future__ import annotations

DRAWINGS: dict[str, str] = {
    "tiles": "the walk over tiles: full, partial and empty ones of a mask, and the order of each block of rows",
    "bytes": "bytes by level of memory, of one kernel or beside other schedules, counted on the emulated device",
    "blocks": "work tiles over multiprocessors: which blocks run where and when, and who waits at the end",
    "swizzle": "banks of shared memory: rows as they would lie and as they lie, or what a warp asks of each bank",
    "fragment": "who holds which element: A, B and D of mma, sums of wgmma, and what ldmatrix loads",
    "timeline": "the pipeline: copies, products and softmax of a traced run",
    "barriers": "phases of mbarriers in a traced run: who arrives, which bytes are announced, who waits",
}
