"""Functions of torch as expressions: the ATen graph of a mask or score is read, operator by operator.

What is remembered of a function is found again by what it closes over (`closures.py`), so that a call with other tensors traces
nothing, and one with another integer that is added or compared compiles nothing.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from attngen.diagnostics import DiagnosticError
from attngen.language.trace import place_of, title_of
from attngen.language.tracer import TraceError
from attngen.spec.expr import Expr, ExpressionError, constant
from attngen.torch.aten import Call, Indices, Lazy, lazy, meaning_of
from attngen.torch.block_mask import Function
from attngen.torch.captured import Inputs, number
from attngen.torch.graphs import (
    CALLED,
    LINE,
    MAKES_CONSTANTS,
    READ_ON_THE_HOST,
    ImportRefusal,
    WriteRefusal,
    graph_of,
    shown_operator,
)
from attngen.torch.private import functions_of

OF_TORCH = ("aten", "prims")  # namespaces of torch's own operators: decompositions consist of both
READS = ("index", "_unsafe_index", "select")  # operators that read a dimension of their first operand whatever its size is
FIRST_ALONE = ("log_sigmoid_forward", "max", "min")  # operators of several results, of which the first is read


def expression(function: Function, examples: Sequence[Tensor], arguments: Sequence[Expr], inputs: Inputs) -> Expr:
    """What `function` returns for `arguments`. Raises ImportRefusal."""
    title = title_of(function)
    try:
        graph = graph_of(function, examples, inputs.closure)
    except Exception as error:
        place = place_of(error, inputs.closure.codes)
        raise ImportRefusal(f"{title} cannot be traced: {_first_line(error)}{place}") from error
    return _read(graph, arguments, inputs, title)


def _first_line(error: Exception) -> str:
    if isinstance(error, (TraceError, WriteRefusal)):
        return str(error)
    if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        cure = "write torch.where(c, a, b) for `if`, a & b for `and`"
        return f"a condition of Python depends on a value that only the GPU knows: {cure}"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _read(graph: torch.fx.GraphModule, arguments: Sequence[Expr], inputs: Inputs, title: str) -> Expr:
    """The expression of a graph whose inputs are numbers."""
    values: dict[torch.fx.Node, Any] = {}
    given = iter(arguments)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = number(node.meta["val"].dtype, next(given))
        elif node.op == "get_attr":
            tensor = attrgetter(str(node.target))(graph)
            values[node] = inputs.read(tensor, all(user.target in MAKES_CONSTANTS for user in node.users))
        elif node.op == "output":
            return _returned(map_arg(node.args[0], values.__getitem__), title)
        else:
            try:
                values[node] = _call(node, values, inputs)
            except (ExpressionError, TraceError, DiagnosticError) as error:
                message = error.message if isinstance(error, ExpressionError) else str(error)
                raise ImportRefusal(f"{title}: {message}{_place(node)}") from error
    raise AssertionError(graph)


def _call(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], inputs: Inputs) -> object:
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem" and not hasattr(target, "_schema"):
        return args[0][args[1]]
    namespace, _, operator = target._schema.name.partition("::")
    if target._schema.is_mutable:  # later uses of the tensor are those of this node
        operator = operator.replace("__i", "", 1).rstrip("_")
    if operator == "_local_scalar_dense":
        raise TraceError(READ_ON_THE_HOST)
    result = node.meta["val"]
    if namespace not in OF_TORCH and (body := _body(target)) is not None:
        return _of_custom_operator(body, node, args, kwargs, inputs)
    several = isinstance(result, (list, tuple))
    meant = meaning_of(operator) if namespace in OF_TORCH and (not several or operator in FIRST_ALONE) else None
    called = _annotation(node, CALLED) or target
    if meant is None:
        shown = shown_operator(called)
        raise TraceError(f"{shown} is not available in an expression; compute it outside the function, or use other operators")
    first = result[0] if several else result
    context = inputs.context
    found = context.wrapped(meant(Call(operator, tuple(first.shape), first.dtype, args, kwargs, context)))
    inputs.fix(args[1:] if operator in READS and called is target else (*args, *kwargs.values()), found.sizes)
    if node.users and not first.shape:
        found.number  # noqa: B018 - made here, so that what it refuses has this operator's place
    return [found, *(_refused(operator, other) for other in result[1:])] if several else found


def _refused(operator: str, result: Tensor) -> Lazy:
    """A result that expressions lack."""

    def refuse(at: Indices) -> Expr:
        raise TraceError(f"only the first result of torch.{operator} is available in an expression")

    return Lazy(tuple(result.shape), result.dtype, refuse, tuple(map(constant, result.shape)))


def _body(target: Any) -> Function | None:
    """What an operator of somebody's library does, as a Python function: that of torch.library.custom_op, or one registered for
    fake tensors if it computes the operator's numbers. None if there is neither."""
    body, fake = functions_of(target)
    if body is not None:
        return body
    sample = torch.linspace(-9.0, 9.0, 37)
    try:
        same = fake is not None and torch.equal(fake(sample), target(sample))
    except Exception:  # it takes something else than one number
        return None
    return fake if same else None


def _of_custom_operator(
    body: Function, node: torch.fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Inputs
) -> Lazy:
    """A custom operator by what it consists of."""
    if kwargs or not all(isinstance(a, Lazy) and not a.shape for a in args):
        raise TraceError(f"{node.target} is supported only if its arguments are numbers that the function computes")
    examples = [torch.empty((), dtype=a.dtype) for a in args]
    found = _read(graph_of(body, examples, inputs.closure), [a.number for a in args], inputs, str(node.target))
    return lazy((), node.meta["val"].dtype, lambda _: found)


def _returned(value: object, title: str) -> Expr:
    if isinstance(value, (bool, int, float)):
        return constant(value)
    if not isinstance(value, Lazy):
        raise ImportRefusal(f"{title} returned {'None: is a `return` missing?' if value is None else type(value).__name__}")
    if any(n != 1 for n in value.shape):
        raise ImportRefusal(f"{title} returned a tensor of shape {list(value.shape)}; expected one number for each pair")
    return value.number


def _annotation(node: torch.fx.Node, key: str) -> Any:
    return node.meta.get("custom", {}).get(key)


def _place(node: torch.fx.Node) -> str:
    """Where the user's source calls the operator of a node."""
    found = _annotation(node, LINE)
    if found is None:
        return ""
    file, line = found
    return f"\n  --> {file}:{line}\n  |\n  |  {linecache.getline(file, line).strip()}"
