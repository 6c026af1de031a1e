"""macOS and Windows: the emulated device compiles for them by zig, which has their headers; what Python needs is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from attngen.cache import disk_cache, trusted_files
from attngen.cache.disk_cache import DiskCache
from attngen.device.emulated.build import CHECKED, FAST, KERNEL, RUNTIME_FLAGS, UNITS, _link, calls_of
from attngen.device.emulated.findings import INTERRUPTED, KINDS
from attngen.device.emulated.host_compiler import HostCompiler
from attngen.device.emulated.translate import COUNTED, RUNTIME, meanings, translate
from attngen.emit.program import KernelEntry, Parameter, Product, Program
from tests.conftest import ROOT
from tests.harness import emitted, shipped

SYSTEMS = {"aarch64-linux-gnu": "linux", "aarch64-macos": "darwin", "x86_64-macos": "darwin", "x86_64-windows-gnu": "win32"}
MODULES = {"darwin": ["cuda"], "win32": ["fcntl", "pwd", "resource", "grp", "termios", "pty"]}
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")
pytestmark = pytest.mark.skipif(find_spec("ziglang") is None, reason="zig is not installed")


def compiler_for(target: str) -> HostCompiler:
    return HostCompiler((sys.executable, "-m", "ziglang", "c++", "-target", target), "zig", SYSTEMS[target])


@pytest.mark.parametrize("target", SYSTEMS)
@pytest.mark.parametrize(("schedule", "arch", "checked"), [("naive", "sm_80", False), ("hopper", "sm_90a", True)])
def test_a_kernel_compiles(target: str, schedule: str, arch: str, checked: bool, tmp_path: Path) -> None:
    compiler = compiler_for(target)
    flags = (*CHECKED, *compiler.family.checked, f"-D{COUNTED}") if checked else FAST
    text, made = tmp_path / "kernel.cpp", tmp_path / "kernel.o"
    text.write_text(translate(emitted(shipped("gpt2"), schedule, arch)).text, "utf-8")
    includes = (f"-I{RUNTIME}", f"-I{meanings()[0].parent}")
    compiler.run([*KERNEL, *flags, *includes, "-c", str(text)], made, "a kernel")
    assert made.read_bytes().count(b"__tsan_") > 0 or not checked


@pytest.mark.long
@pytest.mark.parametrize("unit", range(UNITS))
@pytest.mark.parametrize("target", SYSTEMS)
def test_the_runtime_compiles_without_warnings(target: str, unit: int, tmp_path: Path) -> None:
    text, made = tmp_path / "runtime.cpp", tmp_path / "runtime.o"
    files = sorted(RUNTIME.glob("*.cpp"))[unit::UNITS]
    text.write_text("".join(f'#include "{file.name}"\n' for file in files), "utf-8")
    flags = [flag for flag in RUNTIME_FLAGS if flag != "-w"]
    compiler_for(target).run([*flags, *STRICT, f"-I{RUNTIME}", "-c", str(text)], made, "the runtime")
    assert made.stat().st_size > 0


SMALL = r"""
template <int N> __device__ float* tile() { __shared__ alignas(128) float values[N]; return values; }
__device__ int deep(int n) { volatile char room[20000]; room[n % 20000] = 1; return n < 0 ? 0 : deep(n + 1) + room[0]; }
extern "C" __global__ void small(const float* x, float* y, int what) {
    __shared__ int count;
    float* const t = tile<64>();
    const int i = threadIdx.x;
    t[i] = x[i];
    if (i == 0) count = 7;
    if (what != 1) __syncthreads();
    float v = t[63 - i];
    volatile int zero = 0;
    if (what == 2) v += 10 / zero;
    if (what == 3) v += deep(0);
    if (what == 4) while (!zero) {}
    if (what == 5) v += *(volatile float*)(x + (1 << 30));
    if (what == 6) { int a[4] = {0, 1, 2, 3}; v += a[what + i]; }
    if (what == 7) __trap();
    if (what == 8 && i == 5) return;
    if (what == 9) for (;;) __syncwarp();
    v += __shfl_xor_sync(0xffffffffu, float(i), 1);
    y[i] = v + count;
}
"""
FOUND = {
    1: "uninitialized shared read", 2: "division by zero", 3: "stack overflow", 4: "runaway loop", 5: "out of bounds",
    6: "out of bounds", 7: "trap", 8: "deadlock", 9: INTERRUPTED,
}  # fmt: skip
IN_FAST_MODE = (2, 3, 4, 5, 7, 8, 9)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("wine") is None, reason="Wine is not installed")
@pytest.mark.parametrize("mode", [0, 1])
def test_a_library_for_windows_runs_under_wine(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right after each finding, too. zig's C++ library for Windows is compiled first, which takes minutes."""
    monkeypatch.setenv("WINEDEBUG", "-all")
    monkeypatch.setenv("WINEPREFIX", str(tmp_path / "wine"))
    parameters = [Parameter(n, t, "data", n) for n, t in (("x", "const float*"), ("y", "float*"), ("what", "int"))]
    entry = KernelEntry("small", tuple(parameters), (Product(()),) * 3, (64, 1, 1))
    compiler = compiler_for("x86_64-windows-gnu")
    flags = (*CHECKED, *compiler.family.checked, f"-D{COUNTED}") if mode else FAST
    text = translate(Program("small", SMALL, "sm_80", (entry,), ())).text
    library, host = tmp_path / "small.dll", tmp_path / "host.exe"
    library.write_bytes(_link(compiler, text, "small", (*KERNEL, *flags), RUNTIME_FLAGS))
    compiler.run([str(Path(__file__).with_name("windows_host.cpp"))], host, "the host")
    numbers = [n for what in (FOUND if mode else IN_FAST_MODE) for n in (0, what, 0)]
    command = ["wine", str(host), str(library), str(mode), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [[int(n) for n in line.replace(":", "").split()] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [line[0] for line in lines] == numbers
    places = calls_of(library, [line[-1] for line in lines if line[-1]], "small.cu")
    for what, status, kind, wrong, code in lines:
        expected = (1, FOUND[what]) if what else (0, "")
        assert (what, status, KINDS[kind]) == (what, *expected)
        assert what or not wrong
        assert what not in (2, 5) or f"what == {what}" in SMALL.splitlines()[places[code][0] - 1]


COMMANDS = """
import os, signal, sys
for name in {missing!r}:
    sys.modules[name] = None
from attngen.cache import trusted_files, disk_cache
from attngen.device.cuda import compiler
if {system!r} == "win32":
    del os.fork, os.geteuid, signal.pthread_kill
    trusted_files.ON_WINDOWS = disk_cache.ON_WINDOWS = True
else:
    compiler.NVRTC_EXISTS = False
from click.testing import CliRunner
from attngen.cli import main
for line in {lines!r}:
    done = CliRunner().invoke(main, line.split(), catch_exceptions=False)
    assert done.exit_code == 0, (line, done.output)
    if line == "puzzle start 1":
        open("01_dot_product.cu", "w").write(CliRunner().invoke(main, ["puzzle", "solution", "1"]).output)
"""
LINES = [
    "explain gpt2", "build gpt2 -o built", "list", "doctor", "trace gpt2 --kernel naive --q-len 20",
    "check gpt2 --kernel naive --device emulated", "puzzle start 1", "puzzle check 1",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("compiled_runtime")
@pytest.mark.parametrize("system", MODULES)
def test_commands_import_no_module_that_a_system_lacks(system: str, tmp_path: Path) -> None:
    code = COMMANDS.format(missing=MODULES[system], system=system, lines=LINES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cache_without_descriptors_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    for module in (trusted_files, disk_cache):
        monkeypatch.setattr(module, "ON_WINDOWS", True)
    cache = DiskCache("emulated")
    assert cache.data("one", lambda: b"first", once=True) == b"first"
    assert cache.data("one", lambda: b"second") == b"first"
    assert cache.file("two", lambda: b"two").parent == tmp_path / "cache" / "emulated"
    (tmp_path / "cache" / "emulated" / "one").write_bytes(b"damaged")
    assert cache.find("one") is None
    assert [entry.name for entry in cache.entries()] == ["two"]
    assert cache.state().owner is None
    assert cache.clear() == 1
    assert cache.entries() == ()


def test_texts_are_utf8_on_every_system() -> None:
    """Files are read and written in a stated encoding; Windows has one of its own."""
    unstated = re.compile(r"\.read_text\(\)|\.write_text\([^,]*\)$|(?<![\w.`])(?<!def )open\(")
    files = sorted((ROOT / "attngen").rglob("*.py"))
    lines = [(path, line) for path in files for line in path.read_text("utf-8").splitlines()]
    assert not [(str(path), line) for path, line in lines if unstated.search(line)]
