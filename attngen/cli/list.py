"""`list`: the built-in names, and the meaning of one of them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from difflib import get_close_matches
from itertools import takewhile
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from attngen.cli.common import colored
from attngen.diagnostics import Diagnostic, counted

if TYPE_CHECKING:
    from attngen.plan.plan import Schedule
    from attngen.spec.dtypes import DType

WIDTH = 110
COLUMN = 30  # where meanings start
MISTAKES = f"{click.style('mistakes and warnings', bold=True)}\n  by their codes, as in `attngen list E215`"


@click.command("list")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List what is built in: masks and scores (the prelude), functions, operators, element types, schedules, architectures,
    shipped specs.

    With NAME, show one of them: its definition, what it means, its arguments, an example. NAME may also be the code of a
    mistake or warning.

    \b
    attngen list
    attngen list alibi
    attngen list '//'
    attngen list fused
    attngen list E215
    attngen list --json
    """
    sections = _sections()
    if name is not None:
        sections = _named(sections, name)
    if as_json:
        click.echo(json.dumps({title: _by_name(title, entries) for title, entries in sections.items()}, indent=2))
        return
    for title, entries in sections.items():
        if name is None and title == "mistakes":
            click.echo(MISTAKES, color=colored(sys.stdout))
            continue
        if name is None:
            click.echo(click.style(title, bold=True), color=colored(sys.stdout))
        for entry in entries:
            click.echo(_line(entry) if name is None else _whole(title, entry), color=colored(sys.stdout))


Listed = dict[str, Any]  # the fields of an entry by name: texts, and the arguments of an operator


def _sections() -> dict[str, list[Listed]]:
    """All entries by section. Each has a name and a meaning; names of the language also have usage, value and example. An entry
    has other names too (`_names`): a schedule the keyword of its kernel statement, a shipped file its attentions."""
    from attngen.language.catalogue import catalogue
    from attngen.plan import ARCHES
    from attngen.schedules import SCHEDULES
    from attngen.shipped import attentions_in, shipped_specs
    from attngen.spec.dtypes import DTYPES

    texts = {name: path.read_text("utf-8") for name, path in shipped_specs().items()}
    return {
        **{section: [asdict(entry) for entry in entries] for section, entries in catalogue().items()},
        "types": [{"name": t.name, "usage": t.name, "meaning": _of_type(t)} for t in DTYPES.values()],
        "schedules": [AUTO, *map(_of_keyword, SCHEDULES)],
        "architectures": [{"name": arch.name, "meaning": arch.what} for arch in ARCHES.values()],
        "specs": [
            {"name": name, "meaning": _comment(text), "attentions": attentions_in(text), "definition": text}
            for name, text in texts.items()
        ],
        "mistakes": _mistakes(),
    }


AUTO = {
    "name": "auto",
    "usage": "auto, kernel auto",
    "meaning": "The default: hopper on GPUs that support it, else fused; decode for calls of few rows and many keys, and small "
    "tiles of fused for many short rows.",
}


def _of_keyword(schedule: Schedule) -> Listed:
    name, keyword = schedule.name, schedule.keyword
    return {"name": name, "keyword": keyword, "usage": f"{name}, kernel {keyword}", "meaning": schedule.summary}


def _of_type(dtype: DType) -> str:
    """What may have the element type, and its size."""
    from attngen.spec.dtypes import FP8_DTYPES, STORAGE_DTYPES

    storage = {**dict.fromkeys(STORAGE_DTYPES, "Q, K, V and O, and inputs"), **dict.fromkeys(FP8_DTYPES, "Q, K and V")}
    of_what = storage.get(dtype, "inputs")
    return f"An element type of {of_what}: {counted(dtype.bytes, 'byte')}, {dtype.torch} in numpy and torch."


def _mistakes() -> list[Listed]:
    """Users' mistakes, and warnings: the title with ... for what depends on the text, why it is one, and an example."""
    from attngen.plan.plan import DoesNotFit
    from attngen.spec import mistakes
    from attngen.spec.mistakes.examples import EXAMPLES

    named = (*vars(mistakes).values(), DoesNotFit)
    kinds = [k for k in named if isinstance(k, type) and issubclass(k, Diagnostic) and "code" in vars(k)]
    return [
        {
            "name": kind.code,
            "usage": f"{kind.severity} {kind.code}: {re.sub(r'{+[^{}]*}+', '...', kind.title)}",
            "meaning": EXAMPLES[kind.code].why,
            "wrong": EXAMPLES[kind.code].wrong,
            "right": EXAMPLES[kind.code].right,
        }
        for kind in sorted(kinds, key=lambda kind: kind.code)
    ]


