"""Which schedules there are, which of them suit a spec on an architecture, and which is preferred."""

from __future__ import annotations

from attngen.keywords import ScheduleName
from attngen.plan.arch import ARCHES, DEFAULT_ARCH, Arch
from attngen.plan.facts import SpecFacts, facts_of
from attngen.plan.plan import Schedule, refusal
from attngen.schedules.decode import DECODE, DECODE_WGMMA
from attngen.schedules.fused_mma import FUSED_MMA
from attngen.schedules.fused_simt import FUSED_SIMT
from attngen.schedules.hopper import HOPPER, HOPPER_FP8, HOPPER_FP32, HOPPER_WIDE
from attngen.schedules.naive import NAIVE
from attngen.schedules.tiled import TILED
from attngen.schedules.wgmma import WGMMA
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP8_DTYPES, FP32

# In order of preference under one keyword.
SCHEDULES: tuple[Schedule, ...] = (
    NAIVE, TILED, FUSED_MMA, FUSED_SIMT, WGMMA, HOPPER, HOPPER_WIDE, HOPPER_FP8, HOPPER_FP32, DECODE_WGMMA, DECODE,
)  # fmt: skip
UNFUSED = {s.keyword for s in SCHEDULES if not s.is_fused}  # these have several kernels, with S in global memory
FUSED: ScheduleName = "fused"
# "auto" is the first that suits: the least work; and of those with O(S) memory, if there is one.
AUTOMATIC: tuple[ScheduleName, ...] = ("hopper", FUSED, "tiled", "naive")


def schedules_of(facts: SpecFacts) -> tuple[Schedule, ...]:
    """The schedules of the direction that `facts` are for."""
    if not facts.wanted:
        return SCHEDULES
    from attngen.schedules.backward import BACKWARD_SCHEDULES  # imported late: most commands need none

    return BACKWARD_SCHEDULES


def keywords_of(facts: SpecFacts, arch: Arch) -> tuple[ScheduleName, ...]:
    """The keywords of all schedules that suit the facts on `arch`."""
    return tuple(dict.fromkeys(s.keyword for s in schedules_of(facts) if s.suits(facts, arch)))


def schedules_for(spec: AttentionSpec, arch: Arch, wanted: tuple[str, ...] = ()) -> tuple[ScheduleName, ...]:
    """The keywords of all schedules that suit the spec on `arch`: of forwards, or of backwards with the gradients `wanted`."""
    return keywords_of(facts_of(spec, wanted), arch)


def schedule_of(facts: SpecFacts, arch: Arch, keyword: ScheduleName) -> Schedule:
    """The schedule that `keyword` stands for; one that does not suit if there is no other: it refuses with the reason, one that
    computes the spec on other architectures before one that never does, and before those for other head sizes and types.

    Raises PlanRefusal if the keyword has no backward.
    """
    named = [s for s in schedules_of(facts) if s.keyword == keyword]
    if not named:
        others = ", ".join(dict.fromkeys(s.keyword for s in schedules_of(facts)))
        what = f"the {keyword} schedule has no backward"
        raise refusal(
            "kernel", what, f"the call requests gradients by {keyword}", f"compute gradients by auto, or one of: {others}"
        )
    of_bytes, of_fp32 = facts.spec.dtype in FP8_DTYPES, facts.spec.dtype is FP32
    named = [s for s in named if s.multiplies_bytes == of_bytes] or named
    named = [s for s in named if s.multiplies_terms == of_fp32] or named
    elsewhere = [s for s in named if not any(s.limits(facts.spec))]
    of_size = [s for s in named if "head_dim" not in dict(s.limits(facts.spec))]
    return next((s for s in named if s.suits(facts, arch)), (elsewhere or of_size or named)[-1])


def automatic(facts: SpecFacts, arch: Arch) -> ScheduleName:
    """The keyword that "auto" stands for."""
    suitable = {s.keyword for s in schedules_of(facts) if s.suits(facts, arch)}
    return next((keyword for keyword in AUTOMATIC if keyword in suitable), AUTOMATIC[-1])


def default_arch(*keywords: str | None) -> str:
    """The architecture to plan for if none is named: that of the most GPUs, or the oldest that has what the keywords need."""
    needs = [[s.needs for s in SCHEDULES if s.keyword == keyword] or [()] for keyword in keywords]
    usual = (ARCHES[DEFAULT_ARCH], *ARCHES.values())
    return next((a.name for a in usual if all(any(a.has(*n) for n in of_keyword) for of_keyword in needs)), DEFAULT_ARCH)
