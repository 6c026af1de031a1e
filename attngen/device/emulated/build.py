"""C++ text -> a shared library, compiled by the host compiler and cached on disk.

The runtime is compiled once for each compiler and linked into the library of every kernel.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from attngen.cache.disk_cache import DiskCache, digest
from attngen.device.emulated.host_compiler import HostCompiler, find_compiler
from attngen.device.emulated.translate import COUNTED, RUNTIME, meanings
from attngen.device.temporary import temporary_files

COMMON = ("-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing")
# Lines and inlined calls, for findings; types of variables would take most of the compile time.
# Endless loops stay, so that they are found; a stack that is full meets its guard, however large the local arrays are.
LOOPS = ("-fno-finite-loops", "-fstack-clash-protection")
KERNEL = (*COMMON, *LOOPS, "-std=c++20", "-nostdinc++", "-gdwarf-4", "-g1")
FAST = ("-O2",)
# -O1 removes the accesses to memory that NVRTC removes too, so that they are not counted. -Og compiles in two thirds of the
# time, but a struct that dropout writes to shared memory is then reported as never written.
CHECKED = ("-O1",)
# For a debugger, without optimization; the runtime keeps its own, with the types and variables of its threads.
DEBUG = ("-O0", "-g3")
RUNTIME_DEBUG = ("-g",)
RUNTIME_FLAGS = (*COMMON, "-std=c++17", "-O3", "-fvisibility=hidden")  # the headers of C++20 take twice as long to parse
UNITS = 2  # translation units of the runtime, compiled in parallel; fewer parse the C++ library's headers less often

# The end of its mangled name; the line of one that the compiler makes is that of the struct.
COPY_CONSTRUCTOR = re.compile(r"(?:C[1-4]E|aSE)[RO]K?S\d*_$")

CACHE = DiskCache("emulated")
LOG = logging.getLogger("attngen")  # printed by the command line on a terminal


def build_library(text: str, name: str, checked: bool, debug: bool = False, garbage: bool = False) -> Path:
    """The library of a translated kernel: taken from the cache, or compiled. `debug`, `garbage`: see EmulatedDevice.

    Raises CompilationError, DeviceError.
    """
    compiler = find_compiler()
    watched = (*CHECKED, *compiler.family.checked, f"-D{COUNTED}")
    flags = (*KERNEL, *(watched if checked else FAST), *(DEBUG if debug else ()), *(compiler.garbage if garbage else ()))
    debugged = RUNTIME_DEBUG if debug else ()
    key = digest(text, *flags, *debugged, runtime_digest(), compiler.identity)
    with temporary_files():
        return CACHE.file(f"{name}-{key}.so", lambda: _link(compiler, text, name, flags, (*RUNTIME_FLAGS, *debugged)))


def _link(compiler: HostCompiler, text: str, name: str, flags: tuple[str, ...], runtime_flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(UNITS) as pool:
        kernel, compiled, library = (Path(work) / f for f in (f"{name}.cpp", "kernel.o", "kernel.so"))
        kernel.write_text(text, "utf-8")
        runtime = [pool.submit(_runtime_object, compiler, unit, runtime_flags, Path(work)) for unit in range(UNITS)]
        includes = [f"-I{RUNTIME}", f"-I{meanings()[0].parent}"]
        compiler.run([*flags, *includes, "-c", str(kernel)], compiled, name)
        compiler.link(["-shared", str(compiled), *(str(r.result()) for r in runtime)], library, name)
        return library.read_bytes()


def _runtime_object(compiler: HostCompiler, unit: int, flags: tuple[str, ...], work: Path) -> Path:
    """One translation unit of the runtime, compiled once for each compiler, as a file in `work`."""
    key = digest(str(unit), *flags, runtime_digest(), compiler.identity)
    made = work / f"runtime-{unit}.o"
    made.write_bytes(CACHE.data(f"runtime-{unit}-{key}.o", lambda: _compile_runtime(compiler, unit, flags), once=True))
    return made


@cache  # without a disk cache, a process has one compilation, not one for each kernel
def _compile_runtime(compiler: HostCompiler, unit: int, flags: tuple[str, ...]) -> bytes:
    files = sorted(RUNTIME.glob("*.cpp"), key=lambda file: file.stat().st_size)[unit::UNITS]
    if unit == 0:
        LOG.info("compiling the emulated device with %s; this happens once for each compiler", compiler.version)
    with tempfile.TemporaryDirectory() as work:
        whole, compiled = Path(work) / "runtime.cpp", Path(work) / "runtime.o"
        whole.write_text("".join(f'#include "{file.name}"\n' for file in files), "utf-8")
        compiler.run([*flags, f"-I{RUNTIME}", "-c", str(whole)], compiled, "the emulated device")
        return compiled.read_bytes()


@cache
def runtime_digest() -> str:
    files = [*sorted(RUNTIME.iterdir()), *meanings()]
    return digest(*(part for f in files if f.is_file() for part in (f.name, f.read_text("utf-8"))))


def calls_of(library: Path, addresses: Sequence[int], file: str) -> dict[int, list[int]]:
    """The lines of `file` behind the code before each address, an offset into the library: the innermost inlined call first."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    distinct = sorted(set(addresses))
    if tool is None or not distinct:
        return {address: [] for address in distinct}
    command = [tool, "-i", "-a", "-f", "-e", str(library)]
    base = _linked_at(library)
    places = "\n".join(hex(base + address - 1) for address in distinct)
    done = subprocess.run(command, input=places, capture_output=True, text=True, check=False)
    parts = re.split(r"^0x[0-9a-f]+$", done.stdout, flags=re.MULTILINE)[1:]
    call = re.compile(rf"^(.*)\n.*{re.escape(file)}:(\d+)", re.MULTILINE)
    found = [_without_copies(call.findall(part)) for part in parts]
    return dict(zip(distinct, found, strict=True)) if len(found) == len(distinct) else {a: [] for a in distinct}


def _linked_at(library: Path) -> int:
    """The address for which a library is linked: 0 but on Windows, where the optional header of the file has it."""
    with library.open("rb") as file:
        head = file.read(4096)
    at = int.from_bytes(head[60:64], "little") + 48
    return int.from_bytes(head[at : at + 8], "little") if head[:2] == b"MZ" else 0


def _without_copies(calls: list[tuple[str, str]]) -> list[int]:
    """The lines of calls, each with its function's name, without those of copy constructors that a statement calls."""
    return [int(line) for i, (name, line) in enumerate(calls) if i + 1 == len(calls) or not COPY_CONSTRUCTOR.search(name)]
