"""Small hand-written kernels on the emulated device, with arrays and tensor maps as parameters."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngen.device.arrays import CPU, ArrayView
from attngen.device.emulated import EmulatedDevice
from attngen.device.emulated.device import EmulatedKernel
from attngen.device.emulated.tracing import Watch
from attngen.device.overlap import byte_range
from attngen.device.protocol import Launch, Memory
from attngen.device.tensor_map import MappedTensor, TensorMap
from attngen.emit.emitter import environment
from attngen.emit.program import KernelEntry, Parameter, Product, Program
from attngen.emit.templates import template_directory
from attngen.emit.wgmma import Wgmma
from attngen.spec.dtypes import BOOL, FP16, FP32, INT64

SHARED = "extern __shared__ __align__(1024) unsigned char smem[];"
CTYPES = {"float32": "float", "uint8": "unsigned char", "uint32": "unsigned", "uint16": "unsigned short", "int32": "int"}
PRIMITIVES = (
    "mbarrier",
    "mbarrier_arrive",
    "mbarrier_wait",
    "mbarrier_init_fence",
    "tma_load",
    "tma_store",
    "wgmma",
    "named_barrier",
    "named_barrier_any",
    "setmaxnreg",
    "stmatrix",
    "stmatrix_trans",
    "global_add",
    "keep_order",
    "proxy_fence",
    "pack_bf16",
)


def primitives(*names: str) -> str:
    return "\n".join((template_directory() / "primitives" / f"{n}.cuh").read_text() for n in names)


def products(*wanted: Wgmma) -> str:
    template = environment().get_template("parts/wgmma.cuh.j2")
    return "\n".join(template.render(product=w) for w in wanted)


@dataclass(frozen=True)
class Arguments:
    """What a kernel is given: tensor maps by name, then arrays; all but those `written` are read only."""

    arrays: dict[str, np.ndarray[Any, Any]]
    maps: dict[str, TensorMap]
    written: frozenset[str]


def program_of(body: str, given: Arguments, *, before: str, threads: int, shared: int, blocks: int = 1) -> Program:
    maps = [Parameter(n, "const __grid_constant__ TensorMap", "data", m.tensor) for n, m in given.maps.items()]
    pointers = [
        Parameter(n, f"{'' if n in given.written else 'const '}{CTYPES[str(a.dtype)]}*", "data", n)
        for n, a in given.arrays.items()
    ]
    parameters = ", ".join(f"{p.ctype} {p.name}" for p in (*maps, *pointers))
    text = f"""{before}
extern "C" __global__ void __launch_bounds__({threads}, 1) kernel({parameters}) {{ {SHARED if shared else ""}
{body}
}}
"""
    entry = KernelEntry("kernel", (*maps, *pointers), (Product((blocks,)), Product(()), Product(())), (threads, 1, 1), shared)
    return Program("test", text, "sm_90a", (entry,), ())


OF_BYTES = {dtype.bytes: dtype for dtype in (BOOL, FP16, FP32, INT64)}


def memory_of(name: str, array: np.ndarray[Any, Any], written: bool) -> Memory:
    """What a kernel may access of an array: its elements, in any strides."""
    strides = tuple(step // array.itemsize for step in array.strides)
    found = ArrayView(name, array.ctypes.data, array.shape, strides, OF_BYTES[array.itemsize], CPU, array)
    low, high = byte_range(found)
    return Memory(name, found.pointer + low, high - low, written, array=found)


def launch(
    source: Program, given: Arguments, *, seed: int = 0, checked: bool = True, watch: Watch | None = None
) -> EmulatedKernel:
    kernel = EmulatedDevice(checked=checked, seed=seed, watch=watch).compile(source)
    entry = source.kernels[0]
    values = [MappedTensor(m, given.arrays[m.tensor].ctypes.data) for m in given.maps.values()]
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in given.arrays.values()]
    memory = tuple(memory_of(n, a, n in given.written) for n, a in given.arrays.items())
    kernel.launch((Launch(entry, (entry.grid[0]({}), 1, 1), (*values, *pointers)),), memory)
    return kernel


def run(
    body: str,
    arrays: dict[str, np.ndarray[Any, Any]],
    maps: dict[str, TensorMap] | None = None,
    *,
    written: tuple[str, ...] = ("y",),
    before: str = "",
    threads: int = 32,
    shared: int = 0,
    blocks: int = 1,
    **options: Any,
) -> EmulatedKernel:
    """Run `body` over `arrays`, whose names are the kernel's parameters, and `smem`, its dynamic shared memory.

    The body begins in the third line of a text without `before`. Options are those of `launch`."""
    given = Arguments(arrays, maps or {}, frozenset(written))
    return launch(program_of(body, given, before=before, threads=threads, shared=shared, blocks=blocks), given, **options)


def run_on_hopper(body: str, *arguments: Any, before: str = "", **options: Any) -> EmulatedKernel:
    """The same with the primitives of sm_90a in front of the kernel."""
    return run(body, *arguments, before=primitives(*PRIMITIVES) + before, **options)


def aligned(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy whose address is a multiple of 16."""
    memory = np.zeros(values.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def swizzled(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of 64 two-byte elements as they lie in shared memory: chunk c of row r is at chunk c ^ (r % 8)."""
    chunks = rows.reshape(-1, 8, 8)
    row, chunk = np.ogrid[: len(chunks), :8]
    return chunks[row, chunk ^ (row % 8)].reshape(rows.shape)
