"""Imports follow the packages of docs/architecture.md: none is of a package further down its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from attngen.keywords import PORTABLE_SCHEDULES, SCHEDULE_NAMES
from attngen.schedules import SCHEDULES
from attngen.schedules.backward import BACKWARD_SCHEDULES
from tests.conftest import ROOT

PACKAGE = ROOT / "attngen"
LOW = {"source", "diagnostics", "cache", "shipped", "optional"}
SPEC = {"spec", "diagnostics", "source", "keywords"}
MAY_IMPORT = {
    "source": set(),
    "keywords": set(),
    "cache": set(),
    "shipped": set(),
    "optional": set(),
    "diagnostics": {"source"},
    "spec": {"diagnostics", "source", "keywords"},
    "language": SPEC | {"cache"},
    "plan": SPEC,
    "emit": SPEC | {"plan"},
    "schedules": SPEC | {"plan", "emit"},
    "reference": SPEC,
    "drawings": {"plan"},
    "device": SPEC | {"plan", "emit", "cache"},
    "compiled": SPEC | {"plan", "emit", "schedules", "device"},
    "backward": SPEC | {"plan", "emit", "schedules", "device", "compiled"},
    "api": SPEC | {"language", "plan", "emit", "schedules", "device", "compiled", "backward", "shipped"},
    "sdpa": SPEC | {"language", "device", "api"},
    "torch": SPEC | LOW | {"language", "plan", "emit", "schedules", "device", "backward", "api", "sdpa"},
    "transformers": {"spec", "plan", "device", "torch", "optional"},
    "diffusers": {"device", "torch", "optional"},
    "vllm": {"spec", "plan", "schedules", "torch", "optional"},
    "jax": {"spec", "language", "plan", "emit", "device", "backward", "api", "optional"},
    "bench": SPEC | {"torch", "plan", "emit", "schedules", "device", "reference", "backward", "api"},
    "inspect": SPEC | LOW | {"drawings", "language", "plan", "emit", "schedules", "device", "reference", "backward", "api"},
    "puzzles": SPEC | LOW | {"drawings", "plan", "emit", "device", "inspect"},
    "package": SPEC | {"plan", "emit", "schedules", "device", "cache"},
    "lessons": {"spec", "diagnostics", "keywords", "plan", "emit", "schedules", "device", "reference", "inspect", "puzzles"},
    "cli": SPEC
    | LOW
    | {
        "__init__",
        "language",
        "plan",
        "emit",
        "schedules",
        "device",
        "reference",
        "api",
        "drawings",
        "lessons",
        "inspect",
        "bench",
        "puzzles",
        "package",
    },
    "__main__": {"cli"},
    "__init__": None,  # the Python face: imports everything, late
}
HEAVY = {"torch", "cupy", "cuda", "numpy", "ml_dtypes", "pygments", "ziglang"}
NUMPY_ROOMS = {"reference", "inspect", "device", "puzzles", "lessons", "jax"}
NUMPY_MODULES = {"plan/block_map.py", "plan/balance.py"}  # modules that build never imports


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    allowed = MAY_IMPORT[room(path)]
    if allowed is None:
        return
    for module in imports(ast.parse(path.read_text())):
        if module.split(".")[0] == "attngen":
            target = [*module.split("."), "__init__"][1]
            assert target in allowed | {room(path)}, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_imports_are_late(path: Path) -> None:
    relative = str(path.relative_to(PACKAGE))
    if room(path) in ("torch", "transformers", "diffusers", "vllm", "bench"):  # modules that are imported for torch alone
        return
    allowed = {"numpy"} if room(path) in NUMPY_ROOMS or relative in NUMPY_MODULES else set()
    for node in ast.parse(path.read_text()).body:  # the module's own level only
        for module in imports(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            assert module.split(".")[0] not in HEAVY - allowed, f"{relative} imports {module} at once"


SCHEDULE_PACKAGES = PACKAGE / "schedules"
OF_SCHEDULES = sorted(p.name for p in SCHEDULE_PACKAGES.iterdir() if (p / "__init__.py").exists() and p.name != "parts")


@pytest.mark.parametrize("schedule", [*OF_SCHEDULES, "parts"])
def test_a_schedule_imports_no_other(schedule: str) -> None:
    """What several share is in `schedules/parts`, which imports none of them; imports inside functions count too."""
    for path in (SCHEDULE_PACKAGES / schedule).rglob("*.py"):
        for module in imports(ast.parse(path.read_text())):
            named = module.removeprefix("attngen.schedules.").split(".")[0]
            assert named not in {*OF_SCHEDULES} - {schedule}, f"{path.name} of {schedule} imports {module}"
            assert module != "attngen.schedules", f"{path.name} of {schedule} imports the package itself"


MAY_NAME_SCHEDULES = {"schedules", "keywords"}
LADDER = PACKAGE / "inspect" / "ladder.py"  # names the files of `generated/`


def test_schedules_are_named_in_their_package_alone() -> None:
    """By a literal that is a name, or an import of a schedule's package. Texts for people may have names among other words."""
    names = {*SCHEDULE_NAMES, *(s.name for s in (*SCHEDULES, *BACKWARD_SCHEDULES))}
    packages = {f"attngen.schedules.{name}" for name in OF_SCHEDULES}
    assert {"naive", "fused_mma", "hopper_backward"} <= names
    found = []
    for path in FILES:
        tree, named = ast.parse(path.read_text()), set()
        if room(path) not in MAY_NAME_SCHEDULES and path != LADDER:
            named |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in names}
        if room(path) != "schedules":
            named |= {module for module in imports(tree) if ".".join(module.split(".")[:3]) in packages}
        found += [(str(path.relative_to(ROOT)), *named)] if named else []
    assert not found


def test_keywords_are_those_of_the_schedules() -> None:
    """What `attngen.keywords` says, which does not import them."""
    assert {s.keyword for s in SCHEDULES} == {*SCHEDULE_NAMES}
    assert {s.keyword for s in SCHEDULES if not s.needs} == {*PORTABLE_SCHEDULES}


PATH = re.compile(r"\b(?:templates|docs|attngen|tests|benchmarks|generated)/[\w./]*\.\w+")


def test_files_that_comments_name_exist() -> None:
    """NAME in a path stands for any name."""
    sources = [*FILES, *(p for p in (ROOT / "templates").rglob("*") if p.is_file())]
    named = {(path.relative_to(ROOT), found) for path in sources for found in PATH.findall(path.read_text())}
    assert not [(str(path), found) for path, found in named if not list(ROOT.glob(found.replace("NAME", "*")))]


ANY = re.compile(r"^(?! *from typing import)[^#\n]*\bAny\b.*", re.MULTILINE)
MOST_ANY = 211  # the number of the last change that replaced some: it may only fall


def test_any_stands_where_nothing_better_exists() -> None:
    """Lines whose code names `Any`. A value that is only handed on, or tested by isinstance, is an `object`."""
    found = [f"{path.relative_to(ROOT)}: {line.strip()}" for path in FILES for line in ANY.findall(path.read_text())]
    assert len(found) <= MOST_ANY, f"{len(found)} lines; at most {MOST_ANY} are allowed:\n" + "\n".join(found)
