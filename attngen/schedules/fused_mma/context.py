"""What the template of the fused schedule on tensor cores reads."""

from __future__ import annotations

from attngen.emit.file import ConstantLine, KernelText, thread_grid
from attngen.schedules.fused import ROW_BLOCKS, Fused
from attngen.schedules.fused_mma.plan import FusedMmaPlan


class FusedMma(Fused):
    @property
    def own(self) -> FusedMmaPlan:
        assert isinstance(self.plan.own, FusedMmaPlan)
        return self.plan.own

    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhs", self.heads_in_l2())

    def primitives(self) -> list[str]:
        dtype, split = self.spec.dtype.name, self.own.split
        odd = ["ldmatrix_x2"] if self.spec.head_dim_v % 16 and not split else []
        return [
            *self.first_primitives(None if split == "tf32" else split or dtype),
            "opaque",
            "cp_async",
            "ldmatrix",
            *([] if split else ["ldmatrix_trans"]),
            *odd,
            *([f"mma_{split}", f"split_{split}"] if split else [f"mma_{dtype}"]),
        ]

    def constants(self) -> list[ConstantLine]:
        own = self.own
        zeros = own.qk_width - self.spec.head_dim
        v_width, steps = "V_WIDTH" if own.split else "HEAD_DIM_V", str(own.qk_width // 16) if zeros else "HEAD_DIM / 16"
        return [
            *self.fused_numbers(),
            *self.slack(),
            *self.blocks(),
            *(self.split_constants() if own.split else []),
            *([HALF_KV] if own.copies_between_steps and self.plan.stages == 1 else []),
            *thread_grid(8 * self.plan.warps, 4, v_width),
            ROW_BLOCKS,
            ConstantLine("int", "K_STEPS", steps, "steps of 16 over the head size"),
            ConstantLine("int", "PAD", str(own.chunk)),
            ConstantLine("int", "QK_WIDTH", "16 * K_STEPS", f"{zeros} zeros fill the last step of Q K^T" if zeros else ""),
            ConstantLine("int", "Q_STRIDE", "QK_WIDTH + PAD" if own.qk_width >= own.v_width else f"{v_width} + PAD"),
            ConstantLine("int", "K_STRIDE", "QK_WIDTH + PAD"),
            ConstantLine("int", "V_STRIDE", f"{v_width} + PAD"),
        ]

    def split_constants(self) -> list[ConstantLine]:
        """The constants of split operands."""
        whole = "" if self.own.v_width == self.spec.head_dim_v else "HEAD_DIM_V in whole steps of 16"
        return [
            ConstantLine("int", "SUMMED", str(self.own.summed), "sixteens of keys whose terms are summed by themselves"),
            ConstantLine("int", "V_WIDTH", str(self.own.v_width), whole),
        ]


HALF_KV = ConstantLine("int", "HALF_KV", "BLOCK_KV / 2", "keys or values that are copied at once between steps of products")
