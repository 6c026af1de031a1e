"""What the template of the Hopper schedule for products of 8 bits reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine
from attngen.emit.program import Parameter
from attngen.emit.wgmma import Wgmma
from attngen.schedules.hopper.context import Hopper
from attngen.schedules.hopper.fp8_plan import RESCALE_EXPONENT, ROW_BYTES, WEIGHT_EXPONENT, Fp8Plan, byte_slabs
from attngen.schedules.parts.tma_context import box_rows
from attngen.schedules.parts.wgmma import slabs


class HopperFp8(Hopper):
    own: Fp8Plan

    def maps(self) -> list[Parameter]:
        keys = box_rows(self.plan, self.spec)
        return [
            self.tensor_map("Q", self.q_rows()),
            self.tensor_map("K", keys),
            self.tensor_map("V", self.spec.head_dim_v * self.plan.block_kv // ROW_BYTES),
        ]

    def strides_of_sequences(self) -> list[Parameter]:
        return self.strides("K", "bs") if self.spec.kernel.is_counted else []

    def products(self) -> list[Wgmma]:
        of_k, of_v = (self.spec.dtypes[t].name for t in "kv")
        return [
            Wgmma("wgmma_qk", self.plan.block_kv, of_k),
            Wgmma("wgmma_pv", self.v_columns(), of_v, a_in_registers=True),
        ]

    def v_columns(self) -> int:
        return self.own.part_columns

    def output_constants(self) -> list[ConstantLine]:
        return [
            *super().output_constants(),
            ConstantLine("PART_COLUMNS", self.own.part_columns, "of O, whose products are computed at once"),
            ConstantLine("OUTPUT_PARTS", "OUTPUT_COLUMNS / PART_COLUMNS"),
        ]

    def slab_constants(self, *more: ConstantLine) -> list[ConstantLine]:
        spec = self.spec
        return [
            ConstantLine("ROW_BYTES", "128", "a row of a slab: 128 columns of a tile"),
            ConstantLine("QK_SLABS", byte_slabs(spec.head_dim)),
            ConstantLine("V_SLABS", slabs(spec.head_dim_v), "of O: 64 columns each"),
            *more,
            ConstantLine("K_STEPS", "(HEAD_DIM + 31) / 32", "steps of 32 over the head size; zeros fill the last"),
        ]

    def softmax_constants(self) -> list[ConstantLine]:
        changed = {
            "RESCALE_THRESHOLD": ConstantLine("RESCALE_THRESHOLD", f"{RESCALE_EXPONENT}f", RESCALE_THRESHOLD, ctype="float")
        }
        return [
            *(changed.get(c.name, c) for c in super().softmax_constants()),
            ConstantLine(
                "WEIGHT_EXPONENT", f"{WEIGHT_EXPONENT}f", "weights are 2^WEIGHT_EXPONENT times as large", ctype="float"
            ),
            ConstantLine("WEIGHT_UNIT", f"{2.0**-WEIGHT_EXPONENT}f", "a weight of 1 over what stands for it", ctype="float"),
        ]

    @property
    def large_scores(self) -> bool:
        from attngen.plan import bounded_scores

        return bounded_scores.may_be_large(self.spec)

    def forms_of_primitives(self) -> dict[str, set[str]]:
        return super().forms_of_primitives() | {
            "pack": {self.spec.dtypes["o"].name},
            "quantize_fp8_e4m3": {"cvt"},
            "quantize_fp8_e5m2": set(),
        }

    def context(self) -> dict[str, object]:
        return super().context() | {"raised_weights": True}


RESCALE_THRESHOLD = "an exponent may exceed that of the maximum in use by this much: 2^8.8 is 446, and e4m3 ends at 448"
