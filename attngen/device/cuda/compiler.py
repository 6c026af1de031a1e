"""CUDA text -> cubin, PTX and SASS, with NVRTC from the wheel. Needs no GPU and no toolkit."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attngen.cache_directory import cache_directory
from attngen.device.protocol import CompilationError, DeviceError
from attngen.emit.kernel_source import KernelSource

SASS_CURE = "pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit's nvdisasm on the PATH"


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas gave one entry point. Bytes are of local memory: a spill is a register that did not fit."""

    entry: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled file: the cubin, or PTX text, and what the compiler said."""

    code: bytes
    log: str

    def resources(self) -> tuple[Resources, ...]:
        """Registers and spills of each entry point, from the log of ptxas."""
        return parse_resources(self.log)


def compile_text(source: KernelSource, target: str = "cubin") -> Compiled:
    """Compile afresh, with ptxas's report. `target` is "cubin" or "ptx". Raises CompilationError with the log."""
    log = io.StringIO()
    code = _program(source, verbose=True, log=log).compile(target, logs=log)
    return Compiled(_bytes(code), log.getvalue())


def load_object(source: KernelSource) -> Any:
    """A cuda.core ObjectCode with the cubin, from the cache on disk where it is there."""
    return _program(source, verbose=False, log=None).compile("cubin", cache=_cache())


def _program(source: KernelSource, verbose: bool, log: io.StringIO | None) -> _Guarded:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise DeviceError(f"cuda-core cannot be imported ({error}); pip install attngen again") from error
    options = ProgramOptions(name=f"{source.name}.cu", arch=source.arch, ptxas_options=["-v"] if verbose else None)
    return _Guarded(source, Program(source.text, "c++", options=options), log)


@dataclass(slots=True)
class _Guarded:
    """A Program whose failures become CompilationError."""

    source: KernelSource
    program: Any
    log: io.StringIO | None

    def compile(self, target: str, **options: Any) -> Any:
        try:
            return self.program.compile(target, **options)
        except OSError as error:
            if "cache" not in options:
                raise
            raise DeviceError(
                f"the kernel cache cannot be used ({error}); set ATTNGEN_CACHE_DIR to a directory that can be written"
            ) from error
        except Exception as error:
            log = (self.log.getvalue() if self.log else "") or str(error)
            raise CompilationError(f"NVRTC could not compile {self.source.name} for {self.source.arch}", log) from error


@lru_cache(maxsize=1)
def _cache() -> Any:
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(cache_directory("cuda"))


def _bytes(code: Any) -> bytes:
    data = code.code
    return data.encode() if isinstance(data, str) else bytes(data)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


def parse_resources(log: str) -> tuple[Resources, ...]:
    """The report of `ptxas -v`, one Resources for each entry point."""
    found: list[Resources] = []
    for block in re.split(r"(?=Compiling entry function)", log)[1:]:
        entry, frame, used = _ENTRY.search(block), _FRAME.search(block), _USED.search(block)
        assert entry is not None, block
        assert frame is not None, block
        assert used is not None, block
        found.append(Resources(entry[1], int(used[1]), *(int(n) for n in frame.groups())))
    return tuple(found)


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin. Raises DeviceError where no nvdisasm is to be found."""
    tool = find_nvdisasm()
    if tool is None:
        raise DeviceError(f"nvdisasm was not found; {SASS_CURE}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=False)
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
