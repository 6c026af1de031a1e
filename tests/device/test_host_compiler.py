"""The C++ compiler that the emulated device selects, and the message if it cannot run."""

from __future__ import annotations

import os
import pty
import resource
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import attngen
from attngen import define
from attngen.device.doctor import examine
from attngen.device.emulated.host_compiler import CLANG, GCC, HostCompiler, find_compiler
from attngen.device.protocol import CompilationError, DeviceError
from tests.conftest import ROOT


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("cxx", "said"),
    [
        ("no-such-compiler", "there is no program 'no-such-compiler'"),
        ("no-such-launcher g++", "there is no program 'no-such-launcher'"),
        ("'' g++", "there is no program ''"),
        ("g++ '-DX", "no closing quotation"),
        ("false", "does not answer --version"),
    ],
)
def test_a_cxx_that_cannot_be_run_is_an_error_that_names_it(cxx: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(DeviceError) as caught:
        find_compiler()
    assert said in str(caught.value)
    assert cxx in str(caught.value) or repr(cxx) in str(caught.value)
    found = next(f for f in examine() if f.name == "C++ compiler")
    assert not found.found
    assert said in found.detail


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", False),
        ("Debian clang version 14.0.6", True),
    ],
)
def test_locals_begin_with_garbage_if_the_compiler_can_fill_them(version: str, known: bool) -> None:
    assert bool(HostCompiler(("c++",), version).garbage) == known


QUIET = "reports success, but makes no file of alibi_naive; set CXX to a C++ compiler"


