"""The emission context that the fused schedules share: a tile of scores stays in registers."""

from __future__ import annotations

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.file import File
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv, Extent, Parameter
from attngen.plan import bounded_scores
from attngen.plan.shared_memory import WORK_TILE


class Fused(File):
    """The context of a schedule that keeps a tile of scores in registers."""

    def fused_kernel(self, axes: str, *more: Parameter) -> dict[str, KernelText]:
        parameters = [
            *self.arrays("QKV", "O", axes=axes),
            *self.lse_parameters(),
            *self.sizes(),
            *self.pages(),
            *more,
            *self.captured_anywhere(),
        ]
        return {"fused": self.kernel("fused", self.q_block_grid(), parameters, threads_name=self.launch_bounds(), shared=True)}

    def launch_bounds(self) -> str:
        return "THREADS, BLOCKS" if self.plan.blocks else "THREADS"

    def blocks(self) -> list[ConstantLine]:
        """The number of blocks per SM, if the launch bounds state it."""
        return [ConstantLine("BLOCKS", self.plan.blocks, BLOCKS)] if self.plan.blocks else []

    def q_block_grid(self) -> tuple[Extent, ...]:
        """A grid with one block for every BLOCK_Q rows of a head."""
        return self.head_grid(CeilDiv("q_len", self.plan.block_q))

    def captured_anywhere(self) -> list[Parameter]:
        """The captured values, if any part of the only kernel reads one."""
        v = self.variant
        read = (*v.of_scores, *v.of_row_terms, v.head_scale, v.mask, v.sink, v.v_scale, v.dropout, v.kv_range, v.classify)
        return abi.captured(v) if v.key_vectors or v.pair_elements else self.captured(*read)

    def context(self) -> dict[str, object]:
        softmax = self.spec.normalize == "softmax"
        keeps_maximum = softmax and not self.is_bounded()
        maxima = "with_limits" if self.plan.schedule.is_warp_specialized else "by_tile"
        return super().context() | {
            "keeps_maximum": keeps_maximum,
            "adds_weights": softmax,
            "maxima_are": maxima if keeps_maximum else "bounded",
            "sizes_of_scores": "large" if self.large_scores else "moderate",
            "terms_of_scores": "without_term" if self.variant.affine else "whole",
            "sums_of_o": "O_frag",
            "heaviest_rounded": False,
            "adaptive_threshold": False,
            "raised_weights": False,
            "work_tile": WORK_TILE,
            "places_rows": self.variant.places_rows,
        }

    def fused_numbers(self) -> list[ConstantLine]:
        plan = self.plan
        return [
            *self.numbers(),
            *self.exponent_numbers(),
            ConstantLine("BLOCK_Q", plan.block_q, "query rows of a block"),
            ConstantLine("BLOCK_KV", plan.block_kv, "keys of a tile"),
            ConstantLine("THREADS", plan.threads),
            *(ConstantLine(f"{b.name}_SMEM", b.offset) for b in plan.buffers),
        ]

    def exponent_numbers(self) -> list[ConstantLine]:
        log2_e = ConstantLine("LOG2_E", "1.4426950408889634f", ctype="float")
        if self.variant.exponent_varies:
            return [log2_e]
        factor = self.variant.factor
        exponent = f"{factor} * LOG2_E" if factor else "LOG2_E"
        what = f"exp({factor} x) = 2^(EXPONENT_SCALE x)" if factor else "exp(x) = 2^(EXPONENT_SCALE x)"
        return [
            log2_e,
            ConstantLine("EXPONENT_SCALE", exponent, what, ctype="float"),
        ]

    def slack(self, what: str = "") -> list[ConstantLine]:
        """The rescaling threshold, and the bound of large scores; `what` is added to the comment."""
        return [
            ConstantLine("RESCALE_THRESHOLD", f"{bounded_scores.RESCALE_EXPONENT}f", RESCALE_THRESHOLD + what, ctype="float"),
            ConstantLine("LARGE", f"{bounded_scores.LARGE_EXPONENT}f", LARGE, ctype="float"),
        ]

    @property
    def large_scores(self) -> bool:
        """Whether a row's maximum may need to be subtracted before scaling; with split operands it always is."""
        return self.spec.dtype.bytes == 2 and bounded_scores.may_be_large(self.spec)

    def heads_in_l2(self) -> Parameter:
        """The number of heads whose work tiles are numbered together."""
        return Parameter("heads_in_l2", "int", "section", "", formula=self.plan.heads_in_l2)


LARGE = "above this magnitude, fp32 rounds maximum * EXPONENT_SCALE too coarsely"
RESCALE_THRESHOLD = "an exponent may exceed that of the maximum in use by this much: a factor of 2^8"
BLOCKS = "that an SM should hold at once: it limits the registers of a thread"
ROW_BLOCKS = ConstantLine("ROW_BLOCKS", "ROWS / 2", "blocks of 16 rows of a warp")
NOT_A_NUMBER = ConstantLine("NOT_A_NUMBER", "__builtin_bit_cast(float, 0x7fffffff)", ctype="float")
