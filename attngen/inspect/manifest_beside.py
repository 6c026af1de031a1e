"""The manifest beside a changed file: whether it says of the kernels what their plan says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attngen.diagnostics import ArgumentError
from attngen.emit.manifest import FORMAT, VERSION, to_manifest
from attngen.emit.program import Program

MISSING = "missing"
LONGEST = 60  # characters of a value in a message


def manifest_beside(path: Path) -> Path:
    """Where `attngen build` writes the manifest of the file at `path`."""
    return path.with_suffix(".json")


def contradiction(path: Path, program: Program) -> str:
    """What the manifest beside the file at `path` says that `program`, of the file's plan, does not; "" if they agree, or if
    there is no manifest.

    Raises ArgumentError if the manifest cannot be read.
    """
    beside = manifest_beside(path)
    document = _read(beside)
    if document is None:
        return ""
    expected = json.loads(to_manifest(program))
    if document.get("source") == path.name:  # a file that was renamed, and its manifest with it
        expected["source"] = path.name
    if document.get("version") != VERSION:
        theirs = document.get("version")
        return f"{beside} is a manifest of version {theirs}, and this attngen reads version {VERSION}; {_cure(path)}"
    different = list(_differences("", document, expected))
    if not different:
        return ""
    where, theirs, ours = different[0]
    planned = "no such entry" if ours == MISSING else _short(ours)
    others = f" ({len(different) - 1} more entries differ)" if len(different) > 1 else ""
    return (
        f"{beside} contradicts {path.name}: {where} is {_short(theirs)}, and the plan for {program.arch} has "
        f"{planned}{others}; {_cure(path)}"
    )


def _read(beside: Path) -> dict[str, object] | None:
    """The manifest; None if there is no such file, or if it is JSON of something else, such as the results of a check."""
    try:
        document = json.loads(beside.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # and UnicodeDecodeError, JSONDecodeError
        raise ArgumentError(f"{beside} is not a manifest: {error}; {_cure(beside)}") from None
    except RecursionError:
        raise ArgumentError(f"{beside} is not a manifest: it is nested too deeply; {_cure(beside)}") from None
    return document if isinstance(document, dict) and document.get("format") == FORMAT else None


def _cure(path: Path) -> str:
    return f"build the file again, or delete {manifest_beside(path).name}"


def _differences(where: str, theirs: object, ours: object) -> Iterator[tuple[str, object, object]]:
    """The entries that differ, each with both values. Elements of lists are called by their names, if they have any."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in dict.fromkeys((*ours, *theirs)):
            one, other = theirs.get(key, MISSING), ours.get(key, MISSING)
            if (one, other) != (MISSING, False):  # what the first manifests of a version lack is false
                yield from _differences(f"{where}.{key}" if where else key, one, other)
    elif isinstance(theirs, list) and isinstance(ours, list):
        their_names, names = ([_name(one, i) for i, one in enumerate(each)] for each in (theirs, ours))
        if their_names != names:
            yield where, their_names, names
            return
        for name, one, other in zip(names, theirs, ours, strict=True):
            yield from _differences(f"{where}[{name}]", one, other)
    elif theirs != ours or type(theirs) is not type(ours):
        yield where, theirs, ours


def _name(one: object, position: int) -> str:
    return str(one["name"]) if isinstance(one, dict) and "name" in one else str(position)


def _short(value: object) -> str:
    text = value if value == MISSING else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
