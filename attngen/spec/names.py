"""Which names a spec may give to attentions, inputs, params and definitions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.source import Span
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES
from attngen.spec.operators import FUNCTIONS
from attngen.spec.reserved import reserved_reason

MAX_NAME = 64
CONSTANTS: dict[str, bool | float] = {"true": True, "false": False, "inf": math.inf}
SPELLED = {"heads": "q_heads"}  # other spellings of sizes

TENSORS = frozenset(("Q", "K", "V", "O", "S", "P", "lse", "v", "out", "stream"))


def derived_names(input: str, rank: int) -> Iterator[str]:
    """What generated code calls that belongs to the captured tensor `input`: accessor, strides, tile ranges."""
    yield f"{input}_at"
    yield from (f"{input}_step_{d}" for d in range(rank))
    for index in ("q", "k", "qk"):
        for axis in ("", *map(str, range(rank))):
            for end in ("min", "max"):
                yield f"{input}_{index}{axis}_{end}"
                yield f"{input}_{index}{axis}_{end}_at"
                yield from (f"{input}_{index}{axis}_{end}_step_{d}" for d in range(rank))


def check_name(text: str, span: Span | None = None, title: bool = False) -> None:
    """Raise DiagnosticError for a name that generated code, or a reader, could take for something else."""
    for mistake in name_mistakes(text, span, title=title):
        raise DiagnosticError(mistake)


def name_mistakes(
    text: str, span: Span | None = None, statement: str | None = None, title: bool = False
) -> Iterator[Diagnostic]:
    """What is wrong with a name, if anything. The `title` of an attention stands in no expression and is a part of longer names
    in generated code alone, so that it may be the name of an index, a size or a tensor."""
    if len(text) > MAX_NAME:
        yield mistakes.NameTooLong(span=span, statement=statement, length=len(text), limit=MAX_NAME)
        return
    reason = ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        reason = "a name consists of letters, digits and underscores"
    elif title and text in (*INDICES, "s", *SIZES, *SPELLED, "head_dim", "head_dim_v", *TENSORS):
        return
    elif text in (*INDICES, "s", *SIZES, *SPELLED, "head_dim", "head_dim_v", *CONSTANTS):
        reason = "it has a meaning in every expression"
    elif text in FUNCTIONS:
        reason = "it is a function"
    elif text in TENSORS:
        reason = "it is a tensor or an argument of every kernel"
    else:
        reason = reserved_reason(text)
    if reason:
        suggestion = f"my_{re.sub('[^A-Za-z0-9]+', '_', text).strip('_') or 'name'}"
        yield mistakes.ReservedName(span=span, statement=statement, name=text, reason=reason, suggestion=suggestion[:MAX_NAME])
