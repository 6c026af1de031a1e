"""The emission context that naive and tiled share, and their backwards: S in global memory."""

from __future__ import annotations

from attngen.emit import abi
from attngen.emit.file import File
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Axis, CeilDiv, Extent, Parameter, free
from attngen.emit.variant import Function


class Unfused(File):
    """The kernels of scores and of row weights, with the grids of the naive schedule."""

    def workspace(self, name: str) -> tuple[Axis, ...]:
        """S has scores, then weights in their place; QK has Q K^T if a derivative reads s; dP has dS in its place, ds what is
        not dS. Beside these pairs: delta, and the sink's weight, of each row."""
        if name in ("delta", "sink_weight"):
            return abi.every_row(self.spec)
        if not self.plan.schedule.is_tiled:
            return abi.every_row(self.spec, free("kv_len"))
        block = self.plan.block_kv  # keys are in whole tiles
        return abi.every_row(self.spec, Axis("", CeilDiv("kv_len", block)), Axis("", block))

    def of_tiles(self) -> tuple[Function | None, ...]:
        """The functions that say which tiles are visited."""
        return ()

    def pairs(self) -> tuple[Extent, ...]:
        """The grid of the kernels that compute pairs."""
        return self.head_grid(CeilDiv("kv_len", self.plan.threads), "q_len")

    def rows(self) -> tuple[Extent, ...]:
        """The grid of the kernels that compute rows."""
        return self.head_grid(CeilDiv("q_len", self.plan.threads))

    def context(self) -> dict[str, object]:
        return super().context() | {"keeps_dot": False, "keeps_sink_weight": False, "kernel_files": self.kernel_files()}

    def kernel_files(self) -> list[str]:
        """The kernels that have files of their names, in launch order."""
        return [*self.kernels()]

    def scores(self, *kept: Parameter) -> KernelText:
        """The kernel that writes S; `kept` is what a backward keeps beside it."""
        parameters = [
            *self.arrays("QK", "", Parameter("S", "float*", "data", "S"), *kept),
            *self.sizes(),
            *self.pages(),
            *self.captured(self.variant.score, self.variant.mask, *self.of_tiles()),
        ]
        return self.kernel("scores", self.pairs(), parameters)

    def weights(self, *kept: Parameter) -> KernelText:
        """The kernel that replaces S by P; `kept` is what a backward keeps beside it."""
        parameters = [
            Parameter("S", "float*", "data", "S"),
            *self.lse_parameters(),
            *self.sizes(),
            *kept,
            *self.captured(self.variant.sink, *self.of_tiles(), scale=False),
        ]
        return self.kernel(self.spec.normalize, self.rows(), parameters)

    def dropout(self) -> KernelText:
        """The kernel that drops weights, in place."""
        parameters = [Parameter("P", "float*", "data", "S"), *self.sizes(), *self.captured(self.variant.dropout)]
        return self.kernel("dropout", self.pairs(), parameters)


class ThreeKernels(Unfused):
    """The forwards: scores, row weights, weighted sum."""

    def kernels(self) -> dict[str, KernelText]:
        normalized = {} if self.spec.normalize == "none" else {"weights": self.weights()}
        parameters = [
            Parameter("P", "const float*", "data", "S"),
            *self.arrays("V", "O"),
            *self.sizes(),
            *self.pages(),
            *self.captured(self.variant.v_scale, *self.of_tiles(), scale=False),
        ]
        dropped = {"dropout": self.dropout()} if self.variant.dropout else {}
        return {"scores": self.scores(), **normalized, **dropped, "weighted_sum": self.weighted_sum(parameters)}

    def weighted_sum(self, parameters: list[Parameter]) -> KernelText:
        """The kernel that multiplies P by V."""
        raise NotImplementedError
