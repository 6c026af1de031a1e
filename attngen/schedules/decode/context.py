"""What the template of the schedule for few rows reads."""

from __future__ import annotations

from typing import Any

from attngen.emit import abi
from attngen.emit.file import ConstantLine, KernelText, thread_grid
from attngen.emit.program import Extent, PackedTiles, Parameter, SeveralSplits
from attngen.schedules.decode.plan import OUTPUT_PAD, DecodePlan
from attngen.schedules.fused import ROW_BLOCKS, Fused

ROW_INDICES = {
    "q_idx": {"q_idx", "q_first"},
    "h_idx": {"h_idx"},
}  # of a thread's rows, if a function has one of these arguments
JOINING = 128  # threads of a block that joins splits: each has four columns of O, of some of the splits


class Decode(Fused):
    @property
    def own(self) -> DecodePlan:
        assert isinstance(self.plan.own, DecodePlan)
        return self.plan.own

    def kernels(self) -> dict[str, KernelText]:
        return {"split": self.split_kernel(), "join": self.join_kernel()}

    def split_kernel(self) -> KernelText:
        """The results, of one split: a block for each tile of rows, split, head of keys and batch."""
        v = self.variant
        parameters = [
            *(self.pointer(t) for t in "QKV"),
            self.pointer("O", writable=True),
            *self.partial_results(writable=True),
            *(p for t in "QKVO" for p in self.strides(t, "bhs")),
            *self.lse_parameters(),
            *self.sizes(),
            *self.pages(),
            self.splits(),
            *self.captured(*v.of_scores, v.mask, v.sink, v.kv_range, v.classify),
        ]
        grid: tuple[Extent, ...] = (PackedTiles(self.plan.block_q), self.own.splits, abi.head_axes(self.spec)[1].size, "batch")
        return self.kernel("split", grid, parameters, threads_name=self.launch_bounds(), shared=True, early=self.own.early)

    def join_kernel(self) -> KernelText:
        """The results of several splits: a block for each row."""
        parameters = [
            *self.partial_results(writable=False),
            self.pointer("O", writable=True),
            *self.strides("O", "bhs"),
            *self.lse_parameters(),
            *abi.sizes(self.spec, *(["batch"] if self.variant.uses_batch else []), "q_heads", "kv_heads", "q_len"),
            *(abi.sizes(self.spec, "kv_len") if self.variant.sink else []),
            self.splits(),
            *self.captured(self.variant.sink, scale=False),
        ]
        grid = (SeveralSplits(self.own.splits), *self.head_grid("q_len"))
        return self.kernel("join", grid, parameters, threads=JOINING, threads_name="JOINING", early=self.own.early)

    def partial_results(self, writable: bool) -> list[Parameter]:
        return [abi.data(name, "float", writable=writable) for name in self.plan.workspaces]

    def splits(self) -> Parameter:
        return Parameter("splits", "int", "splits", "", formula=self.own.splits)

    def sections(self) -> dict[str, str]:
        return {**self.tile_sections(), "fused": "The keys of a split", "join": "The join of all splits"}

    def context(self) -> dict[str, Any]:
        v = self.variant
        of_heads = [f for f in (v.kv_range, v.classify) if f is not None and "h_idx" in f.arguments]
        of_pairs = {a for f in (*v.of_scores, v.mask) if f is not None for a in f.arguments}
        return super().context() | {
            "head_ranges": bool(of_heads),
            "row_indices": [i for i, read in ROW_INDICES.items() if read & of_pairs],
            "tiles_read_captured": self.reads_captured(v.kv_range, v.classify, scale=False),
        }

    def primitives(self) -> list[str]:
        dtype, split = self.spec.dtype.name, self.own.split
        odd = ["ldmatrix_x2"] if self.spec.head_dim_v % 16 and not split else []
        softmax = self.spec.normalize == "softmax"
        return [
            *self.conversions(elementwise=False),
            *(["pack_bf16"] if split == "bf16" else [] if split else [f"pack_{dtype}"]),
            *(["exp2_log2", "lane_reduce"] if softmax else []),
            *self.variant.primitives,
            "special_registers",
            *(["griddepcontrol"] if self.own.early else []),
            "cp_async",
            "cp_async_stream",
            "ldmatrix",
            *([] if split else ["ldmatrix_trans"]),
            *odd,
            *([f"mma_{split}", f"split_{split}"] if split else [f"mma_{dtype}"]),
        ]

    def constants(self) -> list[ConstantLine]:
        own, plan = self.own, self.plan
        zeros = own.qk_width - self.spec.head_dim
        v_width = "V_WIDTH" if own.split else "HEAD_DIM_V"
        steps = str(own.qk_width // 16) if zeros else "HEAD_DIM / 16"
        return [
            *self.infinity(),
            *self.numbers(),
            *(self.exponent_numbers() if self.exponentials() else []),
            ConstantLine("int", "BLOCK_Q", str(plan.block_q), "rows of a block, of the query heads that share keys"),
            ConstantLine("int", "BLOCK_KV", str(plan.block_kv), "keys of a tile, which a warp multiplies"),
            ConstantLine("int", "WARPS", str(plan.warps)),
            ConstantLine("int", "THREADS", "32 * WARPS"),
            ConstantLine("int", "STAGES", str(plan.stages), "tiles of a warp in shared memory"),
            *(ConstantLine("int", f"{b.name}_SMEM", str(b.offset)) for b in plan.buffers),
            *self.slack(),
            *self.blocks(),
            *(self.split_constants() if own.split else []),
            *thread_grid(8, 4, v_width),
            ROW_BLOCKS,
            ConstantLine("int", "K_STEPS", steps, "steps of 16 over the head size"),
            ConstantLine("int", "PAD", str(own.chunk)),
            ConstantLine("int", "QK_WIDTH", "16 * K_STEPS", f"{zeros} zeros fill the last step of Q K^T" if zeros else ""),
            ConstantLine("int", "Q_STRIDE", "QK_WIDTH + PAD"),
            ConstantLine("int", "K_STRIDE", "QK_WIDTH + PAD"),
            ConstantLine("int", "V_STRIDE", f"{v_width} + PAD"),
            ConstantLine("int", "O_STRIDE", f"{v_width} + {OUTPUT_PAD}", "of sums of O, in the memory of K and V"),
            ConstantLine("int", "QUADS", "HEAD_DIM_V / 4", "of neighbouring columns of O"),
            ConstantLine("int", "JOINING", str(JOINING), "threads of a block that joins splits"),
        ]

    def split_constants(self) -> list[ConstantLine]:
        whole = "" if self.own.v_width == self.spec.head_dim_v else "HEAD_DIM_V in whole steps of 16"
        return [
            ConstantLine("int", "SUMMED", str(self.own.summed), "sixteens of keys whose terms are summed by themselves"),
            ConstantLine("int", "V_WIDTH", str(self.own.v_width), whole),
        ]
