"""What the template of the fused schedule on tensor cores reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.schedules.fused_mma.plan import FusedMmaPlan
from attngen.schedules.parts.mma_context import ByMma


class FusedMma(ByMma):
    own: FusedMmaPlan

    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhs", self.heads_in_l2())

    def context(self) -> dict[str, object]:
        own, because = self.own, self.own.one_stage_because
        copies = "two_stages" if self.plan.stages == 2 else "one_stage"
        return super().context() | {
            "copies": copies + ("_between" if own.copies_between_steps else ""),
            "one_stage_because": f" {because[0].upper()}{because[1:]}." if because else "",
            "bytes_of_tile": self.plan.block_kv * (self.spec.head_dim + self.spec.head_dim_v) * self.spec.dtype.bytes,
        }

    def constants(self) -> list[ConstantLine]:
        own = self.own
        return [
            *self.fused_numbers(),
            *self.slack(),
            *self.blocks(),
            *self.split_constants(),
            *([ConstantLine("WARPS", self.plan.warps)] if self.of_block else []),
            *self.shares(),
            HALF_KV,
            *self.operand_constants(self.plan.warps, "QK_WIDTH" if own.qk_width >= own.v_width else self.v_width),
        ]


HALF_KV = ConstantLine("HALF_KV", "BLOCK_KV / 2", "keys or values that are copied at once between steps of products")
