"""What takes time to make, on disk: cubins, libraries of the emulated device, and others of KINDS.

An entry is whole or absent: it is written under another name, with a digest of itself at its end, and moved into place. One
that fails its digest is removed and made again. A directory or an entry that another user could have written is not used
(`trusted_files.py`). A cache that cannot be used costs time, never a result: a warning says so once. A wheel contains entries
that are the same for all users, as a part of the package.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.cache.trusted_files import (
    ON_WINDOWS,
    Directory,
    UntrustedError,
    owner_name,
    path_is_fixed,
    read_trusted,
    trusted_directory,
)

# Cubins, libraries of the emulated device, what `attngen tune` found, templates as bytecode, tables of the language's parser.
KINDS = ("cuda", "emulated", "tuned", "templates", "parser")
MADE_AGAIN = ("cuda", "emulated", "templates", "parser")  # what a compilation replaces
PACKAGED = Path(__file__).resolve().parent.parent / "_cache"  # a folder for each kind; only in a wheel
DIGEST_BYTES = 32  # SHA-256, after the last byte that a loader of ELF files looks at
MOST_BYTES = 256 * 2**20  # per kind; the least recently used entries are removed first
STALE_SECONDS = 3600.0  # a temporary file this old was left by a process that was killed
TEMPORARY = ".writing-"
LOCK = ".lock-"
PRIVATE = "."  # how the names of files that are no entries begin
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def cache_directory(kind: str) -> Path:
    """The directory for one of KINDS; `ATTNGEN_CACHE_DIR` overrides its root."""
    root = os.environ.get("ATTNGEN_CACHE_DIR")
    return (Path(root) if root else _of_user()) / kind


@cache
def _of_user() -> Path:
    from platformdirs import user_cache_path

    with suppress(RuntimeError):
        found = user_cache_path("attngen")
        if found.is_absolute():
            return found
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"attngen-{os.geteuid()}"  # for a user without a home, as in containers


class CacheWarning(UserWarning):
    """The kernel cache, or an entry of it, cannot be used; kernels are compiled again by every process."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel on disk."""

    name: str
    bytes: int
    used: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class CacheState:
    """`owner`: None if the directory is not there yet. `refusal`: why the directory is not used; None if it is used."""

    owner: str | None
    refusal: str | None


