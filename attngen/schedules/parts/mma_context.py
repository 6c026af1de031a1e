"""The emission context that fused_mma and decode share: warps multiply fragments by mma.sync."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine, thread_grid
from attngen.schedules.parts.fused_context import ROW_BLOCKS, Fused
from attngen.schedules.parts.mma import MmaPlan, product_dtype, v_step
from attngen.schedules.parts.tile_of_block import key_warps, row_warps


class ByMma(Fused):
    """The context of a forward in which cp.async copies rows of tiles and warps multiply them, fp32 as split operands."""

    own: MmaPlan

    @property
    def split(self) -> str:
        return self.own.split

    @property
    def product_type(self) -> str:
        return product_dtype(self.spec).name

    def forms_of_primitives(self) -> dict[str, set[str]]:
        forms = super().forms_of_primitives()
        converted = {self.spec.dtype.name} if self.own.quantized else set()  # Q
        return forms | {"to_float": forms["to_float"] | converted}

    @property
    def v_width(self) -> str:
        """The columns of V in shared memory, as the text names them."""
        return "V_WIDTH" if self.own.split or self.own.quantized or self.of_block else "HEAD_DIM_V"

    @property
    def of_block(self) -> bool:
        """Whether the warps of a block share the products of its tiles."""
        return self.own.warps_have == "columns"

    def context(self) -> dict[str, object]:
        own = self.own
        q_place = "registers" if own.q_in_registers else "shared"
        return super().context() | {
            "types": self.types() | {"P": product_dtype(self.spec).cuda},
            "multiplied_by": "split" if own.split else "quantized" if own.quantized else "mma",
            "queries_by": f"{'quantized_' if own.quantized else ''}queries_in_{q_place}",
            "warps_have": own.warps_have,
            "weights_by": self.weights_by,
            "sums_are": self.sums_are,
            "rows_by": "softmax" if self.spec.normalize == "softmax" else "no_state",  # in `templates/parts/tile_of_block/`
            "sums_of_o": "O_frag[O_BLOCKS]" if self.of_block else "O_frag",
            "odd_v": self.spec.head_dim_v % 16 != 0 and not self.of_block,  # a warp's own columns are whole sixteens
            "even_odd": bool(own.split) or own.quantized,  # neighbouring blocks of O have even columns and odd ones
            "queries_in": q_place,
            "tiles_in": "slabs" if self.by_tma else "rows",
            "v_width": self.v_width,
            "split": own.split,
            "quantized": own.quantized,
            "multiply_adds": 1024 if own.split == "tf32" else 2048,
        }

    def v_stride(self, pad: str) -> str:
        """From row to row of V in shared memory, in elements."""
        return f"{self.v_width} + {pad}"

    @property
    def weights_by(self) -> str:
        """Where the weights of a tile are as operands: `templates/parts/products/NAME.j2`."""
        if not self.of_block:
            return f"{'quantized_' if self.own.quantized else ''}weights_in_registers"
        return f"{'split_' if self.own.split else 'quantized_' if self.own.quantized else ''}weights_in_shared"

    @property
    def sums_are(self) -> str:
        """What rescales the sums of O of a block's tiles: `templates/parts/tile_of_block/sums_NAME.j2`."""
        return "below_maxima" if self.spec.normalize == "softmax" else "as_they_are"

    @property
    def v_step(self) -> int:
        """The columns of V that are multiplied at once, of which shared memory has whole steps."""
        return v_step(self.spec) * (self.plan.warps if self.of_block else 1)

    @property
    def warp_part(self) -> tuple[str, str]:
        """The columns of O that a warp has, and the keys of its scores in a tile, as the text names them."""
        return ("V_COLUMNS", "KEYS") if self.of_block else (self.v_width, "BLOCK_KV")

    def shares(self) -> list[ConstantLine]:
        """The parts of a tile whose products warps share."""
        if not self.of_block:
            return []
        return [
            ConstantLine("ROW_WARPS", row_warps(self.plan.tile), "warps that compute scores of other rows"),
            ConstantLine("KEY_WARPS", key_warps(self.plan.tile), "and of other keys"),
            ConstantLine("KEYS", "BLOCK_KV / KEY_WARPS", "of a tile, of which a warp computes scores"),
            ConstantLine("V_COLUMNS", "V_WIDTH / WARPS", "columns of O of a warp"),
            ConstantLine("O_BLOCKS", "BLOCK_Q / 16", "blocks of 16 rows of O, of which a warp has columns"),
            ConstantLine("P_STRIDE", f"BLOCK_KV + {self.own.chunk}"),
        ]

    def split_constants(self) -> list[ConstantLine]:
        whole = "" if self.own.v_width == self.spec.head_dim_v else f"HEAD_DIM_V in whole steps of {self.v_step}"
        return [
            ConstantLine("SUMMED", self.own.summed, "sixteens of keys whose terms are summed by themselves"),
            ConstantLine("V_WIDTH", self.own.v_width, whole),
        ]

    def operand_constants(self, warps: int, q_columns: str, pads_keys: bool = True) -> list[ConstantLine]:
        """The constants of fragments and of rows in shared memory, of which Q's have `q_columns`; `warps` have own rows.
        `pads_keys`: rows of K and V are padded, as those of Q are."""
        own = self.own
        pad = "PAD" if own.key_chunk == own.chunk else str(own.key_chunk)
        padded = [ConstantLine("K_STRIDE", f"QK_WIDTH + {pad}"), ConstantLine("V_STRIDE", self.v_stride(pad))]
        zeros = own.qk_width - self.spec.head_dim
        steps = str(own.qk_width // 16) if zeros else "HEAD_DIM / 16"
        return [
            *thread_grid(8 * (row_warps(self.plan.tile) if self.of_block else warps), 4, *self.warp_part),
            ROW_BLOCKS,
            ConstantLine("K_STEPS", steps, "steps of 16 over the head size"),
            ConstantLine("PAD", own.chunk),
            ConstantLine("QK_WIDTH", "16 * K_STEPS", f"{zeros} zeros fill the last step of Q K^T" if zeros else ""),
            ConstantLine("Q_STRIDE", f"{q_columns} + PAD"),
            *(padded if pads_keys else []),
        ]
