"""Architectures as data. Code branches on features, never on names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Feature(Enum):
    """A family of instructions that a schedule may need."""

    CP_ASYNC = "cp.async: asynchronous copies from global to shared memory"
    LDMATRIX = "ldmatrix: matrix fragments from shared memory"
    MMA_FP16 = "mma.sync on fp16 with 16 x 8 x 16 tiles"
    MMA_BF16 = "mma.sync on bf16"
    MMA_TF32 = "mma.sync on tf32: fp32 with 10 bits of fraction"
    MBARRIER = "mbarrier: barriers that count bytes and arrivals"
    TMA = "cp.async.bulk.tensor: whole tiles copied by one instruction"
    WGMMA = "wgmma: matrix products issued by a warpgroup, operands in shared memory"
    TCGEN05 = "tcgen05: matrix products with accumulators in tensor memory"


@dataclass(frozen=True, slots=True)
class Arch:
    """One target of the compiler. Sizes in bytes; `shared_per_block` is the most dynamic shared memory a block may ask for."""

    name: str
    what: str
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    max_registers_per_thread: int
    max_threads_per_block: int
    features: frozenset[Feature]

    def has(self, *features: Feature) -> bool:
        return self.features.issuperset(features)


KIB = 1024
_TURING = frozenset({Feature.LDMATRIX})
_AMPERE = _TURING | {Feature.CP_ASYNC, Feature.MMA_FP16, Feature.MMA_BF16, Feature.MMA_TF32}
_HOPPER = _AMPERE | {Feature.MBARRIER, Feature.TMA, Feature.WGMMA}
_BLACKWELL = _AMPERE | {Feature.MBARRIER, Feature.TMA, Feature.TCGEN05}
_BLACKWELL_CONSUMER = _AMPERE | {Feature.MBARRIER, Feature.TMA}


def _arch(name: str, what: str, block_kib: int, sm_kib: int, features: frozenset[Feature]) -> Arch:
    return Arch(name, what, block_kib * KIB, sm_kib * KIB, 65536, 255, 1024, features)


# Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
ROWS: tuple[Arch, ...] = (
    _arch("sm_75", "Turing: T4, RTX 20", 64, 64, _TURING),
    _arch("sm_80", "Ampere: A100", 163, 164, _AMPERE),
    _arch("sm_86", "Ampere: A10, RTX 30", 99, 100, _AMPERE),
    _arch("sm_89", "Ada: L4, L40, RTX 40", 99, 100, _AMPERE),
    _arch("sm_90a", "Hopper: H100, H200", 227, 228, _HOPPER),
    _arch("sm_100a", "Blackwell: B200", 227, 228, _BLACKWELL),
    _arch("sm_120a", "Blackwell: RTX 50", 99, 100, _BLACKWELL_CONSUMER),
)

ARCHES: dict[str, Arch] = {row.name: row for row in ROWS}
DEFAULT_ARCH = "sm_80"


def find_arch(name: str) -> Arch | None:
    """The row called `name`, with or without the suffix of architecture-specific features (`sm_90` finds `sm_90a`)."""
    return ARCHES.get(name) or ARCHES.get(name + "a")
