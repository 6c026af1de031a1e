"""The kernels of a file that write rows of fp32 as three terms of bf16 before the others, which multiply these."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_maker import KernelMaker
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv
from attngen.plan.terms import TERMS, term_columns
from attngen.spec.dtypes import BF16

SPLIT = 8  # numbers that a thread splits at once: 16 bytes of each term
THREADS = 128  # per block
ROWS = 32  # rows of a block: each thread has several loads under way


@dataclass(frozen=True, slots=True)
class InTerms:
    """A tensor, the workspace with its terms, and the names of its rows' size and of that of a row of one term."""

    source: str
    to: str
    size: str
    columns: str


@dataclass(frozen=True, slots=True)
class Splitting:
    """A kernel that splits tensors whose rows lie alike."""

    kernel: KernelText
    tensors: list[InTerms]
    length: str
    heads: str


def splitting_kernels(maker: KernelMaker) -> list[KernelText]:
    """The kernels before the others, if the file has them."""
    return [one.kernel for one in _splitting(maker)]


def splitting(maker: KernelMaker) -> dict[str, object]:
    """What the template reads of the kernels; nothing if the file has none."""
    if not maker.plan.in_terms:
        return {}
    spec = maker.spec
    return {
        "splitting": _splitting(maker),
        "numbers_of_terms": [
            ConstantLine("TERMS", TERMS, "numbers of bf16 that stand for one of fp32"),
            ConstantLine("TERM_COLUMNS", term_columns(spec.head_dim), "of a row of terms of Q or K"),
            ConstantLine("TERM_COLUMNS_V", term_columns(spec.head_dim_v), "of V"),
            ConstantLine("SPLIT", SPLIT, "numbers that a thread splits at once"),
            ConstantLine("SPLIT_THREADS", THREADS, "of a block"),
            ConstantLine("SPLIT_ROWS", ROWS, "rows of a block, of a head"),
        ],
    }


def _splitting(maker: KernelMaker) -> list[Splitting]:
    """One kernel for Q, and one for K and V, whose rows are as many."""
    of_rows = [name for name in maker.plan.in_terms if name == "Q"]
    of_keys = [name for name in maker.plan.in_terms if name != "Q"]
    return [_kernel(maker, names) for names in (of_rows, of_keys) if names]


def _kernel(maker: KernelMaker, names: list[str]) -> Splitting:
    of_keys = names != ["Q"]
    length, heads = ("kv_len", "kv_heads") if of_keys else ("q_len", "q_heads")
    v = {name: "_V" if name == "V" else "" for name in names}
    found = [InTerms(name, abi.in_terms(name), f"HEAD_DIM{v[name]}", f"TERM_COLUMNS{v[name]}") for name in names]
    parameters = [
        *(abi.data(name, "float") for name in names),
        *(abi.data(one.to, BF16.cuda, writable=True) for one in found),
        *(p for one in found for name in (one.source, one.to) for p in abi.strides(maker.tensors[name], "bhs")),
        *abi.sizes(maker.given, "batch", heads, length),
    ]
    grid = (maker.kv_head_grid if of_keys else maker.head_grid)(CeilDiv(length, ROWS))
    suffix = "split_" + "".join(names).lower()
    kernel = maker.kernel(suffix, grid, parameters, THREADS, "SPLIT_THREADS", reads_prepared=False)
    return Splitting(kernel, found, length, heads)
