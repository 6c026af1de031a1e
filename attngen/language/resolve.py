"""Expressions of the syntax tree -> typed `Expr`s: names looked up, definitions expanded, operators applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations, islice

from attngen.diagnostics import Diagnostic, DiagnosticError, counted
from attngen.language.foreign_words import NAMES, SCALES, spelling_at
from attngen.language.functions import function
from attngen.language.syntax import SYNONYMS, Node
from attngen.source import Span
from attngen.spec import mistakes
from attngen.spec.attention import Input
from attngen.spec.dtypes import DType
from attngen.spec.expr import (
    MAX_DEPTH,
    MAX_SIZE,
    Expr,
    ExpressionError,
    Gather,
    Type,
    constant,
    gather,
    names_in,
    walk,
    within_limits,
)
from attngen.spec.names import CONSTANTS, WORDS
from attngen.spec.operator import TABLE, apply, arity, is_comparison
from attngen.spec.operators import FUNCTIONS
from attngen.spec.print_attn import expression_to_text

MAX_CURE = 80  # characters of an expression that a help line shows
BINARY = {row.infix.symbol: row.name for row in TABLE.values() if row.infix and row.name not in ("neg", "not")}


@dataclass(frozen=True, slots=True)
class Definition:
    """`def name(parameters) = body`; `scope` resolves the names of its body. `builtin`: defined in the prelude. `is_score`: the
    body contains `s`, so that it is a complete score."""

    name: str
    parameters: tuple[str, ...]
    body: Node
    scope: Scope
    builtin: bool = False
    is_score: bool = False

    @property
    def text(self) -> str:
        """The source text of the body, if it is on one line."""
        return _text(self.body)

    @property
    def call(self) -> str:
        """A call, with the parameters as its arguments."""
        return f"{self.name}({', '.join(self.parameters)})" if self.parameters else self.name

    def indices_of(self, parameter: str) -> tuple[Node, ...]:
        """The indices with which the body reads `parameter` first; none if it reads no elements of it."""
        return next(
            (n.children[1].children for n in _nodes(self.body) if n.kind == "index" and n.children[0].value == parameter), ()
        )


def definition_of(node: Node, scope: Scope, builtin: bool = False) -> Definition:
    """The Definition of a `def` statement."""
    name, *middle, body = node.children
    parameters = tuple(p.value for p in middle[0].children) if middle else ()
    is_score = "s" not in parameters and "s" in _names_in(body)
    return Definition(str(name.value), parameters, body, scope, builtin, is_score)


def _nodes(node: Node) -> Iterator[Node]:
    """`node` and all nodes below it."""
    stack = [node]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(part.children)


def _names_in(node: Node) -> set[str]:
    """The names that an expression mentions."""
    return {part.children[0].value for part in _nodes(node) if part.kind == "name"}


Value = Expr | Input | Definition


@dataclass(slots=True)
class Scope:
    """Names and their values. A lookup goes outwards; names of `prelude` are hidden by all others."""

    names: dict[str, Value] = field(default_factory=dict)
    outer: Scope | None = None
    prelude: Callable[[], Mapping[str, Definition]] | None = None
    read: set[str] = field(default_factory=set)  # the names that a lookup has found here

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                scope.read.add(name)
                return scope.names[name]
            if scope.prelude is not None and name in scope.prelude():
                return scope.prelude()[name]
            scope = scope.outer
        return None

    def find_function(self, name: str) -> Value | None:
        """The value that `name(...)` calls. A number may have the name of a function, as in `window(window)`."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if isinstance(found, Definition):
                scope.read.add(name)
                return found
            found = scope.prelude().get(name) if scope.prelude is not None else None
            if found is not None:
                return found
            scope = scope.outer
        return self.find(name)

    def known(self) -> list[str]:
        """Every name that a lookup finds."""
        own = [*self.names, *(self.prelude() if self.prelude else ())]
        return own + (self.outer.known() if self.outer else [])