def _of_schedule(entry: Listed) -> dict[str, str]:
    """The GPUs and the options of a schedule, for a causal mask, fp16 and head size 64."""
    from attngen.language import define
    from attngen.plan.arch import ARCHES
    from attngen.plan.facts import facts_of
    from attngen.schedules import SCHEDULES
    from attngen.schedules.backward import BACKWARD_SCHEDULES

    facts = facts_of(define(mask="causal"))
    schedule = next((s for s in SCHEDULES if s.name == entry["name"]), None)
    if schedule is None:
        return {}
    on = [arch for arch in ARCHES.values() if schedule.suits(facts, arch)]
    tiles = schedule.tiles(facts, on[0])
    options = {
        "tile": [f"{t.block_q} x {t.block_kv}" for t in tiles],
        "stages": [str(n) for n in sorted({t.stages for t in tiles})],
        "warps": [str(n) for n in sorted({t.warps for t in tiles})],
        "q": ["registers, shared"] if any(schedule.holds_q(facts, on[0], t) for t in tiles) else [],
    }
    said = "; ".join(f"{option} {', '.join(dict.fromkeys(values))}" for option, values in options.items() if values)
    has_backward = any(s.keyword == schedule.keyword for s in BACKWARD_SCHEDULES)
    return {
        "statement": f"kernel {schedule.keyword}",
        "GPUs": ", ".join(arch.name for arch in on),
        "options": f"{said} (for fp16, head_dim 64, on {on[0].name})" if said else "none: it has no tiles",
        "backward": "yes" if has_backward else "no; that of auto computes the gradients",
    }


def _by_name(title: str, entries: list[Listed]) -> dict[str, Listed]:
    """Entries by name; operators by usage, because there are two called `-`."""
    return {entry["usage" if title == "operators" else "name"]: entry for entry in entries}


def _comment(text: str) -> str:
    """The comment that a shipped spec begins with."""
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), text.splitlines()))


def _named(sections: dict[str, list[Listed]], name: str) -> dict[str, list[Listed]]:
    """The entries called `name`; `window(64)` finds window. Raises click.UsageError with similar names."""
    plain = re.sub(r"(?<=\w)\(.*", "", name)
    plain = plain.upper() if re.fullmatch(r"[ew]\d{3}", plain) else plain
    found = {title: [entry for entry in entries if plain in _names(entry)] for title, entries in sections.items()}
    found = {title: entries for title, entries in found.items() if entries}
    if not found:
        known = [word for entries in sections.values() for entry in entries for word in _names(entry)]
        near = get_close_matches(plain, list(dict.fromkeys(known)), 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`attngen list` shows all names"
        raise click.UsageError(f"there is no {name!r}; {hint}")
    return found


def _names(entry: Listed) -> list[str]:
    return [entry["name"], *filter(None, [entry.get("keyword")]), *entry.get("attentions", ())]


def _line(entry: Listed) -> str:
    first = re.split(r"(?<!et al)\. ", entry["meaning"])[0].rstrip(".")
    usage = entry.get("usage", entry["name"])
    return fill(f"{usage:<{COLUMN - 1}} {first}", WIDTH, initial_indent="  ", subsequent_indent=" " * (COLUMN + 2)).rstrip()


def _whole(title: str, entry: Listed) -> str:
    """One entry with all its fields."""
    lines = [click.style(entry.get("usage", entry["name"]), bold=True) + f"  ({title})", _filled(entry["meaning"])]
    if title == "specs":
        return "\n".join([*lines, "", entry["definition"].rstrip()])
    if title == "schedules":
        return "\n".join([*lines, *(_filled(what, f"  {name:<12}") for name, what in _of_schedule(entry).items())])
    shown = {
        "mistake": entry.get("wrong"),
        "instead": entry.get("right"),
        "definition": entry.get("definition"),
        "value" if title == "prelude" else "types": entry.get("value"),
        **entry.get("arguments", {}),
        "example": entry.get("example"),
    }
    return "\n".join([*lines, *(_filled(what, f"  {name:<12}") for name, what in shown.items() if what)])


def _filled(text: str, prefix: str = "  ") -> str:
    return fill(text, WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix))
