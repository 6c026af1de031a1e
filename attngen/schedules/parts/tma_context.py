"""The emission context that wgmma and hopper share: TMA copies, warpgroups multiply."""

from __future__ import annotations

from itertools import groupby
from math import gcd

from attngen.emit.constants import ConstantLine
from attngen.emit.program import Parameter
from attngen.emit.variant import Variant
from attngen.emit.wgmma import Wgmma
from attngen.plan import Plan
from attngen.schedules.parts.fused_context import Fused
from attngen.schedules.parts.wgmma import slabs
from attngen.spec.attention import AttentionSpec


class ByTma(Fused):
    """The context of a schedule in which TMA copies slabs of tiles and warpgroups multiply them."""

    def maps(self) -> list[Parameter]:
        """The tensor maps of Q, K and V, with the rows that one copy has."""
        return [self.tensor_map("Q", self.q_rows()), *(self.tensor_map(t, box_rows(self.plan, self.spec)) for t in "KV")]

    def strides_of_sequences(self) -> list[Parameter]:
        """Those that lead to a sequence's first key, or to a page, where a tensor map has one end for all sequences."""
        return [p for t in ("KV" if self.spec.kernel.is_counted else "") for p in self.strides(t, "bs")]

    def q_rows(self) -> int:
        return self.plan.block_q

    def q_in_registers(self) -> bool:
        """Whether Q is an operand in registers, not in shared memory."""
        return False

    def products(self) -> list[Wgmma]:
        dtype = self.spec.dtype.name
        return [
            Wgmma("wgmma_qk", self.plan.block_kv, dtype, a_in_registers=self.q_in_registers()),
            Wgmma("wgmma_pv", self.v_columns(), dtype, a_in_registers=True, b_transposed=True),
        ]

    def v_columns(self) -> int:
        """The number of columns that P is multiplied by."""
        return self.spec.head_dim_v

    def slab_constants(self, *more: ConstantLine) -> list[ConstantLine]:
        """The constants of tiles in shared memory; `more` stands after the numbers of slabs."""
        spec = self.spec
        steps, what = ("HEAD_DIM / 16", "") if spec.head_dim % 16 == 0 else ("(HEAD_DIM + 15) / 16", "; zeros fill the last")
        return [*slabs_of(spec), *more, ConstantLine("K_STEPS", steps, "steps of 16 over the head size" + what)]


def box_rows(plan: Plan, spec: AttentionSpec) -> int:
    """The keys that one copy has: of a tile, or as many as lie in one page wherever the tile begins."""
    return gcd(plan.block_kv, spec.kernel.page_size or 0)


def box_constant(plan: Plan, spec: AttentionSpec) -> ConstantLine:
    return ConstantLine("BOX_ROWS", box_rows(plan, spec), "keys of a copy")


def slabs_of(spec: AttentionSpec) -> list[ConstantLine]:
    return [
        ConstantLine("ROW_BYTES", "128", "a row of a slab: 64 columns of a tile"),
        ConstantLine("QK_SLABS", slabs(spec.head_dim)),
        ConstantLine("V_SLABS", slabs(spec.head_dim_v)),
    ]


def pair_lanes(keys: int) -> ConstantLine:
    """The lanes of a warp that copy a row of a tile of elements of pairs: a power of 2."""
    lanes = next(n for n in (8, 16, 32) if 8 * n >= keys)
    return ConstantLine("PAIR_LANES", lanes, "that copy a row of them, 16 bytes each")


def argument_members(parameters: tuple[Parameter, ...], variant: Variant, exponent: bool = False) -> list[tuple[str, str]]:
    """The kernel's arguments as members of the roles: the line that declares each group, and its values. `exponent`: and the
    factor of exponents, if it varies."""
    maps = [p.name for p in parameters if p.ctype.endswith("TensorMap")]
    others = [p for p in parameters if p.name not in maps and not p.is_captured]
    lines = [(f"const TensorMap {', '.join(f'*{m}' for m in maps)}", ", ".join(f"&{m}" for m in maps))]
    for (ctype, _), group in groupby(others, key=lambda p: (p.ctype, p.name if p.ctype.endswith("*") else "")):
        names = ", ".join(p.name for p in group)
        lines.append((f"{ctype} {names}", names))
    if len(maps) + len(others) < len(parameters):
        lines.append(("Captured in", "in"))
    if variant.is_scale_of_call:
        lines.append(("float softmax_scale", "softmax_scale"))
    if exponent and variant.exponent_varies:
        lines.append(("float exponent_scale", "exponent_scale"))
    return lines
