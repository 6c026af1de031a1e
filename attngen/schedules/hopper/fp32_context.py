"""What the template of the Hopper schedule for fp32 reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine
from attngen.emit.wgmma import Wgmma
from attngen.schedules.hopper.context import Hopper
from attngen.schedules.hopper.fp32_plan import Fp32Plan, output_slabs
from attngen.schedules.parts.wgmma import SLAB
from attngen.spec.dtypes import BF16


class HopperFp32(Hopper):
    own: Fp32Plan

    @property
    def product_type(self) -> str:
        return BF16.name

    @property
    def large_scores(self) -> bool:
        return False  # a maximum is subtracted before scores are scaled

    def products(self) -> list[Wgmma]:
        return [
            Wgmma("wgmma_qk", self.plan.block_kv, BF16.name),
            Wgmma("wgmma_pv", self.v_columns(), BF16.name, a_in_registers=True, b_transposed=True),
        ]

    def output_constants(self) -> list[ConstantLine]:
        return [
            *super().output_constants(),
            ConstantLine("O_SLABS", output_slabs(self.spec), "of O: 32 columns of fp32 each"),
            ConstantLine(
                "KEY_ARRIVALS", 32 if self.variant.key_vectors else 1, "lanes that fill the first term of a tile of K"
            ),
            ConstantLine(
                "VISIT_READERS", int(bool(self.variant.classify)), "threads of the producer that read which tile is next"
            ),
        ]

    def context(self) -> dict[str, object]:
        return super().context() | {"slab_columns": SLAB, "element_bytes": BF16.bytes}
