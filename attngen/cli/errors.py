"""Exit codes, and reports of exceptions."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from attngen.cli.common import DEVICE, FAILED, INTERRUPTED, UNREAD, USAGE, colored
from attngen.cli.specs import LOADED
from attngen.diagnostics import DiagnosticError


@contextmanager
def reported() -> Iterator[None]:
    """Prints users' mistakes as diagnostics, device problems as one line, internal errors with a request to report them."""
    try:
        yield
    except DiagnosticError as error:
        click.echo(error.render(color=colored(sys.stderr)), err=True, nl=False)
        sys.exit(USAGE)
    except BrokenPipeError:  # `| head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        sys.exit(UNREAD)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {place}{error.strerror or error}", err=True)
        sys.exit(USAGE)
    except MemoryError as error:
        click.echo(f"error: these sizes need more memory than there is ({error}); choose smaller ones", err=True)
        sys.exit(USAGE)
    except KeyboardInterrupt as error:
        click.echo(f"\n{error}" if str(error) else "\ninterrupted", err=True)
        sys.exit(INTERRUPTED)
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    from attngen.device.arrays import ArgumentError
    from attngen.device.emulated.findings import EmulationError
    from attngen.device.protocol import DeviceError
    from attngen.spec.obligations import ObligationError

    if isinstance(error, ObligationError) and error.diagnostic is not None:
        spans = next((one.spans for one in LOADED if one.spec.name == error.attention), {})
        click.echo(error.diagnostic.located(spans).render(colored(sys.stderr)), err=True, nl=False)
        sys.exit(USAGE)
    if isinstance(error, (ArgumentError, DeviceError)):
        click.echo(f"error: {error}", err=True)
        if isinstance(error, EmulationError):  # a mistake of the kernel, not a missing device
            sys.exit(FAILED)
        sys.exit(DEVICE if isinstance(error, DeviceError) else USAGE)
    _internal(error)


def _internal(error: Exception) -> None:
    if os.environ.get("ATTNGEN_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    click.echo(
        f"internal error: {type(error).__name__}: {error}\nThis is a bug in attngen. Please report it with the spec. "
        "Set ATTNGEN_DEBUG=1 to see the traceback.",
        err=True,
    )
    sys.exit(70)
