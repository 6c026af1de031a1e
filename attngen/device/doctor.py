"""What this machine has for attngen, what is missing, and how to get it: the facts behind `attngen doctor`."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata

from attngen.cache.disk_cache import KINDS, MOST_BYTES, DiskCache, cache_directory
from attngen.device.cuda import CudaDevice
from attngen.device.cuda.compiler import NVRTC_EXISTS, SASS_CURE, find_nvdisasm, nvrtc_version
from attngen.device.emulated.host_compiler import CURE, find_compiler
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
    nvrtc = "pip install 'nvidia-cuda-nvrtc>=13.0,<14'" if NVRTC_EXISTS else "Linux or Windows"
    driver = "an NVIDIA GPU and its driver (580 or later)"
    on_gpu = "running on a GPU; without one the emulated device runs everything"
    in_findings, optional = "lines in the findings of the emulated device", "not installed (optional)"
    return (
        Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "everything", "install Python 3.11 or later"),
        _looked_for("NVRTC", "compiling for a GPU, and `show --stage ptx|sass`", nvrtc, nvrtc_version),
        _looked_for("GPU", on_gpu, driver, _gpu, "no NVIDIA driver, or no GPU"),
        _looked_for("C++ compiler", "the emulated device", CURE, find_compiler),
        _looked_for("addr2line", in_findings, "install binutils", _addr2line, "not on the PATH"),
        _looked_for("nvdisasm", "`show --stage sass`, and `report`", SASS_CURE, find_nvdisasm),
        _looked_for("torch", "tensors, and the oracle on a GPU", "pip install torch", partial(_version, "torch"), optional),
        _looked_for("cupy-cuda13x", "arrays of CuPy", "pip install cupy-cuda13x", partial(_version, "cupy-cuda13x"), optional),
        _looked_for(
            "matplotlib", "plots of `bench`", "pip install 'attngen[bench]'", partial(_version, "matplotlib"), optional
        ),
        _looked_for("jax", "attngen.jax", "pip install 'attngen[jax]'", partial(_version, "jax"), optional),
        _cache(),
    )


def _looked_for(name: str, needed: str, cure: str, find: Callable[[], object], missing: str = "not found") -> Finding:
    """What `find` returns. It is missing if that is None, or if `find` raises DeviceError, whose first line says why."""
    try:
        found = find()
    except DeviceError as error:
        found, missing = None, str(error).splitlines()[0]
    return Finding(name, found is not None, missing if found is None else str(found), needed, cure)


def _gpu() -> str | None:
    if not has_gpu():
        return None
    device = CudaDevice()
    return f"{device.description}, {device.arch}"


def _addr2line() -> str | None:
    return shutil.which("addr2line") or shutil.which("llvm-addr2line")


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


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
