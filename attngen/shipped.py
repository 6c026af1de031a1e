"""The one place that knows where the shipped specs lie: `specs/` beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def spec_directory() -> Path:
    """The directory with the shipped `.attn` files."""
    inside = PACKAGE / "_specs"
    return inside if inside.is_dir() else PACKAGE.parent / "specs"


def find_spec(name: str) -> Path:
    """The file called `name`, or else the shipped spec of that name."""
    path = Path(name)
    if path.exists() or path.suffix:
        return path
    shipped = spec_directory() / f"{name}.attn"
    return shipped if shipped.is_file() else path
