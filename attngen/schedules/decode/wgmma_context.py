"""What the template of decode by wgmma reads."""

from __future__ import annotations

from attngen.emit.constants import ConstantLine, thread_grid
from attngen.emit.wgmma import Wgmma
from attngen.schedules.decode.memory import OUTPUT_PAD
from attngen.schedules.decode.split_context import JOINING_WIDE, VALUES_BEGIN, SplitKeys
from attngen.schedules.decode.wgmma_plan import CONSUMER_REGISTERS, CONSUMERS, HELD_SLABS, PRODUCER_REGISTERS, DecodeWgmmaPlan
from attngen.schedules.parts.fused_context import ROW_BLOCKS
from attngen.schedules.parts.tma_context import ByTma, argument_members, box_constant

PLACE_OF_WEIGHTS = "weights of each consumer, where slabs of Q were"


class DecodeWgmma(SplitKeys, ByTma):
    own: DecodeWgmmaPlan

    @property
    def starts_early(self) -> bool:
        return self.own.early

    @property
    def key_tensors(self) -> str:
        return "K"

    @property
    def joining(self) -> int:
        return JOINING_WIDE

    @property
    def first_value(self) -> int:
        """The column of K that is the first of V."""
        assert self.spec.values is not None
        return self.spec.values[0]

    def v_columns(self) -> int:
        return self.spec.head_dim_v // CONSUMERS

    def products(self) -> list[Wgmma]:
        dtype = self.spec.dtype.name
        held = Wgmma("wgmma_qk_held", self.plan.block_kv, dtype, a_in_registers=True)
        shared = Wgmma("wgmma_pv_shared", self.v_columns(), dtype, b_transposed=True)
        return [*super().products(), held, shared]

    def context(self) -> dict[str, object]:
        columns = f"{self.first_value} to {self.first_value + self.spec.head_dim_v - 1}"
        return super().context() | {
            "split": "",
            "quantized": False,
            "argument_members": argument_members(self.split_kernel().entry.parameters, self.variant, exponent=True),
            "pages_are": "read_ahead" if self.spec.kernel.is_paged else "none",
            "values_text": f"columns {columns} of K",
        }

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.numbers(),
            *self.exponent_numbers(),
            ConstantLine("BLOCK_Q", plan.block_q, "rows of a block, of the query heads that share keys"),
            ConstantLine("BLOCK_KV", plan.block_kv, "keys of a tile"),
            ConstantLine("THREADS", plan.threads),
            ConstantLine("CONSUMERS", CONSUMERS, "warpgroups that multiply, for the same rows"),
            ConstantLine("WRITERS", "128 * CONSUMERS", "threads that write results"),
            ConstantLine("BOTH", 1, "the named barrier of both consumers; the next ones are those of each"),
            ConstantLine("STAGES", "CONSUMERS", "tiles of K in shared memory, one for each consumer"),
            ConstantLine("PRODUCER_REGISTERS", PRODUCER_REGISTERS, "of a thread"),
            ConstantLine("CONSUMER_REGISTERS", CONSUMER_REGISTERS),
            *(ConstantLine(f"{b.name}_SMEM", b.offset) for b in plan.buffers),
            *self.slack(),
            ConstantLine("VALUES_BEGIN", self.first_value, VALUES_BEGIN),
            ConstantLine("V_COLUMNS", "HEAD_DIM_V / CONSUMERS", "columns of O of a consumer"),
            ConstantLine("V_PARTS", "V_COLUMNS / 64", "slabs of V of a consumer"),
            *thread_grid(8 * 4, 4, "V_COLUMNS"),
            ROW_BLOCKS,
            *self.slab_constants(),
            ConstantLine("HELD_SLABS", HELD_SLABS, "slabs of Q in registers, the last ones"),
            ConstantLine("READ_SLABS", "QK_SLABS - HELD_SLABS", "those in shared memory"),
            ConstantLine("WEIGHTS_SMEM", "Q_SMEM + READ_SLABS * BLOCK_Q * ROW_BYTES", PLACE_OF_WEIGHTS),
            box_constant(plan, self.spec),
            ConstantLine("O_STRIDE", f"HEAD_DIM_V + {OUTPUT_PAD}", "of sums of O, in the memory of K and Q"),
            ConstantLine("QUADS", "HEAD_DIM_V / 4", "of neighbouring columns of O"),
            ConstantLine("JOINING", self.joining, "threads of a block that joins splits"),
        ]
