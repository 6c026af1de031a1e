"""C++ text -> a shared library, by the host compiler, kept on disk between runs."""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from attngen.device.emulated.translate import RUNTIME, meanings
from attngen.device.kernel_cache import KernelCache, digest
from attngen.device.protocol import CompilationError, DeviceError

CURE = "install g++ (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or pip install ziglang"
COMMON = ("-std=c++20", "-fPIC", "-w", "-gdwarf-4", "-ffp-contract=off", "-fno-strict-aliasing")
FAST = ("-O2",)
RUNTIME_FLAGS = ("-O3",)
# Of the sanitizer only the compiler's calls before each access, its runtime is not linked; accesses keep their width.
CHECKED = ("-O1", "-fsanitize=thread", "-fno-tree-sra")
# For a debugger: every variable where the source has it.
DEBUG = ("-O0", "-g3")

CACHE = KernelCache("emulated")


def build_library(text: str, name: str, checked: bool, debug: bool = False) -> Path:
    """The library of a translated kernel: taken from the cache, or compiled. Raises CompilationError, DeviceError."""
    flags = (*COMMON, *(CHECKED if checked else FAST), *(DEBUG if debug else ()))
    key = digest(text, *flags, runtimedigest(), compiler_identity())
    return CACHE.file(f"{name}-{key}.so", lambda: _link(text, name, flags))


def _link(text: str, name: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as work:
        kernel, compiled, library = (Path(work) / f for f in (f"{name}.cpp", "kernel.o", "kernel.so"))
        kernel.write_text(text)
        objects = _runtime_objects()
        _run([*flags, "-c", str(kernel), "-o", str(compiled)], name)
        _run(["-shared", str(compiled), *map(str, objects), "-o", str(library)], name)
        return library.read_bytes()


def _runtime_objects() -> list[Path]:
    """The runtime's files, compiled, by each process in an order of its own: those that start at once share the work."""
    files = [f.name for f in RUNTIME.glob("*.cpp")]
    return sorted(_object(f) for f in random.sample(files, len(files)))


def _object(file: str) -> Path:
    """One file of the runtime, compiled once."""
    flags = (*COMMON, *RUNTIME_FLAGS)
    key = digest(file, *flags, runtimedigest(), compiler_identity())
    return CACHE.file(f"{file}-{key}.o", lambda: _compile_runtime(file, flags))


def _compile_runtime(file: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as work:
        compiled = Path(work) / "runtime.o"
        _run([*flags, "-c", str(RUNTIME / file), "-o", str(compiled)], file)
        return compiled.read_bytes()


def _run(arguments: list[str], name: str) -> None:
    command = [*compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilationError(f"the host compiler could not compile {name}", done.stderr)


@cache
def compiler() -> tuple[str, ...]:
    """The command of the host C++ compiler: $CXX, g++, clang++, or zig's. Raises DeviceError with the cure."""
    for command in (os.environ.get("CXX"), "g++", "clang++"):
        if command and shutil.which(command.split()[0]):
            return tuple(command.split())
    if find_spec("ziglang") is not None:
        import sys

        return (sys.executable, "-m", "ziglang", "c++")
    raise DeviceError(f"the emulated device needs a C++ compiler and found none; {CURE}")


@cache
def compiler_identity() -> str:
    """What must match for a library to be used again: the compiler's version and the machine."""
    done = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=False)
    version = done.stdout.splitlines()[0] if done.stdout else "unknown version"
    return f"{version}, {platform.machine()}"


@cache
def runtimedigest() -> str:
    files = [*sorted(RUNTIME.iterdir()), *meanings()]
    return digest(*(f.read_text() for f in files if f.is_file()))


def calls_of(library: Path, addresses: Sequence[int], file: str) -> dict[int, list[int]]:
    """The lines of `file` that the code before each address was compiled from, innermost first: inlined calls give several.
    Addresses are offsets into the library."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    distinct = sorted(set(addresses))
    if tool is None or not distinct:
        return {address: [] for address in distinct}
    command = [tool, "-i", "-a", "-e", str(library)]
    places = "\n".join(hex(address - 1) for address in distinct)
    done = subprocess.run(command, input=places, capture_output=True, text=True, check=False)
    parts = re.split(r"^0x[0-9a-f]+$", done.stdout, flags=re.MULTILINE)[1:]
    line = re.compile(rf"{re.escape(file)}:(\d+)")
    found = [[int(number) for number in line.findall(part)] for part in parts]
    return dict(zip(distinct, found, strict=True)) if len(found) == len(distinct) else {a: [] for a in distinct}
