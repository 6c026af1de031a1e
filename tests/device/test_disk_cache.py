"""The cache on disk under real failures: other processes, damaged files, full disks, permissions."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import numpy as np
import pytest

import attngen
from attngen.cache import disk_cache
from attngen.cache.disk_cache import DIGEST_BYTES, TEMPORARY, CacheWarning, DiskCache, cache_directory
from attngen.device.compiled_templates import keep_compiled_templates
from attngen.device.cuda import compiler
from attngen.device.emulated import build
from attngen.device.emulated.build import UNITS
from attngen.device.emulated.host_compiler import HostCompiler
from attngen.emit import emitter
from attngen.emit.program import Program
from attngen.language import syntax
from attngen.plan import ARCHES
from attngen.schedules import choose
from attngen.source import SourceFile
from tests import tiers
from tests.conftest import ROOT
from tests.harness import emitted, shipped

# A kernel that is compiled fast, into more than 16 KiB
CUBIN = """
from attngen.device.cuda.compiler import cubin
from attngen.emit.program import Program
text = "__device__ float table[5000] = {1.0f};"
text += "extern \\"C\\" __global__ void copy(float* x) { x[threadIdx.x] = table[threadIdx.x]; }"
print(len(cubin(Program("copy", text, "sm_80", (), ()))))
"""
EMULATED = """
import numpy as np, attngen
q = np.ones((1, 1, 9, 64), np.float16)
print(attngen.compile("specs/gpt2.attn", kernel="naive", device="emulated")(q, q, q).sum())
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(code: str, before=None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=before
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def files(kind: str) -> list[Path]:
    place = cache_directory(kind)
    return sorted(place.iterdir()) if place.is_dir() else []


@pytest.mark.long
@pytest.mark.parametrize(("code", "kind", "count"), [(CUBIN, "cuda", 1), (EMULATED, "emulated", 1 + UNITS)])
def test_sixteen_processes_compile_the_same_spec_at_once(code: str, kind: str, count: int) -> None:
    outputs = {finish(p) for p in [start(code) for _ in range(16)]}
    assert len(outputs) == 1
    assert len(files(kind)) == count
    assert not [f for f in files(kind) if f.name.startswith(TEMPORARY)]


def test_a_process_killed_during_a_write_leaves_nothing_that_harms(directory: Path) -> None:
    code = (
        """
import os, signal
from attngen.cache import disk_cache
disk_cache.os.replace = lambda *paths, **directories: os.kill(os.getpid(), signal.SIGKILL)
"""
        + CUBIN
    )
    process = start(code)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = files("cuda")
    assert left.name.startswith(TEMPORARY)
    assert DiskCache("cuda").entries() == ()
    finish(start(CUBIN))
    assert len(DiskCache("cuda").entries()) == 1
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    compiler.cubin(emitted(shipped("gpt2"), "tiled"))
    assert not left.exists()  # swept up by a later write


KINDS = [(CUBIN, "cuda"), (EMULATED, "emulated")]


@pytest.mark.parametrize("damage", tiers.cases(["truncated", "emptied", "flipped", "replaced"], quick=["flipped"]))
@pytest.mark.parametrize(("code", "kind"), tiers.cases(KINDS, quick=KINDS[:1]))
@pytest.mark.usefixtures("compiled_runtime")
def test_a_damaged_entry_is_made_again(code: str, kind: str, damage: str) -> None:
    right = finish(start(code))
    for path in (f for f in files(kind) if f.suffix != ".o"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(
            {"truncated": data[: len(data) // 2], "emptied": b"", "flipped": data, "replaced": b"x" * 5000}[damage]
        )
    assert finish(start(code)) == right
    before = [p.stat().st_ino for p in files(kind)]
    assert finish(start(code)) == right
    assert [p.stat().st_ino for p in files(kind)] == before  # whole again, and used


def without_override() -> None:
    """Root writes where permissions forbid it: drop CAP_DAC_OVERRIDE (1) from the bounding set (PR_CAPBSET_DROP, 24)."""
    if os.getuid() == 0 and ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) != 0:
        os._exit(77)


@pytest.mark.parametrize(("code", "kind"), tiers.cases(KINDS, quick=KINDS[:1]))
@pytest.mark.parametrize("filled", tiers.cases([False, True], quick=[True]))
@pytest.mark.usefixtures("compiled_runtime")
def test_a_read_only_directory_costs_time_and_no_result(code: str, kind: str, filled: bool, directory: Path) -> None:
    right = finish(start(code))
    if not filled:
        DiskCache(kind).clear()
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        process = start(code, without_override)
        output, errors = process.communicate()
    finally:
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o755)
    assert process.returncode == 0, errors
    assert output == right
    assert ("cannot be used" in errors) is not filled


def limited_files() -> None:
    """Writes beyond 4 KiB fail, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_writes_that_fail_cost_time_and_no_result() -> None:
    process = start(CUBIN, limited_files)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert int(output) > 4096
    assert "CacheWarning" in errors
    assert "cannot be used" in errors
    assert files("cuda") == []


def test_a_full_disk_costs_time_and_no_result(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    run = f"ATTNGEN_CACHE_DIR={place} {sys.executable} -c '{CUBIN}'"
    script = f"mount -t tmpfs -o size=16k tmpfs {place} && {run} && ls {place}/cuda"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this machine lends no small file system; test_writes_that_fail_cost_time_and_no_result stands for it")
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert done.stdout.split() == [done.stdout.split()[0]]  # the cubin's size, and no file


def test_another_nvrtc_makes_other_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    source = emitted(shipped("gpt2"), "naive")
    first = compiler.cubin(source)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.9")
    assert compiler.cubin(source) == first
    assert len(files("cuda")) == 2


def test_an_entry_that_is_there_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = emitted(shipped("gpt2"), "naive")
    first = compiler.cubin(source)
    monkeypatch.setattr(compiler, "compile_text", None)
    assert compiler.cubin(source) == first
    with pytest.raises(TypeError):
        compiler.cubin(emitted(shipped("gpt2"), "tiled"))


def test_other_texts_architectures_and_params_are_other_entries() -> None:
    for arch in ("sm_80", "sm_90a"):
        compiler.cubin(emitted(shipped("gpt2"), "naive", arch))
    compiler.cubin(emitted(shipped("gpt2", "bf16"), "naive"))
    assert len(files("cuda")) == 3


def test_old_entries_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.cache.disk_cache.MOST_BYTES", 3000)
    cache = DiskCache("cuda")
    for i in range(5):
        cache.data(f"{i}", lambda: bytes(900))
        os.utime(cache.directory / f"{i}", (i, i))
    assert [e.name for e in cache.entries()] == ["4", "3", "2"]
    cache.data("2", lambda: b"never made")  # used: now the youngest
    cache.data("5", lambda: bytes(900))
    assert {e.name for e in cache.entries()} == {"5", "2", "4"}


def test_an_entry_ends_with_its_digest_and_is_still_an_elf_file() -> None:
    data = compiler.cubin(emitted(shipped("gpt2"), "naive"))
    (path,) = files("cuda")
    stored = path.read_bytes()
    assert stored[:-DIGEST_BYTES] == data
    assert stored[:4] == b"\x7fELF"


def test_threads_share_one_warning(directory: Path) -> None:
    directory.parent.joinpath("cache").write_text("a file where a directory should be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=DiskCache("cuda").data, args=("x", lambda: b"data")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {w.category for w in caught} <= {CacheWarning}
    assert DiskCache("cuda").data("x", lambda: b"data") == b"data"


@pytest.mark.usefixtures("compiled_runtime")
def test_cubins_are_compiled_ahead() -> None:
    kernel = attngen.compile(shipped("gpt2"), kernel="naive", device="emulated", ahead=["sm_80", "sm_90"])
    assert len(files("cuda")) == 2
    q = np.ones((1, 1, 5, 64), np.float16)
    assert kernel(q, q, q).shape == q.shape


# --- templates


@pytest.fixture
def new_process() -> Iterator[Callable[[], Program]]:
    """A function that emits a file as a process with the cache of templates does: none is in memory yet."""

    def emitted_anew() -> Program:
        emitter.environment.cache_clear()
        keep_compiled_templates()
        return emitter.emit(spec, plan)

    spec = shipped("gpt2")
    plan = choose(spec, ARCHES["sm_90a"])
    yield emitted_anew
    emitter.environment.cache_clear()


def test_templates_are_compiled_once_for_all_processes(new_process, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = jinja2.Environment.compile
    monkeypatch.setattr(jinja2.Environment, "compile", lambda self, *one: compiled.append(one[1]) or compile_one(self, *one))
    first = new_process()
    assert len(compiled) == len(files("templates")) > 10
    assert new_process() == first
    assert len(compiled) == len(files("templates"))
    damaged = files("templates")[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert new_process() == first
    assert len(compiled) == len(files("templates")) + 1


def test_templates_of_the_package_are_found_first(new_process, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = directory.parent / "package"
    monkeypatch.setattr(disk_cache, "PACKAGED", package)
    first = new_process()
    shutil.move(directory, package)
    assert new_process() == first
    assert files("templates") == []
    damaged = next((package / "templates").iterdir())
    *content, last = damaged.read_bytes()
    damaged.write_bytes(bytes([*content, last ^ 1]))
    assert new_process() == first
    assert [found.name for found in files("templates")] == [damaged.name]


def test_templates_need_no_cache(new_process, directory: Path) -> None:
    """Only kernels take so long to compile that a cache that cannot be used is worth a warning."""
    first = new_process()
    shutil.rmtree(directory)
    directory.write_text("a file where a directory should be")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new_process() == first


# --- the parser


def test_tables_of_the_parser_are_made_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = syntax._tables
    monkeypatch.setattr(syntax, "_tables", lambda grammar: made.append(grammar) or make(grammar))

    def parsed_anew() -> tuple[syntax.Node, ...]:
        syntax._parser.cache_clear()
        return syntax.parse(SourceFile("x.attn", "attention x { dtype fp16 head_dim 64 mask q - k < 5 }"))

    assert parsed_anew() == parsed_anew()
    assert len(made) == 1
    (tables,) = files("parser")
    tables.write_bytes(tables.read_bytes()[:-1])
    parsed_anew()
    assert len(made) == 2


def test_without_a_cache_a_process_compiles_the_emulated_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run(_: HostCompiler, arguments: list[str], made: Path, what: str) -> None:
        calls.append(what)
        made.write_bytes(b"object")

    monkeypatch.setattr(HostCompiler, "run", run)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "a file"))
    (tmp_path / "a file").touch()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with warnings.catch_warnings(action="ignore"):
            build._runtime_object(HostCompiler(("c++",), "a compiler of this test"), 0, (), tmp_path / name)
    assert calls == ["the emulated device"]
