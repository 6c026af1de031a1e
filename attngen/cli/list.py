"""`list`: the built-in names, and the meaning of one of them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from difflib import get_close_matches
from itertools import takewhile
from textwrap import fill
from typing import Any

import click

from attngen.cli.common import colored

WIDTH = 110
COLUMN = 30  # of meanings


@click.command("list")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List what is built in: masks and scores (the prelude), functions, operators, schedules, architectures, shipped specs.

    With NAME, show one of them: its definition, what it means, its arguments, an example.

    \b
    attngen list
    attngen list alibi
    attngen list '//'
    attngen list --json
    """
    sections = _sections()
    if name is not None:
        sections = _named(sections, name)
    if as_json:
        click.echo(json.dumps({title: _by_name(title, entries) for title, entries in sections.items()}, indent=2))
        return
    for title, entries in sections.items():
        if name is None:
            click.echo(click.style(title, bold=True), color=colored(sys.stdout))
        for entry in entries:
            click.echo(_line(entry) if name is None else _whole(title, entry), color=colored(sys.stdout))


def _sections() -> dict[str, list[dict[str, Any]]]:
    """All entries by section. Each has a name and a meaning; names of the language also have usage, value and example."""
    from attngen.language.catalogue import catalogue
    from attngen.plan import ARCHES
    from attngen.schedules import SCHEDULES
    from attngen.shipped import spec_directory

    files = sorted(spec_directory().glob("*.attn"))
    return {
        **{section: [asdict(entry) for entry in entries] for section, entries in catalogue().items()},
        "schedules": [{"name": s.name, "usage": f"{s.name}, kernel {s.keyword}", "meaning": s.summary} for s in SCHEDULES],
        "architectures": [{"name": arch.name, "meaning": arch.what} for arch in ARCHES.values()],
        "specs": [{"name": p.stem, "meaning": _comment(p.read_text()), "definition": p.read_text()} for p in files],
    }


def _by_name(title: str, entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Entries by name; operators by usage, because there are two called `-`."""
    return {entry["usage" if title == "operators" else "name"]: entry for entry in entries}


def _comment(text: str) -> str:
    """The comment that a shipped spec begins with."""
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), text.splitlines()))


def _named(sections: dict[str, list[dict[str, Any]]], name: str) -> dict[str, list[dict[str, Any]]]:
    """The entries called `name`; `window(64)` finds window. Raises click.UsageError with similar names."""
    plain = re.sub(r"(?<=\w)\(.*", "", name)
    found = {title: [e for e in entries if e["name"] == plain] for title, entries in sections.items()}
    found = {title: entries for title, entries in found.items() if entries}
    if not found:
        known = [entry["name"] for entries in sections.values() for entry in entries]
        near = get_close_matches(plain, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`attngen list` shows all names"
        raise click.UsageError(f"there is no {name!r}; {hint}")
    return found


def _line(entry: dict[str, Any]) -> str:
    first = re.split(r"(?<!et al)\. ", entry["meaning"])[0].rstrip(".")
    usage = entry.get("usage", entry["name"])
    return fill(f"{usage:<{COLUMN - 1}} {first}", WIDTH, initial_indent="  ", subsequent_indent=" " * (COLUMN + 2)).rstrip()


def _whole(title: str, entry: dict[str, Any]) -> str:
    """One entry with all its fields."""
    lines = [click.style(entry.get("usage", entry["name"]), bold=True) + f"  ({title})", _filled(entry["meaning"])]
    if title == "specs":
        return "\n".join([*lines, "", entry["definition"].rstrip()])
    shown = {
        "definition": entry.get("definition"),
        "value" if title == "prelude" else "types": entry.get("value"),
        **entry.get("arguments", {}),
        "example": entry.get("example"),
    }
    return "\n".join([*lines, *(_filled(what, f"  {name:<12}") for name, what in shown.items() if what)])


def _filled(text: str, prefix: str = "  ") -> str:
    return fill(text, WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix))
