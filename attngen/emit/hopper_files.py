"""The files of the schedules of Hopper: TMA copies, warpgroups multiply."""

from __future__ import annotations

from typing import Any

from attngen.emit import abi
from attngen.emit.file import ConstantLine, KernelText, thread_grid
from attngen.emit.fused_files import ROW_BLOCKS, Fused
from attngen.emit.kernel_source import MULTIPROCESSORS, Parameter
from attngen.emit.wgmma import Wgmma
from attngen.plan import bounded, hopper
from attngen.plan.hopper_tiles import WARPGROUP_ROWS
from attngen.plan.plan import Roles
from attngen.plan.tiles import KV_LEN, Q_HI, Q_LO
from attngen.spec.expr import names_in
from attngen.spec.operator import ZERO


class ByTma(Fused):
    """What the rungs of Hopper share: TMA copies slabs of tiles, warpgroups multiply them."""

    def maps(self) -> list[Parameter]:
        """Q, K and V, as many rows as are copied at a time."""
        return [abi.tensor_map("Q", self.q_rows()), *(abi.tensor_map(t, self.plan.block_kv) for t in "KV")]

    def q_rows(self) -> int:
        return self.plan.block_q

    def products(self) -> list[Wgmma]:
        dtype = self.spec.dtype.name
        return [
            Wgmma("wgmma_qk", self.plan.block_kv, dtype, a_in_registers=self.plan.q_in_registers),
            Wgmma("wgmma_pv", self.v_columns(), dtype, a_in_registers=True, b_transposed=True),
        ]

    def v_columns(self) -> int:
        """Of what P is multiplied with."""
        return self.spec.head_dim_v

    def q_slab_rows(self) -> str:
        return "BLOCK_Q"

    def slab_constants(self, *more: ConstantLine) -> list[ConstantLine]:
        """Of the tiles in shared memory; `more` beside the numbers of slabs."""
        spec = self.spec
        steps, what = ("HEAD_DIM / 16", "") if spec.head_dim % 16 == 0 else ("(HEAD_DIM + 15) / 16", "; zeros fill the last")
        return [
            ConstantLine("int", "ROW_BYTES", "128", "of 64 columns: a slab of a tile"),
            ConstantLine("int", "QK_SLABS", str(hopper.slabs(spec.head_dim))),
            ConstantLine("int", "V_SLABS", str(hopper.slabs(spec.head_dim_v))),
            *more,
            ConstantLine("int", "K_STEPS", steps, "steps of 16 over the head size" + what),
            ConstantLine("int", "Q_SLAB", f"{self.q_slab_rows()} * ROW_BYTES", "bytes"),
            ConstantLine("int", "KV_SLAB", "BLOCK_KV * ROW_BYTES"),
        ]


class FusedWgmma(ByTma):
    def kernels(self) -> dict[str, KernelText]:
        parameters = [
            *self.maps(),
            self.pointer("O", writable=True),
            *abi.strides("O", "bhs"),
            *self.lse_parameters(),
            *self.sizes(),
            self.section(),
            *self.captured_anywhere(),
        ]
        return {"wgmma": self.kernel("wgmma", self.q_block_grid(), parameters, threads_name=self.launch_bounds(), shared=True)}

    def primitives(self) -> list[str]:
        return [
            *self.first_primitives(self.spec.dtype.name),
            "mbarrier",
            "mbarrier_wait",
            "tma_load",
            "proxy_fence",
            "anew",
            "wgmma",
        ]

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.fused_numbers(),
            *self.slack(),
            *self.blocks(),
            *thread_grid(8 * plan.warps, 4, "HEAD_DIM_V"),
            ROW_BLOCKS,
            ConstantLine("int", "STAGES", str(plan.stages), "tiles of K, and of V, in shared memory"),
            *self.slab_constants(),
        ]


