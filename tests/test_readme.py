"""README: its commands, its Python and its installation work."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from attngen.cli import COMMANDS
from tests.conftest import ROOT
from tests.harness import cli
from tests.tour import environment

PAGE = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
MENTIONED = re.findall(r"`(attngen [^`\n]+)`", PAGE)


def commands(block: str) -> list[str]:
    lines = [line.split("#")[0] for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip()]


def words(output: str) -> list[list[str]]:
    """Lines as words, without numbers and times, which differ from machine to machine."""
    return [[word for word in line.split() if not re.match(r"[\d.]", word)] for line in output.splitlines()]


def is_ours(command: str) -> bool:
    return re.match(r"(\.venv/bin/)?attngen ", command) is not None


RUN = [ours for block in BLOCKS if (ours := list(filter(is_ours, commands(block))))]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with specs/ and the reader's own mine.attn."""
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    mine = re.search(r"^```\n(attention mine .*?)^```", PAGE, re.M | re.S)
    assert mine is not None
    (tmp_path / "mine.attn").write_text(mine[1])
    return tmp_path


def printed(command: str, checkout: Path) -> str:
    """The output of a command of the environment, which is a process, or of another, which runs in this one."""
    program, *arguments = shlex.split(command)
    if program.startswith(".venv/bin/"):
        done = subprocess.run(
            [program.removeprefix(".venv/bin/"), *arguments], cwd=checkout, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout
    result = cli(*arguments)
    assert result.exit_code == 0, f"{command}\n{result.output}"
    return result.stdout


@pytest.mark.parametrize("block", RUN, ids=lambda block: block[0])
def test_commands_run(block: list[str], checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a block, run in order in one folder, print the output that the page shows."""
    monkeypatch.chdir(checkout)
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.setenv(name, environment()[name])
    for command in block:
        output = printed(command, checkout)
        if shown := re.search(rf"{re.escape(command)}\n```\n[^`]*```\n(.*?)^```", PAGE, re.M | re.S):
            assert words(output) == words(shown[1])


@pytest.mark.parametrize("command", MENTIONED)
def test_commands_that_are_mentioned_can_be_said(command: str) -> None:
    """Commands that need a GPU are parsed, not run."""
    name, *words = shlex.split(command)[1:]
    if words:
        import_module(f"attngen.cli.{name}").command.make_context(name, words)
    else:
        assert name in COMMANDS


def test_what_is_installed_is_there() -> None:
    """Every command is one of those that are run, or makes an environment, or installs extras that exist, or runs the tests."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = [command for block in BLOCKS for command in commands(block) if not is_ours(command)]
    for command in others + re.findall(r"`(\.venv/bin/pip [^`\n]+)`", PAGE):
        if command.startswith(".venv/bin/pip install"):
            for named in re.findall(r"\.\[(.*?)\]", command):
                assert set(named.split(",")) <= set(extras)
            for constraints in re.findall(r"-c (\S+)", command):
                assert (ROOT / constraints).exists()
        else:
            assert command in ("python3 -m venv .venv", ".venv/bin/python -m pytest -n auto")


def test_constraints_leave_to_torch_what_its_cuda_build_demands() -> None:
    """That build demands one version of each of these; where torch is built for the CPU, pip notices no conflict."""
    demanded = "cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft curand cusolver cusparse nccl-cu13 nvjitlink nvtx"
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "torch" in pinned
    assert not pinned & {f"nvidia-{name}" for name in demanded.split()}


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The Python blocks, run in order, each with tensors as its comments say. One replaces torch's attention."""
    torch = pytest.importorskip("torch")
    from attngen.torch import restore

    request.addfinalizer(restore)
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    shapes = [(32, 8, 128, torch.bfloat16), (2, 1, 80, torch.float16), (2, 2, 64, torch.float16)]
    for i, (block, (heads, kv_heads, head_dim, dtype)) in enumerate(zip(blocks, shapes, strict=True)):
        names |= {"q": torch.randn(1, heads, 20, head_dim).to(dtype)}
        names |= {name: torch.randn(1, kv_heads, 20, head_dim).to(dtype) for name in "kv"}
        path = tmp_path / f"block_{i}.py"  # a file, so that functions of the page have a source
        path.write_text(block)
        exec(compile(block, str(path), "exec"), names)
        assert tuple(names["o"].shape) == (1, heads, 20, head_dim)  # type: ignore[attr-defined]
