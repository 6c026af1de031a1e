"""Words of a fixed set in text and Python specs: element types, schedules and others, with suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.spec import mistakes
from attngen.spec.dtypes import STORAGE_DTYPES, DType

OTHER_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "int": "int32"}


def one_of(word: Any, known: Sequence[str], mistake: Callable[..., Diagnostic], **place: Any) -> Any:
    """`word`, if it is one of `known`. Raises DiagnosticError with `mistake` at `place`, a span or a statement."""
    if word not in known:
        raise DiagnosticError(mistake(found=word, hint=_hint(word, known, f"not one of {', '.join(known)}"), **place))
    return word


def dtype_named(word: Any, known: Sequence[DType], **place: Any) -> DType:
    """The element type called `word`, one of `known`. Raises DiagnosticError at `place`."""
    names = [dtype.name for dtype in known]
    if word in names:
        return known[names.index(word)]
    spelled = str(getattr(word, "__name__", word)).rpartition(".")[2]  # as numpy and torch call it
    meant = OTHER_NAMES.get(spelled)
    hint = f"did you mean `{meant}`?" if meant in names else _hint(word, names, "not supported")
    of_what = " of Q, K and V" if known is STORAGE_DTYPES else " of an input"
    raise DiagnosticError(mistakes.UnknownDType(dtype=str(word), of_what=of_what, hint=hint, known=", ".join(names), **place))


def _hint(word: Any, known: Sequence[str], otherwise: str) -> str:
    near = get_close_matches(str(word), known, 1)
    return f"did you mean `{near[0]}`?" if near else otherwise
