"""Long conditions as text: each conjunct on a line, and names for subexpressions that occur more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from textwrap import wrap

from attngen.emit.cuda_text import c_name
from attngen.plan.normal_form import conjuncts
from attngen.spec.expr import Apply, Expr, Gather, Name, Type, gather, name, names_in, rewrite, walk
from attngen.spec.print_attn import expression_to_text

SYMBOLS = {f"{index}.{end}": f"{named}_{end}" for index, named in (("q", "q"), ("k", "kv")) for end in ("lo", "hi", "tile")}
NAMED_FROM = 24  # characters: shorter subexpressions get no name


def tile_text(expr: Expr) -> str:
    """An expression over a tile, with the names that generated code has for the planner's symbols."""
    return expression_to_text(rewrite(expr, _spelled))


def _spelled(node: Expr) -> Expr | None:
    if isinstance(node, Name):
        return name(SYMBOLS.get(node.name, node.name), node.type)
    if isinstance(node, Gather):
        return gather(c_name(node.input), node.type, tuple(rewrite(arg, _spelled) for arg in node.args))
    return None


def conditions(roots: dict[str, Expr], width: int) -> Iterator[str]:
    """The lines of each condition, below its title (the key in `roots`), then the definitions of the names in them."""
    named, taken = _shared(list(roots.values())), names_in(*roots.values())
    free = (symbol for number in count(1) if (symbol := f"t{number}") not in taken)
    symbols = {node: name(symbol, node.type) for node, symbol in zip(named, free, strict=False)}

    def shortened(expr: Expr, itself: bool = False) -> str:
        return tile_text(rewrite(expr, lambda node: None if itself and node is expr else symbols.get(node)))

    for title, root in roots.items():
        yield title
        parts = conjuncts(root)
        for number, part in enumerate(parts):
            is_or = len(parts) > 1 and isinstance(part, Apply) and part.op == "or"
            text = f"({shortened(part)})" if is_or else shortened(part)
            lead = "    and " if number else "    "
            yield from wrap(text, width, initial_indent=lead, subsequent_indent=" " * 8)
    for number, node in enumerate(named):
        text = f"{symbols[node].name} = {shortened(node, itself=True)}"
        yield from wrap(text, width, initial_indent="  where " if number == 0 else "        ", subsequent_indent=" " * 12)


def _shared(roots: list[Expr]) -> list[Expr]:
    """Long subexpressions that occur more than once, operands first."""
    uses = Counter(arg for node in walk(*roots) for arg in node.args)
    long = (node for node in walk(*roots) if isinstance(node, (Apply, Gather)) and len(tile_text(node)) >= NAMED_FROM)
    return [node for node in long if uses[node] > 1 and node.type is not Type.BOOL]
