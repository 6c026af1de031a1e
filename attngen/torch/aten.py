"""The meaning of ATen operators for expressions: graphs of operators on numbers and small tensors -> `Expr`.

A value of a graph is a `Lazy`: a tensor of known shape whose elements are expressions, made when they are read. Numbers have
no dimension; rows that were gathered have one, until a product or a sum consumes them. An operator that this table lacks is
refused by its name. What is computed from each element is one of `attngen.language.functions`, as in functions that are traced;
`aten_tensors.py` has what moves, gathers and combines elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attngen.language.functions import COMPARISONS, DIVISIONS, canonical, cast, function
from attngen.language.tracer import TraceError
from attngen.spec.attention import INDICES, SIZES
from attngen.spec.bounds import ranges
from attngen.spec.expr import (
    MAX_INT_PARAM,
    MAX_LENGTH,
    Const,
    Expr,
    ExpressionError,
    Name,
    Type,
    constant,
    inputs_in,
    name,
    walk,
)
from attngen.spec.operator import ONE, ZERO, add, apply, less, maximum, minimum, sub, where

Indices = tuple[Expr, ...]
INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Lazy:
    """A tensor of a graph. `sizes` are its dimensions as expressions: a captured tensor's follow the tensor of each call. What
    is computed by `shape` holds for the traced shape alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Callable[[Indices], Expr]
    sizes: Indices = ()

    @property
    def number(self) -> Expr:
        """The element of a tensor without dimensions, or with one element."""
        return self.at((ZERO,) * len(self.shape))

    def elements(self) -> list[Expr]:
        """All elements, in the order of memory. Raises TraceError if they are too many."""
        return [self.at(tuple(map(constant, i))) for i in itertools.product(*map(range, self.shape))]


def lazy(shape: Sequence[int], dtype: torch.dtype, at: Callable[[Indices], Expr]) -> Lazy:
    """A tensor whose elements are computed once each."""
    known: dict[Indices, Expr] = {}

    def remembered(indices: Indices) -> Expr:
        if indices not in known:
            known[indices] = at(indices)
        return known[indices]

    shape = tuple(int(n) for n in shape)
    return Lazy(shape, dtype, remembered, tuple(map(constant, shape)))


def type_of(dtype: torch.dtype) -> Type:
    return Type.BOOL if dtype is torch.bool else Type.FLOAT if dtype.is_floating_point else Type.INT


def literal(value: object) -> Expr:
    if isinstance(value, (bool, int, float)):
        return constant(value)
    raise TraceError(f"a {type(value).__name__} cannot be a number in an expression")


@dataclass
class Context:
    """What operators need beside their operands: ranges of what expressions read, and the numbers that become params.

    With `guarded`, every index that is not an index of the attention itself is kept inside its dimension, as those that come
    from data, and those into a known size that may be negative, always are.
    """

    numbers: Mapping[int, str] = field(default_factory=dict)
    floats: Mapping[float, str] = field(default_factory=dict)  # may become params of a score
    elements: dict[str, tuple[int, int]] = field(default_factory=dict)  # ranges of integers, by the input's name
    trained: set[str] = field(default_factory=set)  # inputs that require grad
    params: dict[str, int] = field(default_factory=dict)
    float_params: dict[str, float] = field(default_factory=dict)
    guarded: bool = False
    reads: list[tuple[Expr, Expr]] = field(default_factory=list)  # (index, size) of each index that is kept inside

    def range(self, expr: Expr) -> tuple[float, float]:
        """The range of an integer over all calls."""
        names = dict.fromkeys(INDICES, (0, MAX_LENGTH - 1)) | dict.fromkeys(SIZES, (0, MAX_LENGTH))
        for node in walk(expr):
            if isinstance(node, Name) and node.type is Type.INT and node.name not in names:
                param = node.name in self.params
                names[node.name] = (-MAX_INT_PARAM, MAX_INT_PARAM) if param else (0, MAX_LENGTH)
        try:
            return ranges(expr, names, self.elements)[expr]
        except ExpressionError:
            return -(2**63), 2**63 - 1

    def term(self, value: object) -> Expr:
        """A number that is added or compared: a param if the closure has an integer of this value, so that a function that
        differs in it alone needs no other kernel. Factors and divisors stay constants, which kernels compute with faster."""
        if type(value) is int and value in self.numbers and 1 < abs(value) <= MAX_INT_PARAM:
            found = self.numbers[value]
            self.params[found] = value
            return name(found, Type.INT)
        return literal(value)

    def operand(self, value: Any) -> Expr:
        """A number that is added, or a factor or divisor, of floats: a param if the closure has a float of this value."""
        found = self.floats.get(value) if type(value) is float else None
        if found is None:
            return literal(value)
        self.float_params[found] = value
        return name(found, Type.FLOAT)

    def inside(self, index: Expr, size: Expr) -> Expr:
        """`index` into a dimension of `size`: a negative one counts from the end; one that might be outside is kept inside."""
        if isinstance(index, Const):
            return add(size, index) if index.value < 0 else index
        from_data = bool(inputs_in(index)) or any(n.type is Type.FLOAT for n in walk(index))
        low, high = self.range(index)
        is_known = isinstance(size, Const)  # size of what the function computes or cuts out: nobody else checks its indices
        if index in OWN or not (from_data or self.guarded or (is_known and low < 0)):
            return index
        self.reads.append((index, size))
        if low < INT32[0] or high > INT32[1]:
            index = maximum(constant(INT32[0]), minimum(index, constant(INT32[1])))
        if low < 0:
            index = where(less(index, ZERO), add(index, size), index)
        return maximum(ZERO, minimum(index, sub(size, ONE)))

    def wrapped(self, value: Lazy) -> Lazy:
        """`value` in the range of its type if that is an integer of less than 32 bits, as arithmetic of torch wraps there."""
        dtype = value.dtype
        if type_of(dtype) is not Type.INT or dtype.itemsize >= 4:
            return value
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max

        def at(indices: Indices) -> Expr:
            found = value.at(indices)
            low, high = self.range(found)
            if least <= low and high <= most:
                return found
            return sub(apply("mod", sub(found, constant(least)), constant(most - least + 1)), constant(-least))

        return Lazy(value.shape, dtype, at, value.sizes)

    def divided(self, op: str, a: Expr, b: Expr) -> Expr:
        """`op` of a and b, and 0 where b is 0."""
        low, high = self.range(b)
        if low > 0 or high < 0:
            return apply(op, a, b)
        positive = apply(op, a, maximum(b, ONE))
        if low >= 0:
            return where(less(ZERO, b), positive, ZERO)
        negative = apply(op, a, minimum(b, constant(-1)))
        return where(less(ZERO, b), positive, where(less(b, ZERO), negative, ZERO))


