"""What the template of the Hopper schedule for wide heads reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine
from attngen.emit.program import Parameter
from attngen.emit.wgmma import Wgmma
from attngen.schedules.hopper.context import Hopper
from attngen.schedules.hopper.wide_plan import FOLLOWER_REGISTERS, WidePlan, most_slabs
from attngen.schedules.parts.tma_context import box_rows
from attngen.schedules.parts.wgmma import SLAB


class HopperWide(Hopper):
    own: WidePlan

    def maps(self) -> list[Parameter]:
        rows = box_rows(self.plan, self.spec)
        return [
            self.tensor_map("Q", self.q_rows()),
            self.tensor_map("K", rows),
            self.tensor_map("V", rows // self.own.value_parts),
        ]

    def v_columns(self) -> int:
        return SLAB * (self.own.value_slabs // 2)

    def products(self) -> list[Wgmma]:
        shared = Wgmma("wgmma_pv_shared", SLAB * most_slabs(self.spec), self.spec.dtype.name, b_transposed=True)
        return [*super().products(), shared]

    def constants(self) -> list[ConstantLine]:
        own = self.own
        consumers = ConstantLine("CONSUMERS", own.consumers, "warpgroups that multiply, for the same 64 rows")
        changed = {c.name: c for c in (consumers, ConstantLine("RELEASES", *RELEASES[own.warps_release]))}
        return [changed.get(c.name, c) for c in super().constants()]

    def output_constants(self) -> list[ConstantLine]:
        own = self.own
        return [
            ConstantLine("VALUE_SLABS", own.value_slabs, "of V and O, of both consumers"),
            ConstantLine("OUTPUT_COLUMNS", "64 * (VALUE_SLABS / 2)", "columns of O in registers of the first consumer"),
            ConstantLine("FOLLOWER_COLUMNS", "64 * VALUE_SLABS - OUTPUT_COLUMNS", "and of the second"),
            ConstantLine("K_PARTS", own.key_parts, "parts of a tile of K, by columns"),
            ConstantLine("V_PARTS", own.value_parts, "parts of a tile of V, by keys, each in two halves of its columns"),
            ConstantLine("FOLLOWER_REGISTERS", FOLLOWER_REGISTERS, "of a thread of the second consumer"),
            ConstantLine(
                "KEY_ARRIVALS", 32 if self.variant.key_vectors else 1, "lanes that fill the first part of a tile of K"
            ),
            ConstantLine(
                "VISIT_READERS", int(bool(self.variant.classify)), "threads of the producer that read which tile is next"
            ),
            ConstantLine("WEIGHT_STAGES", own.weight_stages, "tiles of weights on their way to the second consumer"),
        ]

    def context(self) -> dict[str, object]:
        return super().context() | {"value_slabs": self.own.value_slabs, "output": self.own.output}


RELEASES = {
    True: ("4", "arrivals that empty a part of a stage: one of each warp of its consumer"),
    False: ("1", "arrivals that empty a part of a stage: one of its consumer"),
}
