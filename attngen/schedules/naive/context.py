"""What the template of the naive schedule reads."""

from __future__ import annotations

from attngen.emit.constants import SLICE, ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Extent, Parameter
from attngen.schedules.naive.plan import NaivePlan
from attngen.schedules.parts.unfused_context import ThreeKernels, Unfused


class OfRows(Unfused):
    """Kernels whose blocks compute rows, a thread for each dimension, or whose threads compute pairs or rows."""

    own: NaivePlan
    WIDTH = "the head size of V in whole warps"

    def kernel_of_rows(self, suffix: str, grid: tuple[Extent, ...], parameters: list[Parameter]) -> KernelText:
        return self.kernel(suffix, grid, parameters, threads=self.own.threads_d, threads_name="THREADS_D")

    def constants(self) -> list[ConstantLine]:
        return [
            *self.numbers(),
            ConstantLine("THREADS", self.plan.threads),
            ConstantLine("THREADS_D", self.own.threads_d, self.WIDTH),
            ConstantLine("SLICE", self.own.slice, SLICE),
        ]


class Naive(OfRows, ThreeKernels):
    def weighted_sum(self, parameters: list[Parameter]) -> KernelText:
        return self.kernel_of_rows("weighted_sum", self.head_grid("q_len"), parameters)
