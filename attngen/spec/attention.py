"""`AttentionSpec`: which attention is meant, whoever wrote it down. What it says and nothing of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from attngen.spec.dtypes import DType
from attngen.spec.expr import Expr, Type, name

Rung = Literal["auto", "naive", "tiled", "fused", "wgmma", "hopper"]
Normalize = Literal["softmax", "sigmoid", "none"]
Precision = Literal["highest", "high"]

RUNGS: tuple[Rung, ...] = ("naive", "tiled", "fused")  # of every architecture
HOPPER_RUNGS: tuple[Rung, ...] = ("wgmma", "hopper")  # where there are TMA and wgmma

MAX_HEAD_DIM = 256

# The names that every expression may use. In text, `q_heads` is also spelled `heads`.
INDICES = ("b", "h", "q", "k")
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
S = name("s", Type.FLOAT)


@dataclass(frozen=True, slots=True)
class Input:
    """A captured tensor: `dims` are names of SIZES, numbers, or free names whose size comes with the tensor.

    Without dimensions it is one number. Where a dimension is named, a tensor of size 1 is broadcast over it.
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
class Schedule:
    """What the spec asks of the plan; None is left to the planner."""

    rung: Rung = "auto"
    block_q: int | None = None
    block_kv: int | None = None
    stages: int | None = None
    warps: int | None = None

    def overridden(self, rung: str | None) -> Schedule:
        """What is asked for where a call or a command names `rung`. Tile, stages and warps are for the rung that they were said
        of; of "auto" they were said of whichever rung of a single kernel it would be."""
        if rung is None or rung == self.rung:
            return self
        if self.rung == "auto" and rung not in ("naive", "tiled"):
            return replace(self, rung=cast(Rung, rung))
        return Schedule(cast(Rung, rung))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention variant.

    For query row q and head h of batch b, with s = scale * dot(Q[b, h, q], K[b, h // group_size, k]):

        S[k] = score(s, b, h, q, k) where mask(b, h, q, k), else -inf
        P    = softmax over k of S (with `sink` as one more logit that has no value), or sigmoid(S), or S itself with 0
               where the mask forbids, by `normalize`
        O    = sum over k of P[k] * V[b, h // group_size, k]
        lse  = log(sum over k of exp(S[k]) [+ exp(sink)])

    `precision` is of the products of an fp32 spec, in the words of torch.set_float32_matmul_precision: "highest" is fp32's own;
    "high" lets each number be the sum of two of bf16, with errors of O up to 1e-4 and 1e-3 of its largest element. For elements
    of 16 bits it lets a score's tanh be the GPU's own approximation, with errors of O up to 1e-2 of its largest element.

    `mask` None allows every pair; `score` is `S` (the name `s`) by default; `scale` and `sink` are float expressions,
    `scale` of params only, `sink` of b, h and q. Build one with `attngen.language`, which checks it.
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
    lse: bool = False
    precision: Precision = "highest"
    schedule: Schedule = Schedule()

    def input(self, name: str) -> Input:
        """The input called `name`. Raises KeyError."""
        for candidate in self.inputs:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    @property
    def free_dims(self) -> tuple[str, ...]:
        """Names of dimensions whose size comes with an input, in the order they first occur."""
        names = (d for i in self.inputs for d in i.dims if isinstance(d, str) and d not in SIZES)
        return tuple(dict.fromkeys(names))
