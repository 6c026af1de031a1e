"""Products by wgmma of tiles that TMA copies: what they require, and how tiles lie in shared memory."""

from __future__ import annotations

from attngen.keywords import ScheduleName
from attngen.plan.arch import Arch, Feature
from attngen.plan.code_size import INLINED_UP_TO
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import refusal
from attngen.plan.shared_memory import COLUMN, SharedBuffer

NEEDED = (Feature.MBARRIER, Feature.TMA, Feature.WGMMA)
DTYPES = ("fp16", "bf16")
WARPGROUP_ROWS = 64  # M of a wgmma
SLAB = 64  # 16-bit columns of 128 bytes: what the swizzle permutes
SWIZZLE_ATOM = 1024  # bytes: eight rows of a slab, to which tiles are aligned; their sizes are multiples of it
PAGE_ROWS = 8  # rows that the swizzle of 128 bytes permutes together
WHY_SLABS = (
    "Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted, so that neither TMA nor wgmma "
    "meets a bank conflict"
)


def why_not(facts: SpecFacts, arch: Arch) -> str:
    """Why schedules of these instructions cannot compute the spec on `arch`; empty if they can."""
    return _why_not(facts, arch, facts.pair_cost)


def why_not_beside_terms(facts: SpecFacts, arch: Arch) -> str:
    """The same of a schedule that computes terms of rows once per row."""
    return _why_not(facts, arch, facts.cost_beside_terms)


def _why_not(facts: SpecFacts, arch: Arch, pair_cost: int) -> str:
    if not arch.has(*NEEDED):
        return "it needs TMA and wgmma"
    if facts.spec.dtype.name not in DTYPES:
        return "its products are of fp16 or bf16"
    if facts.spec.kernel.is_paged and (facts.spec.kernel.page_size or 1) % PAGE_ROWS:
        return f"TMA copies keys by pages of a stated size, a multiple of {PAGE_ROWS} rows"
    if pair_cost > INLINED_UP_TO:
        return f"it computes at most {INLINED_UP_TO} additions for each pair: code between its products is inlined"
    return ""


def refuse(facts: SpecFacts, arch: Arch, schedule: ScheduleName, pair_cost: int) -> None:
    """Raise PlanRefusal if a schedule of these instructions cannot compute the spec, each pair of which costs so much."""
    reason = _why_not(facts, arch, pair_cost)
    if not reason:
        return
    if not arch.has(*NEEDED):
        raise refusal("kernel", f"kernel {schedule} on {arch.name}", reason, "use kernel fused, or --arch sm_90a")
    large = f"a mask and a score that cost {pair_cost} additions"
    what = facts.spec.dtype if facts.spec.dtype.name not in DTYPES else large
    raise refusal("kernel", f"kernel {schedule} of {what}", reason, "use kernel fused")


def slabs(head_dim: int) -> int:
    """Slabs of SLAB columns that hold a head; zeros fill the last one."""
    return -(-head_dim // SLAB)


def slab_tiles(
    name: str, dtype: str, extents: tuple[int, ...], use: str, read: str | None = COLUMN, then: str = ""
) -> SharedBuffer:
    """Tiles in slabs of SLAB columns, swizzled as TMA and wgmma have them; `extents` are those before the columns."""
    buffer = SharedBuffer(name=name, element=dtype, shape=(*extents, SLAB), use=use, swizzled=True, read=read, then=then)
    assert buffer.bytes % SWIZZLE_ATOM == 0, buffer
    return buffer
