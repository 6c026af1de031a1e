"""Products by mma.sync: the operands of tensor cores for a storage type, and the widths of rows in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from attngen.plan.arch import Arch, Feature
from attngen.plan.choices import Words, choice
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.tile import Tile
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP8_DTYPES, FP8_E4M3, FP16, DType

NEEDED = (Feature.CP_ASYNC, Feature.LDMATRIX)
MMA_ROWS = 16  # the rows of one mma
CHUNK_BYTES = 16  # what a lane copies at once; a row in shared memory is padded by as much


Split = Literal["", "tf32", "bf16"]
WarpsHave = Literal["rows", "keys", "columns"]  # files `warps_have_NAME.j2` of templates/parts/decode and fused_mma


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of tensor cores for a storage type."""

    feature: Feature
    split: Split = ""  # each number is the sum of two of these, and three products are summed for one
    products: str = ""  # what that is called, and why it is done
    because: str = ""


OPERANDS = {
    "fp16": Operands(Feature.MMA_FP16),
    "bf16": Operands(Feature.MMA_BF16),
    "fp32": Operands(
        Feature.MMA_TF32,
        "tf32",
        "3xTF32",
        "a number as the sum of two that tf32 holds, three products for one: as exact as fp32, and faster than the ordinary "
        "arithmetic units",
    ),
    "fp32, precision high": Operands(
        Feature.MMA_BF16,
        "bf16",
        "bf16x3",
        "a number as the sum of two of bf16, three products for one, as `precision high` allows: errors of about 2^-18 of each",
    ),
}
OPERAND_STATEMENTS = {"16-bit": "dtype fp16", "tf32": "dtype fp32", "bf16": "dtype fp32 precision high"}  # by `Family.operands`
WHY_PAD = "the 8 rows that ldmatrix reads lie in different banks"


def of_products(spec: AttentionSpec) -> Words | None:
    """What products of split numbers are called, and why they are split; None if numbers are not."""
    numbers = operands(spec)
    return (numbers.products, numbers.because) if numbers.split else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MmaPlan(Own):
    """What forwards by mma.sync choose alike beside their tile, and the widths of their tiles in elements."""

    q_in_registers: bool
    warps_have: WarpsHave  # what each warp of a block has for itself
    split: Split = choice("products", lambda own, facts: of_products(facts.spec))  # the two parts of a number, if it is split
    summed: int  # steps of 16 keys whose products are summed by themselves before they are added to O; of split numbers
    unrolled: int  # steps over the head size that are in one round of the loop over them; of split numbers
    quantized: bool  # K and V have 8 bits, and become fp16 in registers
    chunk: int  # elements that a lane copies at once, 16 bytes; a padded row in shared memory is padded by as many
    key_chunk: int  # the same of K and V
    qk_width: int  # elements per row of Q or K in shared memory, without the padding
    v_width: int

    @classmethod
    def of(cls, spec: AttentionSpec, tile: Tile, **own: Any) -> Self:
        """What follows from the spec and the tile, and the schedule's `own` choices."""
        return cls(
            split=operands(spec).split,
            summed=summed(tile),
            quantized=is_quantized(spec),
            chunk=chunk(spec),
            key_chunk=CHUNK_BYTES // spec.dtypes["k"].bytes,
            qk_width=padded_head_dim(spec),
            **({"v_width": width_of_v(spec)} | own),
        )


def is_quantized(spec: AttentionSpec) -> bool:
    """Whether K and V have 8 bits."""
    return spec.dtypes["k"] in FP8_DTYPES


def product_dtype(spec: AttentionSpec) -> DType:
    """The type of what is multiplied, before it is split."""
    return FP16 if is_quantized(spec) else spec.dtype


def operands(spec: AttentionSpec) -> Operands:
    name = product_dtype(spec).name
    return OPERANDS["fp32, precision high" if (name, spec.precision) == ("fp32", "high") else name]


def lacks(spec: AttentionSpec, arch: Arch) -> str:
    """The instructions for the spec that `arch` does not have, in words; empty if it has all."""
    converts = (Feature.CVT_E4M3,) if spec.dtypes["k"] is FP8_E4M3 else ()
    missing = [f.value.partition(":")[0] for f in (*NEEDED, operands(spec).feature, *converts) if not arch.has(f)]
    return f"{arch.name} has no {', no '.join(missing)}" if missing else ""


def chunk(spec: AttentionSpec) -> int:
    """Elements that a lane copies at once."""
    return CHUNK_BYTES // spec.dtype.bytes


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size rounded up to the 16 elements that a step sums over, or the 32 of two with keys of 8 bits; the rest is
    zeros in shared memory."""
    step = 32 if is_quantized(spec) else 16
    return -(-spec.head_dim // step) * step


def v_step(spec: AttentionSpec) -> int:
    """The columns of V that a warp multiplies at once, of which it has whole steps if it has columns of its own."""
    return 32 if is_quantized(spec) else 16


def width_of_v(spec: AttentionSpec) -> int:
    """The head size of V as shared memory holds it: split operands and those of 8 bits in whole steps."""
    step = v_step(spec) if is_quantized(spec) or operands(spec).split else 1
    return -(-spec.head_dim_v // step) * step


def q_registers(spec: AttentionSpec, row_blocks: int) -> int:
    """Registers of a thread for the fragments of Q."""
    return row_blocks * padded_head_dim(spec) * spec.dtype.bytes // 8


def summed(tile: Tile) -> int:
    """Split operands: steps of 16 keys whose products are added to the output together, their fragments of V in registers."""
    return min(2, tile.block_kv // 16)


def counted_head_size(facts: SpecFacts, q_in_registers: bool) -> int:
    """What counts of a spec's head sizes: a thread has columns of O, and fragments of Q if they stay in registers."""
    return max(facts.spec.head_dim_v, facts.spec.head_dim if q_in_registers else 0)
