"""Mistakes of statements and names, E1."""

from __future__ import annotations

from typing import ClassVar

from attngen.diagnostics import Diagnostic
from attngen.keywords import SCHEDULE_NAMES


class NotAChoice(Diagnostic):
    """A word that is none of those which a statement takes. `hint`: the one that it resembles."""

    label: ClassVar[str] = "{hint}"

    found: str
    hint: str


class NoAttention(Diagnostic):
    code: ClassVar[str] = "E101"
    title: ClassVar[str] = "the text defines no attention"
    label: ClassVar[str] = "expected `attention NAME {{ ... }}`"
    help: ClassVar[str] = "write an attention: attention my_attention {{ dtype fp16  head_dim 64  mask causal }}"


class DuplicateAttention(Diagnostic):
    code: ClassVar[str] = "E102"
    title: ClassVar[str] = "two attentions are named `{name}`"
    label: ClassVar[str] = "second definition"
    help: ClassVar[str] = "rename one of them"

    name: str


class UnknownStatement(Diagnostic):
    code: ClassVar[str] = "E103"
    title: ClassVar[str] = "`{found}` is not a statement"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "{cure}"

    found: str
    hint: str
    cure: str


class HeadsDoNotDivide(Diagnostic):
    code: ClassVar[str] = "E104"
    title: ClassVar[str] = "{q_heads} query heads cannot share {kv_heads} key/value heads"
    label: ClassVar[str] = "{kv_heads} does not divide {q_heads}"
    help: ClassVar[str] = "use {divisors} key/value heads"

    q_heads: int
    kv_heads: int
    divisors: str


class DuplicateStatement(Diagnostic):
    code: ClassVar[str] = "E105"
    title: ClassVar[str] = "`{keyword}` is given twice"
    label: ClassVar[str] = "first given in line {line}"
    help: ClassVar[str] = "keep one of them"

    keyword: str
    line: int


class MissingStatement(Diagnostic):
    code: ClassVar[str] = "E106"
    title: ClassVar[str] = "attention `{name}` has no `{keyword}`"
    label: ClassVar[str] = "every attention needs a `{keyword}` statement"
    help: ClassVar[str] = "add: {example}"

    name: str
    keyword: str
    example: str


class UnknownDType(Diagnostic):
    code: ClassVar[str] = "E107"
    title: ClassVar[str] = "`{dtype}` is not an element type{of_what}"
    label: ClassVar[str] = "{hint}"
    help: ClassVar[str] = "use one of {known}"

    dtype: str
    of_what: str
    hint: str
    known: str


class HeadDimNotMultiple(Diagnostic):
    code: ClassVar[str] = "E108"
    title: ClassVar[str] = "head size {size} is not a multiple of 8"
    label: ClassVar[str] = "16-byte loads read 8 elements at a time"
    help: ClassVar[str] = "use {below} or {above}"

    size: int
    below: int
    above: int


class HeadDimTooSmall(Diagnostic):
    code: ClassVar[str] = "E109"
    title: ClassVar[str] = "head size {size} is too small"
    label: ClassVar[str] = "the smallest is 8"
    help: ClassVar[str] = "use a multiple of 8"

    size: int


class NoHeads(Diagnostic):
    code: ClassVar[str] = "E110"
    title: ClassVar[str] = "a head count of {count} is out of range"
    label: ClassVar[str] = "the range is 1 to {limit}"
    help: ClassVar[str] = "use a count from 1 to {limit}"

    count: int
    limit: int


class DuplicateName(Diagnostic):
    code: ClassVar[str] = "E111"
    title: ClassVar[str] = "the name `{name}` is taken"
    label: ClassVar[str] = "{taken_by}"
    help: ClassVar[str] = "choose another name"

    name: str
    taken_by: str


class ReservedName(Diagnostic):
    code: ClassVar[str] = "E112"
    title: ClassVar[str] = "the name `{name}` cannot be used"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "choose another name, such as `{suggestion}`"

    name: str
    reason: str
    suggestion: str


class NameTooLong(Diagnostic):
    code: ClassVar[str] = "E113"
    title: ClassVar[str] = "the name has {length} characters"
    label: ClassVar[str] = "the limit is {limit}"
    help: ClassVar[str] = "choose a shorter name"

    length: int
    limit: int


class UnknownDimension(Diagnostic):
    code: ClassVar[str] = "E114"
    title: ClassVar[str] = "there is no dimension `{name}`"
    label: ClassVar[str] = "did you mean `{near}`?"
    help: ClassVar[str] = "write `{near}`; for a dimension of your own, choose a name that is less similar"

    name: str
    near: str


class DimensionOutOfRange(Diagnostic):
    code: ClassVar[str] = "E115"
    title: ClassVar[str] = "a dimension of size {size} is out of range"
    label: ClassVar[str] = "the range is 1 to {limit}"
    help: ClassVar[str] = "use a size from 1 to {limit}"

    size: int
    limit: int


class TooManyDimensions(Diagnostic):
    code: ClassVar[str] = "E116"
    title: ClassVar[str] = "input `{name}` has {count} dimensions"
    label: ClassVar[str] = "the limit is {limit}"
    help: ClassVar[str] = "use fewer dimensions"

    name: str
    count: int
    limit: int


class UnknownParamType(Diagnostic):
    code: ClassVar[str] = "E117"
    title: ClassVar[str] = "`{found}` is not a type of a param"
    label: ClassVar[str] = "a param is a number"
    help: ClassVar[str] = "use int or float"

    found: str


