"""Directories and files that nobody but this user, or root, can have written.

What is executed is read through these functions alone. A directory is opened once and checked by its descriptor, and its files
are opened relative to it, so that a path which is exchanged between the check and the use has no effect. Windows has neither
owners and modes of this kind nor descriptors of directories: there, files are reached by their paths, and nothing is checked.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0
ON_WINDOWS = sys.platform == "win32"


def _flags(names: str) -> int:
    """Flags of os.open, without those that this system does not have."""
    return sum(getattr(os, f"O_{name}", 0) for name in names.split())


ONLY_FILES = _flags("NOFOLLOW CLOEXEC BINARY NOINHERIT")
ONLY_DIRECTORIES = _flags("RDONLY DIRECTORY NOFOLLOW CLOEXEC")
TO_READ = _flags("RDONLY NONBLOCK")  # a pipe without a writer must not block


class UntrustedError(OSError):
    """Another user owns a directory or file, or may write it; or it is a link, a pipe or the like. `strerror` says which."""


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory. Functions of `os` find a file in it by `at(name)`, and `dir_fd=descriptor`."""

    path: Path
    descriptor: int | None  # None: on Windows

    def at(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)

    def names(self) -> list[str]:
        return os.listdir(self.path if self.descriptor is None else self.descriptor)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file that is no link; of a new one if `flags` say so, for this user alone."""
        return os.open(self.at(name), flags | ONLY_FILES, 0o600, dir_fd=self.descriptor)


def owner_name(user: int) -> str:
    import pwd  # not on Windows

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"number {user}"


def _require_trust(status: os.stat_result, what: str, path: Path) -> None:
    """Raise UntrustedError unless this user or root owns the file, and nobody else may write it."""
    if ON_WINDOWS:
        return
    if status.st_uid not in (os.geteuid(), ROOT):
        raise UntrustedError(errno.EPERM, f"{what} belongs to user {owner_name(status.st_uid)}", str(path))
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise UntrustedError(errno.EPERM, f"{what} can be written by other users; chmod go-w {path}", str(path))


@contextmanager
def trusted_directory(path: Path, create: bool = False) -> Iterator[Directory]:
    """The directory `path`, open. Raises UntrustedError, and OSError if there is none.

    `create` makes it and the directories above it that are missing, for this user alone.
    """
    if create:
        _make(path)
    if ON_WINDOWS:
        yield Directory(path, None)
        return
    try:
        descriptor = os.open(path, ONLY_DIRECTORIES)
    except OSError:
        if path.is_symlink():
            raise UntrustedError(errno.ELOOP, "the directory is a symbolic link", str(path)) from None
        raise
    try:
        _require_trust(os.fstat(descriptor), "the directory", path)
        yield Directory(path, descriptor)
    finally:
        os.close(descriptor)


def _make(path: Path) -> None:
    missing = [p for p in (path, *path.parents) if not p.exists() and not p.is_symlink()]
    for one in reversed(missing):
        try:
            one.mkdir(0o700)
        except FileExistsError:
            continue  # another process made it


def read_trusted(directory: Directory, name: str) -> bytes:
    """The bytes of a file in a trusted directory. Raises UntrustedError, and OSError if there is none."""
    path = directory.path / name
    try:
        handle = directory.open(name, TO_READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedError(error.errno, f"{name} is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:  # a socket
            raise UntrustedError(error.errno, f"{name} is not a regular file", str(path)) from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(errno.EINVAL, f"{name} is not a regular file", str(path))
        _require_trust(status, name, path)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def path_is_fixed(directory: Path) -> bool:
    """Whether other users can neither rename nor replace any directory on this path, which has no links.

    A file that must be opened by its path, as the dynamic loader does, is the one that was checked only where this holds.
    """
    if ON_WINDOWS:
        return True
    for one in (directory, *directory.parents):
        status = one.lstat()
        others_write = status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), ROOT) or others_write:
            return False
    return True
