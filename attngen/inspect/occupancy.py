"""Occupancy: blocks per multiprocessor, from the registers and shared memory of each kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from attngen.device.cuda.compiler import Resources, compile_text, nvrtc_version
from attngen.device.protocol import DeviceError
from attngen.emit.program import KernelEntry, Program
from attngen.plan.arch import Arch

REGISTER_UNIT = 256  # registers of a warp are allocated in multiples of it
SCHEDULERS = 4  # of a multiprocessor, each with its quarter of the registers


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Concurrent `blocks` per multiprocessor, their `warps` of at most `most`, and the resource that limits them."""

    blocks: int
    warps: int
    most: int
    limit: str


def occupancy(arch: Arch, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The occupancy as in NVIDIA's calculator, for blocks of `threads` with `registers` per thread and `shared_bytes` of static
    and dynamic shared memory."""
    warps = -(-threads // 32)
    of_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    of_a_block = shared_bytes + arch.shared_reserved
    limits = {
        "threads": arch.max_threads_per_sm // (32 * warps),
        "blocks": arch.max_blocks_per_sm,
        "registers": arch.registers_per_sm // SCHEDULERS // of_a_warp * SCHEDULERS // warps,
        "shared memory": arch.shared_per_sm // of_a_block if of_a_block else arch.max_blocks_per_sm,
    }
    blocks = min(limits.values())
    limit = next(name for name, n in limits.items() if n == blocks)
    return Occupancy(blocks, blocks * warps, arch.max_threads_per_sm // 32, limit)


def explain_occupancy(source: Program, arch: Arch) -> str:
    """Registers, spills, shared memory and occupancy of every kernel of `source`, or the reason why they are unknown."""
    try:
        version = nvrtc_version()
    except DeviceError as error:
        return f"registers and occupancy: unknown, because the compiler is missing: {error}\n"
    lines = [f"registers and occupancy, by NVRTC {version} for {arch.name}"]
    for found in kernel_resources(source, arch, compile_text(source).resources()):
        lines += _lines(found)
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one kernel: sizes in bytes, registers per thread, static and dynamic shared memory."""

    kernel: str
    threads: int
    registers: int
    spilled: int
    shared: int
    occupancy: Occupancy

    def as_data(self) -> dict[str, object]:
        """Plain values, for JSON."""
        o = self.occupancy
        return {
            "kernel": self.kernel,
            "threads": self.threads,
            "registers": self.registers,
            "spill_bytes": self.spilled,
            "shared_bytes": self.shared,
            "blocks_per_sm": o.blocks,
            "warps_per_sm": o.warps,
            "max_warps_per_sm": o.most,
            "limited_by": o.limit,
        }


def kernel_resources(source: Program, arch: Arch, compiled: Iterable[Resources]) -> list[KernelResources]:
    """The resources of every kernel of `source`, in launch order."""
    found = {r.entry: r for r in compiled}
    return [_resources(entry, found[entry.name], arch) for entry in source.kernels]


def _resources(entry: KernelEntry, r: Resources, arch: Arch) -> KernelResources:
    threads, shared = prod(entry.block), entry.shared_bytes + r.static_shared_bytes
    spilled = r.spill_store_bytes + r.spill_load_bytes
    return KernelResources(entry.name, threads, r.registers, spilled, shared, occupancy(arch, threads, r.registers, shared))


def _lines(found: KernelResources) -> list[str]:
    o = found.occupancy
    spilled = f"spills of {found.spilled} bytes" if found.spilled else "no spills"
    blocks = "1 block" if o.blocks == 1 else f"{o.blocks} blocks"
    return [
        f"  {found.kernel}: {found.threads} threads, {found.registers} registers each, {spilled}, "
        f"{found.shared} bytes of shared memory",
        f"      {blocks} on a multiprocessor at once: {o.warps} of {o.most} warps; limited by {o.limit}",
    ]
