"""The host's C++ compiler: its selection, its options, and running it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from attngen.device.protocol import CompilationError, DeviceError
from attngen.device.temporary import check_room

CURES = {
    "linux": "install g++ (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or pip install ziglang",
    "darwin": "xcode-select --install, or pip install ziglang",
    "win32": "pip install ziglang",
}
CURE = CURES.get(sys.platform, CURES["linux"])
CHANGE = "set CXX to a C++ compiler, or unset it to use g++ or clang++"
CANDIDATES = () if sys.platform == "win32" else ("g++", "clang++")
LINKERS = ("gold", "lld")  # take a fraction of the time of the usual one, most of which is for the C++ library's symbols


@dataclass(frozen=True, slots=True)
class Family:
    """Compilers with the same command line. `common` are the flags of every call; `checked` instrument memory accesses."""

    name: str
    common: tuple[str, ...]
    checked: tuple[str, ...]
    links_with: bool = True  # knows -fuse-ld


# Of the sanitizers, only the calls before each access, and those for an index outside its array, are used: their runtimes are
# not linked.
CALLS = ("-fsanitize=thread", "-fsanitize=bounds")
# Scalar replacement of aggregates is off, because it changes the width of accesses. GCC instruments assignments, and not what a
# call copies itself, its arguments and its result: without elision, a copy constructor does these copies.
# Without unique symbols, libraries whose templates have the same name do not share the `__shared__` arrays in these.
GCC = Family("gcc", ("-fno-gnu-unique",), (*CALLS, "-fno-tree-sra", "-fno-elide-constructors"))
# By default, LLVM does not instrument a read if a write of the same address follows.
LLVM_CALLS = (*CALLS, "-mllvm", "-tsan-instrument-read-before-write")
CLANG = Family("clang", (), LLVM_CALLS)
# By default, zig compiles for the present CPU, but machines may share a cache; and it adds its own checks.
# It links the C++ library statically, with debug information of 4 MB.
ZIG = Family("zig", ("-mcpu=baseline", "-fno-sanitize=undefined", "-Wl,--compress-debug-sections=zlib"), LLVM_CALLS, False)
# For Windows, clang's driver refuses CALLS or links their runtimes; the compiler proper has them. No exception passes a call.
WINDOWS_CALLS = (
    "-Xclang", "-fsanitize=thread,array-bounds,local-bounds", "-Xclang", "-fsanitize-trap=local-bounds",
    "-mllvm", "-tsan-handle-cxx-exceptions=0",
    *LLVM_CALLS[len(CALLS) :],
)  # fmt: skip
WINDOWS = ("-target", "x86_64-windows-gnu")
CLANG_ON_WINDOWS = replace(CLANG, common=WINDOWS, checked=WINDOWS_CALLS, links_with=False)
ZIG_ON_WINDOWS = replace(ZIG, common=(*WINDOWS, *ZIG.common), checked=WINDOWS_CALLS)


_MAJOR = re.compile(r"\b(\d+)\.\d+")


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler. `command` may begin with a launcher such as ccache, and end with options."""

    command: tuple[str, ...]
    version: str  # the first line of its --version
    system: str = sys.platform

    @property
    def family(self) -> Family:
        on_windows = self.system == "win32"
        if any(Path(part).stem in ("zig", "ziglang") for part in self.command):
            return ZIG_ON_WINDOWS if on_windows else ZIG
        if "clang" in self.version:
            return CLANG_ON_WINDOWS if on_windows else CLANG
        if on_windows:  # it cannot give the shared arrays of templates a section of their own
            raise DeviceError(f"the emulated device does not support {self} on Windows; unset CXX, and {CURE}")
        return GCC

    @property
    def garbage(self) -> tuple[str, ...]:
        """The option that fills local variables without a value with NaN (LLVM) or -1.7e38 (GCC, from version 12 on)."""
        version = _MAJOR.search(self.version)
        known = self.family is not GCC or (version is not None and int(version[1]) >= 12)
        return ("-ftrivial-auto-var-init=pattern",) if known else ()

    @cached_property
    def identity(self) -> str:
        """The key of compiled code: code of an equal compiler can be reused."""
        return "\0".join([self.version, self.system, platform.machine(), *self.family.common, *self.command[1:]])

    @cached_property
    def linker(self) -> tuple[str, ...]:
        """The option that selects the fastest linker that is installed."""
        found = [f"-fuse-ld={name}" for name in LINKERS if shutil.which(f"ld.{name}")]
        chosen = any(part.startswith("-fuse-ld") for part in self.command)
        return tuple(found[:1]) if self.family.links_with and not chosen else ()

    def __str__(self) -> str:
        return f"{self.version} ({shlex.join(self.command)})"

    def run(self, arguments: Sequence[str], made: Path, what: str) -> None:
        """Compiles or links `what` to the file `made`. Raises CompilationError with the compiler's messages, and DeviceError
        for a compiler that cannot be run or makes no file, or if there is no room for temporary files."""
        command = [*self.command, *self.family.common, *arguments, "-o", str(made)]
        done = _answer(command)
        if done.returncode:
            check_room(made.parent)
            raise CompilationError(f"the host compiler could not compile {what}", done.stderr)
        if not made.is_file():
            raise DeviceError(
                f"the C++ compiler {shlex.join(self.command)!r} reports success, but makes no file of {what}; {CHANGE}"
            )

    def link(self, arguments: Sequence[str], made: Path, what: str) -> None:
        """Links `what` by the fastest linker, or by the compiler's own if that one cannot: it may not find the C++ library of
        a compiler that was moved. Raises what `run` raises."""
        if self.linker:
            with suppress(CompilationError):
                return self.run([*self.linker, *arguments], made, what)
        self.run(arguments, made, what)


