"""The context of the tiled backward's template: the kernels of the unfused backwards with grids of tiles."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv, Extent, Parameter
from attngen.schedules.parts.unfused_backward_context import UnfusedBackward
from attngen.schedules.tiled.backward_plan import TiledBackwardPlan
from attngen.schedules.tiled.context import OfTiles
from attngen.schedules.tiled.plan import BLOCK_DV


class TiledBackward(OfTiles, UnfusedBackward):
    own: TiledBackwardPlan
    DIMS = ConstantLine("BLOCK_D", BLOCK_DV, "dimensions of a gradient of a block")

    def context(self) -> dict[str, object]:
        return super().context() | {
            "fills": self.own.fills,
            "row_floats": f"(({self.lengths['k']} + BLOCK_KV - 1) / BLOCK_KV * BLOCK_KV)",
        }

    def _score_gradient_grid(self) -> tuple[Extent, ...]:
        return self.rows()

    def _of_product(self, result: str, grid: tuple[Extent, ...], parameters: list[Parameter]) -> KernelText:
        dims = self.spec.head_dim_v if result == "dV" else self.spec.head_dim
        by_rows, by_keys = CeilDiv("q_len", self.plan.block_q), CeilDiv("kv_len", self.plan.block_kv)
        return self.kernel(
            result.lower(), (-(-dims // BLOCK_DV), by_rows if result == "dQ" else by_keys, *grid[1:]), parameters
        )
