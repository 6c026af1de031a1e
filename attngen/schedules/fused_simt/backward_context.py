"""The context of the fused_simt backward's template: kernels, constants and equations."""

from __future__ import annotations

from attngen.emit import abi
from attngen.emit.captured_sums import TERM_CONSTANTS, CapturedSums, Terms
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv, Parameter
from attngen.emit.variant import Function
from attngen.plan.captured_sums import Place
from attngen.schedules.fused_simt import plan as forward
from attngen.schedules.fused_simt.backward_plan import FusedSimtBackwardPlan
from attngen.schedules.fused_simt.context import PAD
from attngen.schedules.parts.fused_context import BLOCKS


class FusedSimtBackward(CapturedSums):
    own: FusedSimtBackwardPlan

    @property
    def wants(self) -> dict[str, bool]:
        return {name: self.plan.wants(name) for name in ("q", "k", "v")}

    def context(self) -> dict[str, object]:
        return super().context() | {
            "wants": self.wants,
            "keys_need_ds": self.keys_need_ds,
            "key_sums": self.term_sums(*OF_KEYS),
            "key_equations": self._key_equations(),
        }

    @property
    def form_of_weights(self) -> str:
        return "exp(S - lse - rest)" if "lse_rest" in self.row_values else "exp(S - lse)"

    def _key_equations(self) -> list[str]:
        of_k = f"dK = softmax_scale * sum over query heads of {self.ds}^T Q"
        of_v = "dV = sum over query heads of P^T dO"
        results = [line for letter, line in (("k", of_k), ("v", of_v)) if self.wants[letter]]
        return [*self.pair_equations(self.keys_need_ds), *results]

    @property
    def keys_need_ds(self) -> bool:
        return self.wants["k"] or bool(self.term_sums(*OF_KEYS))

    def gradient_kernels(self) -> dict[str, KernelText]:
        others = {"delta": self._delta, "dk_dv": self._dk_dv}
        return {name: self._of_rows(name) if name in self.row_owners else others[name]() for name in self.own.kernels}

    def terms_of(self, name: str) -> tuple[Terms, ...]:
        """What one of `row_owners` adds up of captured gradients."""
        return self.term_sums(*OF_ROWS) if name == "dq" else ()

    def _functions_of(self, name: str) -> tuple[Function | None, ...]:
        """The functions that one of `row_owners` calls."""
        v, terms = self.variant, self.terms_of(name)
        derivative = None if name == "delta" else v.derivative
        sink = v.sink if name == "delta" or any(t.of("sink") for t in terms) else None
        of_terms = [f for t in terms for f in t.functions.functions]
        return *v.of_scores, v.mask, derivative, v.dropout, v.kv_range, v.classify, sink, *of_terms

    def _delta(self) -> KernelText:
        parameters = [
            *self.arrays(("O", "dO"), (), abi.data("delta", "float", writable=True)),
            *self.dlse_parameters(),
            *self.sizes(),
        ]
        return self.kernel("delta", self.head_grid(CeilDiv("q_len", self.plan.threads)), parameters)

    def _dk_dv(self) -> KernelText:
        v = self.variant
        results = [name for letter, name in (("k", "dK"), ("v", "dV")) if self.wants[letter]]
        grid = self.kv_head_grid(CeilDiv("kv_len", self.plan.block_kv))
        functions = (*v.of_scores, v.mask, v.derivative, v.dropout, v.q_range, v.classify, *self.term_functions(*OF_KEYS))
        parameters = [*self._operands("dk_dv", results, self.term_parameters(*OF_KEYS)), *self.captured(*functions)]
        return self.kernel("dk_dv", grid, parameters, threads_name=BOUNDS, shared=True)

    def _of_rows(self, name: str) -> KernelText:
        results = ["dQ"] if name == "dq" and self.wants["q"] else []
        grid = self.head_grid(CeilDiv("q_len", self.plan.block_q))
        others = self.term_parameters(*OF_ROWS) if name == "dq" else self.dlse_parameters()
        operands = self._operands(name, results, others)
        parameters = [*operands, *self.captured(*self._functions_of(name))]
        return self.kernel(name, grid, parameters, threads_name=BOUNDS, shared=True)

    def _operands(self, name: str, results: list[str], others: list[Parameter]) -> list[Parameter]:
        saved = [p for n in self.row_inputs(name) for p in (abi.data(n, "float"), *self.strides(n, "bhs"))]
        workspaces = (abi.data(w, "float", writable=name == "delta") for w in self.row_workspaces.values())
        more = (*saved, *workspaces, *others)
        return [*self.arrays(("Q", "K", "V", "dO"), results, *more), *self.sizes()]

    def constants(self) -> list[ConstantLine]:
        plan, own = self.plan, self.own
        return [
            *self.numbers(),
            ConstantLine("BLOCK", plan.block_q, "rows, or keys, that a block owns, and of a tile that it visits"),
            ConstantLine("BLOCK_Q", "BLOCK"),
            ConstantLine("BLOCK_KV", "BLOCK"),
            ConstantLine("THREADS", plan.threads),
            ConstantLine("BLOCKS", plan.blocks, BLOCKS),
            *(ConstantLine(f"{b.name}_SMEM", b.offset) for b in plan.buffers),
            ConstantLine("ROW_THREADS", own.row_threads, "the block's threads as a grid over a tile: its rows"),
            ConstantLine("COLUMN_THREADS", own.column_threads),
            ConstantLine("ROWS", "BLOCK / ROW_THREADS", "own rows of a thread"),
            ConstantLine("COLUMNS", "BLOCK / COLUMN_THREADS", "rows of a thread in a tile"),
            ConstantLine("QK_DIMS", "HEAD_DIM / COLUMN_THREADS", "dimensions of dQ and dK of a thread"),
            ConstantLine("V_DIMS", "HEAD_DIM_V / COLUMN_THREADS", "dimensions of dV of a thread"),
            ConstantLine("QK_SLICE", own.slice_qk, SLICES),
            ConstantLine("V_SLICE", own.slice_v),
            ConstantLine("W_SLICE", own.slice_w, "rows of a tile"),
            ConstantLine("QK_VECTOR", own.vector_qk, "neighbouring dimensions that a thread has"),
            ConstantLine("V_VECTOR", own.vector_v),
            ConstantLine("PAD", forward.PAD, PAD),
            ConstantLine("QK_STRIDE", "HEAD_DIM + PAD", "floats from row to row in shared memory"),
            ConstantLine("V_STRIDE", "HEAD_DIM_V + PAD"),
            ConstantLine("W_STRIDE", "BLOCK + PAD"),
            *TERM_CONSTANTS,
        ]


OF_KEYS: tuple[Place, ...] = ("keys",)  # places of the captured gradients that the key-owning kernel adds up
OF_ROWS: tuple[Place, ...] = ("rows", "pairs", "words")
BOUNDS = "THREADS, BLOCKS"
SLICES = "terms of a sum that are summed by themselves"
