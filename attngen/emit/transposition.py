"""The kernel of a file that transposes values before the others: products of 8 bits read both operands along the sum."""

from __future__ import annotations

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_maker import KernelMaker
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import CeilDiv
from attngen.spec.dtypes import DTYPES

CHUNK_BYTES = 16  # a thread reads so many of each of four keys
THREADS = 128  # per block, at most
TRANSPOSE = "transpose"  # the suffix of the kernel


def transposing_kernels(maker: KernelMaker) -> list[KernelText]:
    """The kernel before the others, if the file has it."""
    return [_kernel(maker)] if maker.plan.transposed else []


def transposition(maker: KernelMaker) -> dict[str, object]:
    """What the template reads of the kernel; nothing if the file has none."""
    if not maker.plan.transposed:
        return {}
    return {
        "transposition": _kernel(maker),
        "given_in": "pages" if maker.given.kernel.is_paged else "rows",
        "numbers_of_transposition": [
            ConstantLine(
                "SIDE_BY_SIDE", abi.TRANSPOSED_BYTES // maker.plan.block_kv, "columns of V in a row of transposed values"
            ),
            ConstantLine("SLAB_ROWS", "HEAD_DIM_V / SIDE_BY_SIDE", "rows of the transposed values of BLOCK_KV keys, a slab"),
            ConstantLine("TRANSPOSE_THREADS", _threads(maker), f"of a block: a warp for {CHUNK_BYTES} columns"),
        ],
    }


def _threads(maker: KernelMaker) -> int:
    rows = maker.spec.head_dim_v * maker.plan.block_kv // abi.TRANSPOSED_BYTES
    return min(32 * -(-rows // CHUNK_BYTES), THREADS)


def _kernel(maker: KernelMaker) -> KernelText:
    spec = maker.given
    (name,) = maker.plan.transposed
    source, to = maker.tensors[name], maker.tensors[abi.transposed(name)]
    element = DTYPES[source.dtype].cuda
    parameters = [
        abi.data(name, element),
        abi.data(to.name, element, writable=True),
        *abi.strides(source, "bhs"),
        *abi.sizes(spec, "batch", "kv_heads", "kv_len"),
        *abi.pages(spec),
    ]
    grid = maker.kv_head_grid(CeilDiv("kv_len", maker.plan.block_kv))
    return maker.kernel(TRANSPOSE, grid, parameters, _threads(maker), "TRANSPOSE_THREADS", reads_prepared=False)
