"""What the template of the naive backward reads."""

from __future__ import annotations

from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Extent, Parameter
from attngen.schedules.naive.context import OfRows
from attngen.schedules.parts.unfused_backward_context import UnfusedBackward


class NaiveBackward(OfRows, UnfusedBackward):
    WIDTH = "the larger head size in whole warps"

    def _of_product(self, result: str, grid: tuple[Extent, ...], parameters: list[Parameter]) -> KernelText:
        return self.kernel_of_rows(result.lower(), grid, parameters)
