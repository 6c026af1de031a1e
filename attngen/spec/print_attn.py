"""Specs and expressions as text of the language, which parses to an equal spec."""

from __future__ import annotations

import math

from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.dropout import RNG_STATE
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, walk
from attngen.spec.operator import INT64_MIN, TABLE, Infix, is_comparison
from attngen.spec.rotary import Rotary

ATOM, PREFIX = 100, 7
MOST_SHOWN = 2_000  # operators and operands, counted each time they occur

Text = tuple[str, int]  # a text and the precedence of its outermost operator
SPELLED = {"q_heads": "heads"}


def expression_to_text(expr: Expr) -> str:
    """`expr` as text of the language, with as few parentheses as possible."""
    texts: dict[Expr, Text] = {}
    for node in walk(expr):
        texts[node] = _node(node, [texts[a] for a in node.args])
    return texts[expr][0]


def shown(expr: Expr) -> str:
    """`expr` for a reader: as text of the language, or how much it is. What is derived from an expression may share so many of
    its parts that its text is longer than any page."""
    if expr.size <= MOST_SHOWN:
        return expression_to_text(expr)
    count = sum(bool(node.args) for node in walk(expr))
    return f"{count} operations on {', '.join(sorted(expr.names | expr.inputs))}"


def levels(expr: Expr) -> int:
    """The levels of nesting of `expr` as text, as the parser counts them."""
    found: dict[Expr, tuple[int, int]] = {}  # levels, and the precedence of the outermost operator
    for node in walk(expr):
        args = [found[a] for a in node.args]
        if isinstance(node, Const):
            text, precedence = _constant(node.value)
            found[node] = 3 if text.startswith("(") else 1 + (precedence == PREFIX), precedence
        elif isinstance(node, Apply) and (infix := TABLE[node.op].infix):
            needed = zip(args, _least_precedences(node.op, infix, len(args)), strict=True)
            found[node] = 1 + max(own + (precedence < least) for (own, precedence), least in needed), infix.precedence
        else:
            found[node] = max((own + 2 for own, _ in args), default=1), ATOM
    return found[expr][0]


def _node(node: Expr, args: list[Text]) -> Text:
    match node:
        case Const(value=value):
            return _constant(value)
        case Name(name=name):
            return SPELLED.get(name, name), ATOM
        case Gather(input=input):
            return f"{input}[{', '.join(a[0] for a in args)}]" if args else input, ATOM
        case Apply(op=op):
            return _operator(op, args)
    raise AssertionError(node)


def _operator(op: str, args: list[Text]) -> Text:
    infix = TABLE[op].infix
    if infix is None:
        return f"{op}({', '.join(a[0] for a in args)})", ATOM
    *left, right = map(_parenthesized, args, _least_precedences(op, infix, len(args)))
    if not left:
        return f"{infix.symbol}{' ' if infix.symbol.isalpha() else ''}{right}", infix.precedence
    return f"{left[0]} {infix.symbol} {right}", infix.precedence


def _least_precedences(op: str, infix: Infix, count: int) -> tuple[int, ...]:
    """The precedences that the operands of an infix or prefix operator have without parentheses, at least."""
    least = infix.precedence
    return (least,) if count == 1 else (least + is_comparison(op), least + 1)


def _parenthesized(text: Text, least: int) -> str:
    return text[0] if text[1] >= least else f"({text[0]})"


def _constant(value: bool | int | float) -> Text:
    if isinstance(value, bool):
        return ("true" if value else "false"), ATOM
    if isinstance(value, float) and math.isinf(value):
        return ("inf", ATOM) if value > 0 else ("-inf", PREFIX)
    if value != value:
        return "(inf - inf)", ATOM
    if value == INT64_MIN and isinstance(value, int):  # its magnitude is too large for a literal
        return f"({value + 1} - 1)", ATOM
    return repr(value), ATOM if value >= 0 and not (value == 0 and math.copysign(1, value) < 0) else PREFIX


