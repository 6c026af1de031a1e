"""What the template of the schedule for few rows reads."""

from __future__ import annotations

from typing import Any

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Axis, PackedTiles, Parameter, Several
from attngen.schedules.decode import shares
from attngen.schedules.decode.memory import OUTPUT_PAD
from attngen.schedules.decode.plan import DecodePlan
from attngen.schedules.parts.mma_context import ByMma
from attngen.schedules.parts.tma_context import box_constant, box_rows, slabs_of

# indices of a thread's rows: each if a function has one of these arguments
ROW_INDICES = {"q_idx": {"q_idx", "q_first"}, "h_idx": {"h_idx"}}
JOINING = 128  # threads of a block that joins splits: each has four columns of O, of some of the splits
VALUES_BEGIN = "the column of K that is the first of V"
JOINING_WIDE = 512  # the same of heads that leave too few groups


class Decode(ByMma):
    own: DecodePlan

    @property
    def by_tma(self) -> bool:
        return self.own.copies == "tma"

    def workspace(self, name: str) -> tuple[Axis, ...]:
        """Of each split, split_O has sums of P V, for weights that the split's maximum is subtracted from; split_max this
        maximum (-inf: the split has no key for the row, and wrote nothing else), split_sum the sum of these weights."""
        columns = [Axis("", self.spec.head_dim_v)] if name == "split_O" else []
        return abi.every_row(self.spec, Axis("", self.own.splits), *columns)

    def maps(self) -> list[Parameter]:
        """The tensor maps of K and V, if TMA copies them."""
        return [self.tensor_map(t, box_rows(self.plan, self.spec)) for t in (self.key_tensors if self.by_tma else "")]

    @property
    def key_tensors(self) -> str:
        """Those that hold keys and values."""
        return "K" if self.own.v_in_k else "KV"

    def kernels(self) -> dict[str, KernelText]:
        return {"split": self.split_kernel(), "join": self.join_kernel()}

    def split_kernel(self) -> KernelText:
        """The results, of one split: a block for each tile of rows, split, head of keys and batch."""
        v = self.variant
        parameters = [
            *self.maps(),
            *self.arrays("Q" if self.by_tma else "Q" + self.key_tensors, "O", *self.partial_results(writable=True), axes="bhs"),
            *(
                p
                for t in (self.key_tensors if self.by_tma and self.spec.kernel.is_counted else "")
                for p in self.strides(t, "bs")
            ),
            *self.lse_parameters(),
            *self.sizes(),
            *self.pages(),
            self.splits(),
            *self.captured(*v.of_scores, *v.of_row_terms, v.mask, v.sink, v.v_scale, v.kv_range, v.classify),
        ]
        grid = self.kv_head_grid(PackedTiles(self.plan.block_q), self.own.splits)
        return self.kernel("split", grid, parameters, threads_name=self.launch_bounds(), shared=True, early=self.own.early)

    def join_kernel(self) -> KernelText:
        """The results of several splits: a block for each row."""
        parameters = [
            *self.partial_results(writable=False),
            *self.arrays("", "O", axes="bhs"),
            *self.lse_parameters(),
            *abi.sizes(self.spec, *(["batch"] if self.variant.uses_batch else []), "q_heads", "kv_heads", "q_len"),
            *(abi.sizes(self.spec, "kv_len") if self.variant.sink else []),
            self.splits(),
            *self.captured(self.variant.sink, self.variant.v_scale, scale=self.variant.exponent_varies),
        ]
        grid = (Several(self.own.splits), *self.head_grid("q_len"))
        return self.kernel("join", grid, parameters, threads=self.joining, threads_name="JOINING", early=self.own.early)

    def partial_results(self, writable: bool) -> list[Parameter]:
        return [abi.data(name, "float", writable=writable) for name in self.plan.workspaces]

    def splits(self) -> Parameter:
        return Parameter("splits", "int", "splits", "", formula=self.own.splits)

    def context(self) -> dict[str, Any]:
        v = self.variant
        of_heads = [f for f in (v.kv_range, v.classify) if f is not None and "h_idx" in f.arguments]
        of_pairs = {a for f in (*v.of_scores, *v.of_row_terms, v.mask, v.scale_of_keys) if f is not None for a in f.arguments}
        return super().context() | {
            "values_by": "values_in_keys" if self.own.v_in_k else "values_beside_keys",
            "key_tensors": self.key_tensors,
            "head_ranges": bool(of_heads),
            "weights_are": "in_units" if self.own.in_units else "as_they_are",
            "reads_ahead": self.by_tma and self.spec.kernel.is_paged and v.classify is None,
            "row_indices": [i for i, read in ROW_INDICES.items() if read & of_pairs],
        }

    @property
    def joining(self) -> int:
        return JOINING_WIDE if self.of_block else JOINING

    def v_stride(self, pad: str) -> str:
        return "K_STRIDE" if self.own.v_in_k else super().v_stride(pad)

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.numbers(),
            *self.exponent_numbers(),
            ConstantLine("BLOCK_Q", plan.block_q, "rows of a block, of the query heads that share keys"),
            ConstantLine("BLOCK_KV", plan.block_kv, f"keys of a tile, which {shares.OWNERS[self.own.warps_have]} multiplies"),
            ConstantLine("WARPS", plan.warps),
            ConstantLine("THREADS", "32 * WARPS"),
            ConstantLine("STAGES", plan.stages, f"tiles of {shares.OWNERS[self.own.warps_have]} in shared memory"),
            *(ConstantLine(f"{b.name}_SMEM", b.offset) for b in plan.buffers),
            *self.slack(),
            *self.blocks(),
            *self.split_constants(),
            *self.shares(),
            *(
                [ConstantLine("VALUES_BEGIN", self.spec.values[0], VALUES_BEGIN)]
                if self.own.v_in_k and self.spec.values
                else []
            ),
            *slabs_of(self.spec),
            box_constant(plan, self.spec),
            *self.operand_constants(1, "QK_WIDTH", pads_keys=not self.by_tma),
            ConstantLine("O_STRIDE", f"{self.v_width} + {OUTPUT_PAD}", "of sums of O, in the memory of K and V"),
            ConstantLine("QUADS", "HEAD_DIM_V / 4", "of neighbouring columns of O"),
            ConstantLine("JOINING", self.joining, "threads of a block that joins splits"),
        ]
