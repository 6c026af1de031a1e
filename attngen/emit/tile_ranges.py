"""The pre-pass: kernels that write the smallest and largest element of captured vectors in each tile."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi
from attngen.emit.cuda_text import c_name
from attngen.emit.kernel_maker import KernelMaker
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Parameter
from attngen.emit.variant import Captured, range_tensors
from attngen.plan.spans import Span
from attngen.spec.dtypes import DType

RANGE_LIMITS = {
    "int32": ("-2147483647 - 1", "2147483647"),
    "int64": ("-9223372036854775807LL - 1", "9223372036854775807LL"),
    "fp32": ("-INF", "INF"),
    "bool": ("false", "true"),
}


@dataclass(frozen=True, slots=True)
class RangeKernel:
    """One kernel of the pre-pass."""

    kernel: KernelText
    vector: str
    dtype: DType  # type of the vector's elements
    length: str
    read: str  # element i
    block: str
    others: tuple[dict[str, object], ...]  # the other dimensions
    low: Captured
    high: Captured
    limits: tuple[str, str]  # least and greatest value of an element


def range_kernel(maker: KernelMaker, span: Span) -> RangeKernel:
    """The kernel of one captured vector."""
    spec = maker.spec
    source = spec.input(span.input)
    vector = f"captured_{source.name}"
    parameters = [Parameter(vector, f"const {source.dtype.cuda}*", "data", source.name)]
    parameters += [Parameter(f"{vector}_stride_{d}", "long long", "stride", source.name, d) for d in range(span.rank)]
    low, high = range_tensors(spec, span)
    parameters += [Parameter(t.c_name, f"{t.dtype.cuda}*", "data", t.c_name) for t in (low, high)]
    parameters += [Parameter(f"out_stride_{d}", "long long", "stride", low.c_name, d) for d in range(span.rank - 1)]
    wanted = [d for d in source.dims if isinstance(d, str)]
    parameters += abi.whole_sizes(spec, *dict.fromkeys(wanted))
    axes = [a for a in range(span.rank) if a != span.dim]
    others = tuple(
        {
            "axis": axis,
            "size": abi.whole_size(spec, str(source.dims[axis])),
            "stride": f"{vector}_stride_{axis}",
            "out_stride": f"out_stride_{position}",
        }
        for position, axis in reversed(list(enumerate(axes)))
    )
    extents = tuple(abi.range_workspaces(spec, maker.plan, span)[0].shape)
    element = f"vector[i * {vector}_stride_{span.dim}]"
    return RangeKernel(
        kernel=maker.kernel(f"{c_name(span.name)}_ranges", extents[::-1], parameters, threads=32, threads_name="32"),
        vector=vector,
        dtype=source.dtype,
        length=abi.whole_size(spec, str(source.dims[span.dim])),
        read=f"to_float({element})" if source.dtype.name in ("fp16", "bf16") else element,
        block="BLOCK_Q" if span.index == "q" else "BLOCK_KV",
        others=others,
        low=low,
        high=high,
        limits=RANGE_LIMITS[low.dtype.name],
    )
