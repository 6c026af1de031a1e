"""The products of a warpgroup that a kernel needs: the operand lists of `templates/parts/wgmma.cuh.j2`."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.spec.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class Wgmma:
    """One wrapper of wgmma: fp32 sums of products of numbers of 16 bits (m64nNk16) or 8 (m64nNk32). Operand forms as PTX ISA,
    "wgmma.mma_async"."""

    name: str
    columns: int  # N: a multiple of 8, at most 256
    dtype: str  # "fp16" or "bf16", or with both operands K-major "fp8_e4m3" or "fp8_e5m2"
    a_in_registers: bool = False  # else in shared memory
    b_transposed: bool = False  # B is MN-major in shared memory, else K-major
    a_transposed: bool = False  # A is MN-major in shared memory, else K-major

    def __post_init__(self) -> None:
        assert self.columns % 8 == 0, self
        assert 8 <= self.columns <= 256, self
        assert self.depth == 16 or not (self.a_transposed or self.b_transposed), self
        assert not (self.a_in_registers and self.a_transposed), self

    @property
    def ptx_type(self) -> str:
        return {"fp16": "f16", "bf16": "bf16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}[self.dtype]

    @property
    def depth(self) -> int:
        """K: a row of A, or of a K-major B, has 32 bytes."""
        return 32 // DTYPES[self.dtype].bytes

    @property
    def accumulators(self) -> int:
        """Registers of D in each thread."""
        return self.columns // 2

    @property
    def accumulator_operands(self) -> list[str]:
        """D in the text of the instruction, line by line."""
        operands = [f"%{i}" for i in range(self.accumulators)]
        operands[0], operands[-1] = "{ " + operands[0], operands[-1] + "}"
        return [", ".join(operands[i : i + 12]) + ", " for i in range(0, self.accumulators, 12)]

    @property
    def accumulator_values(self) -> list[str]:
        """The registers of D, line by line."""
        values = [f'"+f"(d[{i}])' for i in range(self.accumulators)]
        return [", ".join(values[i : i + 8]) for i in range(0, self.accumulators, 8)]

    @property
    def a_parameter(self) -> str:
        return "const unsigned (&a)[4]" if self.a_in_registers else "unsigned long long a"

    @property
    def a_values(self) -> str:
        return ", ".join(f'"r"(a[{i}])' for i in range(4)) if self.a_in_registers else '"l"(a)'

    @property
    def accumulate_operand(self) -> int:
        return self.accumulators + self._a_operands + 1

    @property
    def other_operands(self) -> str:
        """A, B, whether to accumulate, both signs, and of 16 bits, whether each operand in shared memory is MN-major."""
        a = [f"%{self.accumulators + i}" for i in range(self._a_operands)]
        a_text = f"{{ {', '.join(a)}}}" if self.a_in_registers else a[0]
        majors = (
            ([] if self.a_in_registers else [int(self.a_transposed)]) + [int(self.b_transposed)] if self.depth == 16 else []
        )
        return ", ".join([a_text, f"%{self.accumulators + self._a_operands}", "p", "1", "1", *map(str, majors)])

    @property
    def _a_operands(self) -> int:
        return 4 if self.a_in_registers else 1
