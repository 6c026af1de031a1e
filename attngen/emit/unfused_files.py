"""The files of the schedules with three kernels, naive and tiled, which keep S in global memory."""

from __future__ import annotations

from typing import Any

from attngen.emit import abi
from attngen.emit.file import FIRST_SECTIONS, SLICE, ConstantLine, File, KernelText, thread_grid
from attngen.emit.kernel_source import CeilDiv, Parameter
from attngen.plan import tiled
from attngen.plan.tiling import Tile


class ThreeKernels(File):
    """The naive and the tiled rung: scores, row weights, weighted sum."""

    def weights_section(self) -> dict[str, str]:
        title = {"softmax": "Softmax", "sigmoid": "Sigmoid"}.get(self.spec.normalize)
        return {} if title is None else {"weights": title}

    def three_kernels(self, scores: KernelText, weights: KernelText, weighted_sum: KernelText) -> dict[str, KernelText]:
        normalized = {} if self.spec.normalize == "none" else {"weights": weights}
        return {"scores": scores} | normalized | {"weighted_sum": weighted_sum}

    def scores_parameters(self) -> list[Parameter]:
        return [
            self.pointer("Q"),
            self.pointer("K"),
            Parameter("S", "float*", "data", "S"),
            *abi.strides("Q"),
            *abi.strides("K"),
            *self.sizes(),
        ]

    def weights_parameters(self) -> list[Parameter]:
        return [Parameter("S", "float*", "data", "S"), *self.lse_parameters(), *self.sizes()]

    def weighted_sum_parameters(self) -> list[Parameter]:
        return [
            Parameter("P", "const float*", "data", "S"),
            self.pointer("V"),
            self.pointer("O", writable=True),
            *abi.strides("V"),
            *abi.strides("O"),
            *self.sizes(),
        ]

    def primitives(self) -> list[str]:
        return self.conversions()


class Naive(ThreeKernels):
    def sections(self) -> dict[str, str]:
        return {
            **FIRST_SECTIONS,
            "scores": "Scores",
            **self.weights_section(),
            "weighted_sum": "Weighted sum",
        }

    def kernels(self) -> dict[str, KernelText]:
        v, threads = self.variant, self.plan.threads
        return self.three_kernels(
            self.kernel(
                "scores",
                self.head_grid(CeilDiv("kv_len", threads), "q_len"),
                [*self.scores_parameters(), *self.captured(v.score, v.mask)],
            ),
            self.kernel(
                self.spec.normalize,
                self.head_grid(CeilDiv("q_len", threads)),
                [*self.weights_parameters(), *self.captured(v.sink, scale=False)],
            ),
            self.kernel(
                "weighted_sum",
                self.head_grid("q_len"),
                self.weighted_sum_parameters(),
                threads=self._d_threads(),
                threads_name="THREADS_D",
            ),
        )

    def _d_threads(self) -> int:
        return -(-self.spec.head_dim_v // 32) * 32

    def constants(self) -> list[ConstantLine]:
        return [
            *self.infinity(),
            *self.numbers(),
            ConstantLine("int", "THREADS", str(self.plan.threads)),
            ConstantLine("int", "THREADS_D", str(self._d_threads()), "the head size of V in whole warps"),
            ConstantLine("int", "SLICE", "16", SLICE),
        ]


class Tiled(ThreeKernels):
    def primitives(self) -> list[str]:
        return [*super().primitives(), *self.reductions()]

    def sections(self) -> dict[str, str]:
        return {
            **self.tile_sections(),
            "scores": "Scores",
            **self.weights_section(),
            "weighted_sum": "Weighted sum",
        }

    def context(self) -> dict[str, Any]:
        v, plan = self.variant, self.plan
        rows, columns, _ = tiled.outputs(Tile(plan.block_q, plan.block_kv, plan.stages, plan.warps))
        context = super().context()
        return context | {
            "rows": rows,
            "columns": columns,
            "slice": tiled.slice_of(self.spec),
            "rows_of_block": bool({"q_lo", "q_hi", "q_tile"} & set(context["tile_arguments"])),
            "scores_read_captured": self.reads_captured(v.score, v.mask, v.kv_range, v.classify),
            "weights_read_captured": self.reads_captured(v.sink, v.kv_range, v.classify, scale=False),
            "tiles_read_captured": self.reads_captured(v.kv_range, v.classify, scale=False),
        }

    def kernels(self) -> dict[str, KernelText]:
        v = self.variant
        q_blocks = CeilDiv("q_len", self.plan.block_q)
        d_blocks = -(-self.spec.head_dim_v // tiled.BLOCK_DV)
        return self.three_kernels(
            self.kernel(
                "scores",
                self.head_grid(CeilDiv("kv_len", self.plan.block_kv), q_blocks),
                [*self.scores_parameters(), *self.captured(v.score, v.mask, v.kv_range, v.classify)],
            ),
            self.kernel(
                self.spec.normalize,
                self.head_grid("q_len"),
                [*self.weights_parameters(), *self.captured(v.sink, v.kv_range, v.classify, scale=False)],
            ),
            self.kernel(
                "weighted_sum",
                self.head_grid(d_blocks, q_blocks),
                [*self.weighted_sum_parameters(), *self.captured(v.kv_range, v.classify, scale=False)],
            ),
        )

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        row_threads, column_threads = tiled.thread_grid(plan.warps)
        return [
            *self.infinity(),
            *self.numbers(),
            ConstantLine("int", "BLOCK_Q", str(plan.block_q), "query rows of a block"),
            ConstantLine("int", "BLOCK_KV", str(plan.block_kv), "keys of a tile"),
            ConstantLine("int", "BLOCK_DV", str(tiled.BLOCK_DV), "dimensions of O of a block"),
            ConstantLine("int", "THREADS", str(plan.threads)),
            *thread_grid(row_threads, column_threads, "BLOCK_DV"),
            ConstantLine("int", "SLICE", str(tiled.slice_of(self.spec)), SLICE),
            ConstantLine("int", "PAD", str(tiled.pad_of(self.spec)), TRANSPOSED_PAD),
            *([ConstantLine("int", "WARPS", "THREADS / 32")] if self.spec.normalize == "softmax" else []),
        ]


TRANSPOSED_PAD = "floats after every fourth row of a transposed tile: what a warp writes lies in different banks"