@dataclass(slots=True)
class Resolver:
    """The resolver of one attention's expressions. `globals` are the names of all expressions: indices, sizes, params, inputs.
    The checker decides later which of them a statement may use. `number` is the type of a param that a help line declares."""

    globals: Mapping[str, Value]
    number: Type = Type.INT
    steps: int = 0
    depth: int = 0
    active: list[Definition] = field(default_factory=list)
    scores: dict[Expr, Definition] = field(default_factory=dict)  # the expansions of the prelude's scores

    def expression(self, node: Node, scope: Scope) -> Expr:
        """The Expr of `node`. Raises DiagnosticError."""
        return self._number(node, self._value(node, scope))

    def _number(self, node: Node, value: Value) -> Expr:
        """The value of `node` as an Expr. Raises DiagnosticError."""
        if isinstance(value, Input) and not value.dims:
            return gather(value.name, element_type(value.dtype), ())
        if isinstance(value, Input):
            raise DiagnosticError(mistakes.InputWithoutIndex(span=node.span, name=value.name, example=_index_example(value)))
        if isinstance(value, Definition):
            raise _without_arguments(node.span, value.name, len(value.parameters), value.call)
        return value

    def _expressions(self, nodes: Sequence[Node], scope: Scope) -> list[Expr]:
        """The Exprs of `nodes`. Raises DiagnosticError with the mistakes of all, a name that is not defined once. It stands on
        the stack instead of `expression`: expressions are deep."""
        found: list[Expr] = []
        problems: dict[object, Diagnostic] = {}
        for node in nodes:
            try:
                found.append(self._number(node, self._value(node, scope)))
            except DiagnosticError as error:
                for d in error.diagnostics:
                    limit = isinstance(d, mistakes.ExpandsTooMuch | mistakes.NestedTooDeeply)
                    once = type(d) if limit else d.name if isinstance(d, mistakes.UnknownName) else d
                    problems.setdefault(once, d)
        if problems:
            raise DiagnosticError(*problems.values())
        return found

    def _value(self, node: Node, scope: Scope) -> Value:
        self.steps += 1
        if self.steps > MAX_SIZE:
            raise DiagnosticError(mistakes.ExpandsTooMuch(span=node.span, limit=MAX_SIZE))
        if self.depth >= MAX_DEPTH:
            raise DiagnosticError(mistakes.NestedTooDeeply(span=node.span, limit=MAX_DEPTH))
        self.depth += 1
        try:
            return self._node(node, scope)
        finally:
            self.depth -= 1

    def _node(self, node: Node, scope: Scope) -> Value:
        match node.kind:
            case "integer" | "decimal":
                return constant(node.value)
            case "name":
                return self._name(node, scope)
            case "call":
                return self._call(node, scope)
            case "index":
                return self._index(node, scope)
            case "unary":
                return self._unary(node, scope)
            case "binary" | "grouped":
                return self._binary(node, scope)
        raise AssertionError(node.kind)

    def _name(self, node: Node, scope: Scope) -> Value:
        name = node.children[0].value
        value = self._find(name, scope)
        if value is None:
            if name in FUNCTIONS:
                raise _without_arguments(node.span, name, arity(name), _function_example(name))
            raise DiagnosticError(self._unknown(name, node.span, scope))
        if isinstance(value, Definition) and not value.parameters:
            return self._expand(value, {}, node.span)
        return value

    def _find(self, name: str, scope: Scope) -> Value | None:
        if name in CONSTANTS:
            return constant(CONSTANTS[name])
        found = scope.find(name)
        return self.globals.get(name) if found is None else found

    def _unknown(self, name: str, span: Span, scope: Scope, declaration: str = "") -> Diagnostic:
        """The mistake for a name that nothing declares; `declaration` would declare what its use looks like."""
        foreign = spelling_at(span.source, span.line, span.column)
        if foreign is not None:
            return foreign
        if name in SCALES and self.number is Type.FLOAT:
            cure = "remove it; the statement `scale` sets another one than 1 / sqrt(head_dim)"
            return mistakes.UnknownName(span=span, name=name, hint="`s` is already multiplied by scale", known=cure)
        meant = NAMES.get(name)
        if meant is not None:
            return mistakes.UnknownName(span=span, name=name, hint=f"`{meant}` in this language", known=f"write `{meant}`")
        near = self._near(name, scope, is_called=declaration.startswith("def"))
        if near:
            return mistakes.UnknownName(span=span, name=name, hint=f"did you mean `{near}`?", known=f"write `{near}`")
        hint = "no index, size, input, param or function has this name"
        value = 1 if self.number is Type.INT else 1.0
        cure = f"declare it: {declaration or f'param {name}: {self.number}, or let {name} = {value}'}"
        return mistakes.UnknownName(span=span, name=name, hint=hint, known=cure)

    def _near(self, name: str, scope: Scope, is_called: bool) -> str:
        """What is most like `name`, and can stand in its place: a function with its parameters if it is not called already."""
        known = {word: scope.find(word) for word in scope.known()}
        calls = {word: _function_example(word) for word in FUNCTIONS}
        calls |= {
            word: one.call for word, one in known.items() if isinstance(one, Definition) and (one.parameters or is_called)
        }
        others = () if is_called else (known.keys() | self.globals.keys() | CONSTANTS.keys()) - calls.keys()
        for words, cutoff in ((others, 0.66), (calls, 0.66 if is_called else 0.8)):
            same = [word for word in words if word == name.lower()]
            if near := same or get_close_matches(name, sorted(words), 1, cutoff):
                return calls[near[0]] if near[0] in calls and not is_called else near[0]
        return ""

    def _call(self, node: Node, scope: Scope) -> Value:
        name = node.children[0].value
        arguments = node.children[1].children
        target = scope.find_function(name)
        if target is None and name in FUNCTIONS:
            return self._builtin(name, arguments, node, scope)
        if target is None:
            target = self.globals.get(name)
        if target is None:
            if (instead := self._instead_of_call(name, arguments, scope)) is not None:
                called = mistakes.UnknownName(span=node.span, name=name, hint="not a function of this language", known=instead)
                raise DiagnosticError(called)
            letters = ", ".join("xyzuvw"[: len(arguments)])
            definition = f"def {name}({letters}) = expression" if letters else f"def {name} = expression"
            raise DiagnosticError(self._unknown(name, node.children[0].span, scope, definition))
        if not isinstance(target, Definition):
            what = "an input, which is indexed with [ ]" if isinstance(target, Input) else "a number"
            example = _index_example(target) if isinstance(target, Input) else name
            if isinstance(target, Input) and target.dims and len(arguments) == len(target.dims):
                example = f"{name}[{_text(*arguments)}]"
            raise DiagnosticError(mistakes.NotAFunction(span=node.span, name=name, what=what, example=example))
        if len(arguments) != len(target.parameters):
            raise _wrong_arguments(node.span, name, len(target.parameters), len(arguments), target.call)
        values = {p: self._argument(target, p, a, scope) for p, a in zip(target.parameters, arguments, strict=True)}
        return self._expand(target, values, node.span)

    def _argument(self, target: Definition, parameter: str, node: Node, scope: Scope) -> Value:
        """The value of an argument: an input of as many dimensions as the body of `target` has indices, if it has any."""
        indices = target.indices_of(parameter)
        if not indices:
            return self._value(node, scope)
        dtype = "fp32" if target.is_score else "int32"
        name = node.children[0].value if node.kind in ("name", "index") else parameter
        found = self._find(name, scope)
        if node.kind == "name" and name not in FUNCTIONS and found is None:
            raise DiagnosticError(self._unknown(name, node.span, scope, f"input {_declaration(name, indices, dtype)}"))
        value = self._value(node, scope)
        if isinstance(value, Input) and len(value.dims) == len(indices):
            return value
        name = name if isinstance(found, Input) else parameter
        declared = _declaration(name, indices, dtype)
        cure = f"declare input {declared}, and write {name} here"
        if node.kind == "index" and isinstance(value, Gather) and len(value.args) == len(indices):
            cure = f"write {name}, without indices"
        problem = f"`{target.name}` reads `{parameter}` as a tensor of {counted(len(indices), 'dimension')}"
        raise DiagnosticError(mistakes.TypeMismatch(span=node.span, problem=problem, cure=cure))

    def _instead_of_call(self, name: str, arguments: tuple[Node, ...], scope: Scope) -> str | None:
        """What to write for a function of Python, numpy or torch that this language lacks; None if that is unknown or long."""
        meant = function(name)
        if meant is None or name in NAMES:
            return None
        operands = [self.expression(a, scope) for a in arguments]
        try:
            text = expression_to_text(meant(*operands))
        except (ExpressionError, TypeError):
            return None
        return f"write {text}" if len(text) <= MAX_CURE else None

    def _builtin(self, name: str, arguments: tuple[Node, ...], node: Node, scope: Scope) -> Expr:
        if len(arguments) != arity(name):
            example = _function_example(name)
            if name in ("min", "max") and len(arguments) > 2:
                example = f"{name}(a, {name}(b, c))"
            raise _wrong_arguments(node.span, name, arity(name), len(arguments), example)
        return self._apply(name, self._expressions(arguments, scope), node.span)

    def _expand(self, target: Definition, values: dict[str, Value], span: Span) -> Value:
        if any(target is outer for outer in self.active):
            raise DiagnosticError(mistakes.Recursion(span=span, name=target.name))
        self.active.append(target)
        try:
            value = self._value(target.body, Scope(values, target.scope))
            if target.builtin and target.is_score and isinstance(value, Expr):
                self.scores[value] = target
            return value
        except DiagnosticError as error:
            if not target.builtin:
                raise
            raise DiagnosticError(*(replace(d, span=span) for d in error.diagnostics)) from None
        finally:
            self.active.pop()

    def _index(self, node: Node, scope: Scope) -> Expr:
        name_node, arguments = node.children[0], node.children[1].children
        target = self._find(name_node.value, scope)
        if target is None and name_node.value in FUNCTIONS:
            cure = f"write {name_node.value}({_text(*arguments)})"
            raise DiagnosticError(mistakes.NotAnInput(span=node.span, name=name_node.value, what="a function", cure=cure))
        if target is None:
            raise DiagnosticError(
                self._unknown(name_node.value, name_node.span, scope, f"input {_declaration(name_node.value, arguments)}")
            )
        if not isinstance(target, Input):
            name, what = name_node.value, "a number"
            cure = f"declare it as an input: input {_declaration(name, arguments)}"
            if isinstance(target, Definition):
                what, cure = "a function", f"write {target.call}"
            elif name in WORDS:
                cure = f"write {name}; an element of a captured tensor has the name of an input before the ["
            raise DiagnosticError(mistakes.NotAnInput(span=node.span, name=name, what=what, cure=cure))
        if len(arguments) != len(target.dims):
            expected, given = counted(len(target.dims), "dimension"), len(arguments)
            example = _index_example(target, arguments)
            raise DiagnosticError(
                mistakes.WrongIndexCount(span=node.span, name=target.name, expected=expected, given=given, example=example)
            )
        number, self.number = self.number, Type.INT
        try:
            indices = tuple(self._expressions(arguments, scope))
        finally:
            self.number = number
        return _guarded(lambda: gather(target.name, element_type(target.dtype), indices), node.span)

    def _unary(self, node: Node, scope: Scope) -> Expr:
        operand = self.expression(node.children[0], scope)
        symbol = SYNONYMS.get(node.value, node.value)
        if symbol == "+":
            return operand
        return self._apply("not" if symbol == "not" else "neg", [operand], node.span)

    def _binary(self, node: Node, scope: Scope) -> Expr:
        op = BINARY[SYNONYMS.get(node.value, node.value)]
        left, right = node.children
        if op in _COMPARISONS and left.kind == "binary" and BINARY.get(left.value) in _COMPARISONS:
            raise DiagnosticError(mistakes.ChainedComparison(span=node.span))
        if op == "floordiv" and self.expression(left, scope).type is Type.BOOL:
            problem = "`//` divides integers, and its left side is a truth value"
            raise DiagnosticError(
                mistakes.TypeMismatch(span=node.span, problem=problem, cure="if it begins a comment, write # instead")
            )
        first, second = self._expressions((left, right), scope)
        self._check_score_once(op, first, second, node.span)
        return self._apply(op, [first, second], node.span)

    def _check_score_once(self, op: str, first: Expr, second: Expr, span: Span) -> None:
        """Refuse `s + alibi(slopes)`, whose second operand contains `s` already."""
        if not self.scores or op not in ARITHMETIC:
            return
        for one, other in ((second, first), (first, second)):
            found = next((node for node in walk(one) if node in self.scores), None)
            if found is not None and "s" in names_in(other):
                target = self.scores[found]
                raise DiagnosticError(mistakes.ScoreTwice(span=span, call=target.call, stands_for=target.text))

    def _apply(self, op: str, operands: list[Expr], span: Span) -> Expr:
        return _guarded(lambda: within_limits(apply(op, *operands)), span)


