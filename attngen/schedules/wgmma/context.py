"""What the template of the wgmma schedule reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine, thread_grid
from attngen.emit.kernel_text import KernelText
from attngen.schedules.parts.fused_context import ROW_BLOCKS
from attngen.schedules.parts.tma_context import ByTma, box_constant


class FusedWgmma(ByTma):
    def kernels(self) -> dict[str, KernelText]:
        parameters = [
            *self.maps(),
            *self.arrays("", "O", axes="bhs"),
            *self.lse_parameters(),
            *self.sizes(),
            *self.pages(),
            *self.strides_of_sequences(),
            self.heads_in_l2(),
            *self.captured_anywhere(),
        ]
        return {"wgmma": self.kernel("wgmma", self.q_block_grid(), parameters, threads_name=self.launch_bounds(), shared=True)}

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.fused_numbers(),
            *self.slack(),
            *self.blocks(),
            *thread_grid(8 * plan.warps, 4, "HEAD_DIM_V"),
            ROW_BLOCKS,
            ConstantLine("STAGES", plan.stages, "tiles of K, and of V, in shared memory"),
            *self.slab_constants(),
            box_constant(plan, self.spec),
        ]
