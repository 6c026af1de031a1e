"""Occupancy: blocks per multiprocessor, from the registers and shared memory of each kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from attngen.device.cuda.compiler import Resources, compile_text, nvrtc_version
from attngen.device.protocol import DeviceError
from attngen.diagnostics import counted
from attngen.emit.program import KernelEntry, Program
from attngen.plan.arch import Arch

REGISTER_UNIT = 256  # registers of a warp are allocated in multiples of it
SCHEDULERS = 4  # per multiprocessor, each with its quarter of the registers


def occupancy(arch: Arch, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Concurrent blocks per multiprocessor and the resource that limits them, as in NVIDIA's calculator: for blocks of
    `threads` with `registers` per thread and `shared_bytes` of static and dynamic shared memory."""
    warps = -(-threads // 32)
    of_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    of_a_block = shared_bytes + arch.shared_reserved
    limits = {
        "threads": arch.max_threads_per_sm // (32 * warps),
        "blocks": arch.max_blocks_per_sm,
        "registers": arch.registers_per_sm // SCHEDULERS // of_a_warp * SCHEDULERS // warps,
        "shared memory": arch.shared_per_sm // of_a_block if of_a_block else arch.max_blocks_per_sm,
    }
    limit = min(limits, key=limits.__getitem__)
    return limits[limit], limit


def explain_occupancy(source: Program, arch: Arch) -> str:
    """Registers, spills, shared memory and occupancy of every kernel of `source`, or the reason why they are unknown."""
    try:
        version = nvrtc_version()
    except DeviceError as error:
        return f"registers and occupancy: unknown, because the compiler is missing: {error}\n"
    lines = [f"registers and occupancy, by NVRTC {version} for {arch.name}"]
    for r in kernel_resources(source, arch, compile_text(source).resources()):
        spilled = f"spills of {r.spill_bytes} bytes" if r.spill_bytes else "no spills"
        used = f"{r.threads} threads, {r.registers} registers each, {spilled}, {r.shared_bytes} bytes of shared memory"
        warps = f"{r.warps_per_sm} of {r.max_warps_per_sm} warps"
        blocks = counted(r.blocks_per_sm, "block")
        lines += [f"  {r.kernel}: {used}", f"      {blocks} on a multiprocessor at once: {warps}; limited by {r.limited_by}"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one kernel: registers per thread, spilled bytes, static and dynamic shared memory, and its occupancy."""

    kernel: str
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    warps_per_sm: int
    max_warps_per_sm: int
    limited_by: str


def kernel_resources(source: Program, arch: Arch, compiled: Iterable[Resources]) -> list[KernelResources]:
    """The resources of every kernel of `source`, in launch order."""
    found = {r.entry: r for r in compiled}
    return [_resources(entry, found[entry.name], arch) for entry in source.kernels]


def _resources(entry: KernelEntry, r: Resources, arch: Arch) -> KernelResources:
    threads, shared = prod(entry.block), entry.shared_bytes + r.static_shared_bytes
    spilled = r.spill_store_bytes + r.spill_load_bytes
    blocks, limit = occupancy(arch, threads, r.registers, shared)
    warps, most = blocks * -(-threads // 32), arch.max_threads_per_sm // 32
    return KernelResources(entry.name, threads, r.registers, spilled, shared, blocks, warps, most, limit)
