"""The naive rung: the textbook. Three plain kernels with the scores in global memory, a thread per output element."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.plan import Decision, Plan, refusal
from attngen.plan.tiles import tile_bounds
from attngen.spec.attention import AttentionSpec

THREADS = 128


def refuse_overrides(spec: AttentionSpec) -> None:
    """Raise PlanRefusal where the spec sets what this rung does not have."""
    asked = spec.schedule
    for field, value in (("tile", asked.block_q), ("stages", asked.stages), ("warps", asked.warps)):
        if value is not None:
            raise refusal("kernel", f"the naive kernels take no `{field}`", f"{field} {value} asked for", f"remove `{field}`")


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The only naive plan there is."""
    refuse_overrides(spec)
    weights = spec.normalize != "none"  # else the scores are the weights
    what = "scores, row weights and weighted sum" if weights else "scores and weighted sum"
    decisions = (
        Decision("kernels", "3" if weights else "2", f"{what}, each as its equation reads"),
        Decision("THREADS", str(THREADS), "enough warps to hide latency; the kernels share nothing between threads"),
        Decision("scores", "in global memory", "O(q_len * kv_len) bytes, which the other schedules reduce or avoid"),
    )
    return Plan("naive", "naive", arch, 1, THREADS, THREADS // 32, 1, tile_bounds(spec), decisions)
