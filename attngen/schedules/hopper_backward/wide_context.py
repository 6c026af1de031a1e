"""What the template of the Hopper backward for wide heads reads."""

from __future__ import annotations

from attngen.emit import comment_text
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import MULTIPROCESSORS, CeilDiv
from attngen.emit.wgmma import Wgmma
from attngen.schedules.hopper_backward.context import HopperBackward
from attngen.schedules.hopper_backward.form import OF_ROWS
from attngen.schedules.hopper_backward.wide_plan import WideBackwardPlan, part_slabs
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, slabs

LANES = 32  # lanes of a warp, which computes delta of a row
LANE_COLUMNS = 8  # columns of O and dO that a lane reads at once


class HopperWideBackward(HopperBackward):
    own: WideBackwardPlan

    def kernels(self) -> dict[str, KernelText]:
        written = {
            "delta": self._delta,
            "special_rows": self._special_rows,
            "dv": self._dv,
            "dk": self._dk,
            "add_parts": self._add_parts,
            "dq": self._dq,
        }
        return {name: written[name]() for name in self.own.kernels}

    @property
    def _row_lanes(self) -> int:
        return next((n for n in (1, 2, 4, 8, 16) if LANE_COLUMNS * n >= self.spec.head_dim_v), LANES)

    def _of_keys(self, name: str, held: tuple[str, ...], result: str) -> KernelText:
        grid = self.kv_head_grid(*([self.own.parts] if self.own.parts else []), CeilDiv("kv_len", self.own.held_keys))
        seen, sums = (("Q", "dO"), self.plan.block_q), self._part_sums(writable=True)
        parameters = self._parameters((held, self.own.held_keys), seen, (result,), *sums)
        return self.kernel(name, grid, parameters, None, "THREADS, 1", shared=True, at_most=MULTIPROCESSORS)

    def _dv(self) -> KernelText:
        return self._of_keys("dv", ("K",), "dV")

    def _dk(self) -> KernelText:
        return self._of_keys("dk", ("K", "V"), "dK")

    @property
    def _sums_of_parts(self) -> int:
        """A block for each slab of 64 keys."""
        return slabs(self.spec.head_dim) + slabs(self.spec.head_dim_v)

    def products(self) -> list[Wgmma]:
        spec, dtype = self.spec, self.spec.dtype.name
        columns = {SLAB * part_slabs(spec.head_dim), SLAB * part_slabs(spec.head_dim_v)}
        pairs = Wgmma("wgmma_pairs", WARPGROUP_ROWS // self.own.consumers, dtype)
        return [pairs, *(Wgmma(f"wgmma_sum_{n}", n, dtype, b_transposed=True) for n in sorted(columns))]

    def context(self) -> dict[str, object]:
        pair = comment_text.product_equations(self.spec, self.gradient)
        kernels, softmax = self.kernels(), self.spec.normalize == "softmax"
        sums = {
            "dv": "dV = sum of P^T dO",
            "dk": "dK = softmax_scale * sum of dS^T Q",
            "dq": "dQ = softmax_scale * sum of dS K",
        }
        return super().context() | {
            "copies": "hopper_wide_backward",
            "row_chunks": "one_chunk" if self._row_lanes * LANE_COLUMNS >= self.spec.head_dim_v else "two_chunks",
            "sum_kernels": [name for name in self.own.kernels if name not in OF_ROWS],
            "members_of": {name: self.members(kernels[name], name != "dq") for name in sums if name in kernels},
            "number_names": ["lse2", "delta", *(["offset"] if self.lse_rest else [])] if softmax else [],
            "equations_of": {name: [*pair, of_sum] for name, of_sum in sums.items()},
            "qk_columns": SLAB * part_slabs(self.spec.head_dim),
            "v_columns": SLAB * part_slabs(self.spec.head_dim_v),
        }

    def constants(self) -> list[ConstantLine]:
        own, spec = self.own, self.spec
        changed = {
            c.name: c
            for c in (
                ConstantLine("CONSUMERS", own.consumers, "warpgroups that multiply"),
                ConstantLine("BLOCK_ROWS", "WARPGROUP_ROWS", "that a block holds"),
                ConstantLine("BLOCK_KEYS", "WARPGROUP_ROWS", "that a block holds"),
                ConstantLine("STAGES", self.plan.stages, "tiles that are kept in shared memory"),
            )
        }
        return [
            *(changed.get(c.name, c) for c in super().constants()),
            ConstantLine("ROW_TILES", "BLOCK_ROWS / BLOCK_Q", "of a block of rows"),
            ConstantLine("PAIR_COLUMNS", "WARPGROUP_ROWS / CONSUMERS", "of a tile of pairs, for each consumer"),
            ConstantLine("QK_PARTS", own.qk_parts, "parts of a tile of Q or K that is kept, of the consumers in turn"),
            ConstantLine("QK_PART_SLABS", part_slabs(spec.head_dim)),
            ConstantLine("V_PARTS", own.v_parts, "the same of dO"),
            ConstantLine("V_PART_SLABS", part_slabs(spec.head_dim_v)),
            ConstantLine("DV_SLOTS", own.dv_slots, "slabs of Q in shared memory, in the kernel of dV"),
            ConstantLine("DP_SLOTS", own.dp_slots, "slabs of dO or V in shared memory, in the kernels of dK and dQ"),
        ]
