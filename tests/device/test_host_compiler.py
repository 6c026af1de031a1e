"""The C++ compiler that the emulated device selects, and the message if it cannot run."""

from __future__ import annotations

import os
import pty
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attngen
from attngen import define
from attngen.device.doctor import examine
from attngen.device.emulated.host_compiler import CLANG, GCC, HostCompiler, find_compiler
from attngen.device.protocol import DeviceError
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


def test_cxx_is_split_as_a_shell_splits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = script(tmp_path / "my launcher", 'touch "$(dirname "$0")/used"; exec "$@"')
    monkeypatch.setenv("CXX", f"'{launcher}' g++ -DSOMETHING='a b'")
    assert find_compiler().command == (str(launcher), "g++", "-DSOMETHING=a b")
    text, made = tmp_path / "text.cpp", tmp_path / "made.o"
    text.write_text(
        "#define STRING(text) STRING_OF(text)\n#define STRING_OF(text) #text\n"
        'static_assert(sizeof(STRING(SOMETHING)) == sizeof("a b"), "the option arrives in one piece");'
    )
    find_compiler().run(["-c", str(text), "-o", str(made)], "a text")
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
