"""Every C++ compiler that README names and this machine has runs every schedule on the emulated device, in both modes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from attngen.api import compile
from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.device.emulated.host_compiler import find_compiler
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from tests.harness import call, compile_text, emitted, shipped
from tests.tiers import cases

ZIG = shlex.join((sys.executable, "-m", "ziglang", "c++"))
INSTALLED = {"g++": shutil.which("g++"), "clang++": shutil.which("clang++"), ZIG: find_spec("ziglang")}
FOUND = [
    # each compiles the emulated device first, and zig its C++ library, which takes a minute
    command if command == "g++" else pytest.param(command, id=command if command != ZIG else "zig", marks=pytest.mark.long)
    for command, found in INSTALLED.items()
    if found
]
SPEC = shipped("gpt2")
PROBLEM = sample(SPEC, Shape(1, 2, 2, 70, 75), seed=1)
EXPECTED = truth(SPEC, PROBLEM)
ARCHES = {"naive": ("sm_80",), "tiled": ("sm_80",), "fused": ("sm_75", "sm_80"), "wgmma": ("sm_90a",), "hopper": ("sm_90a",)}
RUNS = [(schedule, arch, checked) for schedule, arches in ARCHES.items() for arch in arches for checked in (True, False)]
QUICK = [
    *((schedule, arches[-1], True) for schedule, arches in ARCHES.items() if schedule != "wgmma"),
    ("fused", "sm_80", False),
]


def test_all_compilers_are_there_where_they_are_needed() -> None:
    missing = [command for command, found in INSTALLED.items() if not found]
    assert not (missing and os.environ.get("ATTNGEN_NEEDS_COMPILERS")), (
        f"ATTNGEN_NEEDS_COMPILERS is set, and {missing} is missing"
    )


@pytest.fixture(params=FOUND)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", request.param)
    if request.param == ZIG:  # as where no other compiler is: zig links the start files of one that it finds
        (tmp_path / "addr2line").symlink_to(str(shutil.which("addr2line")))
        monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.join(find_compiler().command) == request.param


@pytest.mark.parametrize(("schedule", "arch", "checked"), cases(RUNS, quick=QUICK))
@pytest.mark.usefixtures("compiler")
def test_a_schedule_is_right(schedule: str, arch: str, checked: bool) -> None:
    compiled = compile(SPEC, kernel=schedule, device=EmulatedDevice(checked=checked, arch=arch))
    found = compare(*call(compiled, PROBLEM), EXPECTED)
    assert found.passed, found


@pytest.mark.usefixtures("compiler")
def test_checked_mode_names_the_lines_of_a_race() -> None:
    source = emitted(SPEC, "tiled")
    text = source.text.replace("__syncthreads();", ";")
    assert text != source.text
    with pytest.raises(EmulationError) as caught:
        call(compile_text(SPEC, "tiled", replace(source, text=text)), PROBLEM)
    assert caught.value.kind in ("race", "uninitialized shared read")
    lines = text.splitlines()
    assert caught.value.at.line > 0
    assert caught.value.at.text == lines[caught.value.at.line - 1]
    assert caught.value.where is not None


CLOSES = """
import gc, numpy, attngen
attngen.compile("cross_attention", kernel="naive", device="emulated")(*numpy.zeros((3, 1, 1, 4, 64), numpy.float32))
gc.collect()
assert "cross_attention_naive" not in open("/proc/self/maps").read()
"""


@pytest.mark.usefixtures("compiler")
def test_a_process_ends_after_libraries_are_closed() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
