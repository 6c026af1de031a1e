"""The cache reads nothing that another user could have written: each way to plant a file, and what is said about it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen.cache import disk_cache, trusted_files
from attngen.cache.disk_cache import CacheWarning, DiskCache, cache_directory
from attngen.cache.trusted_files import owner_name
from attngen.cli import main
from attngen.device.tuning_cache import CACHE as TUNED
from attngen.device.tuning_cache import Winner, remember, remembered
from attngen.spec.attention import KernelRequest
from tests.harness import shipped

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
PLANTED, MADE = b"planted", b"made"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "a" / "cache"))
    disk_cache._warn_once.cache_clear()
    return cache_directory("emulated")


def make() -> bytes:
    return MADE


def whole(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def plant(place: Path) -> Path:
    """A valid entry in a directory with the right owner and permissions."""
    place.mkdir(parents=True, mode=0o700)
    entry = place / "entry"
    entry.write_bytes(whole(PLANTED))
    entry.chmod(0o600)
    return entry


def test_directories_are_made_for_this_user_alone(place: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DiskCache("emulated").data("entry", make)
    finally:
        os.umask(before)
    for directory in (place, place.parent, place.parent.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "entry").stat().st_mode) == 0o600


def _link_directory(place: Path) -> None:
    place.rename(place.parent / "elsewhere")
    place.symlink_to("elsewhere")


DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "group": (lambda p: p.chmod(0o770), "can be written by other users"),
    "everyone": (lambda p: p.chmod(0o707), "can be written by other users"),
    "sticky": (lambda p: p.chmod(0o1777), "can be written by other users"),
    "link": (_link_directory, "is a symbolic link"),
    "owner": (lambda p: os.chown(p, NOBODY, -1), "belongs to user"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=needs_root if c == "owner" else ()) for c in DIRECTORIES])
def test_a_directory_that_others_control_is_not_used(case: str, place: Path) -> None:
    plant(place)
    change, said = DIRECTORIES[case]
    change(place)
    cache = DiskCache("emulated")
    with pytest.warns(CacheWarning, match=said):
        file = cache.file("entry", make)
    assert file.read_bytes()[: len(MADE)] == MADE
    assert place not in file.parents
    assert cache.data("other", make) == MADE
    assert [p.name for p in place.iterdir()] == ["entry"]  # nothing was written there either
    assert said in (cache.state().refusal or "")
    assert cache.entries() == ()
    with pytest.raises(OSError, match=said):
        cache.clear()


def test_the_commands_say_whose_cache_it_is_and_why_it_is_not_used(place: Path) -> None:
    cli = CliRunner()
    plant(place)
    assert f"1 entries    0.0 of 256 MiB  {place} (owner {owner_name(os.geteuid())})" in cli.invoke(main, ["cache"]).output
    place.chmod(0o770)
    assert "not used: the directory can be written by other users" in cli.invoke(main, ["cache"]).output
    described = json.loads(cli.invoke(main, ["cache", "--json"]).output)
    assert described["emulated"] == {
        "directory": str(place),
        "limit_bytes": 256 * 2**20,
        "owner": owner_name(os.geteuid()),
        "refusal": f"the directory can be written by other users; chmod go-w {place}",
        "entries": [],
    }
    doctor = {f["name"]: f for f in json.loads(cli.invoke(main, ["doctor", "--json"]).output)}
    assert not doctor["kernel cache"]["found"]
    assert "can be written by other users" in doctor["kernel cache"]["detail"]


def _pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry, 0o600)


def _socket(entry: Path) -> None:
    entry.unlink()
    at = os.getcwd()
    os.chdir(entry.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(entry.name)
    finally:
        os.chdir(at)


def _link(entry: Path) -> None:
    entry.rename(entry.parent / "elsewhere")
    entry.symlink_to("elsewhere")


ENTRIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "group": (lambda p: p.chmod(0o660), "can be written by other users"),
    "everyone": (lambda p: p.chmod(0o602), "can be written by other users"),
    "link": (_link, "is a symbolic link"),
    "pipe": (_pipe, "is not a regular file"),
    "socket": (_socket, "is not a regular file"),
    "owner": (lambda p: os.chown(p, NOBODY, -1), "belongs to user"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=needs_root if c == "owner" else ()) for c in ENTRIES])
def test_an_entry_that_others_control_is_made_again(case: str, place: Path) -> None:
    entry = plant(place)
    change, said = ENTRIES[case]
    change(entry)
    cache = DiskCache("emulated")
    with pytest.warns(CacheWarning, match=f"entry {said}"):
        assert cache.data("entry", make) == MADE
    assert entry.lstat().st_uid == os.geteuid()
    assert stat.S_ISREG(entry.lstat().st_mode)
    assert cache.find("entry") == MADE


def test_a_directory_in_the_place_of_an_entry_costs_that_entry_alone(place: Path) -> None:
    entry = plant(place)
    (place / "other").write_bytes(entry.read_bytes())
    entry.unlink()
    entry.mkdir()
    (entry / "of somebody").touch()
    cache = DiskCache("emulated")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.data("entry", make) == MADE
        assert cache.file("entry", make).read_bytes() == MADE
        assert cache.data("third", make) == MADE
    (said,) = {str(one.message) for one in caught}  # neither that the cache cannot be used, nor that it cannot be written
    assert said == (
        f"an entry of the kernel cache {place} is not used (entry is not a regular file), and is compiled again; "
        "remove it if this warning returns"
    )
    assert (entry / "of somebody").exists()
    assert (cache.find("other"), cache.find("third")) == (PLANTED, MADE)
    assert sorted(p.name for p in place.iterdir()) == ["entry", "other", "third"]


def test_a_user_without_a_home_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with the number of no user: no relative path, and no error of what looks for a home."""

    def no_home(name: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("ATTNGEN_CACHE_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for found in (no_home, lambda name: Path("~/.cache") / name):  # what versions of platformdirs do
        monkeypatch.setattr("platformdirs.user_cache_path", found)
        disk_cache._of_user.cache_clear()
        try:
            assert cache_directory("cuda") == tmp_path / f"attngen-{os.geteuid()}" / "cuda"
            assert DiskCache("cuda").file("entry", make).parent == cache_directory("cuda")
        finally:
            disk_cache._of_user.cache_clear()


def test_a_directory_of_root_may_be_read_by_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = plant(place)
    monkeypatch.setattr(trusted_files, "ROOT", os.geteuid())
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    place.chmod(0o755)
    entry.chmod(0o644)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DiskCache("emulated").find("entry") == PLANTED


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_where_a_path_can_be_exchanged_a_library_is_loaded_from_elsewhere(mode: int, place: Path) -> None:
    plant(place)
    cache = DiskCache("emulated")
    assert cache.file("entry", make) == place / "entry"
    place.parent.chmod(mode)  # others can put another directory in its place after it was checked
    file = cache.file("entry", make)
    assert place not in file.parents
    assert file.read_bytes() == PLANTED


def test_a_cache_behind_a_link_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "link"))
    cache = DiskCache("emulated")
    assert cache.file("entry", make) == tmp_path / "disk" / "emulated" / "entry"


def test_what_tuning_found_is_read_as_carefully() -> None:
    winner = Winner(KernelRequest("fused", 32, 32, 1, 2), 0.5, 0.6, "a GPU")
    spec = shipped("gpt2")
    assert remember(spec, "sm_80", (10, 13), winner)
    assert remembered(spec, "sm_80", "fused") == {(10, 13): winner}
    (entry,) = TUNED.entries()
    TUNED.keep(entry.name, json.dumps({"of another version": 1}).encode())
    assert remembered(spec, "sm_80", "fused") == {}
    TUNED.directory.chmod(0o770)
    with pytest.warns(CacheWarning, match="can be written by other users"):
        assert not remember(spec, "sm_80", (10, 13), winner)
