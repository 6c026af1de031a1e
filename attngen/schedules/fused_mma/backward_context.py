"""What the template of the backward of the fused schedule on tensor cores reads."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi
from attngen.emit.captured_sums import TERM_CONSTANTS, CapturedSums, Terms
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Axis, CeilDiv, Parameter, free
from attngen.emit.variant import Function
from attngen.schedules.fused_mma import backward_additions, backward_needs
from attngen.schedules.fused_mma.backward_needs import FusedMmaBackwardPlan
from attngen.schedules.parts.fused_context import NOT_A_NUMBER, Fused

DELTA_LANES = 8  # lanes that share a row: of 64 numbers of 16 bits, each loads 16 bytes
ROW_LANES = 4  # lanes that share the columns of a row of a fragment
RESULTS = {"delta": (), "dk_dv": ("dK", "dV"), "dv": ("dV",), "dk": ("dK",), "dq": ("dQ",)}
KERNELS = ("delta", "dk_dv", "dv", "dk", "dq", "convert_dq")  # all that there may be


@dataclass(frozen=True, slots=True)
class KeySum:
    """A gradient of keys, which a thread has a part of: the weights of pairs times rows."""

    result: str  # dK or dV
    weights: str  # the transposed factor's name, and where a thread has its own
    pairs: str
    rows: str  # Q or dO
    keys: str  # K or V, whose place in shared memory the sum takes in the end
    width: str  # columns in shared memory
    columns: str  # those of a warp
    dims: str
    factor: str

    @property
    def equation(self) -> str:
        return f"{self.result} += {self.weights}^T {self.rows}"


@dataclass(frozen=True, slots=True)
class KeyKernel:
    """A kernel that owns keys, as the template sees it."""

    kernel: KernelText
    title: str
    sums: tuple[KeySum, ...]  # dV first
    sums_v: bool
    needs_ds: bool
    terms: tuple[Terms, ...]  # terms of captured gradients, which the kernel adds up
    equations: tuple[str, ...]
    transposed: str


class FusedMmaBackward(Fused, CapturedSums):
    own: FusedMmaBackwardPlan

    @property
    def adds(self) -> bool:
        """Whether blocks of keys add to dQ in global memory."""
        return self.own.dq == "additions"

    def workspace(self, name: str) -> tuple[Axis, ...]:
        """Also sums of dQ before softmax_scale and rounding: of whole tiles of rows, each thread's registers in order."""
        if name != "dq_sums":
            return super().workspace(name)
        assert self.own.dq_part is not None
        added, threads = self.own.dq_part.added, self.plan.threads
        additions = self.plan.block_q * self.own.qk_width // threads // added
        tiles = free("batch"), abi.head_axes(self.spec)[0], Axis("", CeilDiv("q_len", self.plan.block_q))
        return *tiles, *(Axis("", n) for n in (additions, threads, added))

    def context(self) -> dict[str, object]:
        kernels = self.kernels()
        return super().context() | {
            "kernels": {name: kernels.get(name) for name in KERNELS},
            "key_kernels": [
                self._key_kernel(name, kernels[name]) for name in self.own.kernels if name in backward_needs.OF_KEYS
            ],
            "stored_sums": [t for t in self.term_sums("rows", "pairs", "words") if t.place == "rows" or t.of("sink")],
            "sinks": self._sinks,
            "diagonals": any(terms.diagonals for terms in self.term_sums()),
            "subtracts_first": self.subtracts_first,
            "adds": self.adds,
            "multiplied_by": "split" if self.split else "mma",
        }

    def gradient_kernels(self) -> dict[str, KernelText]:
        others = {"convert_dq": self._convert_dq} | ({} if self.sums_delta else {"delta": self._delta})
        return {name: others[name]() if name in others else self._gradients(name) for name in self.own.kernels}

    def terms_of(self, name: str) -> tuple[Terms, ...]:
        """What a kernel adds up of captured gradients."""
        names = {t.name for t in backward_needs.terms_of(self.facts, name, self.own.kernels)}
        return tuple(t for t in self.term_sums() if t.name in names)

    @property
    def _sinks(self) -> bool:
        """Whether a gradient through the sink is wanted."""
        return any(terms.of("sink") for terms in self.term_sums())

    def _functions_of(self, name: str) -> tuple[Function | None, ...]:
        v = self.variant
        of_terms = [f for terms in self.terms_of(name) for f in terms.functions.functions]
        visited = v.q_range if name in backward_needs.OF_KEYS else v.kv_range
        derivative = None if name == "delta" else v.derivative
        sink = v.sink if name == "delta" or (name == "dq" and self._sinks) else None
        return v.score, derivative, v.mask, v.dropout, visited, v.classify, sink, *of_terms

    def _delta(self) -> KernelText:
        delta = abi.data("delta", "float", writable=True)
        parameters = [
            *self.arrays(("O", "dO"), (), delta, *self._dq_sums(), axes="bhs"),
            *self.dlse_parameters(),
            *abi.sizes(self.spec, "q_heads", "q_len"),
        ]
        return self.kernel("delta", self.q_block_grid(), parameters)

    def _convert_dq(self) -> KernelText:
        parameters = [
            abi.data("dq_sums", "float"),
            self.pointer("dQ", writable=True),
            *self.strides("dQ", "bhs"),
            *abi.sizes(self.spec, "q_heads", "q_len"),
            *self.captured(),
        ]
        return self.kernel("convert_dq", self.q_block_grid(), parameters)

    def _dq_sums(self) -> list[Parameter]:
        """The sums of dQ that blocks of keys add to, if they do."""
        return [abi.data("dq_sums", "float", writable=True)] if self.adds else []

    def _gradients(self, name: str) -> KernelText:
        """A kernel that visits tiles and adds up gradients of its keys, or of its rows, or their delta."""
        results = [r for r in RESULTS[name] if self.plan.wants(r[1:].lower())]
        terms = self.terms_of(name)
        read = ("Q", "K", "V", "dO") if name != "dv" or terms else ("Q", "K", "dO")
        lse, workspaces = self.row_inputs(name), self.row_workspaces.values()
        by_query = name not in backward_needs.OF_KEYS
        parameters = [
            *(self.pointer(t) for t in read),
            *(abi.data(n, "float") for n in lse),
            *(abi.data(w, "float", writable=name == "delta") for w in workspaces),
            *(self.pointer(t, writable=True) for t in results),
            *([] if by_query else self._dq_sums()),
            *(self.term_parameters(*{t.place: "" for t in terms}) if terms else []),
            *(p for t in (*read, *results) for p in self.strides(t, "bhs")),
            *(p for n in lse for p in self.strides(n, "bhs")),
            *(self.dlse_parameters() if name == "delta" else []),
            *self.sizes(),
            *([self.heads_in_l2()] if by_query else []),
            *(abi.captured(self.variant) if self.variant.pair_elements else self.captured(*self._functions_of(name))),
        ]
        grid = self.q_block_grid() if by_query else self.kv_head_grid(CeilDiv("kv_len", self.plan.block_kv))
        return self.kernel(name, grid, parameters, threads_name=self.launch_bounds(), shared=True)

    def _key_kernel(self, name: str, kernel: KernelText) -> KeyKernel:
        terms, sums_k, sums_v = self.terms_of(name), name != "dv" and self.plan.wants("k"), name != "dk"
        needs_ds = sums_k or bool(terms)
        kept = "(D P)" if self.variant.dropout else "P"
        of_v = [f"dV = sum over query heads of {kept}^T dO"] if sums_v else []
        of_k = [f"dK = softmax_scale * sum over query heads of {self.ds}^T Q"] if sums_k else []
        of_q = [f"dQ = softmax_scale * sum over keys of {self.ds} K"] if self.adds else []
        operands = " and ".join([*(["P^T"] if sums_v else []), *([f"{self.ds}^T"] if sums_k else [])])
        are = "are A operands as they are" if sums_k and sums_v else "is an A operand as it is"
        transposed = f": {operands} {are}" if operands else ""
        equations = (*self.pair_equations(needs_ds), *of_v, *of_k, *of_q)
        sums = tuple(s for s, wanted in ((self._dv(), sums_v), (self._dk(), sums_k)) if wanted)
        title = " and ".join(s.result for s in reversed(sums)) or "Sums of keys"
        return KeyKernel(kernel, title, sums, sums_v, needs_ds, terms, equations, transposed)

    def _dv(self) -> KeySum:
        return KeySum("dV", "P", "S_frag", "dO", "V", "V_WIDTH", "V_COLUMNS", "HEAD_DIM_V", self.kept_factor)

    def _dk(self) -> KeySum:
        return KeySum("dK", self.ds, "dP_frag", "Q", "K", "QK_WIDTH", "QK_COLUMNS", "HEAD_DIM", "softmax_scale")

    @property
    def split(self) -> str:
        return self.own.split

    @property
    def scales_each(self) -> bool:
        return self.subtracts_first or super().scales_each

    @property
    def form_of_weights(self) -> str:
        if not self.subtracts_first:
            return "exp2(c S - lse)"
        return "exp2(S - lse - rest)" if "lse_rest" in self.row_values else "exp2(S - lse)"

    @property
    def subtracts_first(self) -> bool:
        """Whether lse is subtracted before the scale multiplies: a product of a score and log2(e) is rounded."""
        return bool(self.own.split) or "lse_rest" in self.row_values

    def constants(self) -> list[ConstantLine]:
        own, plan = self.own, self.plan
        filled = {own.qk_width: self.spec.head_dim, own.v_width: self.spec.head_dim_v}
        zeros = {width: f"{width - dim} zeros fill the last step of 16" if width > dim else "" for width, dim in filled.items()}
        block = ConstantLine("BLOCK", plan.block_q, "BLOCK_Q and BLOCK_KV: rows of a tile in shared memory")
        row_blocks = str(backward_additions.ROW_BLOCKS) if self.adds else f"BLOCK / (16 * {plan.warps})"
        return [
            *self.fused_numbers(),
            *self.blocks(),
            NOT_A_NUMBER,
            *([] if self.adds else [block]),
            ConstantLine("PART", own.part, "columns of S and dP that are multiplied at once"),
            ConstantLine("ROW_BLOCKS", row_blocks, "blocks of 16 rows of a warp"),
            ConstantLine("PAD", own.chunk),
            ConstantLine("QK_WIDTH", own.qk_width, zeros[own.qk_width]),
            ConstantLine("V_WIDTH", own.v_width, zeros[own.v_width]),
            *self._adding_constants(),
            ConstantLine("DELTA_LANES", DELTA_LANES, "that share a row"),
            ConstantLine("ROW_LANES", ROW_LANES, "that share a row of a fragment"),
            *TERM_CONSTANTS,
        ]

    def _adding_constants(self) -> list[ConstantLine]:
        """The steps of products, and the constants of blocks of keys that add to dQ."""
        own, part = self.own, self.own.dq_part
        if part is None:
            return [
                ConstantLine("QK_STEPS", "QK_WIDTH / 16", "of 16 terms of S"),
                ConstantLine("V_STEPS", "V_WIDTH / 16", "of dP"),
            ]
        sharing = "warps that have the same keys: each its share of a tile's rows, and of the columns of dK and dV"
        return [
            ConstantLine("SHARES", own.shares, sharing),
            ConstantLine("WARP_KEYS", "16 * ROW_BLOCKS"),
            ConstantLine("OWN_ROWS", "BLOCK_Q / SHARES", "of a tile, whose S and dP a warp computes"),
            ConstantLine("QK_COLUMNS", "QK_WIDTH / SHARES", "of dK, of a warp"),
            ConstantLine("V_COLUMNS", "V_WIDTH / SHARES", "of dV, of a warp"),
            ConstantLine("QK_STEPS", "(HEAD_DIM + 15) / 16", "of 16 terms of S: columns of zeros are left out"),
            ConstantLine("V_STEPS", "(HEAD_DIM_V + 15) / 16", "of dP"),
            ConstantLine("TILE_WIDTH", "BLOCK_Q + PAD", "of a row of P^T or dS^T in shared memory"),
            ConstantLine("DQ_ROWS", part.rows, "of dQ of a tile, of a warp"),
            ConstantLine("DQ_COLUMNS", part.columns),
            ConstantLine("DQ_CHUNKS", part.chunks, "of so many columns, which a warp multiplies one after another"),
            ConstantLine("DQ_CHUNK", "BLOCK_Q * QK_WIDTH / DQ_CHUNKS", "sums of all warps"),
        ]
