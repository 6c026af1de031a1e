"""The command line. Every command imports what it needs when it runs, so that `build` answers at once."""

from __future__ import annotations

import sys

import click

from attngen.cli import lesson, listing, measuring, reporting, road, running, surroundings, tracing
from attngen.cli.common import EPILOG, show_progress


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="attngen")
def main() -> None:
    """Compile a description of an attention variant to readable CUDA specialized to it.

    \b
    attngen list                               what is built in: specs, masks, scores, functions
    attngen build specs/gpt2.attn -o out       write CUDA and a manifest
    attngen check specs/gpt2.attn              run the kernels and compare with float64
    attngen explain specs/gpt2.attn            the plan with its reasons, registers, roofline
    attngen show specs/gpt2.attn --stage sass  one stage, from syntax tree to machine code
    attngen diff specs/gpt2.attn tiled fused   what changes from one schedule to another
    attngen report specs/gpt2.attn             an HTML page: spec, CUDA, PTX and SASS, linked
    attngen trace specs/gpt2.attn              memory accesses, counted and step by step
    attngen bench specs/gpt2.attn              speed beside the alternatives in torch
    attngen tune specs/gpt2.attn               find the fastest tiles on this GPU
    attngen doctor                             what this machine has, and what is missing
    attngen cache                              the compiled kernels on disk

    SPEC is an .attn file, or the name of a shipped spec, as in `attngen check alibi`.

    A schedule is a way to compute a spec: naive, tiled, fused, wgmma or hopper; auto selects hopper on GPUs that support it,
    else fused.
    """
    if sys.stderr.isatty():
        show_progress()


for _command in (
    road.build, road.show, road.explain, lesson.diff, reporting.report, running.check, tracing.trace, measuring.bench,
    measuring.tune,
    listing.list_, surroundings.doctor, surroundings.cache,
):  # fmt: skip
    main.add_command(_command)
