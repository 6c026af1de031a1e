"""Colours of pictures, light and dark, as CSS variables. Pages that show pictures inside their HTML declare the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

Theme = Literal["auto", "light", "dark"]

# Hues are of bars, with dark text on them in both themes; c0 to c7 are of small cells, with the ink of the theme.
HUES = {
    "blue": "#4c8fd6", "green": "#4fae86", "amber": "#dba032", "red": "#cf5b56", "violet": "#9b78cf", "teal": "#56b3bd",
    "on-bar": "#10161f",
}  # fmt: skip
LIGHT: Mapping[str, str] = HUES | {
    "paper": "#ffffff", "ink": "#1b2230", "quiet": "#525c6b", "line": "#d9dee6", "grey": "#a3adba",
    "c0": "#cfe3f7", "c1": "#d3efe0", "c2": "#f8e6c2", "c3": "#f5d5d2", "c4": "#e3d8f3", "c5": "#cdebee", "c6": "#e7ecc9",
    "c7": "#f3d6e6",
}  # fmt: skip
DARK: Mapping[str, str] = HUES | {
    "paper": "#1a2029", "ink": "#dde3ec", "quiet": "#a8b3c3", "line": "#313a48", "grey": "#7f8b9b",
    "c0": "#24476b", "c1": "#1f5440", "c2": "#63491a", "c3": "#662f2c", "c4": "#48366b", "c5": "#1c545a", "c6": "#4b5320",
    "c7": "#602f4c",
}  # fmt: skip


def declared(selector: str, colours: Mapping[str, str]) -> str:
    """A CSS rule that declares the variables."""
    return f"{selector} {{ {' '.join(f'--{name}: {value};' for name, value in colours.items())} }}\n"


def variables(theme: Theme, selector: str) -> str:
    """The variables of a file: of one theme, or of both, by the reader's preference."""
    dark = declared(selector, DARK)
    if theme == "dark":
        return dark
    return declared(selector, LIGHT) + (
        f"@media (prefers-color-scheme: dark) {{ {dark.strip()} }}\n" if theme == "auto" else ""
    )


@cache
def style() -> str:
    """The rules of what pictures consist of, which use the variables."""
    return (Path(__file__).parent / "drawing.css").read_text("utf-8")
