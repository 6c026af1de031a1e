"""Typed expressions of masks, scores, scales and sinks.

An `Expr` is a tree of four kinds of node. Nodes are interned: equal expressions are the same object, so equality is identity,
caches are keyed by node, and an expression that is used twice is stored once. Build them with `constant`, `name`, `gather` and
`apply`. The meaning of operators is defined in `attngen.spec.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from enum import Enum
from functools import reduce
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

MAX_LENGTH = 2**29  # the largest size of any dimension: q + kv_len - q_len and q - k - window fit a 32-bit int
MAX_INT_PARAM = 2**30  # the largest magnitude of an integer `param`, for the same reason
MAX_FLOAT = 3.4028234663852886e38  # the largest number of fp32
MAX_FLOAT_TEXT = "3.4e38, the largest fp32 number"
MAX_DEPTH = 200  # nesting of an expression as written
MAX_SIZE = 20_000  # nodes of an expression, shared ones counted each time they are used

Scalar = bool | int | float


class Type(Enum):
    """The type of an expression. Integers are exact: CUDA text uses 64 bits if the value might not fit 32."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"

    def __str__(self) -> str:
        return self.value


class ExpressionError(ValueError):
    """An invalid expression: wrong types, a wrong number of operands, or too large. `help` says what to write."""

    def __init__(self, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.help = help


Recipe: TypeAlias = "tuple[Callable[..., Expr], *tuple[object, ...]]"  # a function and its arguments


class Expr:
    """A node. `size` counts nodes as a tree (shared ones each time), `depth` the longest path; `names` and `inputs` are those
    that occur in it. None of these is part of identity."""

    __slots__ = ("__weakref__", "args", "depth", "inputs", "key", "names", "size", "type")

    key: tuple[object, ...]
    type: Type
    args: tuple[Expr, ...]
    size: int
    depth: int
    names: frozenset[str]
    inputs: frozenset[str]

    def __reduce__(self) -> tuple[object, ...]:
        """The recipes of all nodes, operands first: a recipe of nested nodes would overflow the stack."""
        nodes = tuple(walk(self))
        places = {node: place for place, node in enumerate(nodes)}
        return _last_of, ([node._recipe(tuple(map(places.__getitem__, node.args))) for node in nodes],)

    def _recipe(self, operands: tuple[int, ...]) -> Recipe:
        """A function and its arguments; the one tuple among them stands for operands, as places of earlier nodes."""
        raise NotImplementedError

    def _repr(self, args: list[str]) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        texts: dict[Expr, str] = {}
        for node in walk(self):
            texts[node] = node._repr([texts[a] for a in node.args])
        return texts[self]

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Expr:
        return self


class Const(Expr):
    """A literal number or truth value."""

    __slots__ = ("value",)
    value: Scalar

    def _recipe(self, operands: tuple[int, ...]) -> Recipe:
        return constant, self.value

    def _repr(self, args: list[str]) -> str:
        return repr(self.value)


class Name(Expr):
    """A name: an index (`b h q k`), the score `s`, a size (`q_len`), a `param`, or a symbol of the planner."""

    __slots__ = ("name",)
    name: str

    def _recipe(self, operands: tuple[int, ...]) -> Recipe:
        return name, self.name, self.type

    def _repr(self, args: list[str]) -> str:
        return self.name


class Gather(Expr):
    """An element of the captured tensor `input`, one integer index for each of its dimensions."""

    __slots__ = ("input",)
    input: str

    def _recipe(self, operands: tuple[int, ...]) -> Recipe:
        return gather, self.input, self.type, operands

    def _repr(self, args: list[str]) -> str:
        return f"{self.input}[{', '.join(args)}]"


class Apply(Expr):
    """An operator of the table applied to operands of the types that it requires."""

    __slots__ = ("op",)
    op: str

    def _recipe(self, operands: tuple[int, ...]) -> Recipe:
        return rebuild, self.op, operands

    def _repr(self, args: list[str]) -> str:
        return f"{self.op}({', '.join(args)})"


NOTHING: frozenset[str] = frozenset()
_interned: WeakValueDictionary[tuple[object, ...], Expr] = WeakValueDictionary()


def _intern(cls: type[Any], key: tuple[object, ...], type: Type, args: tuple[Expr, ...], **fields: object) -> Any:
    found = _interned.get(key)
    if found is not None:
        return found
    node = cls()
    node.key, node.type, node.args = key, type, args
    for field, value in fields.items():
        setattr(node, field, value)
    node.size, node.depth = 1, 1
    node.names = frozenset((node.name,)) if cls is Name else NOTHING
    node.inputs = frozenset((node.input,)) if cls is Gather else NOTHING
    for a in args:
        node.size += a.size
        node.depth = max(node.depth, 1 + a.depth)
        node.names = _union(node.names, a.names)
        node.inputs = _union(node.inputs, a.inputs)
    return _interned.setdefault(key, node)


def _union(a: frozenset[str], b: frozenset[str]) -> frozenset[str]:
    """The union; one of the two, if it contains the other, so that nodes share it."""
    return a if b <= a else b if a <= b else a | b


def constant(value: Scalar) -> Const:
    """A literal. Its Python type is its type: `True`, `3` and `3.0` are three different constants."""
    kind = Type.BOOL if isinstance(value, bool) else Type.INT if isinstance(value, int) else Type.FLOAT
    node: Const = _intern(Const, ("const", kind, repr(value)), kind, (), value=value)
    return node


def name(name: str, type: Type) -> Name:
    node: Name = _intern(Name, ("name", type, name), type, (), name=name)
    return node


def gather(input: str, type: Type, indices: tuple[Expr, ...]) -> Gather:
    """`input[indices]`. Raises ExpressionError for an index that is not an integer."""
    for index in indices:
        if index.type is not Type.INT:
            raise ExpressionError(f"an index of `{input}` is {index.type}, not int", "convert it with int(...)")
    node: Gather = _intern(Gather, ("gather", type, input, indices), type, indices, input=input)
    return node


def within_limits(expr: Expr) -> Expr:
    """`expr`, a part of what a user writes. Raises ExpressionError if it is too large or nested too deeply: some of what is
    done with a spec takes time that grows with the number of its nodes as a tree."""
    if expr.size > MAX_SIZE:
        raise ExpressionError(f"the expression has more than {MAX_SIZE} nodes", "split it, or use a captured tensor")
    if expr.depth > 20 * MAX_DEPTH:
        raise ExpressionError("the expression is nested too deeply", "split it, or use a captured tensor")
    return expr


def rebuild(op: str, args: tuple[Expr, ...]) -> Expr:
    """`attngen.spec.operator.apply`, imported late."""
    from attngen.spec.operator import apply

    return apply(op, *args)


def _last_of(recipes: Sequence[Recipe]) -> Expr:
    """The last node of `recipes`, see `Expr._recipe`."""
    nodes: list[Expr] = []
    for make, *given in recipes:
        nodes.append(make(*(tuple(nodes[place] for place in a) if isinstance(a, tuple) else a for a in given)))
    return nodes[-1]


def intern_apply(op: str, type: Type, args: tuple[Expr, ...]) -> Apply:
    """The node of an operator. Only `attngen.spec.operator.apply` calls it: it checks types and folds constants."""
    node: Apply = _intern(Apply, ("apply", op, args), type, args, op=op)
    return node


def walk(*roots: Expr, known: Container[Expr] = (), through: Callable[[Expr], bool] | None = None) -> Iterator[Expr]:
    """Every distinct node of `roots`, operands first. Nodes in `known`, and their operands, are skipped; so are the operands of
    nodes for which `through` is false."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen and node not in known:
            seen.add(node)
            stack.append((node, True))
            if node.args and (through is None or through(node)):
                stack.extend([(arg, False) for arg in reversed(node.args)])


def names_in(*roots: Expr) -> frozenset[str]:
    """The names that occur in `roots`."""
    return reduce(_union, [root.names for root in roots], NOTHING)


def inputs_in(*roots: Expr) -> frozenset[str]:
    """The captured tensors that `roots` read."""
    return reduce(_union, [root.inputs for root in roots], NOTHING)


def rewrite(root: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
    """`root` with nodes replaced, from the leaves up, if `replace` returns an expression for them."""
    memo: dict[Expr, Expr] = {}
    for node in walk(root):
        replaced = replace(node)
        if replaced is None and node.args:
            args = tuple([memo[a] for a in node.args])
            if args == node.args:
                replaced = node
            elif isinstance(node, Gather):
                replaced = gather(node.input, node.type, args)
            else:
                assert isinstance(node, Apply)
                replaced = rebuild(node.op, args)
        memo[node] = node if replaced is None else replaced
    return memo[root]
