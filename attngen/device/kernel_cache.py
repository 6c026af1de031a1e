"""Compiled kernels on disk: cubins, and the libraries of the emulated device.

An entry is whole or absent: it is written under another name, with a digest of itself at its end, and moved into place; what
fails its digest is removed and made again. A cache that cannot be used costs time, never a result: a warning says so once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.cache_directory import cache_directory

KINDS = ("cuda", "emulated", "tuned")  # cubins, libraries of the emulated device, what `attngen tune` found
MADE_AGAIN = ("cuda", "emulated")  # what costs but a compilation to lose
DIGEST_BYTES = 32  # SHA-256, after the last byte that a loader of ELF files looks at
MOST_BYTES = 2**30  # of one kind; the entries that were not used for longest go first
STALE_SECONDS = 3600.0  # a temporary file this old was left by a process that was killed
TEMPORARY = ".writing-"
LOCK = ".lock-"
PRIVATE = "."  # how the names begin of what is no entry


class CacheWarning(UserWarning):
    """The kernel cache cannot be read or written; kernels are compiled anew by every process."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel on disk."""

    name: str
    bytes: int
    used: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class KernelCache:
    """The entries of one kind, see KINDS. Safe between threads and processes."""

    kind: str

    @property
    def directory(self) -> Path:
        return cache_directory(self.kind)

    def data(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The entry `name`; made, and kept, where it is not there or damaged."""
        found = self.find(name)
        if found is None:
            found = make()
            self.keep(name, found)
        return found

    def file(self, name: str, make: Callable[[], bytes], once: bool = False) -> Path:
        """A file that holds the entry `name`, as a loader wants it: of this directory, or of a temporary one.

        `once`: processes that need the entry at the same time wait for the first of them to make it.
        """
        path = self.directory / name
        if self.find(name) is not None:
            return path
        with self._alone(name) if once else nullcontext():
            if once and self.find(name) is not None:
                return path
            made = make()
            if self.keep(name, made):
                return path
        elsewhere = Path(_temporary_directory().name) / name
        elsewhere.write_bytes(made)
        return elsewhere

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Hold the lock of an entry, where the file system has locks and the directory can be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory / f"{LOCK}{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            with suppress(OSError):  # a process that waits for it finds the entry
                (self.directory / f"{LOCK}{name}").unlink(missing_ok=True)
            os.close(handle)

    def entries(self) -> tuple[Entry, ...]:
        """Every entry, the latest used first."""
        found = [Entry(p.name, s.st_size, s.st_mtime) for p, s in self._files() if not p.name.startswith(PRIVATE)]
        return tuple(sorted(found, key=lambda e: -e.used))

    def clear(self) -> int:
        """Remove every entry; gives their number. Raises OSError where the directory cannot be written."""
        removed = 0
        for path, _ in self._files():
            path.unlink(missing_ok=True)
            removed += not path.name.startswith(PRIVATE)
        return removed

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            paths = list(self.directory.iterdir())
        except OSError:
            return
        for path in paths:
            try:
                yield path, path.stat()
            except OSError:
                continue  # another process removed it

    def find(self, name: str) -> bytes | None:
        """The entry `name`, where it is there and whole."""
        path = self.directory / name
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(self.directory, error)
            return None
        data, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            self._remove(path)
            return None
        with suppress(OSError):  # where the directory is only read, nothing will be removed from it either
            os.utime(path)
        return data

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _warn(self.directory, error)

    def keep(self, name: str, data: bytes) -> bool:
        """Put an entry there; whether it is kept now."""
        temporary: str | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=TEMPORARY)
            with os.fdopen(handle, "wb") as file:
                file.write(data + hashlib.sha256(data).digest())
            os.replace(temporary, self.directory / name)
        except OSError as error:
            if temporary is not None:
                self._remove(Path(temporary))
            _warn(self.directory, error)
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Remove what killed processes left, and the entries that were not used for longest."""
        now = time.time()
        kept: list[tuple[float, int, Path]] = []
        for path, status in self._files():
            if not path.name.startswith(PRIVATE):
                kept.append((status.st_mtime, status.st_size, path))
            elif now - status.st_mtime > STALE_SECONDS:
                self._remove(path)
        total = size + sum(bytes for _, bytes, _ in kept)
        for _, bytes, path in sorted(kept):
            if total <= MOST_BYTES:
                break
            self._remove(path)
            total -= bytes


@cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """For this process alone, where the cache cannot be written."""
    return tempfile.TemporaryDirectory(prefix="attngen-")


@cache
def _warn_once(directory: Path, reason: str) -> None:
    warnings.warn(
        f"the kernel cache {directory} cannot be used ({reason}), so kernels are compiled anew by every process; set "
        "ATTNGEN_CACHE_DIR to a directory that can be written",
        CacheWarning,
        stacklevel=2,
    )


def _warn(directory: Path, error: OSError) -> None:
    _warn_once(directory, error.strerror or str(error))


def digest(*parts: str) -> str:
    """A name for an entry that is made of `parts`."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