@pytest.mark.parametrize(
    ("cxx", "said"),
    [
        ("true", QUIET),
        ("g++ -fsyntax-only", QUIET),
        ("gone", "cannot be run: No such file or directory; set CXX to a C++ compiler"),
        ("other", "the compiled kernel cannot be loaded"),
    ],
)
def test_a_cxx_that_does_not_compile_is_an_error_that_names_it(
    cxx: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    if cxx == "other":  # a library for another machine, say
        cxx = str(script(tmp_path / "other", 'for last; do :; done; echo "a 1.0"; [ "$last" = --version ] || echo x > "$last"'))
    elif cxx == "gone":
        cxx = str(script(tmp_path / "gone", "echo gone 1.0"))
    monkeypatch.setenv("CXX", cxx)
    if Path(cxx).name == "gone":
        find_compiler()
        Path(cxx).unlink()
        monkeypatch.setattr("shutil.which", lambda name: name)
    slopes = np.ones(1, np.float32)
    with pytest.raises(DeviceError) as caught:
        attngen.compile("alibi", kernel="naive", device="emulated")(*np.ones((3, 1, 1, 4, 64), np.float16), slopes=slopes)
    assert not isinstance(caught.value, CompilationError)
    assert said in str(caught.value)
    assert cxx in str(caught.value) or "cannot be loaded" in said


SMALL = """
import numpy as np, tempfile, attngen
tempfile.tempdir = {place!r}
q = np.ones((1, 1, 9, 64), np.float16)
try:
    attngen.compile("gpt2", kernel="naive", device="emulated")(q, q, q)
except attngen.DeviceError as error:
    print(type(error).__name__, error)
"""


def _limit_files(size: int) -> None:
    """Longer files cannot be written, as on a disk that is full; nor by the compiler, which then fails in its own words."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [4096, 65536, None])
@pytest.mark.usefixtures("compiled_runtime")
def test_a_full_directory_for_temporary_files_is_said_to_be_full(size: int | None, tmp_path: Path) -> None:
    """Not that the kernel does not compile, which would be a mistake of attngen. Python fails first, or the compiler."""
    place = tmp_path / "small" if size else tmp_path / "missing"
    if size:
        place.mkdir()
    before = partial(_limit_files, size) if size else None
    code = SMALL.format(place=str(place))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, preexec_fn=before)
    assert done.returncode == 0, done.stderr
    reason = "File too large" if size else "No such file or directory"
    assert done.stdout == (
        f"DeviceError the directory for temporary files, {place}, cannot be used ({reason}); "
        "set TMPDIR to a directory that can be written and has 4 MiB of room\n"
    )


def test_cxx_is_split_as_a_shell_splits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = script(tmp_path / "my launcher", 'touch "$(dirname "$0")/used"; exec "$@"')
    monkeypatch.setenv("CXX", f"'{launcher}' g++ -DSOMETHING='a b'")
    assert find_compiler().command == (str(launcher), "g++", "-DSOMETHING=a b")
    text, made = tmp_path / "text.cpp", tmp_path / "made.o"
    text.write_text(
        "#define STRING(text) STRING_OF(text)\n#define STRING_OF(text) #text\n"
        'static_assert(sizeof(STRING(SOMETHING)) == sizeof("a b"), "the option arrives in one piece");'
    )
    find_compiler().run(["-c", str(text)], made, "a text")
    assert made.is_file()
    assert (tmp_path / "used").exists()


@pytest.mark.parametrize("cxx", [None, "", " "])
def test_without_cxx_the_first_compiler_on_the_path_is_taken(
    cxx: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    with_clang, with_gcc = tmp_path / "clang", tmp_path / "gcc"
    for place, name, version in ((with_clang, "clang++", "clang version 99"), (with_gcc, "g++", "g++ 12")):
        place.mkdir()
        script(place / name, f"echo {version}")
    monkeypatch.setenv("PATH", f"{with_clang}")
    assert find_compiler().family is CLANG
    monkeypatch.setenv("PATH", f"{with_clang}:{with_gcc}")  # the path may change while a process runs
    assert find_compiler().family is GCC


@pytest.mark.usefixtures("compiled_runtime")
def test_headers_of_the_cpp_library_on_the_include_path_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's and conda's environments bring them: these have functions of more types than C."""
    said = subprocess.run([find_compiler().command[0], "-xc++", "-E", "-v", "/dev/null"], capture_output=True, text=True).stderr
    found = [line.strip() for line in said.splitlines() if "c++" in line and Path(line.strip()).is_dir()]
    assert found
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", os.pathsep.join(found))
    spec = define(dtype="fp32", head_dim=16, score="s + abs(q - k) - abs(s)")
    q = np.ones((1, 1, 9, 16), np.float32)
    assert np.allclose(attngen.compile(spec, kernel="naive", device="emulated")(q, q, q), 1)


@pytest.mark.usefixtures("compiled_runtime")
def test_a_linker_that_fails_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gold does not find the C++ library of some compilers, of which the usual linker is told."""
    linker = tmp_path / "ld.gold"
    linker.write_text("#!/bin/sh\nexit 1\n")
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COMPILER_PATH", str(tmp_path))
    q = np.ones((1, 1, 9, 16), np.float32)
    spec = define(dtype="fp32", head_dim=16, score="s + 2")
    assert np.allclose(attngen.compile(spec, kernel="naive", device="emulated")(q, q, q), 1)


def test_options_of_cxx_make_other_libraries() -> None:
    plain, other = (HostCompiler(command, "g++ 12") for command in (("g++",), ("g++", "-O0")))
    assert plain.identity != other.identity


@pytest.mark.parametrize("terminal", [True, False])
def test_the_command_line_says_what_is_compiled_once(terminal: bool, tmp_path: Path) -> None:
    compiler = script(tmp_path / "c++", '[ "$1" = --version ] && echo "fake 1.0" && exit; echo no >&2; exit 1')
    ours, theirs = pty.openpty() if terminal else os.pipe()
    environment = os.environ | {"CXX": str(compiler), "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "attngen", "check", "gpt2", "--kernel", "naive", "--device", "emulated"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    os.write(theirs, b"end")
    errors = os.read(ours, 65536).decode()
    said = "compiling the emulated device with fake 1.0; this happens once for each compiler"
    assert (said in errors) is terminal
    assert said.encode() not in output
