"""Text, or Python functions, -> AttentionSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attngen.language.block import Loaded
from attngen.language.load import load_file, load_path, load_source, load_text
from attngen.spec.print_attn import to_text

if TYPE_CHECKING:
    from attngen.language.python_spec import define, traced

__all__ = ["Loaded", "define", "load_file", "load_path", "load_source", "load_text", "to_text", "traced"]


def __getattr__(name: str) -> object:
    if name in ("define", "traced"):  # imported late: text needs no numpy
        from attngen.language import python_spec

        return getattr(python_spec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
