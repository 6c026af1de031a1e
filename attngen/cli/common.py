"""What the commands share: exit codes, options, and how mistakes are reported."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attngen.emit.comments import Comments
    from attngen.emit.kernel_source import KernelSource
    from attngen.inspect.changed_file import ChangedFile
    from attngen.language import Loaded
    from attngen.plan import Plan
    from attngen.plan.arch import Arch
    from attngen.spec.attention import AttentionSpec

OK, FAILED, USAGE, DEVICE = 0, 1, 2, 3
EPILOG = "Exit codes: 0 success; 1 a check failed; 2 a mistake in the spec or the command line; 3 a device or tool is missing."
RUNG_CHOICE = click.Choice(["auto", "naive", "tiled", "fused", "wgmma", "hopper"])

spec_argument = click.argument("spec")
name_option = click.option("--name", help="The attention of this name, if the file defines several.  [default: all]")
one_name_option = click.option("--name", help="The attention of this name; required if the file defines several.")
kernel_option = click.option("--kernel", type=RUNG_CHOICE, help="The schedule.  [default: the spec's own, else auto]")
kv_len_option = click.option("--kv-len", type=click.IntRange(1), help="Number of keys.  [default: --q-len]")
arch_option = click.option(
    "--arch",
    help="The architecture to generate code for; `attngen list` names them.  [default: sm_80; sm_90a for wgmma and hopper]",
)
arches_option = click.option(
    "--arch",
    help="One or more architectures, separated by commas.  [default: sm_80; sm_90a for wgmma and hopper]",
)
comments_option = click.option(
    "--comments",
    type=click.Choice(["none", "brief", "teach"]),
    default="brief",
    show_default=True,
    help="How much the file explains. The code is the same at every level.",
)
param_option = click.option(
    "--param",
    "given",
    multiple=True,
    metavar="NAME=NUMBER",
    help="The value of a param; repeatable.  [default: the param's own]",
)

source_option = click.option(
    "--source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of `attngen build` that you changed: its kernel is run instead of the generated one.",
)


def show_progress() -> None:
    """Print on stderr what takes long, when it begins."""
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("attngen: %(message)s ..."))
    logger = logging.getLogger("attngen")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)


@contextmanager
def reported() -> Iterator[None]:
    """Prints mistakes as diagnostics, device problems as one line, internal errors with a request to report them."""
    from attngen.diagnostics import DiagnosticError

    try:
        yield
    except DiagnosticError as error:
        click.echo(error.render(color=colored(sys.stderr)), err=True, nl=False)
        sys.exit(USAGE)
    except BrokenPipeError:  # `| head` has read enough; click knows what to do
        raise
    except OSError as error:
        click.echo(f"error: {error.strerror or error}: {error.filename or ''}", err=True)
        sys.exit(USAGE)
    except click.ClickException:
        raise
    except Exception as error:
        _classified(error)


def _classified(error: Exception) -> None:
    from attngen.device.arrays import ArgumentError
    from attngen.device.emulated.findings import EmulationError
    from attngen.device.protocol import DeviceError
    from attngen.spec.obligations import ObligationError

    if isinstance(error, ObligationError) and error.diagnostic is not None:
        places = next((one.spans for one in _loaded if one.spec.name == error.attention), {})
        click.echo(error.diagnostic.located(places).render(colored(sys.stderr)), err=True, nl=False)
        sys.exit(USAGE)
    if isinstance(error, (ArgumentError, DeviceError)):
        click.echo(f"error: {error}", err=True)
        if isinstance(error, EmulationError):  # the device can do it; the kernel must not
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


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        with reported():
            return command(*args, **kwargs)

    return run


def colored(stream: Any) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


_loaded: list[Loaded] = []  # of this command, for the places of what a call of them is refused for


def load_specs(spec: str, name: str | None) -> list[Loaded]:
    """The attentions of SPEC, or the one called `name`."""
    from attngen.language.load import load_path
    from attngen.shipped import find_spec

    loaded = list(load_path(find_spec(spec)))
    _loaded[:] = loaded
    if name is None:
        return loaded
    chosen = [one for one in loaded if one.spec.name == name]
    if not chosen:
        raise click.BadParameter(
            f"{spec} defines no attention named {name}; it defines {', '.join(o.spec.name for o in loaded)}",
            param_hint="--name",
        )
    return chosen


def arches_named(names: str | None, kernel: str | None, loaded: Sequence[Loaded]) -> list[Arch]:
    """Those of `names`; by default the one that has the rung asked for, here or by a spec."""
    from attngen.plan import default_arch

    return [arch_known(name) for name in (names or default_arch(rung_asked(kernel, loaded))).split(",")]


def source_of(one: Loaded, arch: Arch, kernel: str | None, comments: Comments = "brief") -> tuple[Plan, KernelSource]:
    """(plan, KernelSource) of one attention; refusals of the planner point at the spec's text."""
    from attngen.emit.emitter import emit
    from attngen.plan import choose

    with pointing_at(one):
        plan = choose(one.spec, arch, kernel)
    return plan, emit(one.spec, plan, comments)


