"""Directories and files that nobody but this user, or root, can have written.

What is executed is read through these functions alone. A directory is opened once and checked by its descriptor, and its files
are opened relative to it, so that a path which is exchanged between the check and the use has no effect.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0


class UntrustedError(OSError):
    """Another user owns a directory or file, or may write it; or it is a link, a pipe or the like. `strerror` says which."""


def owner_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"number {user}"


def _require_trust(status: os.stat_result, what: str, path: Path) -> None:
    """Raise UntrustedError unless this user or root owns the file, and nobody else may write it."""
    if status.st_uid not in (os.geteuid(), ROOT):
        raise UntrustedError(errno.EPERM, f"{what} belongs to user {owner_name(status.st_uid)}", str(path))
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise UntrustedError(errno.EPERM, f"{what} can be written by other users; chmod go-w {path}", str(path))


@contextmanager
def trusted_directory(path: Path, create: bool = False) -> Iterator[int]:
    """A descriptor of `path`. Raises UntrustedError, and OSError if there is none.

    `create` makes it and the directories above it that are missing, for this user alone.
    """
    if create:
        _make(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except OSError:
        if path.is_symlink():
            raise UntrustedError(errno.ELOOP, "the directory is a symbolic link", str(path)) from None
        raise
    try:
        _require_trust(os.fstat(handle), "the directory", path)
        yield handle
    finally:
        os.close(handle)


def _make(path: Path) -> None:
    missing = [p for p in (path, *path.parents) if not p.exists() and not p.is_symlink()]
    for one in reversed(missing):
        try:
            one.mkdir(0o700)
        except FileExistsError:
            continue  # another process made it


def read_trusted(directory: int, name: str, where: Path) -> bytes:
    """The bytes of a file in a trusted directory. Raises UntrustedError, and OSError if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer must not block
    path = where / name
    try:
        handle = os.open(name, flags, dir_fd=directory)
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
    for one in (directory, *directory.parents):
        status = one.lstat()
        others_write = status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), ROOT) or others_write:
            return False
    return True
