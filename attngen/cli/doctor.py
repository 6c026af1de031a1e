"""`doctor`: what this machine has, and what is missing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from attngen.cli.common import colored


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """Report what this machine has, what is missing, and how to get it.

    \b
    attngen doctor
    attngen doctor --json
    """
    from attngen.device.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2))
        return
    for f in findings:
        mark = click.style("have   ", fg="green") if f.found else click.style("missing", fg="yellow")
        click.echo(f"{mark} {f.name:<13} {f.detail}", color=colored(sys.stdout))
        click.echo(f"        {'':<13} for {f.needed}")
        if not f.found:
            click.echo(f"        {'':<13} cure: {f.cure}")
    emulated = next(f for f in findings if f.name == "C++ compiler").found
    gpu = next(f for f in findings if f.name == "GPU").found
    ways = [*(["on the GPU"] if gpu else []), *(["emulated on the CPU"] if emulated else [])]
    click.echo(
        f"\nattngen can build, and run {' and '.join(ways)}"
        if ways
        else "\nattngen can build, but nothing here can run kernels"
    )
