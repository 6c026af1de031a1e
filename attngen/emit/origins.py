"""Which statements of the spec the lines of an emitted file come from.

A statement is named as the language's loader names its places: "mask", "head_dim", "input slopes", "param window". The names
in generated text are fixed: those of the functions that hold a user's expressions, of the constants, and of captured values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attngen.emit.cuda_text import c_name
from attngen.emit.program import Program
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.dropout import RNG_STATE

Statements = tuple[str, ...]
Rule = tuple[re.Pattern[str], str]

FUNCTIONS = {
    "mask": "mask",
    "score": "score",
    "score_of_two": "score",
    "affine": "score",
    "slope": "score",
    "sink": "sink",
    "v_scale": "scaled v",
    "dropped_weights": "dropout",
    "dropout_of": "dropout",
    "random_words": "dropout",
    "is_kept": "dropout",
    "kept_factor": "dropout",
    "move_rotated": "rotary",
    "q_position": "rotary",
    "k_position": "rotary",
    "nearest": "rotary",
    "rotate_row": "rotary",
    "kv_range": "mask",
    "classify": "mask",
}
CONSTANTS = {
    "HEAD_DIM": "head_dim",
    "HEAD_DIM_V": "head_dim",
    "q_heads": "heads",
    "kv_heads": "heads",
    "softmax_scale": "scale",
    "HALF": "rotary",
    "ROTATED": "rotary",
    "PARTS": "rotary",
}
_DEFINITION = re.compile(r"__device__ (?:__forceinline__|__noinline__) [\w ]+?[ *]*\b(\w+)\(|struct (\w+) \{")


def origins(spec: AttentionSpec, plan: Plan, source: Program) -> dict[int, Statements]:
    """The statements behind each line of `source`, counted from 1, the one that says most first; no entry: none.

    A function made of a statement is of that statement as a whole, its comment too; elsewhere a line is of the statements
    whose functions, constants or captured values it names.
    """
    rules = list(_rules(spec, plan))
    lines = source.text.splitlines()
    if "EXPONENT_SCALE = softmax_scale" in source.text:  # the scale joins the exponent's factor
        rules.append((re.compile(r"\bEXPONENT_SCALE\b"), "scale"))
    found: dict[int, Statements] = {}
    for first, last, statement in _definitions(spec, lines):
        found |= dict.fromkeys(range(first, last + 1), (statement,))
    body = next(i for i, line in enumerate(lines, 1) if line and not line.startswith("//"))
    for number, line in enumerate(lines[body - 1 :], body):
        code = line.split("//")[0]
        named = [statement for pattern, statement in rules if pattern.search(code)]
        together = tuple(dict.fromkeys((*found.get(number, ()), *named)))
        if together:
            found[number] = together
    return found


def _rules(spec: AttentionSpec, plan: Plan) -> Iterator[Rule]:
    """What a line may name, and the statement that it is from."""
    for function, statement in FUNCTIONS.items():
        if _is_stated(spec, statement):
            yield re.compile(rf"\b{function}\("), statement
    for constant, statement in CONSTANTS.items():
        if _is_stated(spec, statement):
            yield re.compile(rf"\bconstexpr \w+ {constant} ="), statement
    if (plan.block_q, plan.block_kv) == (spec.kernel.block_q, spec.kernel.block_kv):
        yield re.compile(r"\bconstexpr \w+ BLOCK_(Q|KV) ="), "kernel"
    if spec.mask is not None:
        yield re.compile(r"\ballowed\b"), "mask"  # what the mask's function said
    yield re.compile(r"\bsoftmax_scale\b"), "scale"
    if spec.lse:
        yield re.compile(r"\blse(_stride_\w)?\b"), "output"
    yield re.compile(rf"\bstruct {spec.dtype.cuda} "), "dtype"
    for statement, name in _captured(spec):
        read = rf"\b(in\.|captured_){name}\b|\b{name}_at\(|^ +(const )?\w+\*? {name};|\b{name}_of_[kq]\d*\b"
        yield re.compile(read), statement


def _is_stated(spec: AttentionSpec, statement: str) -> bool:
    """Whether there is such a statement: those that are not asked for here always have their text, or its default."""
    match statement:
        case "mask":
            return spec.mask is not None
        case "sink":
            return spec.sink is not None
        case "dropout":
            return spec.dropout is not None
        case "rotary":
            return spec.rotary is not None
        case "heads":
            return spec.q_heads is not None
    return True


def _captured(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """(statement, pattern of names): of each captured value, with its steps and what the pre-pass makes of it."""
    for i in spec.inputs:
        if spec.dropout is not None and i == RNG_STATE:
            yield "dropout", c_name(i.name)
            continue
        yield f"input {i.name}", rf"{c_name(i.name)}(_[qk]\d*_(min|max))?(_(step|stride)_\d)?"
    for p in spec.params:
        yield f"param {p.name}", c_name(p.name)


def _definitions(spec: AttentionSpec, lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, statement) of what a statement made as a whole, from its comment to its closing brace."""
    made = {"KvRange": "mask", **FUNCTIONS}
    readers = [(re.compile(rf"{name}_at"), statement) for statement, name in _captured(spec)]
    for number, line in enumerate(lines, 1):
        found = _DEFINITION.match(line)
        if found is None:
            continue
        name = found[1] or found[2]
        statement = made.get(name) or next((s for pattern, s in readers if pattern.fullmatch(name)), None)
        if statement is None or not _is_stated(spec, statement):
            continue
        first = last = number
        while lines[first - 2].startswith("//"):
            first -= 1
        while not lines[last - 1].startswith("}"):
            last += 1
        yield first, last, statement