def number_of(keyword: str) -> Type:
    """The type of most numbers in the expression of a statement."""
    return Type.INT if keyword == "mask" else Type.FLOAT


ARITHMETIC = ("add", "sub", "mul", "div")
COMPARISONS = frozenset(symbol for symbol, name in BINARY.items() if is_comparison(name))
_COMPARISONS = frozenset(name for name in BINARY.values() if is_comparison(name))


def _guarded(build: Callable[[], Expr], span: Span) -> Expr:
    try:
        return build()
    except ExpressionError as error:
        raise DiagnosticError(
            mistakes.TypeMismatch(span=span, problem=error.message, cure=error.help or "check the operands")
        ) from None


def _without_arguments(span: Span, name: str, expected: int, example: str) -> DiagnosticError:
    needed = counted(expected, "argument")
    return DiagnosticError(mistakes.FunctionWithoutArguments(span=span, name=name, expected=needed, example=example))


def _wrong_arguments(span: Span, name: str, expected: int, given: int, example: str) -> DiagnosticError:
    taken = counted(expected, "argument")
    return DiagnosticError(mistakes.WrongArguments(span=span, name=name, expected=taken, given=given, example=example))


def element_type(dtype: DType) -> Type:
    """The type of an expression that reads an element of `dtype`."""
    return Type(dtype.kind)


