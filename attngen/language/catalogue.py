"""The names of the language: definitions of the prelude, functions and operators, each with meaning, types and an example.

The texts are those of the definitions: comments in `prelude.attn`, rows of the operator table. Examples of functions and
operators follow from the types that their row accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from attngen.language.prelude import Documented, documentation
from attngen.spec.expr import ExpressionError, Type
from attngen.spec.operator import TABLE, Operator

# Operands of an example, by type.
OPERANDS = {Type.FLOAT: ("s", "2.0", "0.5"), Type.INT: ("k", "4", "q"), Type.BOOL: ("q >= k", "k - q < 8", "k < 4")}
TERMS = ("s", "0.5 * k")  # terms of a sum: one that all keys share would change no weight


@dataclass(frozen=True)
class Entry:
    """One name. `usage` is its notation, `value` the type of its result; `definition` is empty for names that are not defined
    in the language itself."""

    name: str
    usage: str
    meaning: str
    value: str
    definition: str
    example: str
    arguments: dict[str, str] = field(default_factory=dict)


def catalogue() -> dict[str, list[Entry]]:
    """Every entry, by section: prelude, functions, operators."""
    rows = sorted(TABLE.values(), key=lambda row: row.name)
    operators = sorted((row for row in TABLE.values() if row.infix), key=lambda row: row.infix.precedence if row.infix else 0)
    return {
        "prelude": [_of_prelude(documented) for documented in documentation().values()],
        "functions": [_of_table(row) for row in rows if row.infix is None],
        "operators": [_of_table(row) for row in operators],
    }


def _of_prelude(documented: Documented) -> Entry:
    made = documented.definition
    usage = f"{made.name}({', '.join(made.parameters)})" if made.parameters else made.name
    return Entry(
        name=made.name,
        usage=usage,
        meaning=documented.meaning,
        value=documented.gives,
        definition=made.text,
        example=documented.example,
        arguments=documented.arguments,
    )


def _of_table(row: Operator) -> Entry:
    accepted = _signatures(row)
    count = len(accepted[-1][0])
    letters = "cab" if row.name == "where" else "xyz" if row.infix is None else "ab"
    return Entry(
        name=row.infix.symbol if row.infix else row.name,
        usage=_written(row, list(letters[:count])),
        meaning=row.what,
        value="; ".join(f"{', '.join(map(str, types))} -> {result}" for types, result in accepted),
        definition="",
        example=_example(row, accepted),
    )


def _example(row: Operator, accepted: list[tuple[tuple[Type, ...], Type]]) -> str:
    """A statement that uses the row: a mask if its result is a truth value, else a score."""
    in_masks = [one for one in accepted if one[1] is Type.BOOL and Type.FLOAT not in one[0]]
    types, result = in_masks[-1] if accepted[-1][1] is Type.BOOL else accepted[-1]
    is_sum = row.name in ("add", "sub")
    operands = TERMS if is_sum else tuple(OPERANDS[t][types[:n].count(t)] for n, t in enumerate(types))
    written = _written(row, operands)
    if result is Type.BOOL:
        return f"mask {written}"
    return f"score {written}" if "s" in operands else f"score s + {written}"


def _signatures(row: Operator) -> list[tuple[tuple[Type, ...], Type]]:
    """The types of operands that a row accepts without conversion, each with the type of the result."""
    found: list[tuple[tuple[Type, ...], Type]] = []
    for count in (1, 2, 3):
        for types in product(Type, repeat=count):
            try:
                wanted, result = row.typing(row.infix.symbol if row.infix else row.name, types)
            except ExpressionError:
                continue
            if wanted == types:
                found.append((types, result))
    return found


def _written(row: Operator, operands: Sequence[str]) -> str:
    if row.infix is None:
        return f"{row.name}({', '.join(operands)})"
    if len(operands) == 1:
        space = " " if row.infix.symbol.isalpha() else ""
        operand = f"({operands[0]})" if " " in operands[0] else operands[0]
        return f"{row.infix.symbol}{space}{operand}"
    return f"{operands[0]} {row.infix.symbol} {operands[1]}"
