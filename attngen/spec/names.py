"""Valid names of attentions, inputs, params and definitions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.source import Span
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec
from attngen.spec.gradient import GradientError
from attngen.spec.operators import FUNCTIONS
from attngen.spec.reserved import reserved_reason

MAX_NAME = 64
CONSTANTS: dict[str, bool | float] = {"true": True, "false": False, "inf": math.inf}
SPELLED = {"heads": "q_heads"}  # other spellings of sizes
WORDS = (*INDICES, "s", *SIZES, *SPELLED, "head_dim", "head_dim_v")  # known in every expression

TENSORS = frozenset("Q K V O S P lse next_work split_O split_max split_sum v out stream".split())  # noqa: SIM905

# Names of a backward program and arguments of its call: a spec with one of them has a forward only.
BACKWARD_NAMES = frozenset(
    "dO dQ dK dV dP dS ds QK delta sink_weight row_numbers dq_sums part_sums own_lse own_lse_rest lse_rest "  # noqa: SIM905
    "dlse dout dq dk dv wanted".split()
)
# Of a captured tensor's gradient, and of the workspaces that it is added up in.
GRADIENT_PREFIXES = ("d_", *(f"{place}_of_" for place in ("rows", "keys", "pairs", "words")))
DIGITS = "0123456789"


def check_backward_names(spec: AttentionSpec) -> None:
    """Raises GradientError for an input or a param that a backward program cannot have beside its own tensors."""
    names = [*(i.name for i in spec.inputs), *(p.name for p in spec.params)]
    others = {form for name in names for form in (name, name.rstrip(DIGITS))}
    for name in names:
        derived = any(name.startswith(p) and name.removeprefix(p).rstrip(DIGITS) in others for p in GRADIENT_PREFIXES)
        if name in BACKWARD_NAMES or derived:
            raise GradientError(f"`{name}` is the name of a tensor or an argument of the backward; rename it in the spec")


def derived_names(input: str, rank: int) -> Iterator[str]:
    """Names in generated code that belong to the captured tensor `input`: accessor, strides, tile ranges."""
    yield f"{input}_at"
    yield from (f"{input}_step_{d}" for d in range(rank))
    for index in ("q", "k", "qk"):
        for axis in ("", *map(str, range(rank))):
            for end in ("min", "max"):
                yield f"{input}_{index}{axis}_{end}"
                yield f"{input}_{index}{axis}_{end}_at"
                yield from (f"{input}_{index}{axis}_{end}_step_{d}" for d in range(rank))


def check_name(text: str, span: Span | None = None, title: bool = False) -> None:
    """Raises DiagnosticError for a name that already has a meaning in generated code or in the language."""
    for mistake in name_mistakes(text, span, title=title):
        raise DiagnosticError(mistake)


def name_mistakes(
    text: str, span: Span | None = None, statement: str | None = None, title: bool = False
) -> Iterator[Diagnostic]:
    """The mistakes of a name. A `title`, the name of an attention, occurs in no expression, and in generated code only as a
    part of longer names, so it may also be the name of an index, a size or a tensor."""
    if len(text) > MAX_NAME:
        yield mistakes.NameTooLong(span=span, statement=statement, length=len(text), limit=MAX_NAME)
        return
    reason = ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        reason = "a name consists of letters, digits and underscores"
    elif title and text in (*WORDS, *TENSORS):
        return
    elif text in (*WORDS, *CONSTANTS):
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
