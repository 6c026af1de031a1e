"""What each schedule's file holds: its kernels, numbers, primitives and sections."""

from __future__ import annotations

from typing import Any

from attngen.emit import abi
from attngen.emit.file import ConstantLine, File, KernelText
from attngen.emit.kernel_source import MULTIPROCESSORS, CeilDiv, Parameter
from attngen.emit.wgmma import Wgmma
from attngen.plan import bounded, fused_mma, fused_simt, hopper, tiled
from attngen.plan.plan import Roles
from attngen.plan.tiles import KV_LEN, Q_HI, Q_LO
from attngen.plan.tiling import Tile
from attngen.spec.expr import names_in
from attngen.spec.operator import ZERO


class ThreeKernels(File):
    """The naive and the tiled rung: scores, row weights, weighted sum."""

    def weights_section(self) -> dict[str, str]:
        title = {"softmax": "Softmax", "sigmoid": "Sigmoid"}.get(self.spec.normalize)
        return {} if title is None else {"weights": title}

    def three_kernels(self, scores: KernelText, weights: KernelText, weighted_sum: KernelText) -> dict[str, KernelText]:
        normalized = {} if self.spec.normalize == "none" else {"weights": weights}
        return {"scores": scores} | normalized | {"weighted_sum": weighted_sum}

    def scores_parameters(self) -> list[Parameter]:
        return [
            self.pointer("Q"),
            self.pointer("K"),
            Parameter("S", "float*", "data", "S"),
            *abi.strides("Q"),
            *abi.strides("K"),
            *self.sizes(),
        ]

    def weights_parameters(self) -> list[Parameter]:
        return [Parameter("S", "float*", "data", "S"), *self.lse_parameters(), *self.sizes()]

    def weighted_sum_parameters(self) -> list[Parameter]:
        return [
            Parameter("P", "const float*", "data", "S"),
            self.pointer("V"),
            self.pointer("O", writable=True),
            *abi.strides("V"),
            *abi.strides("O"),
            *self.sizes(),
        ]

    def primitives(self) -> list[str]:
        return self.conversions()


def thread_grid(row_threads: int, column_threads: int, dims: str) -> list[ConstantLine]:
    """A block's threads as a grid over a tile of S, and over its rows of O, of which a block has `dims` dimensions."""
    return [
        ConstantLine("int", "ROW_THREADS", str(row_threads), "of the block's threads, as a grid over a tile"),
        ConstantLine("int", "COLUMN_THREADS", str(column_threads)),
        ConstantLine("int", "ROWS", "BLOCK_Q / ROW_THREADS", "of a thread"),
        ConstantLine("int", "COLUMNS", "BLOCK_KV / COLUMN_THREADS", "keys of a thread in a tile"),
        ConstantLine("int", "DIMS", f"{dims} / COLUMN_THREADS", "dimensions of O of a thread"),
    ]


