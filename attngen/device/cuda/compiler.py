"""CUDA text -> cubin, PTX and SASS, with NVRTC from the wheel. Needs no GPU and no toolkit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attngen.cache.disk_cache import DiskCache, digest
from attngen.device.protocol import CompilationError, DeviceError
from attngen.device.temporary import temporary_files
from attngen.emit.program import Program

NVRTC_EXISTS = sys.platform != "darwin"  # NVIDIA has it for Linux and Windows
CACHE = DiskCache("cuda")
SASS_CURE = "pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit's nvdisasm on the PATH"


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one entry point by ptxas. Stack and spills are bytes of local memory."""

    entry: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled file: the cubin or PTX text, and the compiler's log."""

    code: bytes
    log: str

    def resources(self) -> tuple[Resources, ...]:
        """Registers and spills of each entry point, from the log of ptxas."""
        return parse_resources(self.log)

    @property
    def is_serialized(self) -> bool:
        """Whether ptxas found too few registers for wgmma in the background, or another reason to wait for each."""
        return "are serialized" in self.log


def compile_text(source: Program, target: str = "cubin") -> Compiled:
    """`source` compiled without a cache, with ptxas's report. `target` is "cubin" or "ptx". Needs no driver.

    Raises CompilationError with the log.
    """
    kind = "sm" if target == "cubin" else "compute"
    (code,), log = _compile(source, (target,), f"--gpu-architecture={source.arch.replace('sm', kind)}", "--ptxas-options=-v")
    return Compiled(code, log)


def compile_with_lines(source: Program) -> tuple[bytes, str]:
    """The cubin and the PTX of one compilation, with line tables.

    The instructions are those of `compile_text`. The result is for inspection and is not cached. Raises CompilationError with
    the log.
    """
    (cubin, ptx), _ = _compile(source, ("cubin", "ptx"), f"--gpu-architecture={source.arch}", "--generate-line-info")
    return cubin, ptx.decode().rstrip("\0")


def _compile(source: Program, targets: tuple[str, ...], *options: str) -> tuple[list[bytes], str]:
    """NVRTC's results for `source`, one for each of `targets`, and its log.

    NVRTC's own cache (from 12.9 on, with a driver) is not used, because its entries lack ptxas's report.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(f"cuda-bindings cannot be imported ({error}); pip install 'cuda-bindings>=13.0,<14'") from error

    def checked(status: Any, *results: Any) -> Any:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"NVRTC failed: {status.name}")
        return results[0] if results else None

    def result(size_of: Callable[..., tuple[object, ...]], get: Callable[..., tuple[object, ...]]) -> bytes:
        size = checked(*size_of(program))
        # NVRTC writes into this object, so it must not be one that Python shares, as it does with bytes of length 1
        code = bytes(max(size, 2))
        checked(*get(program, code))
        return code[:size]

    program = checked(*nvrtc.nvrtcCreateProgram(source.text.encode(), f"{source.name}.cu".encode(), 0, [], []))
    options = (*options, "--no-cache")
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = result(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace").rstrip("\0 ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilationError(f"NVRTC could not compile {source.name} for {source.arch}", log)
    getters = {"cubin": (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), "ptx": (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)}
    return [result(*getters[target]) for target in targets], log


def cubin(source: Program) -> bytes:
    """The cubin of `source`, from the cache on disk or compiled. Needs no driver. Raises CompilationError."""
    key = digest(source.text, source.arch, nvrtc_version())
    return CACHE.data(f"{source.name}-{source.arch}-{key}.cubin", lambda: compile_text(source).code)


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """As in "13.0"; another version makes other cubins. Raises DeviceError where NVRTC cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's own error where the library is absent
        raise DeviceError(f"NVRTC cannot be loaded ({error}); pip install 'nvidia-cuda-nvrtc>=13.0,<14'") from error
    return f"{major}.{minor}"


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_resources(log: str) -> tuple[Resources, ...]:
    """The report of `ptxas -v`, one Resources for each entry point."""
    found: list[Resources] = []
    for block in re.split(r"(?=Compiling entry function)", log)[1:]:
        entry, frame, used = _ENTRY.search(block), _FRAME.search(block), _USED.search(block)
        assert entry is not None, block
        assert frame is not None, block
        assert used is not None, block
        stack, stores, loads = (int(n) for n in frame.groups())
        found.append(Resources(entry[1], int(used[1]), stack, stores, loads, int(used[2] or 0)))
    return tuple(found)


def disassemble(cubin: bytes, *options: str) -> str:
    """SASS of a cubin; `options` are nvdisasm's. Raises DeviceError without nvdisasm, or without room for a temporary file."""
    tool = find_nvdisasm()
    if tool is None:
        raise DeviceError(f"nvdisasm was not found; {SASS_CURE}")
    with temporary_files(), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", *options, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def find_nvdisasm() -> Path | None:
    """nvdisasm on the PATH, of the toolkit in CUDA_HOME, or of the wheel nvidia-cuda-nvdisasm."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvdisasm").is_file():
        return Path(home) / "bin" / "nvdisasm"
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "nvdisasm":
            path = Path(str(file.locate()))
            if not os.access(path, os.X_OK):
                path.chmod(0o755)
            return path
    return None
