"""What this machine has for attngen, what is missing, and how to get it: the facts behind `attngen doctor`."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata

from attngen.cache.directory import cache_directory
from attngen.cache.disk_cache import KINDS, MOST_BYTES, DiskCache
from attngen.device.protocol import DeviceError
from attngen.device.select import has_gpu


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for. `needed` says what for; `cure` how to get it where it is missing."""

    name: str
    found: bool
    detail: str
    needed: str
    cure: str = ""


def examine() -> tuple[Finding, ...]:
    """Look for everything that attngen can use. Imports no array library."""
    return (
        Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "everything", "install Python 3.11 or later"),
        _nvrtc(),
        _gpu(),
        _host_compiler(),
        _tool(("addr2line", "llvm-addr2line"), "lines in the findings of the emulated device", "install binutils"),
        _nvdisasm(),
        _package("torch", "tensors, and the oracle on a GPU", "pip install torch"),
        _package("cupy-cuda13x", "arrays of CuPy", "pip install cupy-cuda13x"),
        _cache(),
    )


def _nvrtc() -> Finding:
    from attngen.device.cuda.compiler import nvrtc_version

    needed = "compiling for a GPU, and `show --stage ptx|sass`"
    try:
        return Finding("NVRTC", True, nvrtc_version(), needed)
    except DeviceError as error:
        return Finding("NVRTC", False, str(error).splitlines()[0], needed, "pip install 'nvidia-cuda-nvrtc>=13.0,<14'")


def _gpu() -> Finding:
    needed = "running on a GPU; without one the emulated device runs everything"
    if not has_gpu():
        cure = "an NVIDIA GPU and its driver (580 or later)"
        return Finding("GPU", False, "no NVIDIA driver, or no GPU", needed, cure)
    from attngen.device.cuda import CudaDevice

    try:
        device = CudaDevice()
    except DeviceError as error:
        return Finding("GPU", False, str(error), needed, "see the message")
    return Finding("GPU", True, f"{device.description}, {device.arch}", needed)


def _host_compiler() -> Finding:
    from attngen.device.emulated.host_compiler import CURE, find_compiler

    needed = "the emulated device"
    try:
        compiler = find_compiler()
    except DeviceError as error:
        return Finding("C++ compiler", False, str(error), needed, CURE)
    return Finding("C++ compiler", True, str(compiler), needed)


def _tool(names: tuple[str, ...], needed: str, cure: str) -> Finding:
    """A program that may have several names."""
    path = next(filter(None, map(shutil.which, names)), None)
    return Finding(names[0], path is not None, path or "not on the PATH", needed, cure)


def _nvdisasm() -> Finding:
    from attngen.device.cuda.compiler import SASS_CURE, find_nvdisasm

    path = find_nvdisasm()
    return Finding("nvdisasm", path is not None, str(path or "not found"), "`show --stage sass`, and `report`", SASS_CURE)


def _package(name: str, needed: str, cure: str) -> Finding:
    try:
        return Finding(name, True, metadata.version(name), needed)
    except metadata.PackageNotFoundError:
        return Finding(name, False, "not installed (optional)", needed, cure)


def _cache() -> Finding:
    caches = [DiskCache(kind) for kind in KINDS]
    sizes = []
    for one in caches:
        entries = one.entries()
        sizes.append(f"{one.kind} {len(entries)} entries, {sum(e.bytes for e in entries) / 2**20:.1f} MiB")
    states = {one.kind: one.state() for one in caches}
    refused = [f"{kind} is not used: {state.refusal}" for kind, state in states.items() if state.refusal]
    owners = ", ".join(sorted({state.owner for state in states.values() if state.owner}))
    where = cache_directory("cuda").parent
    limit = f"at most {MOST_BYTES >> 20} MiB of each"
    detail = f"{where}{f', owner {owners}' if owners else ''} ({'; '.join([*sizes, limit, *refused])})"
    needed = "compiled kernels, used again by later processes; ATTNGEN_CACHE_DIR moves it"
    return Finding("kernel cache", not refused, detail, needed, "set ATTNGEN_CACHE_DIR to a directory that only you can write")
