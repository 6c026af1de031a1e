"""The command line. Every command imports what it needs when it runs, so that `build` answers at once."""

from __future__ import annotations

import click

from attngen.cli import lesson, measuring, reporting, road, running, surroundings, tracing
from attngen.cli.common import EPILOG


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="attngen")
def main() -> None:
    """attngen: say which attention you mean, get readable CUDA specialized to it.

    \b
    attngen build specs/gpt2.attn -o out     write CUDA and a manifest
    attngen check specs/gpt2.attn            run every rung against the oracle
    attngen explain specs/gpt2.attn          the plan, with its reasons
    attngen diff specs/gpt2.attn tiled fused what one rung does differently
    attngen report specs/gpt2.attn           a page: every line of spec, CUDA, PTX and SASS, linked
    attngen trace specs/gpt2.attn            what each rung does to memory, counted and step by step
    attngen bench specs/gpt2.attn            beside what one would use instead
    attngen tune specs/gpt2.attn             the fastest tiles on this GPU, remembered
    attngen doctor                           what this machine has
    attngen cache                            the kernels that were compiled

    SPEC is an .attn file, or the name of a shipped one, as in `attngen check alibi`.
    """


for _command in (
    road.build, road.show, road.explain, lesson.diff, reporting.report, running.check, tracing.trace, measuring.bench,
    measuring.tune,
    surroundings.list_, surroundings.doctor, surroundings.cache,
):  # fmt: skip
    main.add_command(_command)
