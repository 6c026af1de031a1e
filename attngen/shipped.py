"""The shipped specs: `specs/` beside the package in a checkout, inside the package in a wheel."""

from __future__ import annotations

import errno
from difflib import get_close_matches
from os import PathLike
from os.path import exists, isdir, isfile  # false for names that no file can have, of which Path raises errors
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def spec_directory() -> Path:
    """The directory with the shipped `.attn` files."""
    inside = PACKAGE / "_specs"
    return inside if inside.is_dir() else PACKAGE.parent / "specs"


def shipped_specs() -> dict[str, Path]:
    """The shipped `.attn` files by their names: of variants, then of published models."""
    directory = spec_directory()
    return {found.stem: found for where in (directory, directory / "models") for found in sorted(where.glob("*.attn"))}


def find_spec(name: str | PathLike[str]) -> Path:
    """The file called `name`, or else the shipped spec of that name. Raises OSError with a suggestion if there is neither."""
    path = Path(name)
    if isfile(path):
        return path
    shipped = shipped_specs()
    if path.name == str(name) and path.name in shipped:
        return shipped[path.name]
    if isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"this is a directory; {_files_in(path)}", str(name))
    if exists(path):  # a pipe
        return path
    if "{" in str(name):
        hint = "to load the text of a spec, call attngen.language.load_text"
    elif path.suffix == ".attn" and path.stem in shipped:
        hint = f"the shipped spec is called {path.stem}, without .attn"
    elif path.suffix or path.name != str(name):
        hint = _files_in(path.parent)
    else:
        near = get_close_matches(path.name, shipped, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"shipped are {', '.join(shipped)}"
    raise FileNotFoundError(errno.ENOENT, f"no file and no shipped spec has this name; {hint}", str(name))


def _files_in(directory: Path) -> str:
    """The specs of a directory, in words."""
    if not isdir(directory):
        return f"there is no directory {directory}"
    names = sorted(found.name for found in directory.glob("*.attn"))
    more = ", ..." if len(names) > 5 else ""
    return f"{directory} has {', '.join(names[:5])}{more}" if names else f"{directory} has no .attn file"
