"""The tiled rung: the naive kernels with tiles in shared memory, and a block per row of the softmax."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.naive import refuse_overrides
from attngen.plan.plan import Decision, Plan
from attngen.plan.tiles import tile_bounds
from attngen.spec.attention import AttentionSpec

BLOCK = 64
WARPS = 8


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The only tiled plan there is: 64 x 64 outputs a block, 4 x 4 a thread."""
    if spec.schedule.rung == "tiled":
        refuse_overrides(spec, "tiled")
    decisions = (
        Decision("BLOCK_Q x BLOCK_KV", f"{BLOCK} x {BLOCK}", "each element in shared memory is used 64 times"),
        Decision("THREADS", str(32 * WARPS), "16 x 16 threads, each with 4 x 4 outputs in registers"),
        Decision("scores", "in global memory", "the softmax needs whole rows; the fused rung removes this"),
    )
    return Plan("tiled", "tiled", arch, BLOCK, BLOCK, WARPS, 1, tile_bounds(spec), decisions)