LETTERS = {"batch": "b", "q_heads": "h", "kv_heads": "h", "q_len": "q", "kv_len": "k"}  # the usual index of a dimension


def _index_example(target: Input, given: Sequence[Node] = ()) -> str:
    """An element of `target`: the indices that a person has `given` at the dimensions that they fit, in their order, and the
    usual ones elsewhere. `ids[q]` of ids: int32[batch, kv_len] is `ids[b, q]`."""
    if not target.dims:
        return target.name
    count = min(len(given), len(target.dims))
    pairings = (
        tuple(zip(places, indices, strict=True))
        for places in combinations(range(len(target.dims)), count)
        for indices in combinations(given, count)
    )
    best = max(islice(pairings, MAX_PAIRINGS), key=lambda pairs: sum(_fits(target.dims[place], i) for place, i in pairs))
    written = {place: _text(index) for place, index in best}
    indices = (written.get(place) or LETTERS.get(str(dim), "0") for place, dim in enumerate(target.dims))
    return f"{target.name}[{', '.join(indices)}]"


MAX_PAIRINGS = 1000  # limit on pairings of dimensions and indices that are compared


def _fits(dim: int | str, index: Node) -> float:
    """How likely `index` is meant for a dimension of this size. Queries have positions among the keys."""
    names, usual = _names_in(index), LETTERS.get(str(dim))
    if usual in names:
        return 3.0
    if usual in ("q", "k") and names & {"q", "k"}:
        return 2.0
    return 0.0 if usual else 1.0  # the table of a distance, of what else


def _text(*arguments: Node) -> str:
    """The source text of arguments that are each on one line."""
    return ", ".join(a.span.source.line(a.span.line)[a.span.column - 1 : a.span.end_column - 1] for a in arguments)


def _declaration(name: str, indices: tuple[Node, ...], dtype: str = "fp32") -> str:
    """The declaration of an input that is read at such indices."""
    dims = {"b": "batch", "h": "heads", "q": "q_len", "k": "kv_len"}
    free = iter("nmijwxyz")  # names of dimensions whose sizes come with the tensor
    sizes = [dims.get(node.children[0].value) if node.kind == "name" else None for node in indices]
    return f"{name}: {dtype}[{', '.join(size or next(free, '1') for size in sizes)}]"


def _function_example(function: str) -> str:
    return f"{function}({', '.join('abc'[: arity(function)])})"
