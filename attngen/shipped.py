"""The shipped specs: `specs/` beside the package in a checkout, inside the package in a wheel."""

from __future__ import annotations

import errno
import re
from difflib import get_close_matches
from os import PathLike
from os.path import exists, isdir, isfile  # false for names that no file can have, of which Path raises errors
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent


def spec_directory() -> Path:
    """The directory with the shipped `.attn` files."""
    inside = PACKAGE / "_specs"
    return inside if inside.is_dir() else PACKAGE.parent / "specs"


def shipped_specs() -> dict[str, Path]:
    """The shipped `.attn` files by their names: of variants, then of published models."""
    directory = spec_directory()
    return {found.stem: found for where in (directory, directory / "models") for found in sorted(where.glob("*.attn"))}


def shipped_attentions() -> dict[str, Path]:
    """The shipped `.attn` files by the names of the attentions in them."""
    return {name: path for path in shipped_specs().values() for name in attentions_in(path.read_text("utf-8"))}


def attentions_in(text: str) -> list[str]:
    """The names of the attentions in a shipped file, without parsing it."""
    return re.findall(r"^attention (\w+)", text, re.MULTILINE)


class Named(NamedTuple):
    """What the name of a spec stands for: a file, and the attention in it, or all of them (None)."""

    path: Path
    attention: str | None = None


def find_spec(name: str | PathLike[str]) -> Named:
    """What `name` stands for: the file of that path, the shipped file of that name, an attention of one of these
    (FILE:ATTENTION), or an attention of a shipped file. Raises OSError with a suggestion if there is none."""
    text = str(name)
    if (path := _file(text)) is not None:
        return Named(path)
    file, _, attention = text.rpartition(":")
    if file and attention.isidentifier():
        if (path := _file(file)) is not None:
            return Named(path, attention)
        raise _not_found(file)
    if (path := shipped_attentions().get(text)) is not None:
        return Named(path, text)
    raise _not_found(text)


def _file(name: str) -> Path | None:
    """The file called `name`, or else the shipped one of that name. Raises IsADirectoryError."""
    path, shipped = Path(name), shipped_specs()
    if isfile(path):
        return path
    if path.name == name and name in shipped:
        return shipped[name]
    if isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"this is a directory; {_files_in(path)}", name)
    return path if exists(path) else None  # a pipe


def _not_found(name: str) -> FileNotFoundError:
    path, shipped = Path(name), shipped_specs()
    if "{" in name:
        hint = "to load the text of a spec, call attngen.language.load_text"
    elif path.suffix == ".attn" and path.stem in shipped:
        hint = f"the shipped spec is called {path.stem}, without .attn"
    elif path.suffix or path.name != name:
        hint = _files_in(path.parent)
    else:
        near = get_close_matches(path.name, [*shipped, *shipped_attentions()], 1)
        hint = f"did you mean `{near[0]}`?" if near else f"shipped are {', '.join(shipped)}"
    return FileNotFoundError(errno.ENOENT, f"no file and no shipped spec has this name; {hint}", name)


def _files_in(directory: Path) -> str:
    """The specs of a directory, in words."""
    if not isdir(directory):
        return f"there is no directory {directory}"
    names = sorted(found.name for found in directory.glob("*.attn"))
    more = ", ..." if len(names) > 5 else ""
    return f"{directory} has {', '.join(names[:5])}{more}" if names else f"{directory} has no .attn file"
