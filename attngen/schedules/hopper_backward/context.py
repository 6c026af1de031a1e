"""What the template of the Hopper backward reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attngen.emit import abi, comment_text
from attngen.emit.constants import ConstantLine
from attngen.emit.gradient_functions import own_indices
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import MULTIPROCESSORS, Axis, CeilDiv, PackedBlocks, Parameter, Several, Tensor, free
from attngen.emit.variant import Function
from attngen.emit.wgmma import Wgmma
from attngen.plan.bounded_scores import LARGE_EXPONENT
from attngen.schedules.hopper_backward.form import OF_ROWS, WARPGROUP, clears_special, pair_slots
from attngen.schedules.hopper_backward.plan import HopperBackwardPlan
from attngen.schedules.parts.fused_context import LARGE, NOT_A_NUMBER
from attngen.schedules.parts.tma_context import ByTma, argument_members, pair_lanes
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, slabs
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import gradient_argument
from attngen.spec.operator import FLOAT_ONE

DELTA_THREADS = 512  # at most; a thread then loads at most eight rows
WARP_ROWS = 16  # per warp; a warpgroup has 64
# the template of the consumers of a kernel of keys, by how they divide their work
CONSUMERS_OF_KEYS = {
    "keys": "keys_consumer",
    "adding": "keys_consumer",
    "split": "split_consumers",
    "halves": "halves_consumers",
}


@dataclass(frozen=True, slots=True)
class RoleMembers:
    """The members of the roles of one kernel, as its template sees them."""

    kernel: KernelText
    arguments: list[tuple[str, str]]  # arguments of the call: lines that declare them, and their values
    indices: tuple[str, ...]  # where a consumer's pairs are
    visit_heads: bool  # the head of a visited tile is told: pairs need it
    registers: tuple[int, int]  # per thread of the producer, and of a consumer
    places_held: bool  # a consumer's thread needs the numbers of the keys, or rows, that it holds


class HopperBackward(ByTma):
    own: HopperBackwardPlan

    @property
    def lse_rest(self) -> bool:
        """Whether lse is the sum of two numbers, so that scores may be large."""
        return "lse_rest" in self.plan.saved

    # workspaces

    def workspace(self, name: str) -> tuple[Axis, ...]:
        return {"row_numbers": self._axes_of_numbers, "dq_sums": self._axes_of_dq, "part_sums": self._axes_of_parts}[name]()

    def _row_blocks(self, *of_block: int) -> tuple[Axis, ...]:
        """The blocks of rows of every head, each with numbers in these dimensions."""
        heads, inner = abi.head_axes(self.spec)[0], (Axis("", n) for n in of_block)
        if self.spec.kernel.is_packed:
            return heads, Axis("", PackedBlocks("total_q", self.own.held, "batch")), *inner
        return free("batch"), heads, Axis("", CeilDiv("q_len", self.own.held)), *inner

    def _axes_of_numbers(self) -> tuple[Axis, ...]:
        """lse in powers of 2, delta, and what is subtracted from large scores: of whole blocks of rows, tile by tile."""
        return self._row_blocks(self.own.held // self.plan.block_q, self.own.row_numbers, self.plan.block_q)

    def _axes_of_dq(self) -> tuple[Axis, ...]:
        """Sums of dQ before softmax_scale and rounding: each consumer's part of a tile, in the order of its registers."""
        parts = (self.own.consumers,) if self.own.dq_parts == "rows" else ()
        return self._row_blocks(self.own.held // self.plan.block_q, *parts, self.own.dq_columns // 8, WARPGROUP, 4)

    def _axes_of_parts(self) -> tuple[Axis, ...]:
        """dK and dV of each part of a group, before softmax_scale and rounding: of every work tile, in the order of the
        registers of 64 keys; nothing if groups have one part."""
        parts, keys, columns = self.own.parts, self.own.held_keys, self._part_columns
        assert parts is not None
        of_tile = (Axis("", CeilDiv("kv_len", keys)), Axis("", parts), Axis("", keys), Axis("", columns))
        return Axis("", Several(parts)), free("batch"), abi.head_axes(self.spec)[1], *of_tile

    @property
    def _part_columns(self) -> int:
        """Columns of dK and dV as a part of a group has them: where they are transposed, whole slabs."""
        sizes = (self.spec.head_dim, self.spec.head_dim_v)
        return SLAB * sum(map(slabs, sizes)) if self.own.by_halves else sum(sizes)

    # kernels

    def kernels(self) -> dict[str, KernelText]:
        written = {
            "delta": self._delta,
            "special_rows": self._special_rows,
            "dk_dv": self._dk_dv,
            "add_parts": self._add_parts,
            "dq": self._dq,
            "convert_dq": self._convert_dq,
        }
        return {name: written[name]() for name in self.own.kernels}

    def _delta(self) -> KernelText:
        of_rows = ("lse", *(["lse_rest"] if self.lse_rest else []), *(["dlse"] if self.spec.lse else []))
        matrices = ("O", "dO", *(["Q"] if clears_special(self.spec) else []))
        parameters = [
            *(self.pointer(t) for t in matrices),
            *(abi.data(t, "float") for t in of_rows),
            *self._numbers(writable=True),
            *self._dq_sums(),
            *(p for t in (*matrices, *of_rows) for p in self.strides(t, "bhs")),
            *self._row_sizes(),
        ]
        grid = self.head_grid(CeilDiv("q_len", self.own.held))
        return self.kernel("delta", grid, parameters, threads=self._delta_threads, threads_name="DELTA_THREADS")

    def _special_rows(self) -> KernelText:
        matrices = ("Q", "dO")
        parameters = [
            *(self.pointer(t) for t in matrices),
            *self._numbers(writable=True),
            *(p for t in matrices for p in self.strides(t, "bhs")),
            *self._row_sizes(),
        ]
        grid = self.head_grid(CeilDiv("q_len", self.own.held))
        return self.kernel("special_rows", grid, parameters, threads=self._delta_threads, threads_name="SPECIAL_THREADS")

    def _dk_dv(self) -> KernelText:
        blocks = CeilDiv("kv_len", self.own.held_keys)
        grid = self.kv_head_grid(*([self.own.parts] if self.own.parts else []), blocks)
        seen = (("Q", "dO"), self.plan.block_q)
        sums = [*self._dq_sums(), *self._part_sums(writable=True)]
        parameters = self._parameters(("KV", self.own.held_keys), seen, ("dK", "dV"), *sums, *self._written_pairs())
        return self.kernel("dk_dv", grid, parameters, None, "THREADS, 1", shared=True, at_most=MULTIPROCESSORS)

    def _add_parts(self) -> KernelText:
        assert self.own.parts is not None
        blocks = (self._sums_of_parts, CeilDiv("kv_len", self.own.held_keys))
        grid = (Several(self.own.parts), *self.kv_head_grid(*blocks))
        parameters = [
            *(self.tensor_map(t, self._stored_keys) for t in ("dK", "dV")),
            *self._part_sums(),
            *abi.sizes(self.spec, "kv_heads", "kv_len"),
            *self.captured(self.variant.dropout),
        ]
        return self.kernel("add_parts", grid, parameters, WARPGROUP, "128")

    @property
    def _sums_of_parts(self) -> int:
        """Blocks that add up the parts of the keys of a block: one for 64 keys of dK or of dV, or for a slab of all keys."""
        if self.own.by_halves:
            return self._part_columns // SLAB
        return 2 * self.own.held_keys // WARPGROUP_ROWS

    @property
    def _row_lanes(self) -> int:
        """That share a row of O and dO, 8 columns each."""
        return next(n for n in (1, 2, 4, 8, 16, 32) if 8 * n >= self.spec.head_dim_v)

    @property
    def _delta_threads(self) -> int:
        return min(DELTA_THREADS, self.own.held * self._row_lanes)

    @property
    def _stored_keys(self) -> int:
        """Keys of dK or dV that one copy has: those of a warp, or of the block where each warp has some columns of all."""
        return self.own.held_keys if self.own.by_halves else WARP_ROWS

    def _part_sums(self, writable: bool = False) -> list[Parameter]:
        """The sums of dK and dV of each part of a group, and the number of parts, if there are groups."""
        if self.own.parts is None:
            return []
        count = Parameter("parts", "int", "parts", "", formula=self.own.parts)
        return [abi.data("part_sums", "float", writable=writable), count]

    def _dq(self) -> KernelText:
        grid = self.head_grid(CeilDiv("q_len", self.own.held))
        parameters = self._parameters((("Q", "dO"), self.own.held), ("KV", self.plan.block_kv), ("dQ",))
        return self.kernel("dq", grid, parameters, None, "THREADS, 1", shared=True, at_most=MULTIPROCESSORS)

    def _convert_dq(self) -> KernelText:
        grid = self.head_grid(CeilDiv("q_len", self.own.held))
        parameters = [
            self.tensor_map("dQ", WARP_ROWS),
            abi.data("dq_sums", "float"),
            *self._row_sizes(),
            *self.captured(),
        ]
        return self.kernel("convert_dq", grid, parameters, 128 * self.own.consumers, "128 * CONSUMERS")

    def _dq_sums(self) -> list[Parameter]:
        """The sums of dQ that blocks of keys add to, if they do."""
        return [abi.data("dq_sums", "float", writable=True)] if self.own.dq == "additions" else []

    def _written_pairs(self) -> Iterator[Parameter]:
        """The gradients of captured tensors that are dS of each pair."""
        for tensor in self._gradients_of_pairs:
            yield abi.data(tensor.name, DTYPES[tensor.dtype].cuda, writable=True)
            yield from abi.all_strides(tensor)

    @property
    def _gradients_of_pairs(self) -> list[Tensor]:
        return [self.tensors[gradient_argument(name)] for name in self.plan.written_pairs]

    def _parameters(
        self, held: tuple[Iterable[str], int], seen: tuple[Iterable[str], int], results: tuple[str, ...], *more: Parameter
    ) -> list[Parameter]:
        """Of a kernel of products; tensors `held` and `seen` with the rows that one copy of them has."""
        return [
            *(self.tensor_map(t, rows) for tensors, rows in (held, seen) for t in tensors),
            *(self.tensor_map(t, self._stored_keys if t != "dQ" else WARP_ROWS) for t in results),
            *self._numbers(),
            *more,
            Parameter("next_work", "unsigned*", "data", "next_work"),
            *abi.sizes(self.spec, *self._totals("batch"), "q_heads", "kv_heads", "q_len", "kv_len"),
            self.heads_in_l2(),
            *(abi.captured(self.variant) if self.variant.pair_elements else self.captured(*self._functions)),
        ]

    def _row_sizes(self) -> list[Parameter]:
        """Of kernels of blocks of rows."""
        return abi.sizes(self.spec, *(self._totals("batch") if self.spec.kernel.is_packed else ()), "q_heads", "q_len")

    def _totals(self, *sizes: str) -> tuple[str, ...]:
        """`sizes`, and in packed storage the number of all rows: blocks of rows are numbered by it."""
        return (*sizes, "total_q") if self.spec.kernel.is_packed else sizes

    def _numbers(self, writable: bool = False) -> list[Parameter]:
        """lse2 and delta of every row, if there are any."""
        if "row_numbers" not in self.plan.workspaces:
            return []
        return [abi.data("row_numbers", "RowNumbers", writable=writable, name="numbers")]

    @property
    def _functions_of_pairs(self) -> list[Function]:
        v = self.variant
        return [f for f in (v.score, v.derivative, v.mask, v.dropout) if f is not None]

    @property
    def _functions(self) -> list[Function | None]:
        return [*self._functions_of_pairs, self.variant.kv_range, self.variant.q_range, self.variant.classify]

    def members(self, kernel: KernelText, keys: bool) -> RoleMembers:
        """The members of a kernel's roles; `keys`: whether its blocks hold keys."""
        read = {n for f in self._functions_of_pairs for n in f.arguments}
        if self.variant.pair_elements:
            read |= {"b_idx", "h_idx", "q_idx", "kv_idx"}
        if self.variant.dropout is not None:
            read |= {"q_idx", "kv_idx"}
        held, of_held = ("kv_lo", {"kv_idx", "kv_first"}) if keys else ("q_lo", {"q_idx", "q_first"})
        held_read = not read.isdisjoint(of_held)
        indices = [*([held] if held_read else []), *(n for n in ("h_idx", "b_idx") if n in read)]
        return RoleMembers(
            kernel,
            argument_members(kernel.entry.parameters, self.variant, exponent=True),
            tuple(indices),
            visit_heads=keys and "h_idx" in read,
            registers=self.own.key_registers if keys else self.own.row_registers,
            places_held=held_read,
        )

    # the file

    def context(self) -> dict[str, object]:
        pair, kept = comment_text.product_equations(self.spec, self.gradient), self.spec.dropout is not None
        kernels = self.kernels()
        of_keys, of_rows = kernels.get("dk_dv"), kernels.get("dq")
        return super().context() | {
            "number_kernels": [name for name in self.own.kernels if name in OF_ROWS],
            "gradient_kernels": [self._file_of(name) for name in self.own.kernels if name not in OF_ROWS],
            "keys_by": self._keys_by,
            "consumers_of_keys": CONSUMERS_OF_KEYS[self._keys_by],
            "of_keys": self.members(of_keys, True) if of_keys else None,
            "of_rows": self.members(of_rows, False) if of_rows else None,
            "copies": "hopper_backward",
            "row_chunks": "one_chunk",
            "adds_dq": self.own.dq == "additions",
            "last_part_is_smaller": self._last_fours < self.own.dq_registers // 4,
            "key_equations": [*pair, f"dV = sum of {'(D * P)^T' if kept else 'P^T'} dO,  dK = softmax_scale * sum of dS^T Q"],
            "query_equations": [*pair, "dQ = softmax_scale * sum of dS K"],
            "dv_factor": "kept_factor(dropped_weights(in))" if kept else "1.0f",
            "offsets": self.lse_rest,
            "clears_special": clears_special(self.spec),
            "special_elements": "cleared" if clears_special(self.spec) else "kept",
            "lse_shows_q": self.gradient.ds is FLOAT_ONE and self.spec.sink is None,
            "weight_form": "exp2(c S - lse2)" if self.spec.normalize == "softmax" else self.spec.normalize,
            "written_pairs": [
                (tensor.name, own_indices(self.gradient.of(name)))
                for name, tensor in zip(self.plan.written_pairs, self._gradients_of_pairs, strict=True)
            ],
        }

    def products(self) -> list[Wgmma]:
        spec, dtype = self.spec, self.spec.dtype.name
        of_keys = "dk_dv" in self.own.kernels
        if self.own.by_halves:
            return self._products_of_halves()
        from_registers, from_shared = self.own.keys_in_registers, "dq" in self.own.kernels or not self.own.keys_in_registers
        return [
            *([Wgmma("wgmma_pairs", self.plan.block_q, dtype)] if from_shared else []),
            *([Wgmma("wgmma_held", self.plan.block_q, dtype, a_in_registers=True)] if from_registers else []),
            Wgmma("wgmma_dqk", spec.head_dim, dtype, a_in_registers=True, b_transposed=True),
            *([Wgmma("wgmma_dv", spec.head_dim_v, dtype, a_in_registers=True, b_transposed=True)] if of_keys else []),
            *([Wgmma("wgmma_dq", 2 * self.own.dq_registers, dtype, b_transposed=True)] if self.own.dq == "additions" else []),
        ]

    def _products_of_halves(self) -> list[Wgmma]:
        """Those of consumers that have half of the pairs of a tile each."""
        dtype = self.spec.dtype.name
        return [
            Wgmma("wgmma_pairs", self.own.held_keys // self.own.consumers, dtype),
            Wgmma("wgmma_keys", self.own.held_keys, dtype, b_transposed=True, a_transposed=True),
            Wgmma("wgmma_dq", SLAB, dtype, b_transposed=True),
            Wgmma("wgmma_dq_own", SLAB, dtype, a_in_registers=True, b_transposed=True),
        ]

    def _file_of(self, kernel: str) -> str:
        """The template of a kernel."""
        return "add_slabs" if kernel == "add_parts" and self.own.by_halves else kernel

    @property
    def _keys_by(self) -> str:
        """How consumers of a kernel of keys divide their work."""
        own = self.own
        if own.by_halves:
            return "halves"
        return "split" if own.split_products else "adding" if own.dq == "additions" else "keys"

    @property
    def _last_fours(self) -> int:
        """Registers of the last consumer's part of dQ that hold columns of the head, in fours."""
        own = self.own
        parts_before = own.consumers - 1 if own.dq_parts == "columns" else 0
        return min(own.dq_columns // 8 - parts_before * (own.dq_registers // 4), own.dq_registers // 4)

    def _of_additions(self) -> list[ConstantLine]:
        """The constants of a consumer that adds to dQ in global memory."""
        own, steps = self.own, self.plan.block_q // 16
        sums = [
            ConstantLine("DQ_COLUMNS", own.dq_columns, "sums of a row of dQ"),
            ConstantLine("DQ_TILE", "BLOCK_Q * DQ_COLUMNS", "sums of a tile of rows"),
        ]
        if own.by_halves:
            return sums
        part = {"rows": "64 rows of a tile", "columns": f"{2 * own.dq_registers} columns of a tile"}[own.dq_parts]
        early = "of a tile, those between the products of dK; the others, between those of the next scores"
        return [
            ConstantLine("DQ_REGISTERS", own.dq_registers, f"of a consumer's part of dQ: {part}"),
            *sums,
            ConstantLine("LAST_FOURS", self._last_fours, "of the last consumer's part, which has fewer"),
            ConstantLine("EARLY_ADDITIONS", own.early_additions, early),
            ConstantLine("DV_STEPS", own.dv_steps, f"of the {steps} of dV, those in the queue before dP is awaited"),
        ]

    def constants(self) -> list[ConstantLine]:
        own, spec = self.own, self.spec
        whole = spec.head_dim_v % 16 == 0
        v_steps, what = ("HEAD_DIM_V / 16", "") if whole else ("(HEAD_DIM_V + 15) / 16", "zeros fill the last")
        each = "" if own.split_products else ", for 64 rows, or keys, each"
        return [
            *self.fused_numbers(),
            ConstantLine("LARGE", f"{LARGE_EXPONENT}f", LARGE, ctype="float"),
            NOT_A_NUMBER,
            ConstantLine("STAGES", self.plan.stages, "tiles to visit in shared memory"),
            ConstantLine("CONSUMERS", own.consumers, "warpgroups that multiply" + each),
            ConstantLine("WARPGROUP_ROWS", WARPGROUP_ROWS),
            ConstantLine(
                "BLOCK_ROWS", "CONSUMERS * WARPGROUP_ROWS", "that a block holds" + (": keys, or rows" if each else "")
            ),
            # for consumers that share the keys of a block
            ConstantLine(
                "BLOCK_KEYS",
                "BLOCK_KV" if own.by_halves else "WARPGROUP_ROWS",
                "that a block holds: both consumers multiply for them",
            ),
            ConstantLine("HALF_KEYS", "BLOCK_KEYS / CONSUMERS", "whose pairs a consumer computes"),
            ConstantLine("SLAB_COLUMNS", SLAB),
            ConstantLine(
                "BLOCK_SUMS", f"BLOCK_KEYS * {self._part_columns}", "of dK and dV of a part of a group, of a block of keys"
            ),
            ConstantLine("KEY_TILES", "BLOCK_KEYS / BLOCK_KV", "of a block of keys"),
            ConstantLine("VALUE_STAGES", own.value_stages, "tiles of values in shared memory"),
            ConstantLine("RELEASES", "128 * CONSUMERS", "of a tile: each thread of a consumer"),
            ConstantLine("PAIR_SLOTS", pair_slots(self.facts), "tiles of elements of pairs in shared memory"),
            pair_lanes(own.held_keys),
            ConstantLine("WRITERS", "64", "threads that write dS to global memory: two warps that the producer does not need"),
            ConstantLine(
                "FOLLOWERS",
                32 * bool(self.plan.staged.pairs) + 64 * bool(self.plan.written_pairs),
                "threads of its warpgroup that need to know the tiles",
            ),
            *self.slab_constants(ConstantLine("OUTPUT_SLABS", own.output_slabs, "the larger of both")),
            ConstantLine("V_STEPS", v_steps, what),
            ConstantLine("DELTA_THREADS", self._delta_threads),
            ConstantLine("SPECIAL_THREADS", self._delta_threads),
            ConstantLine("ROW_LANES", self._row_lanes, "that share a row of O and dO"),
            ConstantLine("DELTA_ROWS", own.held * self._row_lanes // self._delta_threads, "of a thread"),
            *(self._of_additions() if own.dq == "additions" else []),
        ]
