"""The kernel of a file that converts keys and values of 8 bits before the others, which read 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_maker import KernelMaker
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv
from attngen.spec.dtypes import DTYPES

CHUNK_BYTES = 16  # a thread writes so many at once
THREADS = 128  # per block
ROWS = 32  # rows of a block: each thread has several loads under way
CONVERT = "convert"  # the suffix of the kernel


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor of keys or values, the workspace with its rows in the type of Q, and what a row has of chunks."""

    source: str
    to: str
    ctype: str  # type of the source
    chunks: str


def converting_kernels(maker: KernelMaker) -> list[KernelText]:
    """The kernel before the others, if the file has it."""
    return [_kernel(maker, _converted(maker))] if maker.plan.converted else []


def conversion(maker: KernelMaker) -> dict[str, object]:
    """What the template reads of the kernel; nothing if the file has none."""
    if not maker.plan.converted:
        return {}
    spec, own = maker.given, maker.spec.dtype
    converted = _converted(maker)
    sizes, page_size = {"K": "HEAD_DIM", "V": "HEAD_DIM_V"}, spec.kernel.page_size
    stated = [] if page_size is None else [ConstantLine("page_size", page_size, "rows of a page of keys")]
    return {
        "conversion": _kernel(maker, converted),
        "converted": converted,
        "converted_to": own.name,  # `parts/converted_to_NAME.j2`
        "given_in": "pages" if spec.kernel.is_paged else "rows",
        "numbers_of_conversion": [
            ConstantLine("CONVERTED", CHUNK_BYTES // own.bytes, f"elements of {CHUNK_BYTES} bytes of {own}"),
            *(ConstantLine(one.chunks, f"{sizes[one.source]} / CONVERTED", f"of a row of {one.source}") for one in converted),
            ConstantLine("CONVERT_THREADS", THREADS, "of a block"),
            ConstantLine("CONVERT_ROWS", ROWS, "keys of a block, of a head"),
            *stated,
        ],
    }


def _converted(maker: KernelMaker) -> list[Converted]:
    return [
        Converted(name, abi.converted(name), DTYPES[maker.tensors[name].dtype].cuda, f"{name}_CHUNKS")
        for name in maker.plan.converted
    ]


def _kernel(maker: KernelMaker, converted: list[Converted]) -> KernelText:
    spec = maker.given
    tensors = [name for one in converted for name in (one.source, one.to)]
    parameters = [
        *(abi.data(name, DTYPES[maker.tensors[name].dtype].cuda, writable=maker.tensors[name].is_written) for name in tensors),
        *(p for name in tensors for p in abi.strides(maker.tensors[name], "bhs")),
        *abi.sizes(spec, "batch", "kv_heads", "kv_len"),
        *abi.pages(spec),
    ]
    grid = maker.kv_head_grid(CeilDiv("kv_len", ROWS))
    return maker.kernel(CONVERT, grid, parameters, THREADS, "CONVERT_THREADS", reads_prepared=False)
