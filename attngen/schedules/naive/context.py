"""What the template of the naive schedule reads."""

from __future__ import annotations

from attngen.emit.constants import SLICE, ConstantLine
from attngen.emit.file import FIRST_SECTIONS
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Parameter
from attngen.schedules.naive.plan import NaivePlan
from attngen.schedules.unfused import ThreeKernels


class Naive(ThreeKernels):
    own: NaivePlan

    def first_sections(self) -> dict[str, str]:
        return FIRST_SECTIONS

    def weighted_sum(self, parameters: list[Parameter]) -> KernelText:
        grid = self.head_grid("q_len")
        return self.kernel("weighted_sum", grid, parameters, threads=self.own.threads_d, threads_name="THREADS_D")

    def constants(self) -> list[ConstantLine]:
        return [
            *self.infinity(),
            *self.numbers(),
            ConstantLine("int", "THREADS", str(self.plan.threads)),
            ConstantLine("int", "THREADS_D", str(self.own.threads_d), "the head size of V in whole warps"),
            ConstantLine("int", "SLICE", str(self.own.slice), SLICE),
        ]
