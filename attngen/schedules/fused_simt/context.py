"""The context of the fused_simt schedule's template: kernel and constants."""

from __future__ import annotations

from attngen.emit.constants import SLICE, ConstantLine, thread_grid
from attngen.emit.kernel_text import KernelText
from attngen.schedules.fused_simt import plan as fused_simt
from attngen.schedules.parts.fused_context import Fused


class FusedSimt(Fused):
    own: fused_simt.FusedSimtPlan

    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhsd")

    def constants(self) -> list[ConstantLine]:
        own = self.own
        assert isinstance(own, fused_simt.FusedSimtPlan)
        return [
            *self.fused_numbers(),
            *thread_grid(fused_simt.ROW_THREADS, fused_simt.COLUMN_THREADS, "HEAD_DIM_V"),
            ConstantLine("SLICE", own.slice, SLICE),
            ConstantLine("VECTOR", own.vector, "neighbouring dimensions of O that a thread has"),
            ConstantLine("PAD", fused_simt.PAD, PAD),
            ConstantLine("QK_STRIDE", "HEAD_DIM + PAD", "floats from row to row in shared memory"),
            ConstantLine("V_STRIDE", "HEAD_DIM_V + PAD"),
            ConstantLine("P_STRIDE", "BLOCK_KV + PAD"),
        ]


PAD = "floats at the end of each row in shared memory: its neighbours start in other banks"
