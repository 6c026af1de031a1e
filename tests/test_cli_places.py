"""The command line's words about files, commands and options that are not there, and closed or full streams."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

import attngen
from tests.conftest import ROOT
from tests.harness import cli

TEXT = "attention mine { dtype fp16 head_dim 64 mask causal }"


def test_a_file_that_is_not_there_gets_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.attn").write_text(TEXT)
    for name, words in {
        "mein.attn": "mein.attn: no file and no shipped spec has this name; . has mine.attn",
        "gpt2.attn": "the shipped spec is called gpt2, without .attn",
        "gpt3": "did you mean `gpt2`?",
        "nowhere/mine.attn": "there is no directory nowhere",
        ".": ".: this is a directory; . has mine.attn",
    }.items():
        done = cli("show", name, "--stage", "spec")
        assert (done.exit_code, done.stdout) == (2, "")
        assert words in done.stderr


def test_a_spec_comes_from_standard_input() -> None:
    command = [sys.executable, "-m", "attngen", "show", "-", "--stage", "spec"]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("name       mine")
    done = subprocess.run(command, input="attention mine {", capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "--> /dev/stdin:1:16" in done.stderr


def test_the_tree_of_standard_input_is_that_of_the_text_that_was_read() -> None:
    command = [sys.executable, "-m", "attngen", "show", "-", "--stage", "tree"]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("attention  (1:1)")


def test_a_read_only_file_system_is_reported_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    done = cli("build", "gpt2", "--kernel", "fused", "-o", str(tmp_path))
    assert (done.exit_code, done.stderr) == (2, f"error: {tmp_path / 'gpt2_fused.cu'}: Read-only file system\n")


def test_a_closed_pipe_is_no_failed_check() -> None:
    command = [sys.executable, "-m", "attngen", "diff", "gpt2", "naive", "tiled", "--full"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_report_of_a_path_that_is_no_text_is_written(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.attn"  # Latin-1
    path.write_text(TEXT)
    done = cli("report", str(path), "--no-check", "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.stderr
    assert "caf?.attn" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("where", [">&-", "2>&- >&-", "> /dev/full"])
def test_a_closed_or_full_output_is_no_internal_error(where: str) -> None:
    command = f"{sys.executable} -m attngen list {where}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "internal error" not in done.stderr
    assert done.returncode == (2 if "full" in where else 0)
    if "full" in where:
        assert done.stderr == "error: No space left on device\n"


def test_a_file_that_cannot_be_written_is_named_as_the_user_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "a temporary file")

    monkeypatch.setattr(Path, "replace", refused)
    done = cli("build", "gpt2", "--kernel", "naive", "-o", str(tmp_path))
    assert done.exit_code == 2
    assert done.stderr == f"error: {tmp_path / 'gpt2_naive.cu'}: Permission denied\n"
    assert list(tmp_path.iterdir()) == []


def test_the_text_of_a_spec_in_place_of_a_path_gets_the_function_for_it() -> None:
    with pytest.raises(FileNotFoundError, match=r"attngen\.language\.load_text"):
        attngen.compile(TEXT)


def test_a_command_with_a_typo_gets_a_suggestion() -> None:
    done = cli("chekc", "gpt2")
    assert done.exit_code == 2
    assert "No such command 'chekc'. Did you mean 'check'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lengths", "64"), "counted instead without --lengths"),
        (("--kernel", "naive", "--full"), "counted instead without --full, --kernel"),
        (("--dtypes", "int32"), "counted instead without --dtypes. `attngen check` compares"),
    ],
)
def test_counts_without_a_gpu_ignore_no_option(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.device.select.has_gpu", lambda: False)
    done = cli("bench", "gpt2", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in " ".join(done.stderr.split())


def test_sizes_of_the_command_line_are_those_of_a_call() -> None:
    from attngen.cli.options import MOST_SIZE
    from attngen.spec.expr import MAX_LENGTH

    assert MOST_SIZE == MAX_LENGTH
