"""Mistakes of expressions, E2: names, types, indices, and limits of masks, scores, scales and sinks."""

from __future__ import annotations

from typing import ClassVar

from attngen.diagnostics import Diagnostic


class UnknownName(Diagnostic):
    code: ClassVar[str] = "E201"
    title: ClassVar[str] = "`{name}` is not defined"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "{known}"

    name: str
    hint: str
    known: str


class NameNotHere(Diagnostic):
    code: ClassVar[str] = "E202"
    title: ClassVar[str] = "`{name}` cannot be used in the {where}"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "{cure}"

    name: str
    where: str
    reason: str
    cure: str


class NotAFunction(Diagnostic):
    code: ClassVar[str] = "E203"
    title: ClassVar[str] = "`{name}` is not a function"
    label: ClassVar[str] = "it is {what}"
    help: ClassVar[str] = "write {example}"

    name: str
    what: str
    example: str


class WrongArguments(Diagnostic):
    code: ClassVar[str] = "E204"
    title: ClassVar[str] = "`{name}` takes {expected}, not {given}"
    label: ClassVar[str] = "{given} given"
    help: ClassVar[str] = "write {example}"

    name: str
    expected: str
    given: int
    example: str


class TypeMismatch(Diagnostic):
    code: ClassVar[str] = "E205"
    title: ClassVar[str] = "{problem}"
    label: ClassVar[str] = "the operands do not fit"
    help: ClassVar[str] = "{cure}"

    problem: str
    cure: str


class NotATruthValue(Diagnostic):
    code: ClassVar[str] = "E206"
    title: ClassVar[str] = "the mask is {found}, not a truth value"
    label: ClassVar[str] = "a mask is true for the pairs (q, k) that take part"
    help: ClassVar[str] = "compare two numbers, as in q >= k"

    found: str


class NotANumber(Diagnostic):
    code: ClassVar[str] = "E207"
    title: ClassVar[str] = "the {keyword} is {found}, not a number"
    label: ClassVar[str] = "expected a number"
    help: ClassVar[str] = "write where(condition, 1.0, 0.0) to get a number; `mask` states which pairs take part"

    keyword: str
    found: str


class WrongIndexCount(Diagnostic):
    code: ClassVar[str] = "E208"
    title: ClassVar[str] = "`{name}` has {expected}, not {given}"
    label: ClassVar[str] = "{given} given"
    help: ClassVar[str] = "write {example}"

    name: str
    expected: str
    given: int
    example: str


class NotAnInput(Diagnostic):
    code: ClassVar[str] = "E209"
    title: ClassVar[str] = "`{name}` cannot be indexed"
    label: ClassVar[str] = "it is {what}"
    help: ClassVar[str] = "{cure}"

    name: str
    what: str
    cure: str


class InputWithoutIndex(Diagnostic):
    code: ClassVar[str] = "E210"
    title: ClassVar[str] = "input `{name}` needs indices"
    label: ClassVar[str] = "an input is a tensor, not a number"
    help: ClassVar[str] = "write {example}"

    name: str
    example: str


class Recursion(Diagnostic):
    code: ClassVar[str] = "E211"
    title: ClassVar[str] = "`{name}` is defined in terms of itself"
    label: ClassVar[str] = "a definition cannot refer to itself"
    help: ClassVar[str] = "write it without recursion"

    name: str


class ExpandsTooMuch(Diagnostic):
    code: ClassVar[str] = "E212"
    title: ClassVar[str] = "the definitions expand to more than {limit} nodes"
    label: ClassVar[str] = "the limit is reached here"
    help: ClassVar[str] = "use fewer or simpler definitions"

    limit: int


class MightOverflow(Diagnostic):
    code: ClassVar[str] = "E213"
    title: ClassVar[str] = "an integer in this expression might not fit 64 bits"
    label: ClassVar[str] = "sizes can be up to 2^29, int params up to 2^30, elements of int64 up to 2^63"
    help: ClassVar[str] = "limit {operands} with min, max or clamp, or read them from an int32 input"

    operands: str


class IndexOutOfRange(Diagnostic):
    code: ClassVar[str] = "E214"
    title: ClassVar[str] = "index {position} of `{name}` {can_be}"
    label: ClassVar[str] = "the dimension has {size}, 0 to {last}"
    help: ClassVar[str] = "{cure}"

    position: int
    name: str
    can_be: str
    size: str
    last: int
    cure: str


class IndexFromData(Diagnostic):
    code: ClassVar[str] = "E215"
    title: ClassVar[str] = "index {position} of `{name}` {problem}"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "{cure}"

    position: int
    name: str
    problem: str
    why: str
    cure: str


class DivisionByZero(Diagnostic):
    code: ClassVar[str] = "E216"
    title: ClassVar[str] = "the divisor of `{symbol}` can be zero"
    label: ClassVar[str] = "{why}"
    help: ClassVar[str] = "use max(..., 1)"

    symbol: str
    why: str


