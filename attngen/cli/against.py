"""`check --against`: a spec compared with a user's own attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from attngen.cli.common import FAILED, OK, colored

if TYPE_CHECKING:
    from attngen.inspect.against import Against, Compared
    from attngen.language import Loaded


def check_against(loaded: Sequence[Loaded], named: str, stated: Mapping[str, Against], as_json: bool) -> None:
    """Compares each spec with the attention `named`, prints the comparisons, and exits. Raises ArgumentError."""
    from attngen.device.arrays import ArgumentError
    from attngen.inspect.against import compare_against, own_of

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise ArgumentError("--against compares by torch, which is not installed: pip install torch") from None
    own = own_of(named)
    found = [(one.spec.name, c) for one in loaded for c in compare_against(one.spec, own, stated[one.spec.name])]
    if as_json:
        click.echo(json.dumps([{"attention": name, "against": own.title, **_json(c)} for name, c in found], indent=2))
    else:
        click.echo(f"{'attention':<20} {'against ' + own.title:<28} {'lengths':>12} {'error':>9} {'allowed':>9}")
        for name, c in found:
            _show(name, c)
    sys.exit(OK if all(c.passed for _, c in found) else FAILED)


def _show(name: str, c: Compared) -> None:
    """One line, and what differs first."""
    start = f"{name:<20} {c.result:<28} {c.lengths:>12}"
    if c.error is None or c.allowed is None:
        click.echo(f"{start}  {c.note}")
        return
    verdict = click.style("ok", fg="green") if c.passed else click.style("FAILED", fg="red", bold=True)
    click.echo(f"{start} {c.error:>9.2e} {c.allowed:>9.2e}  {verdict}", color=colored(sys.stdout))
    for line in (c.first, *c.why, c.note):
        if line:
            click.echo(f"    {line}")


def _json(c: Compared) -> dict[str, object]:
    return {**asdict(c), "passed": c.passed}