def to_text(spec: AttentionSpec) -> str:
    """`spec` as an `attention` block."""
    own = spec.values is None and spec.head_dim != spec.head_dim_v
    head = str(spec.head_dim) if not own else f"{spec.head_dim}, v {spec.head_dim_v}"
    lines = [("dtype", dtypes_to_text(spec)), ("head_dim", head)]
    if spec.values is not None:
        lines.append(("values", f"k[{spec.values[0]}:{spec.values[1]}]"))
    if spec.q_heads is not None:
        lines.append(("heads", f"{spec.q_heads} over {spec.kv_heads}"))
    for i in spec.inputs:
        if spec.dropout is not None and i == RNG_STATE:
            continue
        dims = ", ".join(SPELLED.get(str(d), str(d)) for d in i.dims)
        lines.append(("input", f"{i.name}: {i.dtype.name}[{dims}]"))
    for p in spec.params:
        default = "" if p.default is None else f" = {expression_to_text(_literal(p.default, p.type))}"
        lines.append(("param", f"{p.name}: {p.type}{default}"))
    lines.append(("scale", expression_to_text(spec.scale)))
    if spec.mask is not None:
        lines.append(("mask", expression_to_text(spec.mask)))
    if not (isinstance(spec.score, Name) and spec.score.name == "s"):
        lines.append(("score", expression_to_text(spec.score)))
    if spec.normalize != "softmax":
        lines.append(("normalize", spec.normalize))
    if spec.sink is not None:
        lines.append(("sink", expression_to_text(spec.sink)))
    if spec.v_scale is not None:
        lines.append(("scaled", f"v by {expression_to_text(spec.v_scale)}"))
    if spec.dropout is not None:
        lines.append(("dropout", expression_to_text(spec.dropout)))
    if spec.rotary is not None:
        lines.append(("rotary", rotary_to_text(spec.rotary)))
    if spec.precision != "highest":
        lines.append(("precision", spec.precision))
    if spec.lse:
        lines.append(("output", "lse"))
    if spec.kernel != KernelRequest():
        lines.append(("kernel", kernel_to_text(spec.kernel)))
    if spec.allow:
        lines.append(("allow", ", ".join(spec.allow)))
    body = "\n".join(f"    {keyword:<9} {rest}" for keyword, rest in lines)
    return f"attention {spec.name} {{\n{body}\n}}\n"


def dtypes_to_text(spec: AttentionSpec) -> str:
    """The operands of a `dtype` statement."""
    if {*spec.dtypes.values()} == {spec.dtype}:
        return spec.dtype.name
    return "  ".join(f"{tensor} {dtype.name}" for tensor, dtype in spec.dtypes.items())


def rotary_to_text(rotary: Rotary) -> str:
    """The operands of a `rotary` statement."""
    at = "" if rotary.has_usual_positions else f" at {', '.join(map(expression_to_text, rotary.positions))}"
    return f"{rotary.dim} {rotary.pairs} by {rotary.cosines}, {rotary.sines}{at}"


def _literal(value: int | float, type: Type) -> Expr:
    from attngen.spec.expr import constant

    return constant(float(value) if type is Type.FLOAT else value)


def kernel_to_text(request: KernelRequest) -> str:
    """The operands of a `kernel` statement."""
    parts = []
    if request.block_q is not None:
        parts.append(f"tile {request.block_q} x {request.block_kv}")
    if request.stages is not None:
        parts.append(f"stages {request.stages}")
    if request.warps is not None:
        parts.append(f"warps {request.warps}")
    if request.q is not None:
        parts.append(f"q {request.q}")
    if request.storage != "dense":
        parts.append(f"storage {request.storage}")
    if request.page_size is not None:
        parts.append(f"page_size {request.page_size}")
    if request.batch_invariant:
        parts.append("batch_invariant")
    return request.schedule + (f" {{ {'  '.join(parts)} }}" if parts else "")
