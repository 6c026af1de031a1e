"""The mistakes that a spec can have, one dataclass each; codes E0 are of the text, E1 of statements, E2 of expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.diagnostics import Diagnostic


@dataclass(frozen=True, kw_only=True)
class UnexpectedCharacter(Diagnostic):
    code: ClassVar[str] = "E001"
    title: ClassVar[str] = "unexpected character {character}"
    label: ClassVar[str] = "no statement or expression has it here"
    help: ClassVar[str] = "remove it; names are letters, digits and underscores"

    character: str


@dataclass(frozen=True, kw_only=True)
class UnexpectedText(Diagnostic):
    code: ClassVar[str] = "E002"
    title: ClassVar[str] = "unexpected {found}"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "write {expected} here, or remove {found}"

    found: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class UnexpectedEnd(Diagnostic):
    code: ClassVar[str] = "E003"
    title: ClassVar[str] = "the text ends too early"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "close every bracket and brace that was opened"

    expected: str


@dataclass(frozen=True, kw_only=True)
class TextTooLong(Diagnostic):
    code: ClassVar[str] = "E004"
    title: ClassVar[str] = "the text has {size} characters"
    label: ClassVar[str] = "at most {limit} are read"
    help: ClassVar[str] = "split it into several files"

    size: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class NestedTooDeeply(Diagnostic):
    code: ClassVar[str] = "E005"
    title: ClassVar[str] = "the expression is nested too deeply"
    label: ClassVar[str] = "more than {limit} levels"
    help: ClassVar[str] = "name its parts with `let` or `def`"

    limit: int


@dataclass(frozen=True, kw_only=True)
class NumberTooLarge(Diagnostic):
    code: ClassVar[str] = "E006"
    title: ClassVar[str] = "the number {number} is too large"
    label: ClassVar[str] = "at most {limit}"
    help: ClassVar[str] = "use a smaller number"

    number: str
    limit: str


@dataclass(frozen=True, kw_only=True)
class NotAText(Diagnostic):
    code: ClassVar[str] = "E007"
    title: ClassVar[str] = "the file is not UTF-8 text"
    label: ClassVar[str] = "byte {position} is no character"
    help: ClassVar[str] = "save it as UTF-8"

    position: int


@dataclass(frozen=True, kw_only=True)
class NoAttention(Diagnostic):
    code: ClassVar[str] = "E101"
    title: ClassVar[str] = "there is no attention in this text"
    label: ClassVar[str] = "expected `attention NAME {{ ... }}`"
    help: ClassVar[str] = "write a block: attention my_attention {{ dtype fp16  head_dim 64  mask causal }}"


@dataclass(frozen=True, kw_only=True)
class DuplicateAttention(Diagnostic):
    code: ClassVar[str] = "E102"
    title: ClassVar[str] = "two attentions are called `{name}`"
    label: ClassVar[str] = "the second one"
    help: ClassVar[str] = "give it another name"

    name: str


@dataclass(frozen=True, kw_only=True)
class UnknownStatement(Diagnostic):
    code: ClassVar[str] = "E103"
    title: ClassVar[str] = "`{found}` is no statement"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "statements are {known}"

    found: str
    hint: str
    known: str


@dataclass(frozen=True, kw_only=True)
class HeadsDoNotDivide(Diagnostic):
    code: ClassVar[str] = "E104"
    title: ClassVar[str] = "{q_heads} query heads cannot share {kv_heads} key/value heads"
    label: ClassVar[str] = "{kv_heads} does not divide {q_heads}"
    help: ClassVar[str] = "use {divisors} key/value heads"

    q_heads: int
    kv_heads: int
    divisors: str


@dataclass(frozen=True, kw_only=True)
class DuplicateStatement(Diagnostic):
    code: ClassVar[str] = "E105"
    title: ClassVar[str] = "`{keyword}` is said twice"
    label: ClassVar[str] = "said before in line {line}"
    help: ClassVar[str] = "keep one of them"

    keyword: str
    line: int


@dataclass(frozen=True, kw_only=True)
class MissingStatement(Diagnostic):
    code: ClassVar[str] = "E106"
    title: ClassVar[str] = "attention `{name}` has no `{keyword}`"
    label: ClassVar[str] = "every attention says its {keyword}"
    help: ClassVar[str] = "add: {example}"

    name: str
    keyword: str
    example: str


@dataclass(frozen=True, kw_only=True)
class UnknownDType(Diagnostic):
    code: ClassVar[str] = "E107"
    title: ClassVar[str] = "`{dtype}` is no element type{of_what}"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "use one of {known}"

    dtype: str
    of_what: str
    hint: str
    known: str


@dataclass(frozen=True, kw_only=True)
class HeadDimNotMultiple(Diagnostic):
    code: ClassVar[str] = "E108"
    title: ClassVar[str] = "head size {size} is not a multiple of 8"
    label: ClassVar[str] = "16-byte loads read 8 elements at a time"
    help: ClassVar[str] = "use {below} or {above}"

    size: int
    below: int
    above: int


@dataclass(frozen=True, kw_only=True)
class HeadDimOutOfRange(Diagnostic):
    code: ClassVar[str] = "E109"
    title: ClassVar[str] = "head size {size} is out of range"
    label: ClassVar[str] = "from 8 to {limit}"
    help: ClassVar[str] = "use a head size of at most {limit}"

    size: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class NoHeads(Diagnostic):
    code: ClassVar[str] = "E110"
    title: ClassVar[str] = "{count} heads are no attention"
    label: ClassVar[str] = "at least 1 and at most {limit}"
    help: ClassVar[str] = "use a count from 1 to {limit}"

    count: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class DuplicateName(Diagnostic):
    code: ClassVar[str] = "E111"
    title: ClassVar[str] = "the name `{name}` is taken"
    label: ClassVar[str] = "{taken_by}"
    help: ClassVar[str] = "choose another name"

    name: str
    taken_by: str


@dataclass(frozen=True, kw_only=True)
class ReservedName(Diagnostic):
    code: ClassVar[str] = "E112"
    title: ClassVar[str] = "the name `{name}` cannot be used"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "choose another name, such as `{suggestion}`"

    name: str
    reason: str
    suggestion: str


@dataclass(frozen=True, kw_only=True)
class NameTooLong(Diagnostic):
    code: ClassVar[str] = "E113"
    title: ClassVar[str] = "a name of {length} characters"
    label: ClassVar[str] = "at most {limit}"
    help: ClassVar[str] = "choose a shorter one"

    length: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class UnknownDimension(Diagnostic):
    code: ClassVar[str] = "E114"
    title: ClassVar[str] = "there is no dimension `{name}`"
    label: ClassVar[str] = "did you mean `{near}`?"
    help: ClassVar[str] = "write `{near}`, or a name less like it for a dimension of the tensor's own"

    name: str
    near: str


@dataclass(frozen=True, kw_only=True)
class DimensionOutOfRange(Diagnostic):
    code: ClassVar[str] = "E115"
    title: ClassVar[str] = "a dimension of size {size}"
    label: ClassVar[str] = "from 1 to {limit}"
    help: ClassVar[str] = "use a size from 1 to {limit}"

    size: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class TooManyDimensions(Diagnostic):
    code: ClassVar[str] = "E116"
    title: ClassVar[str] = "input `{name}` has {count} dimensions"
    label: ClassVar[str] = "at most {limit}"
    help: ClassVar[str] = "index it with fewer"

    name: str
    count: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class UnknownParamType(Diagnostic):
    code: ClassVar[str] = "E117"
    title: ClassVar[str] = "`{found}` is no type of a param"
    label: ClassVar[str] = "a param is a number"
    help: ClassVar[str] = "use int or float"

    found: str


@dataclass(frozen=True, kw_only=True)
class BadDefault(Diagnostic):
    code: ClassVar[str] = "E118"
    title: ClassVar[str] = "the default of param `{name}` is {found}"
    label: ClassVar[str] = "expected a constant {expected}"
    help: ClassVar[str] = "write a constant {expected}, or leave the default out"

    name: str
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True)
class UnknownNormalize(Diagnostic):
    code: ClassVar[str] = "E119"
    title: ClassVar[str] = "`{found}` is no row normalization"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "use softmax, sigmoid or none"

    found: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class UnknownPrecision(Diagnostic):
    code: ClassVar[str] = "E123"
    title: ClassVar[str] = "`{found}` is no precision"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "use highest or high"

    found: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class UnknownOutput(Diagnostic):
    code: ClassVar[str] = "E120"
    title: ClassVar[str] = "there is no output `{found}`"
    label: ClassVar[str] = "O is always returned"
    help: ClassVar[str] = "the only further output is lse"

    found: str


@dataclass(frozen=True, kw_only=True)
class UnknownRung(Diagnostic):
    code: ClassVar[str] = "E121"
    title: ClassVar[str] = "there is no kernel `{found}`"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "use naive, tiled, fused, wgmma, hopper or auto"

    found: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class BadTile(Diagnostic):
    code: ClassVar[str] = "E122"
    title: ClassVar[str] = "{what} {value} is out of range"
    label: ClassVar[str] = "{limits}"
    help: ClassVar[str] = "{cure}"

    what: str
    value: int
    limits: str
    cure: str


@dataclass(frozen=True, kw_only=True)
class UnknownName(Diagnostic):
    code: ClassVar[str] = "E201"
    title: ClassVar[str] = "`{name}` is not known here"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "{known}"

    name: str
    hint: str
    known: str


@dataclass(frozen=True, kw_only=True)
class NameNotHere(Diagnostic):
    code: ClassVar[str] = "E202"
    title: ClassVar[str] = "`{name}` has no meaning in `{where}`"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "use only {allowed}"

    name: str
    where: str
    reason: str
    allowed: str


@dataclass(frozen=True, kw_only=True)
class NotAFunction(Diagnostic):
    code: ClassVar[str] = "E203"
    title: ClassVar[str] = "`{name}` is not a function"
    label: ClassVar[str] = "it is {what}"
    help: ClassVar[str] = "write it without parentheses"

    name: str
    what: str


@dataclass(frozen=True, kw_only=True)
class WrongArguments(Diagnostic):
    code: ClassVar[str] = "E204"
    title: ClassVar[str] = "`{name}` takes {expected} argument{plural}, not {given}"
    label: ClassVar[str] = "{given} given"
    help: ClassVar[str] = "write {example}"

    name: str
    expected: int
    plural: str
    given: int
    example: str


@dataclass(frozen=True, kw_only=True)
class TypeMismatch(Diagnostic):
    code: ClassVar[str] = "E205"
    title: ClassVar[str] = "{problem}"
    label: ClassVar[str] = "the types do not fit"
    help: ClassVar[str] = "{cure}"

    problem: str
    cure: str


@dataclass(frozen=True, kw_only=True)
class NotATruthValue(Diagnostic):
    code: ClassVar[str] = "E206"
    title: ClassVar[str] = "the mask is {found}, not a truth value"
    label: ClassVar[str] = "true where the pair takes part"
    help: ClassVar[str] = "compare it with something, as in q >= k"

    found: str


@dataclass(frozen=True, kw_only=True)
class NotANumber(Diagnostic):
    code: ClassVar[str] = "E207"
    title: ClassVar[str] = "the {keyword} is {found}, not a number"
    label: ClassVar[str] = "expected a float"
    help: ClassVar[str] = "use where(condition, 1.0, 0.0) for a number"

    keyword: str
    found: str


@dataclass(frozen=True, kw_only=True)
class WrongIndexCount(Diagnostic):
    code: ClassVar[str] = "E208"
    title: ClassVar[str] = "`{name}` has {expected} dimension{plural}, not {given}"
    label: ClassVar[str] = "{given} given"
    help: ClassVar[str] = "write {example}"

    name: str
    expected: int
    plural: str
    given: int
    example: str


@dataclass(frozen=True, kw_only=True)
class NotAnInput(Diagnostic):
    code: ClassVar[str] = "E209"
    title: ClassVar[str] = "`{name}` cannot be indexed"
    label: ClassVar[str] = "it is {what}"
    help: ClassVar[str] = "declare it: input {name}: fp32[heads]"

    name: str
    what: str


@dataclass(frozen=True, kw_only=True)
class InputWithoutIndex(Diagnostic):
    code: ClassVar[str] = "E210"
    title: ClassVar[str] = "input `{name}` needs its indices"
    label: ClassVar[str] = "a tensor is not a number"
    help: ClassVar[str] = "write {example}"

    name: str
    example: str


@dataclass(frozen=True, kw_only=True)
class Recursion(Diagnostic):
    code: ClassVar[str] = "E211"
    title: ClassVar[str] = "`{name}` is defined by itself"
    label: ClassVar[str] = "a definition cannot use itself"
    help: ClassVar[str] = "write it out"

    name: str


@dataclass(frozen=True, kw_only=True)
class ExpandsTooMuch(Diagnostic):
    code: ClassVar[str] = "E212"
    title: ClassVar[str] = "the definitions expand to more than {limit} nodes"
    label: ClassVar[str] = "here"
    help: ClassVar[str] = "use fewer or simpler definitions"

    limit: int


@dataclass(frozen=True, kw_only=True)
class MightOverflow(Diagnostic):
    code: ClassVar[str] = "E213"
    title: ClassVar[str] = "an integer of this expression might not fit 64 bits"
    label: ClassVar[str] = "sizes and int params may be large"
    help: ClassVar[str] = "use min, max or clamp, or an int32 input"


@dataclass(frozen=True, kw_only=True)
class IndexOutOfRange(Diagnostic):
    code: ClassVar[str] = "E214"
    title: ClassVar[str] = "index {position} of `{name}` {can_be}"
    label: ClassVar[str] = "the dimension has {size} elements, 0 to {last}"
    help: ClassVar[str] = "keep it inside: clamp(..., 0, {last})"

    position: int
    name: str
    can_be: str
    size: int
    last: int


@dataclass(frozen=True, kw_only=True)
class IndexFromData(Diagnostic):
    code: ClassVar[str] = "E215"
    title: ClassVar[str] = "index {position} of `{name}` comes from data"
    label: ClassVar[str] = "it might lie outside the dimension"
    help: ClassVar[str] = "keep it inside: clamp(..., 0, {last})"

    position: int
    name: str
    last: str


@dataclass(frozen=True, kw_only=True)
class DivisionByZero(Diagnostic):
    code: ClassVar[str] = "E216"
    title: ClassVar[str] = "the divisor of `{symbol}` can be zero"
    label: ClassVar[str] = "it comes from data"
    help: ClassVar[str] = "use max(..., 1)"

    symbol: str


@dataclass(frozen=True, kw_only=True)
class ChainedComparison(Diagnostic):
    code: ClassVar[str] = "E217"
    title: ClassVar[str] = "comparisons cannot be chained"
    label: ClassVar[str] = "the left side is a truth value already"
    help: ClassVar[str] = "write a < b and b < c"


@dataclass(frozen=True, kw_only=True)
class NotConstant(Diagnostic):
    code: ClassVar[str] = "E218"
    title: ClassVar[str] = "`let {name}` is not a constant"
    label: ClassVar[str] = "it uses {uses}"
    help: ClassVar[str] = "use def for what depends on indices, inputs or params"

    name: str
    uses: str


@dataclass(frozen=True, kw_only=True)
class Unused(Diagnostic):
    code: ClassVar[str] = "E219"
    title: ClassVar[str] = "{what} `{name}` is not used"
    label: ClassVar[str] = "nothing reads it"
    help: ClassVar[str] = "remove it, or use it in the mask or score"

    what: str
    name: str


@dataclass(frozen=True, kw_only=True)
class PrecisionHasNoEffect(Diagnostic):
    code: ClassVar[str] = "E225"
    title: ClassVar[str] = "a precision below the highest has no effect here"
    label: ClassVar[str] = "products of {dtype} are what they are, and the score has no tanh"
    help: ClassVar[str] = "remove `precision`, or use dtype fp32"

    dtype: str


@dataclass(frozen=True, kw_only=True)
class LseNeedsSoftmax(Diagnostic):
    code: ClassVar[str] = "E220"
    title: ClassVar[str] = "there is no lse without softmax"
    label: ClassVar[str] = "rows are normalized by {normalize}"
    help: ClassVar[str] = "remove `output lse`, or use normalize softmax"

    normalize: str


@dataclass(frozen=True, kw_only=True)
class SinkNeedsSoftmax(Diagnostic):
    code: ClassVar[str] = "E221"
    title: ClassVar[str] = "a sink means nothing without softmax"
    label: ClassVar[str] = "rows are normalized by {normalize}"
    help: ClassVar[str] = "remove `sink`, or use normalize softmax"

    normalize: str


@dataclass(frozen=True, kw_only=True)
class NotFinite(Diagnostic):
    code: ClassVar[str] = "E222"
    title: ClassVar[str] = "the {keyword} is {value}"
    label: ClassVar[str] = "expected a finite number"
    help: ClassVar[str] = "write a finite number"

    keyword: str
    value: str


@dataclass(frozen=True, kw_only=True)
class FunctionWithoutArguments(Diagnostic):
    code: ClassVar[str] = "E223"
    title: ClassVar[str] = "`{name}` needs its argument{plural}"
    label: ClassVar[str] = "it takes {expected}"
    help: ClassVar[str] = "write {example}"

    name: str
    expected: int
    plural: str
    example: str


@dataclass(frozen=True, kw_only=True)
class TooManyNames(Diagnostic):
    code: ClassVar[str] = "E224"
    title: ClassVar[str] = "more than {limit} {what}"
    label: ClassVar[str] = "here"
    help: ClassVar[str] = "use fewer"

    limit: int
    what: str
