"""What a file has because its text names it: primitives, `templates/primitives/*.cuh`, and functions, types and constants.

Templates write a definition without a thought of who uses it; what nothing uses is left out here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from attngen.emit.templates import template_directory

PLACE = "%primitives%\n"  # where primitives stand in a template, after the constants
# In the order of the text: what a primitive names itself stands before it.
ORDER = """
    type_fp16 to_float_fp16 to_fp16 type_bf16 to_float_bf16 to_bf16 to_float_fp32 to_fp32
    type_fp8_e4m3 to_float_fp8_e4m3 type_fp8_e5m2 to_float_fp8_e5m2
    pack_fp16 pack_bf16 unpack_fp16 unpack_bf16 terms_bf16
    exp2_log2 fast_reciprocal fast_log2 fast_tanh fast_tanh_of_two rough_tanh
    special_registers opaque griddepcontrol cp_async cp_async_stream finite_or_0 cp_async_4
    special_fp16 special_bf16 special_fp32 not_zero
    mbarrier mbarrier_arrive mbarrier_wait mbarrier_init_fence tma_load tma_load_5d bulk_load tma_store tma_store_5d
    ldmatrix ldmatrix_trans ldmatrix_x2 stmatrix stmatrix_trans global_add global_add_one keep_order
    mma_fp16 mma_bf16 mma_tf32 split_tf32 split_bf16 proxy_fence setmaxnreg wgmma wgmma_unset named_barrier named_barrier_any
    lane_reduce reduce_add_redux reduce_add_shuffles exact_sum philox permute_bytes two_sum
    halves_fp8_e4m3 halves_fp8_e5m2
    quantize_fp8_e4m3_cvt quantize_fp8_e4m3_bits quantize_fp8_e5m2_cvt quantize_fp8_e5m2_bits