OWN = frozenset(name(n, Type.INT) for n in INDICES)


@dataclass
class Call:
    """One node: its result's shape and type, its operands, and the context."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Context

    def arg(self, position: int, keyword: str, default: object = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(keyword, default)

    @property
    def kind(self) -> Type:
        return type_of(self.dtype)

    def made(self, at: Callable[[Indices], Expr]) -> Lazy:
        return lazy(self.shape, self.dtype, at)

    def read(self, operand: object, indices: Indices, number: Callable[[object], Expr | str | None] = literal) -> Any:
        """The element of an operand that broadcasts to the result."""
        if not isinstance(operand, Lazy):
            return number(operand)
        own = indices[len(indices) - len(operand.shape) :] if operand.shape else ()
        return operand.at(tuple(ZERO if size == 1 else i for i, size in zip(own, operand.shape, strict=True)))

    def elementwise(
        self, function: Callable[..., Expr], *operands: object, number: Callable[[object], Expr | str | None] = literal
    ) -> Lazy:
        made = self.made(lambda at: function(*(self.read(o, at, number) for o in operands)))
        sizes = list(made.sizes)
        for operand in operands:
            if isinstance(operand, Lazy):
                for dim, (length, size) in enumerate(zip(operand.shape, operand.sizes, strict=True), -len(operand.shape)):
                    if length != 1:
                        sizes[dim] = size
        return Lazy(made.shape, made.dtype, made.at, tuple(sizes))


MEANING: dict[str, Callable[[Call], Lazy]] = {}


def meaning(*names: str) -> Callable[[Callable[[Call], Lazy]], Callable[[Call], Lazy]]:
    def register(function: Callable[[Call], Lazy]) -> Callable[[Call], Lazy]:
        for one in names:
            MEANING[one] = function
        return function

    return register


# --- operators that compute each element from elements ----------------------------------------------------------------

TERMS = frozenset(("add", "sub", "rsub", "clamp", "clamp_min", "clamp_max"))  # operators of integers: see `Context.term`
OPERANDS = frozenset(("add", "sub", "rsub", "mul", "div"))  # operators of floats: see `Context.operand`


def meaning_of(operator: str) -> Callable[[Call], Lazy] | None:
    """What an operator means: by this table, or by that of functions of numbers. None if expressions cannot say it."""
    if operator in MEANING or function(operator) is None:
        return MEANING.get(operator)
    return _elementwise


def _elementwise(call: Call) -> Lazy:
    title, meant = canonical(call.name), function(call.name)
    assert meant is not None
    options = {"divided": call.context.divided} if title in DIVISIONS else {}
    term = literal
    if title in COMPARISONS or (title in TERMS and call.kind is Type.INT):
        term = call.context.term
    elif title in OPERANDS and call.kind is Type.FLOAT:
        term = call.context.operand

    def of(*operands: object) -> Expr:
        named = dict(zip(call.kwargs, operands[len(call.args) :], strict=True))
        try:
            found = meant(*operands[: len(call.args)], **named, **options)
        except TypeError as error:
            shown = ", ".join(call.kwargs) or f"{len(call.args)} arguments"
            raise TraceError(f"torch.{call.name} with {shown} is not available in an expression") from error
        if found.type is Type.FLOAT and call.kind is Type.INT:
            raise TraceError(
                f"torch.{call.name} of integers returns an integer in torch, but the language has only its float; "
                "write .float() on the argument"
            )
        return cast(found, call.kind)

    operands = (*call.args, *call.kwargs.values())
    return call.elementwise(of, *operands, number=lambda x: x if x is None or isinstance(x, str) else term(x))
