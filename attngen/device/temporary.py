"""The directory for temporary files: what is said if it cannot be used."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attngen.device.protocol import DeviceError

ROOM = 4 * 2**20  # bytes; a compilation for the emulated device writes at most 2 MiB of temporary files


@contextmanager
def temporary_files() -> Iterator[None]:
    """A context whose files are temporary ones: an OSError becomes a DeviceError that names their directory and the cure."""
    try:
        yield
    except OSError as error:
        raise _unusable(error) from error


def check_room(directory: Path) -> None:
    """Raises DeviceError if a temporary directory cannot hold ROOM more bytes: called after a program that writes there failed,
    because programs say so in many ways, and in the user's language."""
    with temporary_files(), tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(ROOM))
        file.flush()


def _unusable(error: OSError) -> DeviceError:
    try:
        where = f"the directory for temporary files, {tempfile.gettempdir()},"
    except OSError:
        where = "the directory for temporary files"
    reason = error.strerror or str(error)
    return DeviceError(
        f"{where} cannot be used ({reason}); set TMPDIR to a directory that can be written and has {ROOM >> 20} MiB of room"
    )
