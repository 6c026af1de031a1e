"""What the template of the Hopper schedule reads."""

from __future__ import annotations

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import MULTIPROCESSORS, Parameter
from attngen.plan import bounded_scores
from attngen.plan.axes import KEYS
from attngen.schedules.hopper import plan as hopper
from attngen.schedules.hopper.choices import HopperPlan, heavy
from attngen.schedules.parts.tma_context import ByTma, argument_members, box_constant, pair_lanes
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS
from attngen.spec.operator import ZERO


class Hopper(ByTma):
    own: HopperPlan

    def kernels(self) -> dict[str, KernelText]:
        parameters = [
            *self.maps(),
            self.tensor_map("O", WARP_ROWS),
            *self.lse_parameters(),
            Parameter("next_work", "unsigned*", "data", "next_work"),
            *abi.sizes(self.spec, "batch", "q_heads", "kv_heads", "q_len", "kv_len"),
            *self.pages(),
            *self.strides_of_sequences(),
            self.heads_in_l2(),
            *self.captured_anywhere(),
        ]
        grid, bounds = self.q_block_grid(), "THREADS, 1"
        return {"hopper": self.kernel("hopper", grid, parameters, None, bounds, shared=True, at_most=MULTIPROCESSORS)}

    def q_rows(self) -> int:
        return WARPGROUP_ROWS if self.own.per_consumer_range or not self.own.q_in_registers else self.plan.block_q

    def v_columns(self) -> int:
        return self.spec.head_dim_v + (hopper.ONES if self.own.row_sums == "products" else 0)

    def q_in_registers(self) -> bool:
        return self.own.q_in_registers

    def is_bounded(self) -> bool:
        return self.own.shift is not None

    @property
    def pair_steps(self) -> list[str]:
        """The steps of captured tensors of which the score reads one element per pair."""
        v = self.variant
        reads = v.score is not None and ("in" in v.score.arguments or bool(v.pair_elements))
        if not reads or v.one_score is not None:
            return []
        return [f"{t.c_name}_step_{d}" for t in v.tensors if sum(t.narrow) > 1 for d in range(t.rank) if t.narrow[d]]

    def places_rows(self) -> bool:
        """Whether a thread needs its row indices."""
        v = self.variant
        return v.places_rows or v.dropout is not None or bool(v.pair_elements)

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.fused_numbers(),
            *self.softmax_constants(),
            ConstantLine("STAGES", plan.stages, "tiles of K, and of V, in shared memory"),
            box_constant(plan, self.spec),
            ConstantLine("CONSUMERS", self.own.consumers, "warpgroups that multiply, 64 rows each"),
            ConstantLine("WARPGROUP_ROWS", WARPGROUP_ROWS),
            ConstantLine("RELEASES", *RELEASES[self.own.warps_release]),
            ConstantLine("PRODUCER_REGISTERS", self.own.producer_registers, "of a thread"),
            ConstantLine("CONSUMER_REGISTERS", self.own.consumer_registers),
            ConstantLine("ROWS", "2", "of a thread"),
            *self.slab_constants(ConstantLine("OUTPUT_SLABS", self.own.output_slabs, OUTPUT_SLABS)),
            *self.output_constants(),
            ConstantLine("SLOTS", "STAGES + 1", "tiles whose key vectors are in shared memory"),
            ConstantLine("PAIR_SLABS", -(-plan.block_kv // 64), "of a tile of elements of pairs"),
            ConstantLine("PAIR_SLOTS", self.own.pair_slots, "such tiles in shared memory, of each consumer"),
            ConstantLine("PAIR_LOADERS", 64, "threads that copy them"),
            pair_lanes(plan.block_kv),
            ConstantLine("LANE_KEYS", -(-plan.block_kv // 32), "keys of a tile whose elements a lane of the producer reads"),
        ]

    def softmax_constants(self) -> list[ConstantLine]:
        if self.own.shift is not None:
            least, most = bounded_scores.LEAST, bounded_scores.MOST
            what = f"subtracted from exponents instead of a maximum: weights stay between 2^{least:.0f} and 2^{most:.0f}"
            return [ConstantLine("SHIFT", f"{self.own.shift}f", what, ctype="float")]
        adapts, keys = self.own.adaptive_threshold, heavy(self.own.row_sums)
        return [
            *self.slack(", at most" if adapts else ""),
            ConstantLine("HEAVY", f"{keys}.0f", "keys: a weight like all theirs is not rounded", ctype="float"),
            ConstantLine("HEAVY_OF_ROOT", f"{hopper.HEAVY_OF_ROOT}f", "of the root of kv_len, if that is more", ctype="float"),
            ConstantLine("SAMPLE", min(64, self.plan.block_kv), "keys by which a tile's weights are judged"),
            ConstantLine("MAX_CHAINS", "4", "independent maxima of a row, so that comparisons do not wait for each other"),
        ]

    def output_constants(self) -> list[ConstantLine]:
        if self.own.row_sums != "products":
            return [ConstantLine("OUTPUT_COLUMNS", "HEAD_DIM_V", "columns of O in registers")]
        return [
            ConstantLine("ONES", hopper.ONES, "columns of ones beside V, the fewest that wgmma multiplies"),
            ConstantLine("TWO_ONES", TWO_ONES[self.spec.dtype.name], f"1.0 twice, in {self.spec.dtype.name}", ctype="unsigned"),
            ConstantLine("OUTPUT_COLUMNS", "HEAD_DIM_V + ONES", "of O in registers, and of the row sums beside it"),
        ]

    def consumer_indices(self) -> list[str]:
        """Those of the indices of a head that a consumer's threads need."""
        v = self.variant
        functions = [f for f in (*v.of_scores, v.head_scale, v.one_score, v.mask, v.dropout, v.scale_of_keys) if f is not None]
        elements = (*v.row_elements, *v.pair_elements)
        needed = {n for f in functions for n in f.arguments} | {n for e in elements for n in e.indices}
        if v.by_row or v.classify is None:
            needed |= {*v.kv_range.arguments}
        return [n for n in OF_HEAD if n in needed]

    def context(self) -> dict[str, object]:
        v, bounds, by_products = self.variant, self.plan.bounds, self.own.row_sums == "products"
        softmax = self.spec.normalize == "softmax"
        of_tiles = [f for f in (v.kv_range, v.classify) if f is not None]
        key_vector_indices = {n for e in v.key_vectors for n in e.indices}
        return super().context() | {
            "places_rows": self.places_rows(),
            "ranges_of": "consumer" if self.own.per_consumer_range else "block",
            "queries_in": "registers" if self.own.q_in_registers else "shared",
            "heaviest_rounded": self.own.row_sums == "weights, the heaviest rounded",
            "adaptive_threshold": self.own.adaptive_threshold,
            "adds_weights": softmax and not by_products,
            "argument_members": argument_members(self.kernels()["hopper"].entry.parameters, v),
            # tiles
            "tiles_by_row": any({"q_lo", "q_hi"} & {*f.arguments} for f in of_tiles),
            "tiles_read_captured": bool(self.captured(*of_tiles, scale=False)),
            "tile_indices": [n for n in OF_HEAD if v.classify is None and n in v.kv_range.arguments],
            "partial_below": bounds.full_begin not in (None, ZERO),
            "partial_above": bounds.full_end not in (None, KEYS.length),
            "row_begins": v.by_row and bounds.begin is not ZERO,
            # what threads read
            "consumer_indices": self.consumer_indices(),
            "lanes_work": " and ".join(["look for tiles"] * bool(v.classify) + ["read key vectors"] * bool(v.key_vectors)),
            "mask_vectors": v.classify is not None and any(not e.in_score for e in v.key_vectors),  # for partial tiles alone
            "key_vector_indices": key_vector_indices,
            "producer_indices": [n for n in OF_HEAD if n in {"b_idx", *key_vector_indices}],
            "pair_steps": self.pair_steps,
        }


TWO_ONES = {"fp16": "0x3c003c00", "bf16": "0x3f803f80"}
WARP_ROWS = 16  # per warp; a warpgroup has 64
OUTPUT_SLABS = "of a warp's rows on their way to global memory"
OF_HEAD = ("h_idx", "b_idx")
RELEASES = {
    True: ("4 * CONSUMERS", "arrivals that empty a stage: one of each warp of a consumer"),
    False: ("CONSUMERS", "arrivals that empty a stage: one of each consumer"),
}
