"""`cache`: compiled kernels and tuning results on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime

import click


@click.command("cache")
@click.argument("action", type=click.Choice(["list", "size", "clear"]), default="size")
@click.option(
    "--kind",
    type=click.Choice(["cuda", "emulated", "tuned", "templates", "parser"]),
    help="Only cubins (cuda), libraries of the emulated device, tuning results (tuned), templates, or the parser's tables.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(action: str, kind: str | None, as_json: bool) -> None:
    """Show or clear the files kept on disk: compiled kernels and tuning results.

    \b
    attngen cache                      number of entries, size, and directory
    attngen cache list                 every entry, the most recently used first
    attngen cache clear                remove compiled kernels; they are compiled again when needed
    attngen cache clear --kind tuned   remove tuning results

    ATTNGEN_CACHE_DIR sets the directory. Each kind is limited to 256 MiB: the least recently used entries are removed first. A
    directory that another user owns or can write is not used.
    """
    from attngen.cache.disk_cache import KINDS, MADE_AGAIN, MOST_BYTES, DiskCache

    caches = [DiskCache(k) for k in KINDS if kind in (None, k)]
    if action == "clear":
        removed = {c.kind: c.clear() for c in caches if kind is not None or c.kind in MADE_AGAIN}
        click.echo(json.dumps(removed) if as_json else f"removed {sum(removed.values())} entries")
        return
    found = {c.kind: c.entries() for c in caches}
    states = {c.kind: c.state() for c in caches}
    if as_json:
        described = {
            c.kind: {"directory": str(c.directory), "limit_bytes": MOST_BYTES, **asdict(states[c.kind])}
            | {"entries": [asdict(e) for e in found[c.kind]]}
            for c in caches
        }
        click.echo(json.dumps(described, indent=2))
        return
    for one in caches:
        entries, state = found[one.kind], states[one.kind]
        size = f"{sum(e.bytes for e in entries) / 2**20:>6.1f} of {MOST_BYTES >> 20} MiB"
        owner = f" (owner {state.owner})" if state.owner else " (not made yet)"
        click.echo(f"{one.kind:<9} {len(entries):>5} entries {size}  {one.directory}{owner}")
        if state.refusal:
            click.echo(f"{'':<9} not used: {state.refusal}")
        for entry in entries if action == "list" else ():
            used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
            click.echo(f"  {used}  {entry.bytes / 1024:>8.1f} KiB  {entry.name}")