@contextmanager
def pointing_at(one: Loaded) -> Iterator[None]:
    """Refusals of the planner point at the spec's text."""
    from attngen.diagnostics import DiagnosticError

    try:
        yield
    except DiagnosticError as error:
        raise error.located(one.spans) from None


def rungs_named(kernel: str | None, spec: AttentionSpec) -> tuple[str, ...]:
    """The one asked for, else those that every architecture has, and the spec's own."""
    from attngen.spec.attention import HOPPER_RUNGS, RUNGS

    if kernel is not None:
        return (kernel,)
    return (*RUNGS, *(rung for rung in HOPPER_RUNGS if rung == spec.schedule.rung))


def params_given(given: tuple[str, ...]) -> dict[str, int | float]:
    values: dict[str, int | float] = {}
    for text in given:
        key, _, value = text.partition("=")
        try:
            values[key] = float(value) if any(c in value for c in ".einf") else int(value)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not of the form NAME=NUMBER", param_hint="--param") from None
    return values


def known_params(spec: AttentionSpec, given: tuple[str, ...]) -> dict[str, int | float]:
    """Those of `given`, which must be params of `spec`. Raises ArgumentError for one that is not, or of the wrong type, and
    BadParameter where one without a default is missing."""
    from attngen.device.binding import check_params, refuse_unknown

    values = params_given(given)
    declared = {p.name: (str(p.type), p.default) for p in spec.params if p.name in values}
    refuse_unknown(list(values), [p.name for p in spec.params])
    for p in spec.params:
        if p.default is None and p.name not in values:
            raise click.BadParameter(f"the param `{p.name}` has no default; add --param {p.name}=NUMBER", param_hint="--param")
    return check_params(declared, values)


def rung_asked(kernel: str | None, loaded: Sequence[Loaded]) -> str | None:
    """The rung that decides what to plan for where nothing says it: `kernel`, else one of Hopper where a spec states it."""
    from attngen.spec.attention import HOPPER_RUNGS

    return kernel or next((one.spec.schedule.rung for one in loaded if one.spec.schedule.rung in HOPPER_RUNGS), None)


def held_by(
    source: Path | None, loaded: list[Loaded], kernel: str | None, arch: str | None
) -> tuple[list[Loaded], ChangedFile | None]:
    """The attentions to run and the file that holds the kernel of one of them: all and None without a file.

    Raises ArgumentError for a file that holds none of them.
    """
    from attngen.inspect.changed_file import changed_file

    if source is None:
        return loaded, None
    held = changed_file(source, [one.spec for one in loaded], kernel, arch)
    return [one for one in loaded if one.spec == held.spec], held


@contextmanager
def compiled_from(held: ChangedFile | None) -> Iterator[None]:
    """What does not compile is named by the user's own file. Raises ArgumentError in place of CompilationError."""
    from attngen.device.arrays import ArgumentError
    from attngen.device.protocol import CompilationError

    try:
        yield
    except CompilationError as error:
        if held is None:
            raise
        log = re.sub(rf"(?<![\w./-]){held.spec.name}_{held.rung}\.cu\b", str(held.path), error.log)
        raise ArgumentError(f"{held.path} does not compile:\n{log.strip()}") from None


def emulated_by_default(device: str) -> bool:
    """Whether the option --device names the emulated device, by itself or because there is no GPU."""
    from attngen.device.choose import has_gpu

    return device == "emulated" or (device == "auto" and not has_gpu())


def device_named(device: str) -> Any:
    """The GPU that the option --device names."""
    from attngen.device.choose import device_by_name

    try:
        return device_by_name(device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from None


def arch_known(name: str) -> Arch:
    """The architecture called `name`."""
    from attngen.plan.arch import ARCHES, find_arch

    found = find_arch(name.strip())
    if found is None:
        raise click.BadParameter(f"unknown architecture {name}; known: {', '.join(ARCHES)}", param_hint="--arch")
    return found


def write_whole(path: Path, data: bytes) -> None:
    """All of it, or nothing: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
