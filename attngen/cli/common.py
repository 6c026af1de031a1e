"""Exit codes, output, and values of options."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from attngen.device.protocol import Device

OK, FAILED, USAGE, DEVICE = 0, 1, 2, 3
INTERRUPTED, UNREAD = 130, 141  # as shells have them: 128 and the number of the signal, SIGINT or SIGPIPE


def show_progress() -> None:
    """Prints the name of each long step on stderr when it begins."""
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("attngen: %(message)s ..."))
    logger = logging.getLogger("attngen")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)


def colored(stream: TextIO | None) -> bool:
    """Whether text for `stream` has colours."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal; a closed standard stream is None."""
    return stream is not None and bool(stream.isatty())


def kernel_title(schedule: str, template: str) -> str:
    """A schedule, with its template if that has another name, and whether it is a backward."""
    from attngen.plan.plan import BACKWARD_SUFFIX

    forward = template.removesuffix(BACKWARD_SUFFIX)
    title = schedule if schedule == forward else f"{schedule} {forward}"
    return title if forward == template else f"{title} backward"


def words(text: str | None) -> list[str]:
    """The items of a comma-separated option."""
    return [word.strip() for word in text.split(",")] if text else []


def whole_numbers(text: str | None, option: str) -> list[int]:
    """The numbers of the comma-separated `option`. Raises BadParameter for an item that is not a positive whole number."""
    items = words(text)
    if (items == [] and text is not None) or not all(item.isascii() and item.isdigit() and int(item) > 0 for item in items):
        raise click.BadParameter(f"{text!r} is not a list of positive whole numbers separated by commas", param_hint=option)
    return [int(item) for item in items]


def emulated_by_default(device: str) -> bool:
    """Whether --device selects the emulated device, by its name or because there is no GPU."""
    from attngen.device.select import has_gpu

    return device == "emulated" or (device == "auto" and not has_gpu())


def device_named(device: str) -> Device:
    """The GPU that --device names."""
    from attngen.device.select import device_by_name

    try:
        return device_by_name(device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from None


def check_writable(path: Path) -> None:
    """Raises OSError if `write_whole` cannot create a file beside `path`."""
    temporary = _beside(path)
    try:
        temporary.touch()
    except OSError as error:
        error.filename = str(path)
        raise
    temporary.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file by renaming a temporary one, so that a reader never sees part of it."""
    temporary = _beside(path)
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the file that the user named
        raise
    finally:
        with suppress(OSError):  # raised by a read-only file system, even if there is no such file
            temporary.unlink()