class ChainedComparison(Diagnostic):
    code: ClassVar[str] = "E217"
    title: ClassVar[str] = "comparisons cannot be chained"
    label: ClassVar[str] = "the left operand is a truth value"
    help: ClassVar[str] = "write a < b and b < c"


class NotConstant(Diagnostic):
    code: ClassVar[str] = "E218"
    title: ClassVar[str] = "`let {name}` is not a constant"
    label: ClassVar[str] = "it uses {uses}"
    help: ClassVar[str] = "use `def` for an expression of indices, inputs or params"

    name: str
    uses: str


class Unused(Diagnostic):
    code: ClassVar[str] = "E219"
    title: ClassVar[str] = "{what} `{name}` is not used"
    label: ClassVar[str] = "nothing reads it"
    help: ClassVar[str] = "remove it, or use it in the mask or score"

    what: str
    name: str


class LseNeedsSoftmax(Diagnostic):
    code: ClassVar[str] = "E220"
    title: ClassVar[str] = "`output lse` requires normalize softmax"
    label: ClassVar[str] = "rows are normalized by {normalize}"
    help: ClassVar[str] = "remove `output lse`, or use normalize softmax"

    normalize: str


class SinkNeedsSoftmax(Diagnostic):
    code: ClassVar[str] = "E221"
    title: ClassVar[str] = "`sink` requires normalize softmax"
    label: ClassVar[str] = "rows are normalized by {normalize}"
    help: ClassVar[str] = "remove `sink`, or use normalize softmax"

    normalize: str


class NotFinite(Diagnostic):
    code: ClassVar[str] = "E222"
    title: ClassVar[str] = "the {keyword} is {value}"
    label: ClassVar[str] = "expected a finite number"
    help: ClassVar[str] = "write a finite number"

    keyword: str
    value: str


class SinkTooLarge(Diagnostic):
    code: ClassVar[str] = "E229"
    title: ClassVar[str] = "the sink is {value}"
    label: ClassVar[str] = "its magnitude is larger than 1e37"
    help: ClassVar[str] = "write a smaller number, or -inf for no sink"

    value: str


class FunctionWithoutArguments(Diagnostic):
    code: ClassVar[str] = "E223"
    title: ClassVar[str] = "`{name}` needs {expected}"
    label: ClassVar[str] = "written without arguments"
    help: ClassVar[str] = "write {example}"

    name: str
    expected: str
    example: str


class TooManyNames(Diagnostic):
    code: ClassVar[str] = "E224"
    title: ClassVar[str] = "more than {limit} {what}"
    label: ClassVar[str] = "this one exceeds the limit"
    help: ClassVar[str] = "use fewer"

    limit: int
    what: str


class PrecisionHasNoEffect(Diagnostic):
    code: ClassVar[str] = "E225"
    title: ClassVar[str] = "`precision` has no effect here"
    label: ClassVar[str] = "it applies to products of fp32, and to tanh in scores of {dtype}"
    help: ClassVar[str] = "remove `precision`, or use dtype fp32"

    dtype: str


class ScoreTwice(Diagnostic):
    code: ClassVar[str] = "E226"
    title: ClassVar[str] = "`{call}` is a complete score, but the other operand contains `s` too"
    label: ClassVar[str] = "`{call}` is {stands_for}: here `s` counts twice"
    help: ClassVar[str] = "write `score {call}` alone, or {stands_for} with the terms that you want"

    call: str
    stands_for: str


class CallIndexOutOfRange(Diagnostic):
    """A mistake of a call: its sizes or params are wrong, not the spec."""

    code: ClassVar[str] = "E227"
    title: ClassVar[str] = "index {position} of `{name}` {can_be}, but the dimension{of_dim} has {count}"
    label: ClassVar[str] = "with the sizes and params of this call"
    help: ClassVar[str] = "{cure}"

    position: int
    name: str
    can_be: str
    of_dim: str
    count: str
    cure: str


class TooMuchCode(Diagnostic):
    code: ClassVar[str] = "E230"
    title: ClassVar[str] = "the {what} would take compilers too long: it costs {cost} additions, and {most} are allowed"
    label: ClassVar[str] = "{part}"
    help: ClassVar[str] = "{cure}"

    what: str
    cost: int
    most: int
    part: str
    cure: str


class CallDividesByZero(Diagnostic):
    """A mistake of a call: its sizes or params are wrong, not the spec."""

    code: ClassVar[str] = "E228"
    title: ClassVar[str] = "the divisor of `{symbol}` {can_be}"
    label: ClassVar[str] = "with the sizes and params of this call"
    help: ClassVar[str] = "give another param, or use max(..., 1)"

    symbol: str
    can_be: str