@dataclass(frozen=True, slots=True)
class DiskCache:
    """The entries of one kind, see KINDS. Safe between threads and processes.

    `packaged`: entries are looked up in the package first. They take milliseconds to make, so there is no warning about a cache
    that cannot be used.
    """

    kind: str
    packaged: bool = False

    @property
    def directory(self) -> Path:
        return cache_directory(self.kind)

    def data(self, name: str, make: Callable[[], bytes], once: bool = False) -> bytes:
        """The entry `name`; made, and kept, if it is missing or damaged.

        `once`: processes that need the entry at the same time wait for the first of them to make it.
        """
        found = self.find(name)
        if found is not None:
            return found
        with self._alone(name) if once else nullcontext():
            found = self.find(name) if once else None
            if found is None:
                found = make()
                self.keep(name, found)
            return found

    def file(self, name: str, make: Callable[[], bytes]) -> Path:
        """A file that holds the entry `name`, for a loader that wants a path: in this directory, or in one of this process."""
        assert not self.packaged
        directory = Path(os.path.realpath(self.directory.parent)) / self.kind
        data = self.find(name)
        kept = data is not None
        if data is None:
            data = make()
            kept = self.keep(name, data)
        if kept and path_is_fixed(directory):
            return directory / name
        elsewhere = Path(_temporary_directory().name) / name
        elsewhere.write_bytes(data)
        return elsewhere

    def find(self, name: str) -> bytes | None:
        """The entry `name`, if it is there and whole: in the package, or written by nobody but this user or root."""
        if self.packaged and (found := self._in_package(name)) is not None:
            return found
        try:
            with trusted_directory(self.directory) as directory:
                return self._found(directory, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None

    def _found(self, directory: Directory, name: str) -> bytes | None:
        """The entry `name`, if it is there and whole. One that cannot be read costs only itself: a warning names it."""
        try:
            data = _content(read_trusted(directory, name))
        except FileNotFoundError:
            return None
        except OSError as error:
            said = error.strerror or str(error)
            self._warn_of_entry(said if isinstance(error, UntrustedError) else f"{name}: {said}")
            return None
        with suppress(OSError):  # where the directory is only read, nothing will be removed from it either
            if data is None:
                os.unlink(directory.at(name), dir_fd=directory.descriptor)
            else:
                os.utime(directory.at(name), dir_fd=directory.descriptor, follow_symlinks=ON_WINDOWS)
        return data

    def _in_package(self, name: str) -> bytes | None:
        """The entry `name` of the package, which is trusted as its code is."""
        try:
            return _content((PACKAGED / self.kind / name).read_bytes())
        except OSError:
            return None

    def _warn_of_entry(self, reason: str) -> None:
        self._warn_once(
            f"an entry of the kernel cache {self.directory} is not used ({reason}), and is compiled again; remove it if this "
            "warning returns"
        )

    def _warn(self, error: OSError) -> None:
        self._warn_once(
            f"the kernel cache {self.directory} cannot be used ({error.strerror or error}), so every process compiles its "
            "kernels again; set ATTNGEN_CACHE_DIR to a directory of your own that can be written"
        )

    def _warn_once(self, message: str) -> None:
        if not self.packaged:
            _warn_once(message)

    def keep(self, name: str, data: bytes) -> bool:
        """Store an entry; returns whether it is stored."""
        try:
            with trusted_directory(self.directory, create=True) as directory:
                self._make_room(directory, len(data))
                temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
                try:
                    with os.fdopen(directory.open(temporary, NEW_FILE), "wb") as file:
                        file.write(data + hashlib.sha256(data).digest())
                    at = directory.descriptor
                    os.replace(directory.at(temporary), directory.at(name), src_dir_fd=at, dst_dir_fd=at)
                except OSError as error:
                    _remove(temporary, directory)
                    if ON_WINDOWS and (self.directory / name).is_file():
                        return True  # another process has made the same entry, and has loaded it since
                    if not isinstance(error, IsADirectoryError):
                        raise
                    self._warn_of_entry(f"{name} is not a regular file")
                    return False
        except OSError as error:
            self._warn(error)
            return False
        return True

    def entries(self) -> tuple[Entry, ...]:
        """Every entry, the latest used first; none if the directory is missing or refused."""
        try:
            with trusted_directory(self.directory) as directory:
                found = [Entry(n, s.st_size, s.st_mtime) for n, s in _files(directory) if not n.startswith(PRIVATE)]
        except OSError:
            return ()
        return tuple(sorted(found, key=lambda e: -e.used))

    def state(self) -> CacheState:
        """The owner of the directory, and whether it is used."""
        owner = refusal = None
        try:
            status = self.directory.lstat()
            owner = None if ON_WINDOWS else owner_name(status.st_uid)
            with trusted_directory(self.directory):
                pass
        except FileNotFoundError:
            pass
        except OSError as error:
            refusal = error.strerror or str(error)
        return CacheState(owner, refusal)

    def clear(self) -> int:
        """Remove every entry; returns their number. Raises OSError if the directory cannot be written, or is refused."""
        removed = 0
        try:
            with trusted_directory(self.directory) as directory:
                for name, _ in _files(directory):
                    os.unlink(directory.at(name), dir_fd=directory.descriptor)
                    removed += not name.startswith(PRIVATE)
        except FileNotFoundError:
            pass
        return removed

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Hold the lock of an entry, where the file system has locks and the directory can be written."""
        lock = f"{LOCK}{name}"
        with ExitStack() as stack:
            with suppress(OSError):
                directory = stack.enter_context(trusted_directory(self.directory, create=True))
                handle = directory.open(lock, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, handle)
                stack.callback(_remove, lock, directory)  # a process that waits for the lock finds the entry
                _lock(handle)
            yield

    def _make_room(self, directory: Directory, size: int) -> None:
        """Remove what killed processes left, and the entries that were not used for longest."""
        now = time.time()
        kept: list[tuple[float, int, str]] = []
        for name, status in _files(directory):
            if not name.startswith(PRIVATE):
                kept.append((status.st_mtime, status.st_size, name))
            elif now - status.st_mtime > STALE_SECONDS:
                _remove(name, directory)
        total = size + sum(bytes for _, bytes, _ in kept)
        for _, bytes, name in sorted(kept):
            if total <= MOST_BYTES:
                break
            _remove(name, directory)
            total -= bytes


def _content(stored: bytes) -> bytes | None:
    """An entry without its digest; None if it is damaged."""
    data, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def _files(directory: Directory) -> Iterator[tuple[str, os.stat_result]]:
    """What is in a directory, but directories."""
    for name in directory.names():
        try:
            status = os.stat(directory.at(name), dir_fd=directory.descriptor, follow_symlinks=False)
        except OSError:
            continue  # another process removed it
        if not stat.S_ISDIR(status.st_mode):
            yield name, status


def _remove(name: str, directory: Directory) -> None:
    with suppress(OSError):
        os.unlink(directory.at(name), dir_fd=directory.descriptor)


def _lock(file: int) -> None:
    """Waits until no other process has the lock; on Windows, for at most 10 seconds. Raises OSError."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


@cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """For this process alone, where the cache cannot be written."""
    return tempfile.TemporaryDirectory(prefix="attngen-")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)


def digest(*parts: str) -> str:
    """A name for an entry that is made of `parts`."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
