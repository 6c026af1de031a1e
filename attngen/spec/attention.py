"""`AttentionSpec`: the definition of an attention variant, from text or Python, independent of how it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from attngen.diagnostics import ArgumentError
from attngen.keywords import ScheduleName
from attngen.spec.dtypes import DType
from attngen.spec.expr import Expr, Type, name
from attngen.spec.rotary import Rotary

T = TypeVar("T")
Normalize = Literal["softmax", "sigmoid", "none"]
Precision = Literal["highest", "high"]
Storage = Literal["dense", "padded", "packed", "paged", "packed_paged"]
QPlace = Literal["registers", "shared"]

# The names that every expression may use. In text, `q_heads` is also spelled `heads`.
INDICES = ("b", "h", "q", "k")
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
S = name("s", Type.FLOAT)

# The arguments of a call beside arrays and params: in packed storage, of queries, then of keys; of padded keys the last, and of
# keys in pages both of PAGES.
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
PAGES = ("page_table", "seqused")
LONGEST = ("max_q_len", "max_kv_len")  # at least the longest sequence: the host knows no lengths


@dataclass(frozen=True, slots=True)
class Input:
    """A captured tensor: `dims` are names of SIZES, numbers, or free names whose size comes with the tensor.

    Without dimensions it is one number. A tensor of size 1 in a named dimension is broadcast over it.
    """

    name: str
    dtype: DType
    dims: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """A number given at call time."""

    name: str
    type: Type  # INT or FLOAT
    default: int | float | None = None


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """The `kernel` statement of a spec: a schedule and its overrides. The planner chooses those that are None.

    `storage` says how the arrays of a call lie: "dense" is [batch, heads, length, size]; "padded" is the same, with `seqused`
    int32 [batch]: how many keys each sequence has; "packed" is [total, heads, size], the rows of all sequences one after
    another, with `cu_seqlens_q` and `cu_seqlens_k` int32 [batch + 1]: where each sequence begins and the last one ends; "paged"
    has keys and values in a pool of pages, [pages, kv_heads, page_size, size], with `page_table` int32 [batch, max_pages]: the
    pages of each sequence, and `seqused`; "packed_paged" has packed queries and paged keys. q_len and kv_len are then those of
    a sequence. `page_size` fixes the number of rows of a page, which otherwise comes with the pool.

    With `batch_invariant`, no choice depends on batch or heads: a sequence has the same bits in any batch.
    """

    schedule: ScheduleName = "auto"
    block_q: int | None = None
    block_kv: int | None = None
    stages: int | None = None
    warps: int | None = None
    storage: Storage = "dense"
    batch_invariant: bool = False
    q: QPlace | None = None  # where the fragments of Q stay, in schedules on tensor cores
    page_size: int | None = None

    @property
    def is_packed(self) -> bool:
        """Whether queries are packed."""
        return self.storage in ("packed", "packed_paged")

    @property
    def is_paged(self) -> bool:
        """Whether keys are in pages."""
        return self.storage in ("paged", "packed_paged")

    @property
    def is_counted(self) -> bool:
        """Whether the number of each sequence's keys is an argument by itself, `seqused`."""
        return self.storage in ("padded", "paged", "packed_paged")

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The arguments that say where sequences are, and their lengths."""
        rows = CU_SEQLENS[: 1 if self.is_counted else 2] if self.is_packed else ()
        return (*rows, *(PAGES if self.is_paged else PAGES[1:] if self.is_counted else ()))

    @property
    def longest(self) -> tuple[str, ...]:
        """The arguments that are lengths which no sequence exceeds."""
        return (*(LONGEST[:1] if self.is_packed else ()), *(LONGEST[1:] if self.storage != "dense" else ()))

    @property
    def is_planned(self) -> bool:
        """Whether the planner chooses everything but the schedule, by all sizes of a call."""
        return not self.batch_invariant and self == self.bare()

    def bare(self, schedule: ScheduleName | None = None) -> KernelRequest:
        """The same, or another schedule, for the same storage and promise, without overrides."""
        stated = self.schedule if schedule is None else schedule
        return replace(self, schedule=stated, block_q=None, block_kv=None, stages=None, warps=None, q=None)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention variant.

    For query row q and head h of batch b, with s = scale * dot(Q[b, h, q], K[b, h // group_size, k]):

        S[k] = score(s, b, h, q, k) if mask(b, h, q, k), else -inf
        P    = by `normalize`: softmax over k of S (with `sink` as one more logit, without a value), or sigmoid(S), or S itself
               with 0 for pairs that the mask excludes
        O    = sum over k of D[k] * P[k] * v_scale(b, h, k) * V[b, h // group_size, k]
        lse  = log(sum over k of exp(S[k]) [+ exp(sink)])

    where D[k] is 1; with `dropout` p, it is 1 / (1 - p) for weights that are kept, and others are 0 (`attngen.spec.dropout`). A
    spec with dropout has one more input than are declared, `rng_state`. With `rotary`, Q and K are rows that were rotated
    before (`attngen.spec.rotary`).

    `precision` has the words of torch.set_float32_matmul_precision. "highest" computes fp32 products in fp32; "high" may split
    each number into two of bf16, with errors of products of about 2^-18 of themselves. For elements of 16 bits, "high"
    allows the GPU's approximation of tanh in scores, with errors of O up to 1e-2 of its largest element.

    `v_scale` None is 1. It is what stored values are multiplied with, as those of fp8 are; a scale of K is a factor of s in
    `score`.

    `mask` None allows every pair; `score` is `S` (the name `s`) by default; `scale` and `sink` are float expressions,
    `scale` of params only, `sink` of b, h and q; `dropout` is a number or a param. Build one with `attngen.language`, which
    checks it. `dtype` is the element type of Q, and of K, V and O unless they have one of their own.
    """

    name: str
    dtype: DType
    head_dim: int
    head_dim_v: int
    scale: Expr
    q_heads: int | None = None
    kv_heads: int | None = None
    inputs: tuple[Input, ...] = ()
    params: tuple[Param, ...] = ()
    mask: Expr | None = None
    score: Expr = S
    normalize: Normalize = "softmax"
    sink: Expr | None = None
    dropout: Expr | None = None
    rotary: Rotary | None = None
    lse: bool = False
    precision: Precision = "highest"
    kernel: KernelRequest = KernelRequest()
    k_dtype: DType | None = None  # the types of K, V and O, where they are not that of Q
    v_dtype: DType | None = None
    o_dtype: DType | None = None
    v_scale: Expr | None = None
    values: tuple[int, int] | None = None  # V is these columns of K, from the first to before the second; None: it is a tensor
    allow: tuple[str, ...] = ()  # the codes of warnings that are not issued

    @property
    def expressions(self) -> dict[str, Expr]:
        """The expressions that the spec has, by their statements."""
        found = {
            "scale": self.scale,
            "mask": self.mask,
            "score": self.score,
            "sink": self.sink,
            "dropout": self.dropout,
            "scaled v": self.v_scale,
        }
        return {statement: expr for statement, expr in found.items() if expr is not None}

    @property
    def dtypes(self) -> dict[str, DType]:
        """The element types of the tensors "q", "k", "v" and "o"."""
        others = {"k": self.k_dtype, "v": self.v_dtype, "o": self.o_dtype}
        return {"q": self.dtype, **{name: dtype or self.dtype for name, dtype in others.items()}}

    def values_of(self, k: Any, v: Any) -> Any:
        """V of a call that is given `k` and `v`: a part of k, if the spec says so. Raises ArgumentError."""
        if self.values is None:
            if v is None:
                raise ArgumentError("`v` was not given")
            return v
        begin, end = self.values
        if v is not None:
            raise ArgumentError(f"`v` is k[..., {begin}:{end}] in this attention; leave it out")
        return k[..., begin:end]

    @property
    def is_mixed(self) -> bool:
        """Whether Q, K, V and O have several element types."""
        return len({*self.dtypes.values()}) > 1

    def input(self, name: str) -> Input:
        """The input called `name`. Raises KeyError."""
        for candidate in self.inputs:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def own_sizes(self, shapes: Mapping[str, Sequence[T]]) -> dict[str, T]:
        """The sizes of `free_dims`, by the `shapes` of the inputs: one of size 1 is for any size, and states none."""
        sizes: dict[str, T] = {}
        for declared in self.inputs:
            for dim, size in zip(declared.dims, shapes[declared.name], strict=True):
                if isinstance(dim, str) and dim not in SIZES and sizes.get(dim, 1) == 1:
                    sizes[dim] = size
        return sizes

    @property
    def stated_group(self) -> int:
        """The query heads that share a key head, as the spec states; 1: it does not."""
        return self.q_heads // max(self.kv_heads, 1) if self.q_heads and self.kv_heads is not None else 1

    @property
    def free_dims(self) -> tuple[str, ...]:
        """The dimensions whose size comes with an input, in order of first occurrence."""
        names = (d for i in self.inputs for d in i.dims if isinstance(d, str) and d not in SIZES)
        return tuple(dict.fromkeys(names))
