"""What a file has because its text names it: primitives, `templates/primitives/*.cuh`, and constants."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache

from attngen.emit.templates import template_directory

PLACE = "%primitives%\n"  # where primitives stand in a template, after the constants
# In the order of the text: what a primitive names itself stands before it.
ORDER = """
    type_fp16 to_float_fp16 to_fp16 type_bf16 to_float_bf16 to_bf16 to_float_fp32 to_fp32
    pack_fp16 pack_bf16 unpack_fp16 unpack_bf16 exp2_log2 fast_reciprocal fast_log2 fast_tanh fast_tanh_of_two rough_tanh
    special_registers opaque griddepcontrol cp_async cp_async_stream finite_or_0 cp_async_4
    special_fp16 special_bf16 special_fp32 not_zero
    mbarrier mbarrier_arrive mbarrier_wait mbarrier_init_fence tma_load tma_load_5d bulk_load tma_store tma_store_5d
    ldmatrix ldmatrix_trans ldmatrix_x2 stmatrix stmatrix_trans global_add global_add_one keep_order
    mma_fp16 mma_bf16 mma_tf32 split_tf32 split_bf16 proxy_fence setmaxnreg wgmma wgmma_unset named_barrier named_barrier_any
    lane_reduce reduce_add_redux reduce_add_shuffles exact_sum philox permute_bytes split_sum
"""
FORMS = ("fp16", "bf16", "tf32", "fp32", "redux", "shuffles")

_FUNCTION = re.compile(r"^(?:template <.*?> )?__device__ __forceinline__ [\w ]+?[ *]*\b(\w+)\(", re.M)
_STRUCT = re.compile(r"^struct (?:alignas\(\w+\) )?(\w+)", re.M)
_CONSTANT = re.compile(r"constexpr .*?(\w+) = ")
_NOT_CODE = re.compile(r'//.*|"[^"\n]*"')
_NAME = re.compile(r"\w+[(<]?")  # a name; for a function, as it is called


def with_primitives(text: str, forms: Mapping[str, Collection[str]]) -> str:
    """`text` with the primitives that it needs, and without the constants that nothing names.

    `forms`: of primitives that have one name for several types, or instructions, those that the file has.
    """
    before, after = text.split(PLACE)
    names, found = names_of(after), []
    for primitive in reversed(ORDER.split()):
        kind, _, last = primitive.rpartition("_")
        code, defined = definition(primitive)
        if defined & names and (last not in FORMS or last in forms.get(kind, FORMS)):
            found.append(f"\n{code}")
            names |= names_of(code)
    return _with_constants(before, names) + "".join(reversed(found)) + after


def _with_constants(text: str, names: set[str]) -> str:
    """`text` with those of its constants that are among `names`, or that one of these names."""
    lines = []
    for line in reversed(text.splitlines(keepends=True)):
        constant = _CONSTANT.match(line)
        if constant and constant[1] not in names:
            continue
        if constant:
            names |= names_of(line)
        lines.append(line)
    return "".join(reversed(lines))


@cache
def definition(name: str) -> tuple[str, frozenset[str]]:
    """The text of a primitive, and the names that it defines."""
    text = (template_directory() / "primitives" / f"{name}.cuh").read_text()
    return text, frozenset((*(f + opening for f in _FUNCTION.findall(text) for opening in "(<"), *_STRUCT.findall(text)))


def names_of(code: str) -> set[str]:
    return {*_NAME.findall(_NOT_CODE.sub("", code))}
