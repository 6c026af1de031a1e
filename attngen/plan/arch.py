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
    CVT_E4M3 = "cvt between e4m3 and fp16: numbers of 8 bits become fp16, two at a time"
    REDUX = "redux.sync: a sum over lanes of a warp by one instruction"
    RED_V4 = "red.global.add.v4.f32: four fp32 numbers added in global memory by one instruction"
    MBARRIER = "mbarrier: barriers that count bytes and arrivals"
    TMA = "cp.async.bulk.tensor: whole tiles copied by one instruction"
    GRID_DEPENDENCY = "griddepcontrol: a kernel that starts while the one before it still runs"
    WGMMA = "wgmma: matrix products issued by a warpgroup, operands in shared memory"
    TCGEN05 = "tcgen05: matrix products with accumulators in tensor memory"


@dataclass(frozen=True, slots=True)
class Arch:
    """One target of the compiler. Sizes are in bytes; the peak rates are those of one GPU of the architecture, `gpu`."""

    name: str
    what: str
    shared_per_block: int  # the most dynamic shared memory that a block may ask for
    shared_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    gpu: str
    tensor_tflops: float  # the rate of dense matrix products with operands of 16 bits and sums in fp32
    fp32_tflops: float  # the rate of fused multiply-adds outside of the tensor cores
    bandwidth_tb_s: float  # the rate of its memory
    features: frozenset[Feature]
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255

    @property
    def shared_reserved(self) -> int:
        """What the system takes of every block beside its own."""
        return self.shared_per_sm - self.shared_per_block

    def has(self, *features: Feature) -> bool:
        return self.features.issuperset(features)


KIB = 1024
_TURING = frozenset({Feature.LDMATRIX})
_AMPERE = _TURING | {Feature.CP_ASYNC, Feature.MMA_FP16, Feature.MMA_BF16, Feature.MMA_TF32, Feature.REDUX}
_ADA = _AMPERE | {Feature.CVT_E4M3}
_HOPPER = _ADA | {Feature.RED_V4, Feature.MBARRIER, Feature.TMA, Feature.GRID_DEPENDENCY, Feature.WGMMA}
_BLACKWELL = _ADA | {Feature.RED_V4, Feature.MBARRIER, Feature.TMA, Feature.GRID_DEPENDENCY, Feature.TCGEN05}
_BLACKWELL_CONSUMER = _ADA | {Feature.RED_V4, Feature.MBARRIER, Feature.TMA, Feature.GRID_DEPENDENCY}

# Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Rates: NVIDIA's data sheets of the GPU
# named, those of tensor cores without sparsity (half of what a sheet prints with it); of the RTX 5090 its whitepaper.
ROWS: tuple[Arch, ...] = (
    Arch("sm_75", "Turing: T4, RTX 20", 64 * KIB, 64 * KIB, 1024, 16, "T4", 65, 8.1, 0.320, _TURING),
    Arch("sm_80", "Ampere: A100", 163 * KIB, 164 * KIB, 2048, 32, "A100 80GB SXM", 312, 19.5, 2.039, _AMPERE),
    Arch("sm_86", "Ampere: A10, RTX 30", 99 * KIB, 100 * KIB, 1536, 16, "A10", 125, 31.2, 0.600, _AMPERE),
    Arch("sm_89", "Ada: L4, L40, RTX 40", 99 * KIB, 100 * KIB, 1536, 24, "L40", 181.05, 90.5, 0.864, _ADA),
    Arch("sm_90a", "Hopper: H100, H200", 227 * KIB, 228 * KIB, 2048, 32, "H200 SXM", 989.5, 67, 4.8, _HOPPER),
    Arch("sm_100a", "Blackwell: B200", 227 * KIB, 228 * KIB, 2048, 32, "B200", 2250, 75, 8.0, _BLACKWELL),
    Arch("sm_120a", "Blackwell: RTX 50", 99 * KIB, 100 * KIB, 1536, 24, "RTX 5090", 209.5, 104.8, 1.792, _BLACKWELL_CONSUMER),
)

ARCHES: dict[str, Arch] = {row.name: row for row in ROWS}
DEFAULT_ARCH = "sm_80"


def find_arch(name: str) -> Arch | None:
    """The row called `name`, with or without the suffix of architecture-specific features (`sm_90` finds `sm_90a`)."""
    return ARCHES.get(name) or ARCHES.get(name + "a")
