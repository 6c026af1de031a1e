"""What the template of the schedule for few rows reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine
from attngen.schedules.decode import shares
from attngen.schedules.decode.memory import OUTPUT_PAD
from attngen.schedules.decode.plan import DecodePlan
from attngen.schedules.decode.split_context import JOINING, JOINING_WIDE, VALUES_BEGIN, SplitKeys
from attngen.schedules.parts.mma_context import ByMma
from attngen.schedules.parts.tma_context import box_constant, slabs_of


class Decode(SplitKeys, ByMma):
    own: DecodePlan

    @property
    def by_tma(self) -> bool:
        return self.own.copies == "tma"

    @property
    def starts_early(self) -> bool:
        return self.own.early

    @property
    def key_tensors(self) -> str:
        """Those that hold keys and values."""
        return "K" if self.own.v_in_k else "KV"

    def context(self) -> dict[str, object]:
        return super().context() | {
            "values_by": "values_in_keys" if self.own.v_in_k else "values_beside_keys",
            "weights_are": "in_units" if self.own.in_units else "as_they_are",
        }

    @property
    def sums_are(self) -> str:
        return "in_units" if self.own.in_units else super().sums_are

    @property
    def joining(self) -> int:
        return JOINING_WIDE if self.of_block else JOINING

    def v_stride(self, pad: str) -> str:
        return "K_STRIDE" if self.own.v_in_k else super().v_stride(pad)

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.numbers(),
            *self.exponent_numbers(),
            ConstantLine("BLOCK_Q", plan.block_q, "rows of a block, of the query heads that share keys"),
            ConstantLine("BLOCK_KV", plan.block_kv, f"keys of a tile, which {shares.OWNERS[self.own.warps_have]} multiplies"),
            ConstantLine("WARPS", plan.warps),
            ConstantLine("THREADS", "32 * WARPS"),
            ConstantLine("STAGES", plan.stages, f"tiles of {shares.OWNERS[self.own.warps_have]} in shared memory"),
            *(ConstantLine(f"{b.name}_SMEM", b.offset) for b in plan.buffers),
            *self.slack(),
            *self.blocks(),
            *self.split_constants(),
            *self.shares(),
            *(
                [ConstantLine("VALUES_BEGIN", self.spec.values[0], VALUES_BEGIN)]
                if self.own.v_in_k and self.spec.values
                else []
            ),
            *slabs_of(self.spec),
            box_constant(plan, self.spec),
            *self.operand_constants(1, "QK_WIDTH", pads_keys=not self.by_tma),
            ConstantLine("O_STRIDE", f"{self.v_width} + {OUTPUT_PAD}", "of sums of O, in the memory of K and V"),
            ConstantLine("QUADS", "HEAD_DIM_V / 4", "of neighbouring columns of O"),
            ConstantLine("JOINING", self.joining, "threads of a block that joins splits"),
        ]
