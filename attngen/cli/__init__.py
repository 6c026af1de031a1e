"""The command line. Modules are imported when they are needed, so that `build` starts fast."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from attngen import __version__
from attngen.cli.common import is_terminal, show_progress
from attngen.cli.errors import reported

EPILOG = (
    "Exit codes: 0 success; 1 a check failed; 2 a mistake in the spec or the command line; 3 a device or tool is missing; "
    "130 interrupted; 141 the output was closed."
)
COMMANDS = (
    "bench",
    "build",
    "cache",
    "check",
    "diff",
    "doctor",
    "draw",
    "explain",
    "ladder",
    "list",
    "package",
    "puzzle",
    "report",
    "show",
    "trace",
    "tune",
)


class CommandGroup(click.Group):
    """The commands: `command` of the module in this package that has the command's name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]  # `list` is a command's module here, once that is imported

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = get_close_matches(cmd_name, COMMANDS, 1)
            ctx.fail(f"No such command '{cmd_name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        command: click.Command = import_module(f"attngen.cli.{cmd_name}").command
        command.epilog = EPILOG
        return command

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with reported():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with reported():
            return super().invoke(ctx)


@click.group(
    cls=CommandGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__)
def main() -> None:
    """Compile a description of an attention variant to readable CUDA specialized to it.

    \b
    attngen list                               what is built in: specs, masks, scores, functions
    attngen build specs/gpt2.attn -o out       write CUDA and a manifest
    attngen check specs/gpt2.attn              run the kernels and compare with float64
    attngen explain specs/gpt2.attn            the plan with its reasons, registers, roofline
    attngen show specs/gpt2.attn --stage sass  one stage, from syntax tree to machine code
    attngen diff specs/gpt2.attn tiled fused   what changes from one schedule to another
    attngen draw specs/gpt2.attn tiles         a picture: tiles, banks, fragments, pipeline, barriers
    attngen package specs/gpt2.attn -o out     a library for C and C++, without Python
    attngen report specs/gpt2.attn             an HTML page: spec, CUDA, PTX and SASS, linked
    attngen ladder specs/gpt2.attn             lesson kernels, one idea a step
    attngen trace specs/gpt2.attn              memory accesses, counted and step by step
    attngen bench specs/gpt2.attn              speed beside the alternatives in torch
    attngen tune specs/gpt2.attn               find the fastest tiles on this GPU
    attngen puzzle list                        kernels to write yourself, checked without a GPU
    attngen doctor                             what this machine has, and what is missing
    attngen cache                              the compiled kernels on disk

    SPEC is an .attn file, - for standard input, or the name of a shipped spec, as in `attngen check alibi`.
    One attention of a file with several is FILE:ATTENTION, as in mine.attn:local or gemma2:gemma2_local.

    A schedule is a way to compute a spec: naive, tiled, fused, wgmma, hopper or decode; auto selects hopper
    on GPUs that support it, else fused; decode for calls of few rows, and fused for many short rows.
    """
    if is_terminal(sys.stderr):
        show_progress()