class Naive(ThreeKernels):
    def sections(self) -> dict[str, str]:
        return {
            "numbers": "Numbers",
            "primitives": "Primitives",
            "variant": "This variant's score and mask",
            "scores": "Scores",
            **self.weights_section(),
            "weighted_sum": "Weighted sum",
        }

    def kernels(self) -> dict[str, KernelText]:
        v, threads = self.variant, self.plan.threads
        return self.three_kernels(
            self.kernel(
                "scores",
                self.head_grid(CeilDiv("kv_len", threads), "q_len"),
                [*self.scores_parameters(), *self.captured(v.score, v.mask)],
            ),
            self.kernel(
                self.spec.normalize,
                self.head_grid(CeilDiv("q_len", threads)),
                [*self.weights_parameters(), *self.captured(v.sink, scale=False)],
            ),
            self.kernel(
                "weighted_sum",
                self.head_grid("q_len"),
                self.weighted_sum_parameters(),
                threads=self._d_threads(),
                threads_name="THREADS_D",
            ),
        )

    def _d_threads(self) -> int:
        return -(-self.spec.head_dim_v // 32) * 32

    def constants(self) -> list[ConstantLine]:
        return [
            *self.infinity(),
            *self.numbers(),
            ConstantLine("int", "THREADS", str(self.plan.threads)),
            ConstantLine("int", "THREADS_D", str(self._d_threads()), "the head size of V in whole warps"),
            ConstantLine("int", "SLICE", "16", SLICE),
        ]


class Tiled(ThreeKernels):
    def primitives(self) -> list[str]:
        return [*super().primitives(), *self.reductions()]

    def sections(self) -> dict[str, str]:
        prepass = {"tile_ranges": "Tile ranges of captured vectors"} if self.variant.spans else {}
        return {
            "numbers": "Numbers",
            "primitives": "Primitives",
            "variant": "This variant's score and mask",
            "tiles": "Which tiles are visited",
            **prepass,
            "loads": "Loading tiles",
            "scores": "Scores",
            **self.weights_section(),
            "weighted_sum": "Weighted sum",
        }

    def context(self) -> dict[str, Any]:
        v, plan = self.variant, self.plan
        rows, columns, _ = tiled.outputs(Tile(plan.block_q, plan.block_kv, plan.stages, plan.warps))
        context = super().context()
        return context | {
            "rows": rows,
            "columns": columns,
            "slice": tiled.slice_of(self.spec),
            "rows_of_block": bool({"q_lo", "q_hi", "q_tile"} & set(context["tile_arguments"])),
            "scores_read_captured": self.reads_captured(v.score, v.mask, v.kv_range, v.classify),
            "weights_read_captured": self.reads_captured(v.sink, v.kv_range, v.classify, scale=False),
            "tiles_read_captured": self.reads_captured(v.kv_range, v.classify, scale=False),
        }

    def kernels(self) -> dict[str, KernelText]:
        v = self.variant
        q_blocks = CeilDiv("q_len", self.plan.block_q)
        d_blocks = -(-self.spec.head_dim_v // tiled.BLOCK_DV)
        return self.three_kernels(
            self.kernel(
                "scores",
                self.head_grid(CeilDiv("kv_len", self.plan.block_kv), q_blocks),
                [*self.scores_parameters(), *self.captured(v.score, v.mask, v.kv_range, v.classify)],
            ),
            self.kernel(
                self.spec.normalize,
                self.head_grid("q_len"),
                [*self.weights_parameters(), *self.captured(v.sink, v.kv_range, v.classify, scale=False)],
            ),
            self.kernel(
                "weighted_sum",
                self.head_grid(d_blocks, q_blocks),
                [*self.weighted_sum_parameters(), *self.captured(v.kv_range, v.classify, scale=False)],
            ),
        )

    def constants(self) -> list[ConstantLine]:
        plan = self.plan
        row_threads, column_threads = tiled.thread_grid(plan.warps)
        return [
            *self.infinity(),
            *self.numbers(),
            ConstantLine("int", "BLOCK_Q", str(plan.block_q), "query rows of a block"),
            ConstantLine("int", "BLOCK_KV", str(plan.block_kv), "keys of a tile"),
            ConstantLine("int", "BLOCK_DV", str(tiled.BLOCK_DV), "dimensions of O of a block"),
            ConstantLine("int", "THREADS", str(plan.threads)),
            *thread_grid(row_threads, column_threads, "BLOCK_DV"),
            ConstantLine("int", "SLICE", str(tiled.slice_of(self.spec)), SLICE),
            ConstantLine("int", "PAD", str(tiled.pad_of(self.spec)), TRANSPOSED_PAD),
            *([ConstantLine("int", "WARPS", "THREADS / 32")] if self.spec.normalize == "softmax" else []),
        ]


class Fused(File):
    """What the schedules share that keep a tile of scores in registers."""

    def fused_kernel(self, axes: str) -> dict[str, KernelText]:
        v = self.variant
        parameters = [
            self.pointer("Q"),
            self.pointer("K"),
            self.pointer("V"),
            self.pointer("O", writable=True),
            *(p for t in "QKVO" for p in abi.strides(t, axes)),
            *self.lse_parameters(),
            *self.sizes(),
            *(abi.captured(v) if v.key_vectors else self.captured(v.score, v.mask, v.sink, v.kv_range, v.classify)),
        ]
        grid = self.head_grid(CeilDiv("q_len", self.plan.block_q))
        bounds = "THREADS, BLOCKS" if self.plan.blocks else "THREADS"
        return {"fused": self.kernel("fused", grid, parameters, threads_name=bounds, shared=True)}

    def sections(self) -> dict[str, str]:
        prepass = {"tile_ranges": "Tile ranges of captured vectors"} if self.variant.spans else {}
        return {
            "numbers": "Numbers",
            "primitives": "Primitives",
            "variant": "This variant's score and mask",
            "tiles": "Which tiles are visited",
            **prepass,
            "loads": "Loading tiles",
            "fused": "The fused kernel",
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

    def exponentials(self) -> list[str]:
        """The primitives of a softmax in base 2, which comes with tensor cores."""
        return ["exp2_log2"] if self.plan.on_tensor_cores and self.spec.normalize == "softmax" else []

    def sharing(self) -> list[ConstantLine]:
        """What the order of blocks goes by, where some rows have more keys to visit than others."""
        if self.plan.bounds.even:
            return []
        rows = f"(32 << 20) / ({self.spec.dtype.bytes} * (HEAD_DIM + HEAD_DIM_V))"
        return [ConstantLine("int", "L2_ROWS", rows, "keys and values that blocks share in L2")]


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
        return self.fused_kernel("bhs")

    def primitives(self) -> list[str]:
        dtype = self.spec.dtype.name
        split = fused_mma.operands(self.spec).split
        odd = ["ldmatrix_x2"] if self.spec.head_dim_v % 16 and not split else []
        return [
            *self.conversions(elementwise=False),
            *([f"pack_{dtype}"] if not split else ["pack_bf16"] if split == "bf16" else []),
            *self.exponentials(),
            *self.variant.primitives,
            "special_registers",
            "cp_async",
            "ldmatrix",
            *([] if split else ["ldmatrix_trans"]),
            *odd,
            *([f"mma_{split}", f"split_{split}"] if split else [f"mma_{dtype}"]),
        ]

    def context(self) -> dict[str, Any]:
        operands = fused_mma.operands(self.spec)
        return super().context() | {
            "chunk": fused_mma.chunk(self.spec),
            "mma": "mma_16x8x8" if operands.split == "tf32" else "mma_16x8x16",
            "split": operands.split,
        }

    def constants(self) -> list[ConstantLine]:
        padded, wide = fused_mma.padded_head_dim(self.spec), fused_mma.width_of_v(self.spec)
        split = fused_mma.operands(self.spec).split
        v_width = "V_WIDTH" if split else "HEAD_DIM_V"
        what = "" if padded == self.spec.head_dim else f"{padded - self.spec.head_dim} zeros fill the last step of Q K^T"
        return [
            *self.fused_numbers(),
            *([ConstantLine("float", "SLACK", "8.0f", SLACK)] if self.spec.normalize == "softmax" else []),
            *self.sharing(),
            *([ConstantLine("int", "BLOCKS", str(self.plan.blocks), BLOCKS)] if self.plan.blocks else []),
            *(self.split_constants() if split else []),
            *thread_grid(8 * self.plan.warps, 4, v_width),
            ConstantLine("int", "ROW_BLOCKS", "ROWS / 2", "of 16 rows, of a warp"),
            ConstantLine(
                "int",
                "K_STEPS",
                "HEAD_DIM / 16" if padded == self.spec.head_dim else str(padded // 16),
                "steps of 16 over the head size",
            ),
            ConstantLine("int", "PAD", str(fused_mma.chunk(self.spec))),
            ConstantLine("int", "QK_WIDTH", "16 * K_STEPS", what),
            ConstantLine("int", "Q_STRIDE", "QK_WIDTH + PAD" if padded >= wide else f"{v_width} + PAD"),
            ConstantLine("int", "K_STRIDE", "QK_WIDTH + PAD"),
            ConstantLine("int", "V_STRIDE", f"{v_width} + PAD"),
        ]

    def split_constants(self) -> list[ConstantLine]:
        """Those of split operands."""
        plan, wide = self.plan, fused_mma.width_of_v(self.spec)
        tile = Tile(plan.block_q, plan.block_kv, plan.stages, plan.warps)
        return [
            ConstantLine("int", "SUMMED", str(fused_mma.summed(tile)), "sixteens of keys whose terms are summed by themselves"),
            ConstantLine(
                "int", "V_WIDTH", str(wide), "" if wide == self.spec.head_dim_v else "HEAD_DIM_V in whole steps of 16"
            ),
        ]


class ByTma(Fused):
    """What the rungs of Hopper share: TMA copies slabs of tiles, warpgroups multiply them."""

    def maps(self) -> list[Parameter]:
        """Q, K and V, a tile at a time; Q a consumer's rows at a time where these are not in their order."""
        own_tiles = self.plan.roles is not None and self.plan.roles.own_tiles
        q_rows = hopper.WARPGROUP_ROWS if own_tiles else self.plan.block_q
        return [abi.tensor_map("Q", q_rows), *(abi.tensor_map(t, self.plan.block_kv) for t in "KV")]

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
            ConstantLine("int", "Q_SLAB", "BLOCK_Q * ROW_BYTES", "bytes"),
            ConstantLine("int", "KV_SLAB", "BLOCK_KV * ROW_BYTES"),
        ]


class FusedWgmma(ByTma):
    def kernels(self) -> dict[str, KernelText]:
        v = self.variant
        parameters = [
            *self.maps(),
            self.pointer("O", writable=True),
            *abi.strides("O", "bhs"),
            *self.lse_parameters(),
            *self.sizes(),
            *self.captured(v.score, v.mask, v.sink, v.kv_range, v.classify),
        ]
        grid = self.head_grid(CeilDiv("q_len", self.plan.block_q))
        return {"wgmma": self.kernel("wgmma", grid, parameters, shared=True)}

    def primitives(self) -> list[str]:
        return [
            *self.conversions(elementwise=False),
            f"pack_{self.spec.dtype.name}",
            *self.exponentials(),
            *self.variant.primitives,
            "special_registers",
            "mbarrier",
            "mbarrier_wait",
            "tma_load",
            "proxy_fence",
            "wgmma",
        ]

    def products(self) -> list[Wgmma]:
        dtype = self.spec.dtype.name
        return [
            Wgmma("wgmma_qk", self.plan.block_kv, dtype, a_in_registers=False),
            Wgmma("wgmma_pv", self.spec.head_dim_v, dtype, a_in_registers=True, b_transposed=True),
        ]

    def constants(self) -> list[ConstantLine]:
        plan, spec = self.plan, self.spec
        return [
            *self.fused_numbers(),
            *([ConstantLine("float", "SLACK", "8.0f", SLACK)] if spec.normalize == "softmax" else []),
            *self.sharing(),
            *thread_grid(8 * plan.warps, 4, "HEAD_DIM_V"),
            ConstantLine("int", "STAGES", str(plan.stages), "tiles of K, and of V, in shared memory"),
            *self.slab_constants(),
        ]


class Hopper(ByTma):
    def kernels(self) -> dict[str, KernelText]:
        v = self.variant
        parameters = [
            *self.maps(),
            abi.tensor_map("O", WARP_ROWS),
            *self.lse_parameters(),
            Parameter("next_work", "unsigned*", "data", "next_work"),
            *abi.sizes(self.spec, "batch", "q_heads", "kv_heads", "q_len", "kv_len"),
            *(abi.captured(v) if v.key_vectors else self.captured(v.score, v.mask, v.sink, v.kv_range, v.classify)),
        ]
        grid = self.head_grid(CeilDiv("q_len", self.plan.block_q))
        bounds = "THREADS, 1"
        return {"hopper": self.kernel("hopper", grid, parameters, None, bounds, shared=True, at_most=MULTIPROCESSORS)}

    def sections(self) -> dict[str, str]:
        sections = super().sections()
        return {**sections, "fused": "The kernel: one warpgroup copies, the others multiply"}

    def primitives(self) -> list[str]:
        return [
            *self.conversions(elementwise=False),
            f"pack_{self.spec.dtype.name}",
            *self.exponentials(),
            *(["fast_log2"] if hopper.adapts_slack(self.spec) else []),
            *self.variant.primitives,
            "special_registers",
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

    def products(self) -> list[Wgmma]:
        dtype = self.spec.dtype.name
        return [
            Wgmma("wgmma_qk", self.plan.block_kv, dtype, a_in_registers=self.plan.q_in_registers),
            Wgmma(
                "wgmma_pv",
                self.spec.head_dim_v + (hopper.ONES if self.roles.row_sums == "products" else 0),
                dtype,
                a_in_registers=True,
                b_transposed=True,
            ),
        ]

    @property
    def roles(self) -> Roles:
        assert self.plan.roles is not None
        return self.plan.roles

    def constants(self) -> list[ConstantLine]:
        plan, spec = self.plan, self.spec
        return [
            *self.fused_numbers(),
            *(self.softmax_constants() if spec.normalize == "softmax" else []),
            *self.sharing(),
            ConstantLine("int", "STAGES", str(plan.stages), "tiles of K, and of V, in shared memory"),
            ConstantLine("int", "CONSUMERS", str(self.roles.consumers), "warpgroups that multiply, 64 rows each"),
            *([ConstantLine("int", "WARPGROUP_ROWS", str(hopper.WARPGROUP_ROWS))] if self.roles.own_tiles else []),
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
            ConstantLine("float", "SLACK", "8.0f", SLACK + (", at most" if hopper.adapts_slack(self.spec) else "")),
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
        tiles_read_captured = self.reads_captured(v.kv_range, v.classify, scale=False)
        warp_copies_keys = v.classify is not None or bool(v.key_vectors)
        # tiles of the block below a consumer's own stand between its last P V and the next rows
        passes_below = self.roles.own_tiles and bool(names_in(self.plan.bounds.kv_begin) & {Q_LO.name, Q_HI.name})
        return super().context() | {
            "keeps_maximum": self.spec.normalize == "softmax" and not self.plan.is_bounded,
            "adapts_slack": hopper.adapts_slack(self.spec),
            "maximum_of_lanes": self.spec.normalize == "softmax" and not self.plan.is_bounded,
            "sum_of_lanes": self.spec.normalize == "softmax"
            and (self.roles.row_sums != "products" or hopper.adapts_slack(self.spec)),
            "own_tiles": self.roles.own_tiles,
            "passes_below": passes_below,
            "scores_ahead": self.plan.q_in_registers and not passes_below,
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
            "mask_vectors": any(not e.in_score for e in v.key_vectors),
            "key_vector_indices": sorted(frozenset().union(*(e.indices for e in v.key_vectors))),
        }


SLACK = "powers of 2 by which a score may exceed the kept maximum"
TWO_ONES = {"fp16": "0x3c003c00", "bf16": "0x3f803f80"}
BLOCKS = "that an SM is to hold at once: the compiler may use the registers of so many"
WARP_ROWS = 16  # of a warpgroup's 64
PAD = "floats at the end of each row in shared memory: its neighbours start in other banks"
TRANSPOSED_PAD = "floats after every fourth row of a transposed tile: what a warp writes lies in different banks"
SLICE = "terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)"

FILES: dict[str, type[File]] = {
    "naive": Naive,
    "tiled": Tiled,
    "fused_simt": FusedSimt,
    "fused_mma": FusedMma,
    "wgmma": FusedWgmma,
    "hopper": Hopper,
}
