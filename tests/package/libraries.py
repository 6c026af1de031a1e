"""Libraries of `attngen package` for tests: their files, and programs that host compilers make of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from attngen.device.emulated import EmulatedDevice
from attngen.emit.program import Program
from attngen.package.functions import Request, packaged
from attngen.package.library import Library, files, library
from attngen.plan import ARCHES
from attngen.spec.attention import AttentionSpec

WARNINGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror")


def headers() -> Path | None:
    """The directory of CUDA's own header, of a toolkit or of the wheel of its runtime."""
    roots = [os.environ.get("CUDA_HOME", "/nonexistent"), *map(str, Path("/usr/local").glob("cuda*"))]
    found = [Path(root) / "include" for root in roots]
    try:
        import nvidia

        found += [Path(p) / "cu13" / "include" for p in nvidia.__path__]
    except ImportError:
        pass
    return next((directory for directory in found if (directory / "cuda.h").is_file()), None)


def not_compiled(program: Program, target: str) -> bytes:
    """In place of code, of libraries that are not run."""
    return f"{program.name} as {target}".encode()


def emulated(program: Program, target: str) -> bytes:
    """The path of the library with the kernels for the emulated device, as tests/package/emulated_driver.cpp loads them."""
    return str(EmulatedDevice(checked=False, arch=program.arch).compile(program).library).encode() + b"\0"


def library_of(*specs: AttentionSpec, arches: Sequence[str] = ("sm_80",), compile=not_compiled, **request: object) -> Library:  # type: ignore[no-untyped-def]
    wanted = Request(tuple(ARCHES[arch] for arch in arches), **request)  # type: ignore[arg-type]
    return library("attngen", [packaged(spec, wanted) for spec in specs], compile=compile)


def written(made: Library, directory: Path) -> Path:
    for path, data in files(made).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def built(command: Sequence[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
