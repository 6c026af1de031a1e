"""The contexts of the tiled schedule's templates: what its forward and its backward share, and the forward."""

from __future__ import annotations

from attngen.emit.constants import SLICE, ConstantLine, thread_grid
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv, Extent, Parameter
from attngen.emit.variant import Function
from attngen.schedules.parts.unfused_context import ThreeKernels, Unfused
from attngen.schedules.tiled.plan import BLOCK_DV, TiledPlan


class OfTiles(Unfused):
    """Kernels whose blocks compute tiles, or rows of them."""

    own: TiledPlan
    DIMS = ConstantLine("BLOCK_DV", BLOCK_DV, "dimensions of O of a block")

    def of_tiles(self) -> tuple[Function | None, ...]:
        return self.variant.kv_range, self.variant.classify

    def pairs(self) -> tuple[Extent, ...]:
        return self.head_grid(CeilDiv("kv_len", self.plan.block_kv), CeilDiv("q_len", self.plan.block_q))

    def rows(self) -> tuple[Extent, ...]:
        return self.head_grid("q_len")

    def context(self) -> dict[str, object]:
        classify = self.variant.classify
        return super().context() | {
            "rows_of_block": bool(
                {"q_lo", "q_hi", "q_tile"} & {*(classify.arguments if classify else ()), *self.variant.kv_range.arguments}
            )
        }

    def constants(self) -> list[ConstantLine]:
        plan, own = self.plan, self.own
        return [
            *self.numbers(),
            ConstantLine("BLOCK_Q", plan.block_q, "query rows of a block"),
            ConstantLine("BLOCK_KV", plan.block_kv, "keys of a tile"),
            self.DIMS,
            ConstantLine("THREADS", plan.threads),
            *thread_grid(own.row_threads, own.column_threads, self.DIMS.name),
            ConstantLine("SLICE", own.slice, SLICE),
            ConstantLine("PAD", own.pad, TRANSPOSED_PAD),
            ConstantLine("WARPS", "THREADS / 32"),
        ]


class Tiled(OfTiles, ThreeKernels):
    def weighted_sum(self, parameters: list[Parameter]) -> KernelText:
        grid = self.head_grid(-(-self.spec.head_dim_v // BLOCK_DV), CeilDiv("q_len", self.plan.block_q))
        return self.kernel("weighted_sum", grid, parameters)


TRANSPOSED_PAD = "floats after every fourth row of a transposed tile: what a warp writes lies in different banks"
