"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TypeVar, get_args

import click
from click.core import ParameterSource

from attngen.cli.specs import Gradients
from attngen.keywords import ScheduleName

F = TypeVar("F", bound=Callable[..., object])


MOST = 2**31 - 1
MOST_SIZE = 2**29  # `MAX_LENGTH` of `spec/expr.py`, which commands import late


def number(flag: str, least: int, what: str, default: int | None = None, most: int = MOST) -> Callable[[F], F]:
    """An option whose value is a whole number from `least` to `most`."""
    return click.option(flag, type=click.IntRange(least, most), default=default, show_default=default is not None, help=what)


def size(flag: str, least: int, what: str, default: int | None = None) -> Callable[[F], F]:
    """An option whose value is a length or another size of a call, from `least` to MOST_SIZE."""
    return number(flag, least, what, default, MOST_SIZE)


def file(*flags: str, what: str) -> Callable[[F], F]:
    """An option whose value is the path of a file to be written."""
    return click.option(*flags, type=click.Path(dir_okay=False, path_type=Path), help=what)


def given(*names: str) -> list[str]:
    """The parameters called `names` that the command line states, as a user writes them: --q-len, SPEC."""
    context = click.get_current_context()
    return [
        max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def refuse(because: str, *names: str) -> None:
    """Raises UsageError if the command line states one of the parameters called `names`, which would have no effect."""
    found = given(*names)
    if found:
        raise click.UsageError(f"{because}; leave out {', '.join(found)}")


SCHEDULES = click.Choice(get_args(ScheduleName))

spec = click.argument("spec")
kernel = click.option("--kernel", type=SCHEDULES, help="The schedule.  [default: the spec's own, else auto]")
kv_len = size("--kv-len", 1, "Number of keys.  [default: --q-len]")
tokens = number("--tokens", 1, "Batch times length: the batch follows from it.", 16384)
USUAL = "  [default: sm_80; sm_90a for wgmma and hopper]"
arch = click.option("--arch", help=f"The architecture to generate code for; `attngen list` names them.{USUAL}")
arches = click.option("--arch", help=f"One or more architectures, separated by commas.{USUAL}")
comments = click.option(
    "--comments",
    type=click.Choice(["none", "brief", "teach"]),
    default="brief",
    show_default=True,
    help="How much the file explains. The code is the same at every level.",
)
PARAM = "The value of a param; repeatable.  [default: the param's own]"
param = click.option("--param", "given", multiple=True, metavar="NAME=NUMBER", help=PARAM)

backward = click.option("--backward", is_flag=True, help="The backward, which computes gradients, instead of the forward.")
wanted = click.option(
    "--wanted",
    metavar="NAMES",
    help="With --backward: the gradients, such as q,k,v,slopes.  [default: q, k, v and all captured float tensors and params]",
)

deterministic = click.option(
    "--deterministic",
    is_flag=True,
    help="With --backward: gradients have the same bits in every run, at the cost of time for hopper and fused.",
)


def gradients(command: Callable[..., object]) -> Callable[..., object]:
    """The gradients that a command is about, as its argument `gradients`: `--backward`, `--wanted` and `--deterministic`."""

    @wraps(command)
    def call(*, backward: bool, wanted: str | None, deterministic: bool, **others: object) -> object:
        return command(gradients=Gradients(backward, wanted, deterministic), **others)

    return backward(wanted(deterministic(call)))


source = click.option(
    "--source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of `attngen build` that you changed: its kernel is run instead of the generated one.",
)