"""
FORMS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "tf32", "fp32", "redux", "shuffles", "cvt", "bits")

_DEFINITION = re.compile(r"(?:template <|(?:static )?__device__ |struct |enum |using |constexpr )")
_ALIGNMENT = r"(?:alignas\((?:[^()]|\(\w+\))*\) )?"
_HEAD = re.compile(
    r"(?:template <.*?>\s+(?=static|__device__|struct|using|constexpr))?"
    rf"(?:struct {_ALIGNMENT}(?P<type>\w+)|enum[^{{]*(?P<values>\{{.*?\}})|using (?P<alias>\w+)"
    r"|constexpr [\w :]*?(?P<constant>\w+)(?:\[\w*\])* = |(?:static )?__device__ [^(]*?(?P<function>\w+|operator\W+)\()",
    re.S,
)
_TYPE = re.compile(r"^(?:template <.*> )?struct (?:alignas\(.*\) )?(\w+)[^;{}]*\{\n", re.M)
_CONSTANT = re.compile(r"^ +static constexpr \w+ (\w+) = [^,;]*;.*\n", re.M)
_NOT_CODE = re.compile(r'//.*|"[^"\n]*"')
_NAME = re.compile(r"(\w+)([(<]?)")  # a name; for a function, as it is called


@dataclass(frozen=True, slots=True)
class Piece:
    """A definition with the comment above it, or other lines of a file."""

    text: str
    defines: frozenset[str]  # the names by which others need it; of a function, as it is called; empty: the piece stays
    names: frozenset[str]  # what it needs itself

    def without_members(self, names: set[str]) -> Piece:
        """The piece without constants and functions of a type that neither it nor the text after it, with `names`, reads."""
        text = _without_functions(self.text, names)
        for member in _CONSTANT.finditer(text):
            if member[1] not in names and len(re.findall(rf"\b{member[1]}\b", text)) == 1:
                text = text.replace(member[0], "")
        return self if text == self.text else replace(self, text=text, names=self.names & names_of(text))


def _without_functions(text: str, names: set[str]) -> str:
    """The text of a type without the functions of its own that neither the text after it, with `names`, nor the rest calls."""
    head = _TYPE.search(text)
    if not head or "__device__" not in text:
        return text
    pieces = [*_pieces(text[head.end() :].splitlines(keepends=True), margin="    ")]
    constructor = f"{head[1]}("
    kept = [not piece.defines or constructor in piece.defines for piece in pieces]
    while True:
        called = names.union(*(piece.names for piece, stays in zip(pieces, kept, strict=True) if stays))
        now = [stays or bool(piece.defines & called) for piece, stays in zip(pieces, kept, strict=True)]
        if now == kept:
            return text[: head.end()] + "".join(piece.text for piece, stays in zip(pieces, kept, strict=True) if stays)
        kept = now


def with_primitives(text: str, forms: Mapping[str, Collection[str]]) -> str:
    """`text` with the primitives that it needs, and without the functions, types and constants that nothing names.

    `forms`: of primitives that have one name for several types, or instructions, those that the file has.
    """
    before, after = text.split(PLACE)
    needed, names = _needed(pieces_of(after), set())
    kept = [needed]
    for known in reversed([primitive(p) for p in ORDER.split() if _has_form(p, forms)]):
        needed, names = _needed(known, names)
        if any(piece.defines for piece in needed):
            kept.append(needed)
    kept.append(_needed(pieces_of(before), names)[0])
    return "".join(piece.text for needed in reversed(kept) for piece in needed)


def _needed(pieces: Iterable[Piece], names: set[str]) -> tuple[list[Piece], set[str]]:
    """Those of `pieces` that the text after them, in which there are `names`, needs; and the names in all of it."""
    needed: list[Piece] = []
    for piece in reversed([*pieces]):
        if not piece.defines or piece.defines & names:
            piece = piece.without_members(names)
            needed.insert(0, piece)
            names = names | piece.names
    return needed, names


def _has_form(primitive: str, forms: Mapping[str, Collection[str]]) -> bool:
    own = [form for form in FORMS if primitive.endswith(f"_{form}")]
    return all(form in forms.get(primitive.removesuffix(f"_{form}"), FORMS) for form in own)


@cache
def primitive(name: str) -> tuple[Piece, ...]:
    """The pieces of a primitive, after an empty line."""
    return pieces_of("\n" + (template_directory() / "primitives" / f"{name}.cuh").read_text("utf-8"))


def pieces_of(text: str) -> tuple[Piece, ...]:
    """The definitions of `text` that are not within others, and the lines between them."""
    return tuple(_pieces(text.splitlines(keepends=True)))


def _pieces(lines: list[str], margin: str = "") -> Iterator[Piece]:
    """Those of lines that begin with `margin`."""
    begin = at = 0  # the lines that are not in a piece yet
    while at < len(lines):
        if not lines[at].startswith(margin) or not _DEFINITION.match(lines[at], len(margin)):
            at += 1
            continue
        first = at
        while first > begin and lines[first - 1].startswith(f"{margin}//") and not lines[first - 1].startswith("//#"):
            first -= 1
        yield from _other(lines[begin:first])
        end = _end_of(lines, at)
        yield _definition("".join(lines[first:end]), "".join(lines[at:end]))
        begin = at = end
    yield from _other(lines[begin:])


def _end_of(lines: list[str], at: int) -> int:
    """The line after a definition that begins at `at`: all its brackets are closed."""
    open_brackets = 0
    while True:
        code = _NOT_CODE.sub("", lines[at]).rstrip()
        open_brackets += code.count("{") + code.count("(") - code.count("}") - code.count(")")
        at += 1
        if open_brackets == 0 and code.endswith((";", "}")):
            return at


def _other(lines: list[str]) -> Iterator[Piece]:
    if lines:
        text = "".join(lines)
        yield Piece(text, frozenset(), names_of(text))


def _definition(text: str, code: str) -> Piece:
    code = code.lstrip()
    head = _HEAD.match(code)
    assert head is not None, f"what does this define? {code}"
    function = head["function"]
    if function and function.startswith("operator"):
        return Piece(text, frozenset(), names_of(code))
    if function:
        rest = code[: head.start("function")] + code[head.end("function") + 1 :]  # it does not need itself
        return Piece(text, frozenset((f"{function}(", f"{function}<")), names_of(rest))
    only = head["type"] or head["alias"] or head["constant"]
    return Piece(text, frozenset((only,)) if only else names_of(head["values"]), names_of(code))


@cache
def names_of(code: str) -> frozenset[str]:
    """The names in a piece of CUDA; a name before a bracket also with the bracket."""
    found = _NAME.findall(_NOT_CODE.sub("", code))
    return frozenset((*(name for name, _ in found), *(name + bracket for name, bracket in found if bracket)))
