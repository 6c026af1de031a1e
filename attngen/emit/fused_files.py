"""The files of the fused schedules, and what those of Hopper have in common with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attngen.emit import abi
from attngen.emit.file import SLICE, ConstantLine, File, KernelText, thread_grid
from attngen.emit.kernel_source import CeilDiv, Extent, Parameter, Sections
from attngen.plan import bounded, fused_mma_loop, fused_mma_needs, fused_simt
from attngen.plan.tiling import Tile


class Fused(File):
    """What the schedules share that keep a tile of scores in registers."""

    def fused_kernel(self, axes: str, *more: Parameter) -> dict[str, KernelText]:
        parameters = [
            self.pointer("Q"),
            self.pointer("K"),
            self.pointer("V"),
            self.pointer("O", writable=True),
            *(p for t in "QKVO" for p in abi.strides(t, axes)),
            *self.lse_parameters(),
            *self.sizes(),
            *more,
            *self.captured_anywhere(),
        ]
        return {"fused": self.kernel("fused", self.q_block_grid(), parameters, threads_name=self.launch_bounds(), shared=True)}

    def launch_bounds(self) -> str:
        return "THREADS, BLOCKS" if self.plan.blocks else "THREADS"

    def blocks(self) -> list[ConstantLine]:
        """Of an SM, where the compiler is told."""
        return [ConstantLine("int", "BLOCKS", str(self.plan.blocks), BLOCKS)] if self.plan.blocks else []

    def q_block_grid(self) -> tuple[Extent, ...]:
        """One for each BLOCK_Q rows of a head."""
        return self.head_grid(CeilDiv("q_len", self.plan.block_q))

    def captured_anywhere(self) -> list[Parameter]:
        """The captured values, where any part of a kernel that is the only one reads one."""
        v = self.variant
        return abi.captured(v) if v.key_vectors else self.captured(v.score, v.mask, v.sink, v.kv_range, v.classify)

    def sections(self) -> dict[str, str]:
        return {**self.tile_sections(), "fused": "The fused kernel"}

    def context(self) -> dict[str, Any]:
        v = self.variant
        partial_anew = bool(v.key_vectors) and not self.products()
        asked = {n for f in (v.score, None if partial_anew else v.mask) if f is not None for n in f.arguments}
        of_rows = self.spec.lse or (v.sink is not None and "q_idx" in v.sink.arguments) or (v.row_elements and not partial_anew)
        return super().context() | {
            "large_scores": self.large_scores,
            "partial_anew": partial_anew,
            "places_rows": bool(of_rows) or "q_idx" in asked,
            "places_keys": not partial_anew or "kv_idx" in asked,
        }

    def fused_numbers(self) -> list[ConstantLine]:
        plan = self.plan
        factor = self.variant.factor
        exponent = f"{factor} * LOG2_E" if factor else "LOG2_E"
        what = f"exp(x) = 2^(x log2(e)); {factor} joins the factor" if factor else "exp(x) = 2^(x log2(e))"
        softmax = [
            ConstantLine("float", "LOG2_E", "1.4426950408889634f"),
            ConstantLine("float", "EXPONENT_SCALE", exponent, what),
        ]
        return [
            *self.infinity(),
            *self.numbers(),
            *(softmax if self.exponentials() else []),
            ConstantLine("int", "BLOCK_Q", str(plan.block_q), "query rows of a block"),
            ConstantLine("int", "BLOCK_KV", str(plan.block_kv), "keys of a tile"),
            ConstantLine("int", "THREADS", str(plan.threads)),
            *(ConstantLine("int", f"{b.name}_SMEM", str(b.offset)) for b in plan.buffers),
        ]

    def first_primitives(self, packed: str | None) -> list[str]:
        """What every fused schedule on tensor cores has; `packed` is the type of operands that are made in pairs."""
        return [
            *self.conversions(elementwise=False),
            *([f"pack_{packed}"] if packed else []),
            *self.exponentials(),
            *self.variant.primitives,
            "special_registers",
        ]

    def slack(self, what: str = "") -> list[ConstantLine]:
        """By how much a score may exceed a softmax's kept maximum; `what` is added to the comment."""
        if self.spec.normalize != "softmax":
            return []
        large = ConstantLine("float", "LARGE", f"{bounded.LARGE_EXPONENT}f", LARGE)
        return [ConstantLine("float", "SLACK", "8.0f", SLACK + what), *([large] if self.large_scores else [])]

    @property
    def large_scores(self) -> bool:
        """Whether a row's maximum may have to be subtracted before the scale multiplies: split operands always do so."""
        return self.spec.dtype.bytes == 2 and bounded.may_be_large(self.spec)

    def exponentials(self) -> list[str]:
        """The primitives of a softmax in base 2, which comes with tensor cores."""
        if not self.plan.on_tensor_cores or self.spec.normalize != "softmax":
            return []
        return ["exp2_log2", *(["fast_reciprocal"] if self.spec.dtype.bytes == 2 else [])]

    def section(self) -> Parameter:
        """The number of heads that `place_of` goes by.

        Where all rows have as many keys to visit: those that share keys. Elsewhere by bounds that were found by measurement
        (docs/experiments.md): more heads at once leave no two blocks of a head together, fewer leave those of
        long rows far from each other. A wider head has fewer rows in a block.
        """
        width = self.spec.head_dim + self.spec.head_dim_v
        sections = Sections(L2_BYTES // (self.spec.dtype.bytes * width), min(32, 8192 // width), max(64, 16384 // width))
        return Parameter("section_heads", "int", "section", "", sections=ONE_HEAD if self.plan.bounds.even else sections)


class FusedSimt(Fused):
    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhsd")

    def primitives(self) -> list[str]:
        return [*self.conversions(), *self.reductions()]

    def constants(self) -> list[ConstantLine]:
        per_thread = self.spec.head_dim_v // fused_simt.COLUMN_THREADS
        vector = next(n for n in (4, 2, 1) if per_thread % n == 0)
        return [
            *self.fused_numbers(),
            *thread_grid(fused_simt.ROW_THREADS, fused_simt.COLUMN_THREADS, "HEAD_DIM_V"),
            ConstantLine("int", "SLICE", str(fused_simt.slice_of(self.spec)), SLICE),
            ConstantLine("int", "VECTOR", str(vector), "neighbouring dimensions of O that a thread has"),
            ConstantLine("int", "PAD", str(fused_simt.PAD), PAD),
            ConstantLine("int", "QK_STRIDE", "HEAD_DIM + PAD", "floats from row to row in shared memory"),
            ConstantLine("int", "V_STRIDE", "HEAD_DIM_V + PAD"),
            ConstantLine("int", "P_STRIDE", "BLOCK_KV + PAD"),
        ]


class FusedMma(Fused):
    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhs", self.section())

    def primitives(self) -> list[str]:
        dtype = self.spec.dtype.name
        split = fused_mma_needs.operands(self.spec).split
        odd = ["ldmatrix_x2"] if self.spec.head_dim_v % 16 and not split else []
        return [
            *self.first_primitives(None if split == "tf32" else split or dtype),
            "anew",
            "cp_async",
            "ldmatrix",
            *([] if split else ["ldmatrix_trans"]),
            *odd,
            *([f"mma_{split}", f"split_{split}"] if split else [f"mma_{dtype}"]),
        ]

    def context(self) -> dict[str, Any]:
        operands = fused_mma_needs.operands(self.spec)
        addresses_anew = fused_mma_loop.addresses_anew(self.spec, self.tile())
        return super().context() | {
            "chunk": fused_mma_needs.chunk(self.spec),
            "left_over": fused_mma_loop.left_over(self.spec, self.tile()),
            "addresses_anew": addresses_anew,
            "places_anew": fused_mma_loop.places_anew(self.spec, self.tile()),
            "lane_anew": addresses_anew and self.variant.captures,
            **({"from_block": "first", "from_row": "2 * first"} if self.plan.half_tile else {}),
            "inline_classify": True,  # what it costs in registers is free again before the tiles
            "mma": "mma_16x8x8" if operands.split == "tf32" else "mma_16x8x16",
            "split": operands.split,
            "second_stage": self._second_stage(),
        }

    def _second_stage(self) -> str:
        """Why there are no two stages, as the end of a paragraph; empty if the tile's size is not the reason."""
        spec, arch, tile = self.spec, self.plan.arch, self.tile()
        if fused_mma_needs.cost(spec, replace(tile, stages=2)).shared > arch.shared_per_block:
            return " Two of each do not fit shared memory."
        one, two = (fused_mma_needs.blocks_of_an_sm(spec, arch, tile, slots) for slots in (1, 2))
        return " Two of each would take the room of another block on the same multiprocessor." if two < one else ""

    def tile(self) -> Tile:
        return Tile(self.plan.block_q, self.plan.block_kv, self.plan.stages, self.plan.warps)

    def constants(self) -> list[ConstantLine]:
        padded, wide = fused_mma_needs.padded_head_dim(self.spec), fused_mma_needs.width_of_v(self.spec)
        split = fused_mma_needs.operands(self.spec).split
        v_width = "V_WIDTH" if split else "HEAD_DIM_V"
        what = "" if padded == self.spec.head_dim else f"{padded - self.spec.head_dim} zeros fill the last step of Q K^T"
        return [
            *self.fused_numbers(),
            *self.slack(),
            *self.blocks(),
            *(self.split_constants() if split else []),
            *([HALF_KV] if self.plan.copies_between_steps and self.plan.stages == 1 else []),
            *([SLOTS] if self.plan.staggered and self.plan.stages == 2 else []),
            *([HALF_Q] if self.plan.half_tile else []),
            *thread_grid(8 * self.plan.warps, 4, v_width),
            ROW_BLOCKS,
            ConstantLine(
                "int",
                "K_STEPS",
                "HEAD_DIM / 16" if padded == self.spec.head_dim else str(padded // 16),
                "steps of 16 over the head size",
            ),
            ConstantLine("int", "PAD", str(fused_mma_needs.chunk(self.spec))),
            ConstantLine("int", "QK_WIDTH", "16 * K_STEPS", what),
            ConstantLine("int", "Q_STRIDE", "QK_WIDTH + PAD" if padded >= wide else f"{v_width} + PAD"),
            ConstantLine("int", "K_STRIDE", "QK_WIDTH + PAD"),
            ConstantLine("int", "V_STRIDE", f"{v_width} + PAD"),
        ]

    def split_constants(self) -> list[ConstantLine]:
        """Those of split operands."""
        tile, wide = self.tile(), fused_mma_needs.width_of_v(self.spec)
        return [
            ConstantLine(
                "int", "SUMMED", str(fused_mma_needs.summed(tile)), "sixteens of keys whose terms are summed by themselves"
            ),
            ConstantLine(
                "int", "V_WIDTH", str(wide), "" if wide == self.spec.head_dim_v else "HEAD_DIM_V in whole steps of 16"
            ),
        ]


L2_BYTES = 32 << 20  # of keys and values that a section of heads may read
ONE_HEAD = Sections(1, 1, 1)
LARGE = "exponents beyond which the product of a maximum and EXPONENT_SCALE is too coarse"
SLACK = "powers of 2 by which a score may exceed the kept maximum"
BLOCKS = "that an SM is to hold at once: the compiler may use the registers of so many"
ROW_BLOCKS = ConstantLine("int", "ROW_BLOCKS", "ROWS / 2", "of 16 rows, of a warp")
SLOTS = ConstantLine("int", "SLOTS", "3", "tiles of K, and of V, in shared memory: one for each half of the rows, one to come")
HALF_Q = ConstantLine("int", "HALF_Q", "BLOCK_Q / 2", "rows from one of a warp's two blocks of 16 to the other")
HALF_KV = ConstantLine("int", "HALF_KV", "BLOCK_KV / 2", "keys or values that are copied at once between steps of products")
PAD = "floats at the end of each row in shared memory: its neighbours start in other banks"
