"""Libraries of `attngen package` for tests: their files, and programs that host compilers make of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from attngen.device.emulated import EmulatedDevice
from attngen.emit.program import MULTIPROCESSORS, Program
from attngen.package.functions import Request, packaged
from attngen.package.library import Library, files, library
from attngen.plan import ARCHES
from attngen.spec.attention import AttentionSpec
from tests.conftest import ROOT

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


COMPILERS = [c for c in ("g++", "clang++") if shutil.which(c)]
INCLUDE = headers()
needs_compiler = pytest.mark.skipif(not COMPILERS or INCLUDE is None, reason="no C++ compiler, or no cuda.h")


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


def as_device(driver: Path, arch: str, processors: int = 2) -> Mapping[str, str]:
    """The environment in which a library finds the stand-in of the driver, of a GPU with so many multiprocessors."""
    gpu = {"FAKE_CAPABILITY": arch.removeprefix("sm_").rstrip("a"), "FAKE_PROCESSORS": str(processors)}
    return {**os.environ, **gpu, "LD_LIBRARY_PATH": str(driver)}


def output_of_tests(made: Library, directory: Path, driver: Path, arch: str, processors: int = 2) -> str:
    """What the test program of a library prints on the emulated device. All of its checks have to pass."""
    written(made, directory)
    sources = [directory / "attngen.cpp", directory / "attngen_test.cpp", *(directory / "code").iterdir()]
    built([COMPILERS[-1], *WARNINGS, "-O1", f"-I{INCLUDE}", f"-I{directory}", *sources, "-o", directory / "test", "-ldl"])
    environment = as_device(driver, arch, processors)
    done = subprocess.run([directory / "test"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


def extension_prints(made: Library, program: str, directory: Path, driver: Path, arch: str = "sm_80") -> str:
    """What a program in Python prints that imports the extension of a library, on the emulated device."""
    written(made, directory)
    sources = [directory / "attngen_kernels.cpp", directory / "attngen.cpp", *(directory / "code").iterdir()]
    flags = [*WARNINGS, "-O1", "-shared", "-fPIC", f"-I{INCLUDE}", f"-I{sysconfig.get_paths()['include']}"]
    built([COMPILERS[0], *flags, *sources, "-o", directory / "attngen_kernels.abi3.so", "-ldl"])
    environment = {**as_device(driver, arch), "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sizes_of_calls(count: int) -> Iterator[dict[str, int]]:
    random = Random(0)
    for _ in range(count):
        kv_heads = random.choice((1, 2, 8, 12, 32))
        yield {
            "batch": random.choice((1, 2, 7, 64, 300)),
            "kv_heads": kv_heads,
            "q_heads": kv_heads * random.choice((1, 1, 2, 4, 7)),
            "q_len": random.choice((1, 5, 16, 64, 100, 4096)),
            "kv_len": random.choice((0, 1, 64, 100, 513, 5000, 100_000)),
            MULTIPROCESSORS: random.choice((2, 108, 132)),
        }