class BadDefault(Diagnostic):
    code: ClassVar[str] = "E118"
    title: ClassVar[str] = "the default of param `{name}` is {found}"
    label: ClassVar[str] = "expected a constant {expected}"
    help: ClassVar[str] = "write a constant {expected}, or omit the default"

    name: str
    expected: str
    found: str


class UnknownNormalize(NotAChoice):
    code: ClassVar[str] = "E119"
    title: ClassVar[str] = "`{found}` is not a row normalization"
    help: ClassVar[str] = "use softmax, sigmoid or none"


class UnknownOutput(Diagnostic):
    code: ClassVar[str] = "E120"
    title: ClassVar[str] = "there is no output `{found}`"
    label: ClassVar[str] = "O is always returned"
    help: ClassVar[str] = "the only additional output is lse"

    found: str


class UnknownSchedule(NotAChoice):
    code: ClassVar[str] = "E121"
    title: ClassVar[str] = "there is no kernel `{found}`"
    help: ClassVar[str] = f"use {', '.join(SCHEDULE_NAMES)} or auto"


class UnknownStorage(NotAChoice):
    code: ClassVar[str] = "E124"
    title: ClassVar[str] = "there is no storage `{found}`"
    help: ClassVar[str] = "use dense, padded, packed, paged or packed_paged"


class BadTile(Diagnostic):
    code: ClassVar[str] = "E122"
    title: ClassVar[str] = "{what} {value} is out of range"
    label: ClassVar[str] = "{limits}"
    help: ClassVar[str] = "{cure}"

    what: str
    value: int
    limits: str
    cure: str


class UnknownQPlace(NotAChoice):
    code: ClassVar[str] = "E128"
    title: ClassVar[str] = "Q cannot stay in `{found}`"
    help: ClassVar[str] = "use q registers or q shared"


class UnknownPrecision(NotAChoice):
    code: ClassVar[str] = "E123"
    title: ClassVar[str] = "`{found}` is not a precision"
    help: ClassVar[str] = "use highest or high"


class DropoutOutOfRange(Diagnostic):
    code: ClassVar[str] = "E125"
    title: ClassVar[str] = "the share of dropped weights is {value}"
    label: ClassVar[str] = "expected a number from 0 to below 1"
    help: ClassVar[str] = "write the share that is dropped, as in dropout 0.1"

    value: str


class DropoutNotANumber(Diagnostic):
    code: ClassVar[str] = "E126"
    title: ClassVar[str] = "the share of dropped weights is an expression"
    label: ClassVar[str] = "expected a number or a float param"
    help: ClassVar[str] = "declare a param and compute its value before the call: param p: float  dropout p"


class CallDropoutOutOfRange(Diagnostic):
    code: ClassVar[str] = "E127"
    title: ClassVar[str] = "param `{name}`, the share of dropped weights, is {value}"
    label: ClassVar[str] = "this param"
    help: ClassVar[str] = "pass a number from 0 to below 1"

    name: str
    value: str


class UnknownPairs(NotAChoice):
    code: ClassVar[str] = "E129"
    title: ClassVar[str] = "`{found}` is not a way to pair the elements of a row"
    help: ClassVar[str] = "use halves (elements n and n + dim / 2, as Llama) or interleaved (neighbours, as GPT-J)"


class BadRotaryDim(Diagnostic):
    code: ClassVar[str] = "E130"
    title: ClassVar[str] = "{dim} elements of a row of {head_dim} cannot be rotated"
    label: ClassVar[str] = "expected {limits}"
    help: ClassVar[str] = "{cure}"

    dim: int
    head_dim: int
    limits: str
    cure: str


class RotaryTable(Diagnostic):
    code: ClassVar[str] = "E131"
    title: ClassVar[str] = "`{name}` cannot be a table of the rotation of {dim} elements"
    label: ClassVar[str] = "{found}"
    help: ClassVar[str] = "declare input {name}: fp32[positions, {pairs}], and the other table with the same element type"

    name: str
    dim: int
    pairs: int
    found: str


class RotaryPosition(Diagnostic):
    code: ClassVar[str] = "E132"
    title: ClassVar[str] = "the {where} is {found}, not an integer"
    label: ClassVar[str] = "positions are rows of the tables"
    help: ClassVar[str] = "write integers, as in rotary 64 halves by cosines, sines at q, k"

    where: str
    found: str


class NotThatTensor(NotAChoice):
    code: ClassVar[str] = "E135"
    title: ClassVar[str] = "`{found}` cannot stand here"
    help: ClassVar[str] = "write scaled k by, or scaled v by; values are columns of k, as in values k[0:64]"


class BadValues(Diagnostic):
    code: ClassVar[str] = "E134"
    title: ClassVar[str] = "k[{begin}:{end}] cannot be V"
    label: ClassVar[str] = "{found}"
    help: ClassVar[str] = "write values k[0:n], n a multiple of 8 up to {head_dim}, and state no other size or type of V"

    begin: int
    end: int
    found: str
    head_dim: int


class UnknownWarning(NotAChoice):
    code: ClassVar[str] = "E136"
    title: ClassVar[str] = "`{found}` is not the code of a warning"
    help: ClassVar[str] = "write the code that the warning begins with, as in allow W205; `attngen list W205` explains one"


class RotaryOfPages(Diagnostic):
    code: ClassVar[str] = "E133"
    title: ClassVar[str] = "keys in storage {storage} cannot be rotated by a call"
    label: ClassVar[str] = "a pool of pages is a cache"
    help: ClassVar[str] = "leave out `storage`; attngen.torch.Attention.decode rotates keys when it appends them to a cache"

    storage: str
