"""Words of a fixed set in text and Python specs: element types, schedules and others, with suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.spec import mistakes
from attngen.spec.dtypes import DTYPES_OF, DType

W = TypeVar("W")
Place = dict[str, Any]  # keywords of a diagnostic: a span, or a statement
OTHER_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "int": "int32"}


def one_of(word: W, known: Sequence[str], mistake: Callable[..., Diagnostic], **place: object) -> W:
    """`word`, if it is one of `known`. Raises DiagnosticError with `mistake` at `place`, a span or a statement."""
    if word not in known:
        raise DiagnosticError(mistake(found=word, hint=_hint(word, known, f"not one of {', '.join(known)}"), **place))
    return word


def allowed(*words: tuple[str, Place]) -> tuple[str, ...]:
    """The codes of warnings that a spec allows, of words and their places. Raises DiagnosticError."""
    kinds = (k for k in vars(mistakes).values() if isinstance(k, type) and issubclass(k, mistakes.Suspicion))
    known = sorted(kind.code for kind in kinds if "code" in vars(kind))
    return tuple(sorted({one_of(word, known, mistakes.UnknownWarning, **place) for word, place in words}))


def dtype_named(word: object, known: Sequence[DType], of_what: str, **place: Any) -> DType:
    """The element type called `word`, one of `known`: those of `of_what`. Raises DiagnosticError at `place`."""
    names = [dtype.name for dtype in known]
    if word in names:
        return known[names.index(word)]
    spelled = str(getattr(word, "__name__", word)).rpartition(".")[2]  # as numpy and torch call it
    meant = OTHER_NAMES.get(spelled)
    hint = f"did you mean `{meant}`?" if meant in names else _hint(word, names, "not supported")
    raise DiagnosticError(
        mistakes.UnknownDType(dtype=str(word), of_what=f" of {of_what}", hint=hint, known=", ".join(names), **place)
    )


def dtypes_of_tensors(words: Mapping[str, object], place: Callable[[str], Place]) -> dict[str, DType | None]:
    """The fields of an AttentionSpec for the element types of "q" and of other tensors that have one of their own; `place` has
    that of a tensor's word. Raises DiagnosticError."""
    found = {t: dtype_named(word, DTYPES_OF[t], t.upper(), **place(t)) for t, word in words.items()}
    others = {f"{t}_dtype": None if found.get(t) is found["q"] else found.get(t) for t in DTYPES_OF if t != "q"}
    return {"dtype": found["q"], **others}


def _hint(word: object, known: Sequence[str], otherwise: str) -> str:
    near = get_close_matches(str(word), known, 1)
    return f"did you mean `{near[0]}`?" if near else otherwise