def find_compiler() -> HostCompiler:
    """The compiler named by $CXX, else g++, clang++, or zig of the ziglang wheel. Raises DeviceError with the cure."""
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@cache
def _find(cxx: str, path: str) -> HostCompiler:
    if cxx.strip():
        return _named(cxx)
    found = next((name for name in CANDIDATES if shutil.which(name)), None)
    if found is not None:
        return HostCompiler((found,), _version((found,)))
    if find_spec("ziglang") is not None:
        zig = (sys.executable, "-m", "ziglang", "c++")
        return HostCompiler(zig, _version(zig))
    raise DeviceError(f"the emulated device needs a C++ compiler, and none was found; {CURE}")


def _named(cxx: str) -> HostCompiler:
    """The compiler named by the value of CXX: a program and arguments, split as by a shell."""
    try:
        command = _split(cxx)
    except ValueError as error:
        raise DeviceError(f"CXX is {cxx!r}, which is not a command: {str(error).lower()}") from None
    if not command or shutil.which(command[0]) is None:
        program = command[0] if command else ""
        raise DeviceError(f"CXX is {cxx!r}, but there is no program {program!r}; {CHANGE}")
    return HostCompiler(command, _version(command))


def _split(cxx: str) -> tuple[str, ...]:
    """A command line in parts; on Windows, where \\ separates directories, quotes alone are special."""
    if sys.platform != "win32":
        return tuple(shlex.split(cxx))
    return tuple(part.strip('"') for part in shlex.split(cxx, posix=False))


def _version(command: tuple[str, ...]) -> str:
    done = _answer([*command, "--version"])
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip() or "it prints no version").splitlines()[0]
        raise DeviceError(f"the C++ compiler {shlex.join(command)!r} does not answer --version: {said}")
    return lines[0]


def _answer(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What a compiler prints, in any encoding. Raises DeviceError if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise DeviceError(f"the C++ compiler {command[0]!r} cannot be run: {error.strerror}; {CHANGE}") from None
