"""The kernels of a file: their parameters, grids and blocks, from the tensors of its program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from attngen.emit import abi
from attngen.emit.kernel_text import KernelText, signature_lines
from attngen.emit.program import Axis, Extent, KernelEntry, Parameter, Product, SharedRange, Tensor
from attngen.emit.variant import Function, Variant
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Plan
from attngen.spec.attention import INDICES, AttentionSpec
from attngen.spec.dtypes import DTYPES


def shared_ranges(plan: Plan, kernel: str = "") -> tuple[SharedRange, ...]:
    """The shared memory of a kernel; without one, of every kernel of the file."""
    of_kernel = (b for b in plan.buffers if not kernel or b.kernel in ("", kernel))
    return tuple(SharedRange(b.name, b.offset, b.bytes, b.what) for b in of_kernel)


@dataclass(slots=True)
class KernelMaker:
    """Makes the kernels of one file."""

    spec: AttentionSpec  # spec of a call; once made, as kernels read it (`abi.as_read`)
    plan: Plan
    variant: Variant
    given: AttentionSpec = field(init=False)  # spec of a call
    own: Own = field(init=False)  # the schedule's own choices, see `Plan.own`
    tensors: dict[str, Tensor] = field(init=False)

    @property
    def facts(self) -> SpecFacts:
        return self.plan.facts

    def __post_init__(self) -> None:
        self.own = self.plan.own
        self.given, self.spec = self.spec, abi.as_read(self.spec, self.plan)
        self.tensors = {t.name: t for t in abi.program_tensors(self.given, self.plan, self.variant, self.workspace)}

    def workspace(self, name: str) -> tuple[Axis, ...]:
        """The axes of a workspace of fp32 numbers, one of `Plan.workspaces`."""
        raise NotImplementedError(name)

    @property
    def prepared(self) -> dict[str, str]:
        """The tensors whose rows a kernel before the others prepares, each with the workspace that those read in its place."""
        rotated = {name: abi.rotated(name) for name in self.plan.rotated}
        transposed = {name: abi.transposed(name) for name in self.plan.transposed}
        in_terms = {name: abi.in_terms(name) for name in self.plan.in_terms}
        return rotated | transposed | in_terms | {name: abi.converted(name) for name in self.plan.converted}

    def read(self, name: str) -> Tensor:
        """A tensor as kernels read it after those that prepare rows."""
        return replace(self.tensors[self.prepared.get(name, name)], name=name)

    @property
    def lengths(self) -> dict[str, str]:
        """How far each index of a pair may go, whatever the sequence."""
        lengths = (abi.whole_size(self.spec, n) for n in ("q_len", "kv_len"))
        return dict(zip(INDICES, ("batch", "q_heads", *lengths), strict=True))

    def kernel(
        self,
        suffix: str,
        grid: tuple[Extent, ...],
        parameters: list[Parameter],
        threads: int | None = None,
        threads_name: str = "THREADS",
        shared: bool = False,
        at_most: str = "",
        early: bool = False,
        reads_prepared: bool = True,
    ) -> KernelText:
        """The kernel of that suffix. With `reads_prepared`, it reads the workspaces of rows that the plan prepares."""
        prepared = self.prepared if reads_prepared else {}
        entry = KernelEntry(
            name=f"{self.spec.name}{self.plan.suffix}_{suffix}",
            parameters=tuple(replace(p, of=prepared.get(p.of, p.of)) for p in parameters),
            grid=(Product(grid, at_most), Product(()), Product(())),
            block=(self.plan.threads if threads is None else threads, 1, 1),
            shared_bytes=self.plan.shared_bytes if shared else 0,
            shared_buffers=shared_ranges(self.plan, suffix) if shared else (),
            early=early,
        )
        return KernelText(entry, signature_lines(entry, self.tensors), threads_name)

    def head_grid(self, *inner: Extent) -> tuple[Extent, ...]:
        return (*inner, abi.head_axes(self.spec)[0].size, "batch")

    def kv_head_grid(self, *inner: Extent) -> tuple[Extent, ...]:
        return (*inner, abi.head_axes(self.spec)[1].size, "batch")

    def sizes(self) -> list[Parameter]:
        batch = ("batch",) if self.variant.uses_batch else ()
        return abi.sizes(self.spec, *batch, "q_heads", "kv_heads", "q_len", "kv_len")

    def pages(self) -> list[Parameter]:
        return abi.pages(self.spec)

    def arrays(
        self, read: Iterable[str], written: Iterable[str] = (), *more: Parameter, axes: str = abi.STRIDE_LETTERS
    ) -> list[Parameter]:
        """Tensors of rows or keys that a kernel reads and writes, `more`, and the tensors' strides."""
        return [
            *(self.pointer(t) for t in read),
            *(self.pointer(t, writable=True) for t in written),
            *more,
            *(p for t in (*read, *written) for p in self.strides(t, axes)),
        ]

    def captured(self, *functions: Function | None, scale: bool = True) -> list[Parameter]:
        """The captured values, where one of `functions` or the scale reads any."""
        in_scale = scale and self.variant.is_scale_of_call
        is_read = in_scale or any("in" in f.arguments for f in functions if f is not None)
        return abi.captured(self.variant) if is_read else []

    def lse_parameters(self) -> list[Parameter]:
        return [p for n in self.plan.numbers_of_rows for p in (abi.data(n, "float", writable=True), *self.strides(n, "bhs"))]

    def dlse_parameters(self) -> list[Parameter]:
        """The gradient of lse, if lse is an output."""
        return [abi.data("dlse", "float"), *self.strides("dlse", "bhs")] if self.spec.lse else []

    def strides(self, tensor: str, axes: str = abi.STRIDE_LETTERS) -> list[Parameter]:
        """The strides of a tensor of rows or keys, for those of `axes` that it has."""
        return abi.strides(self.read(tensor), axes)

    def tensor_map(self, tensor: str, box_rows: int) -> Parameter:
        return abi.tensor_map(self.spec, self.read(tensor), box_rows)

    def pointer(self, tensor: str, *, writable: bool = False, name: str | None = None) -> Parameter:
        return abi.data(tensor, DTYPES[self.read(tensor).dtype].cuda, writable=writable, name=name)