class Hopper(ByTma):
    def kernels(self) -> dict[str, KernelText]:
        parameters = [
            *self.maps(),
            abi.tensor_map("O", WARP_ROWS),
            *self.lse_parameters(),
            Parameter("next_work", "unsigned*", "data", "next_work"),
            *abi.sizes(self.spec, "batch", "q_heads", "kv_heads", "q_len", "kv_len"),
            self.section(),
            *self.captured_anywhere(),
        ]
        grid, bounds = self.q_block_grid(), "THREADS, 1"
        return {"hopper": self.kernel("hopper", grid, parameters, None, bounds, shared=True, at_most=MULTIPROCESSORS)}

    def sections(self) -> dict[str, str]:
        sections = super().sections()
        return {**sections, "fused": "The kernel: one warpgroup copies, the others multiply"}

    def primitives(self) -> list[str]:
        return [
            *self.first_primitives(self.spec.dtype.name),
            "mbarrier",
            "mbarrier_arrive",
            "mbarrier_wait",
            *([] if self.roles.row_sums == "products" else ["mbarrier_init_fence"]),
            "tma_load",
            "tma_store",
            "stmatrix",
            "proxy_fence",
            "setmaxnreg",
            *(["anew"] if self.variant.key_vectors else []),
            "wgmma",
            *([f"unpack_{self.spec.dtype.name}"] if self.roles.row_sums == "weights, the heaviest rounded" else []),
            *(["ldmatrix"] if self.plan.q_in_registers else []),
        ]

    def exponentials(self) -> list[str]:
        return [*super().exponentials(), *(["fast_log2"] if hopper.adapts_slack(self.spec) else [])]

    @property
    def names_rows(self) -> bool:
        """Whether the text asks for the rows of one consumer."""
        return self.roles.own_tiles or not self.plan.q_in_registers

    def q_rows(self) -> int:
        return WARPGROUP_ROWS if self.names_rows else self.plan.block_q

    def q_slab_rows(self) -> str:
        return "BLOCK_Q" if self.plan.q_in_registers else "WARPGROUP_ROWS"

    def v_columns(self) -> int:
        return self.spec.head_dim_v + (hopper.ONES if self.roles.row_sums == "products" else 0)

    @property
    def roles(self) -> Roles:
        assert self.plan.roles is not None
        return self.plan.roles

    def constants(self) -> list[ConstantLine]:
        plan, spec = self.plan, self.spec
        return [
            *self.fused_numbers(),
            *(self.softmax_constants() if spec.normalize == "softmax" else []),
            ConstantLine("int", "STAGES", str(plan.stages), "tiles of K, and of V, in shared memory"),
            ConstantLine("int", "CONSUMERS", str(self.roles.consumers), "warpgroups that multiply, 64 rows each"),
            *([ConstantLine("int", "WARPGROUP_ROWS", str(WARPGROUP_ROWS))] if self.names_rows else []),
            ConstantLine("int", "PRODUCER_REGISTERS", str(self.roles.producer_registers), "of a thread"),
            ConstantLine("int", "CONSUMER_REGISTERS", str(self.roles.consumer_registers)),
            *self.slab_constants(
                ConstantLine(
                    "int", "OUTPUT_SLABS", str(self.roles.output_slabs), "of a warp's rows on their way to global memory"
                )
            ),
            *self.stage_constants(),
            *(self.staging_constants() if plan.staged.keys else []),
        ]

    def softmax_constants(self) -> list[ConstantLine]:
        if self.roles.shift is not None:
            what = f"of exponents, in place of a maximum: weights stay between 2^{bounded.LEAST:.0f} and 2^{bounded.MOST:.0f}"
            return [ConstantLine("float", "SHIFT", f"{self.roles.shift}f", what)]
        return [
            *self.slack(", at most" if hopper.adapts_slack(self.spec) else ""),
            *(
                [
                    ConstantLine(
                        "float",
                        "HEAVY",
                        f"{hopper.heavy(self.roles.row_sums)}.0f",
                        "keys: a weight like all theirs is not rounded",
                    ),
                    ConstantLine(
                        "float", "HEAVY_OF_ROOT", f"{hopper.HEAVY_OF_ROOT}f", "of the root of kv_len, if that is more"
                    ),
                    ConstantLine(
                        "int", "SAMPLE", str(min(64, self.plan.block_kv)), "keys by which a tile's weights are judged"
                    ),
                ]
                if hopper.adapts_slack(self.spec)
                else []
            ),
            ConstantLine("int", "MAX_CHAINS", "4", "maxima of a row at once: comparisons that need not wait"),
        ]

    def stage_constants(self) -> list[ConstantLine]:
        if self.roles.row_sums != "products":
            return [ConstantLine("int", "V_STAGE", "V_SLABS * KV_SLAB")]
        return [
            ConstantLine("int", "V_STAGE", "(V_SLABS + 1) * KV_SLAB", "with a slab of ones"),
            ConstantLine("int", "ONES", str(hopper.ONES), "columns of ones beside V, the fewest that wgmma multiplies"),
            ConstantLine("unsigned", "TWO_ONES", TWO_ONES[self.spec.dtype.name], f"1.0 twice, in {self.spec.dtype.name}"),
        ]

    def staging_constants(self) -> list[ConstantLine]:
        lane_keys = -(-self.plan.block_kv // 32)
        return [
            ConstantLine("int", "SLOTS", "STAGES + 1", "tiles whose key vectors are in shared memory"),
            ConstantLine("int", "LANE_KEYS", str(lane_keys), "keys of a tile whose elements a lane of the producer reads"),
        ]

    def context(self) -> dict[str, Any]:
        v = self.variant
        keeps_maximum = self.spec.normalize == "softmax" and not self.plan.is_bounded
        tiles_read_captured = self.reads_captured(v.kv_range, v.classify, scale=False)
        warp_copies_keys = v.classify is not None or bool(v.key_vectors)
        # tiles of the block below a consumer's own stand between its last P V and the next rows
        passes_below = self.roles.own_tiles and bool(names_in(self.plan.bounds.kv_begin) & {Q_LO.name, Q_HI.name})
        of_rows = v.kv_range.arguments if v.by_row or v.classify is None else ()
        asked = {n for f in (v.score, v.one_score, v.mask, v.sink) if f is not None for n in f.arguments}.union(of_rows)
        asked |= {n for e in v.row_elements for n in e.indices}
        rows_differ = any("q_idx" in f.arguments for f in (v.score, v.mask, v.sink) if f is not None) or bool(v.row_elements)
        sink_in_output = v.sink is not None and self.roles.row_sums == "products"
        short_of_registers = self.plan.is_bounded or any(e.in_score for e in v.key_vectors)  # one more, and they spill
        return super().context() | {
            "tiles_by_row": any({"q_lo", "q_hi"} & set(f.arguments) for f in (v.kv_range, v.classify) if f is not None),
            "tile_indices": [n for n in OF_HEAD if v.classify is None and n in v.kv_range.arguments],
            "consumer_indices": [n for n in OF_HEAD if n in asked],
            "places_rows": rows_differ or (v.by_row and bool({"q_lo", "q_hi"} & set(v.kv_range.arguments))),
            "keeps_maximum": keeps_maximum,
            "adapts_slack": hopper.adapts_slack(self.spec),
            "sink_in_output": sink_in_output,  # beside the products with ones
            "replaces_output": not sink_in_output and not short_of_registers,
            "maximum_of_lanes": keeps_maximum,
            "sum_of_lanes": self.spec.normalize == "softmax"
            and (self.roles.row_sums != "products" or hopper.adapts_slack(self.spec)),
            "own_tiles": self.roles.own_tiles,
            "passes_below": passes_below,
            "scores_ahead": self.plan.q_in_registers and not passes_below,
            "begins_early": not self.plan.q_in_registers and not passes_below,
            # before its V come the rows of a consumer: with more than two, that would hold up those which are ahead
            "values_after_q": self.plan.q_in_registers or self.roles.consumers == 2,
            "partial_below": self.plan.bounds.full_begin not in (None, ZERO),
            "row_begins": v.by_row and self.plan.bounds.kv_begin is not ZERO,
            "partial_above": self.plan.bounds.full_end not in (None, KV_LEN),
            "tiles_read_captured": tiles_read_captured,
            "producer_reads_captured": bool(v.key_vectors) or (v.classify is not None and tiles_read_captured),
            "consumers_read_captured": bool(v.row_elements)
            or self.reads_captured(v.score, v.mask, v.sink, v.kv_range if v.by_row else None),
            "warp_copies_keys": warp_copies_keys,
            "each_warp_arrives": warp_copies_keys or self.roles.own_tiles,
            "lanes_work": " and ".join(["look for tiles"] * bool(v.classify) + ["read key vectors"] * bool(v.key_vectors)),
            # read for partial tiles alone
            "mask_vectors": v.classify is not None and any(not e.in_score for e in v.key_vectors),
            "key_vector_indices": sorted(frozenset().union(*(e.indices for e in v.key_vectors))),
        }


TWO_ONES = {"fp16": "0x3c003c00", "bf16": "0x3f803f80"}
WARP_ROWS = 16  # of a warpgroup's 64
OF_HEAD = ("h_idx", "b_idx")
