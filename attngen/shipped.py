"""The shipped specs: `specs/` beside the package in a checkout, inside the package in a wheel."""

from __future__ import annotations

import errno
from difflib import get_close_matches
from os import PathLike
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def spec_directory() -> Path:
    """The directory with the shipped `.attn` files."""
    inside = PACKAGE / "_specs"
    return inside if inside.is_dir() else PACKAGE.parent / "specs"


def find_spec(name: str | PathLike[str]) -> Path:
    """The file called `name`, or else the shipped spec of that name. Raises FileNotFoundError with a suggestion if
    there is neither."""
    path = Path(name)
    if path.is_file() or path.suffix not in ("", ".attn") or path.name != str(name):
        return path
    shipped = {found.stem: found for found in sorted(spec_directory().glob("*.attn"))}
    if path.suffix and path.stem in shipped and not path.exists():
        raise FileNotFoundError(errno.ENOENT, f"no such file; the shipped spec is called {path.stem}, without .attn", str(name))
    if path.suffix:
        return path
    if path.name in shipped:
        return shipped[path.name]
    near = get_close_matches(path.name, shipped, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"shipped are {', '.join(shipped)}"
    raise FileNotFoundError(errno.ENOENT, f"no file and no shipped spec has this name; {hint}", str(name))
