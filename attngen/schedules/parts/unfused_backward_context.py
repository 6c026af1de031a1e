"""The context that naive and tiled share in their backwards: a kernel for each equation, S, dP and dS in global memory."""

from __future__ import annotations

from collections.abc import Callable

from attngen.emit import abi, comment_text
from attngen.emit.captured_sums import CapturedKernel, times
from attngen.emit.gradient_functions import CapturedFunctions
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Extent, Parameter, grid_of_elements
from attngen.emit.variant import Function
from attngen.schedules.parts.unfused_context import Unfused
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import gradient_argument


class UnfusedBackward(Unfused):
    """The kernels of the gradients, with the grids of the naive schedule."""

    def keeps(self, workspace: str) -> bool:
        return workspace in self.plan.workspaces

    def derivative_reads_s(self) -> bool:
        derivative = self.variant.derivative
        return self.keeps("ds") and derivative is not None and "s" in derivative.arguments

    def context(self) -> dict[str, object]:
        return super().context() | {
            "keeps_dot": self.keeps("QK"),
            "weight_gradient_equation": comment_text.weight_gradient_equation(self.spec),
            "score_gradient_equations": comment_text.score_gradient_equations(self.spec),
            "ds": "ds" if self.keeps("ds") else "dS",
            "derivative_reads_s": self.derivative_reads_s(),
            "keeps_sink_weight": self.keeps("sink_weight"),
            "row_floats": self.lengths["k"],
            "times": times,
            "captured_equations": lambda one: comment_text.captured_equations(self.spec, self.gradient, one),
            "captured_kernels": [self._captured_kernel(one) for one in self.variant.captured_gradients],
        }

    def kernels(self) -> dict[str, KernelText]:
        written: dict[str, Callable[[], KernelText]] = {
            "scores": lambda: self.scores(*self._write("QK")),
            "weights": lambda: self.weights(*self._write("sink_weight")),
            "weight_gradients": self._weight_gradients,
            "delta": self._delta,
            "score_gradients": self._score_gradients,
            "dropout": self.dropout,
            "dq": lambda: self._product("dQ", "K"),
            "dk": lambda: self._product("dK", "Q"),
            "dv": lambda: self._product("dV", "dO"),
        }
        of_captured = {f"d_{one.gradient.name}": self._captured_kernel(one).kernel for one in self.variant.captured_gradients}
        return {name: of_captured[name] if name in of_captured else written[name]() for name in self.own.kernels}

    def kernel_files(self) -> list[str]:
        captured = {gradient_argument(one.gradient.name) for one in self.variant.captured_gradients}
        return [name for name in self.own.kernels if name not in captured]

    def _score_gradient_grid(self) -> tuple[Extent, ...]:
        return self.pairs()

    def _read(self, name: str, tensor: str | None = None) -> list[Parameter]:
        """The workspace `tensor` as `name`, where the plan has it."""
        return [abi.data(tensor or name, "float", name=name)] if self.keeps(tensor or name) else []

    def _write(self, name: str, tensor: str | None = None) -> list[Parameter]:
        return [abi.data(tensor or name, "float", writable=True, name=name)] if self.keeps(tensor or name) else []

    def _weight_gradients(self) -> KernelText:
        parameters = [
            *self.arrays(("dO", "V"), (), *self._write("dP")),
            *self.sizes(),
            *self.captured(self.variant.mask, self.variant.dropout, *self.of_tiles(), scale=False),
        ]
        return self.kernel("weight_gradients", self.pairs(), parameters)

    def _delta(self) -> KernelText:
        parameters = [*self._read("P", "S"), *self._read("dP"), *self._write("delta"), *self.dlse_parameters(), *self.sizes()]
        parameters += self.captured(*self.of_tiles(), scale=False)
        return self.kernel("delta", self.rows(), parameters)

    def _score_gradients(self) -> KernelText:
        parameters = [
            *(self._read("P", "S") if self.spec.normalize != "none" else []),
            *(self._read("QK") if self.derivative_reads_s() else []),
            *self._read("delta"),
            *self._write("dS", "dP"),
            *self._write("ds"),
            *self.sizes(),
            *self.captured(self.variant.derivative, *self.of_tiles(), scale=self.derivative_reads_s()),
        ]
        return self.kernel("score_gradients", self._score_gradient_grid(), parameters)

    def _ds(self) -> list[Parameter]:
        return self._read("ds") or self._read("dS", "dP")

    def _product(self, result: str, rows: str) -> KernelText:
        """A block computes a row of `result`, a sum of `rows`; a thread computes an element."""
        grid = self.head_grid("q_len") if result == "dQ" else self.kv_head_grid("kv_len")
        of_scores = result != "dV"
        parameters = [
            *(self._ds() if of_scores else self._read("P", "S")),
            self.pointer(rows),
            self.pointer(result, writable=True),
            *self.strides(rows),
            *self.strides(result),
            *self.sizes(),
            *self.captured(*self.of_tiles(), scale=of_scores),
        ]
        return self._of_product(result, grid, parameters)

    def _of_product(self, result: str, grid: tuple[Extent, ...], parameters: list[Parameter]) -> KernelText:
        raise NotImplementedError

    def _captured_kernel(self, functions: CapturedFunctions[Function]) -> CapturedKernel:
        """A thread computes one element of the gradient of a captured tensor, or that of a param."""
        tensor = self.tensors[gradient_argument(functions.gradient.name)]
        parameters = [
            *(self._read("dS", "dP") if functions.reads("score") else []),
            *(self._ds() if functions.reads("scale") and (self.keeps("ds") or not functions.reads("score")) else []),
            *(self._read("QK") if functions.reads_s or functions.reads("scale") else []),
            *(self._read("sink_weight") + self._read("delta") if functions.reads("sink") else []),
            abi.data(tensor.name, DTYPES[tensor.dtype].cuda, writable=True),
            *abi.extents(tensor),
            *abi.all_strides(tensor),
            *abi.sizes(self.spec, "batch", "q_heads", "kv_heads", "q_len", "kv_len"),
            *self.captured(*functions.functions, scale=functions.reads_s),
        ]
        grid = grid_of_elements(tensor.shape, self.plan.threads)
        return CapturedKernel(tensor, functions, self.kernel(tensor.name, grid, parameters))
