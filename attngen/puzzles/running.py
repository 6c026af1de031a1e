"""A student's file on the emulated device: the kernel's signature, its launch, and who wrote an element."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from attngen.device.arrays import ArrayView, view
from attngen.device.emulated import EmulatedDevice
from attngen.device.emulated.device import Counters, EmulatedKernel
from attngen.device.emulated.tracing import NOBODY, Call, Traced, Watch
from attngen.device.protocol import Argument, CTypesScalar, Launch, Memory
from attngen.device.tensor_map import MappedTensor, TensorMap
from attngen.emit.comments import strip_comments
from attngen.emit.program import KernelEntry, Parameter, Product, Program
from attngen.puzzles.folder import Folder
from attngen.puzzles.puzzle import Array, Case
from attngen.spec.dtypes import NUMPY_BFLOAT16

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^()]*)\)')
_PARAMETER = re.compile(r"(.+?)\s*(\w+)")
ELEMENTS: dict[str, DTypeLike] = {"float": np.float32, "fp16": np.float16, "bf16": NUMPY_BFLOAT16, "int": np.int32}
SCALARS: dict[str, type[CTypesScalar]] = {"int": ctypes.c_int, "float": ctypes.c_float}
ALIGNMENT = 256  # bytes, as cudaMalloc has it: counts of sectors do not depend on where numpy puts an array
GARBAGE = 0xFD  # a byte; many of it are NaN in fp16 and fp32
MOST_BLOCKS, STEPS = 64, 4096  # blocks and steps that are searched for the writer of an element


@dataclass(frozen=True, slots=True)
class Signature:
    """Name and parameters (type, name) of the kernel of a file."""

    name: str
    parameters: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f'extern "C" __global__ void {self.name}({", ".join(" ".join(p) for p in self.parameters)})'


def signature_of(text: str) -> Signature | None:
    """The signature of the only kernel of a file, spaces normalized; None if it has none, or several."""
    found = _ENTRY.findall(strip_comments(text))
    if len(found) != 1:
        return None
    name, listed = found[0]
    return Signature(name, parameters_of(listed))


def parameters_of(listed: str) -> tuple[tuple[str, str], ...]:
    """Types and names of what stands between the parentheses of a kernel, spaces normalized."""
    split = [_PARAMETER.fullmatch(" ".join(one.split())) for one in listed.split(",")]
    return tuple((p[1].replace(" *", "*"), p[2]) for p in split if p is not None)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one case left: the written arrays by name, counts, and access sites."""

    written: dict[str, Array]
    counters: Counters
    traced: Traced


def program_of(folder: Folder, text: str, name: str) -> Program:
    """The file as a program; `name` is that of the file without `.cu`."""
    signature = signature_of(folder.text)
    assert signature is not None, f"puzzle.cu of {folder.name} has no kernel"
    maps = {n: one.tensor for c in _some_cases(folder) for n, one in c.given.items() if isinstance(one, TensorMap)}
    parameters = tuple(
        Parameter(n, ctype, "size" if ctype in SCALARS else "data", "" if ctype in SCALARS else maps.get(n, n))
        for ctype, n in signature.parameters
    )
    case = _some_cases(folder)[0]
    grid = (Product(case.blocks), Product(()), Product(()))
    entry = KernelEntry(signature.name, parameters, grid, _three(case.threads))
    return Program(name, text, folder.puzzle.arch, (entry,), ())


def _some_cases(folder: Folder) -> list[Case]:
    return [*folder.puzzle.cases(np.random.default_rng(0))]


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def compile_program(program: Program, seed: int = 0, watch: Watch = NOBODY) -> EmulatedKernel:
    """Raises CompilationError, DeviceError."""
    return EmulatedDevice(arch=program.arch, seed=seed, watch=watch, garbage=True).compile(program)


def run_case(kernel: EmulatedKernel, case: Case) -> Ran:
    """Launches the kernel once. Raises EmulationError for a mistake that the checked mode finds."""
    arrays = {name: aligned(one) for name, one in case.given.items() if isinstance(one, np.ndarray)}
    for name, dtype in outputs_of(kernel.source, case).items():
        if name not in arrays:
            arrays[name] = garbage(case.expected[name].shape, dtype)
    memory = tuple(memory_of(name, array, name in case.expected) for name, array in arrays.items())
    kernel.launch((launch_of(kernel.source, case, {n: a.ctypes.data for n, a in arrays.items()}),), memory)
    assert kernel.traced is not None
    return Ran({name: arrays[name] for name in case.expected}, kernel.counters, kernel.traced)


def launch_of(program: Program, case: Case, addresses: Mapping[str, int]) -> Launch:
    """The launch of a case whose arrays are at `addresses`."""
    entry = program.kernels[0]
    arguments = tuple(_argument(p, case, addresses) for p in entry.parameters)
    return Launch(KernelEntry(entry.name, entry.parameters, entry.grid, _three(case.threads)), _three(case.blocks), arguments)


def writer_of(program: Program, case: Case, name: str, index: int) -> tuple[int, int, Call] | None:
    """Block (linear), thread and statement that wrote element `index` of array `name` last; None if nobody is found."""
    width = np.dtype(outputs_of(program, case)[name]).itemsize
    everybody = tuple(range(prod(case.threads)))
    for block in range(min(prod(case.blocks), MOST_BLOCKS)):
        ran = run_case(compile_program(program, watch=Watch(block, everybody, STEPS, name)), case)
        writes = [s for s in ran.traced.steps if s.offset <= index * width < s.offset + s.width]
        if writes:
            last = max(writes, key=lambda s: s.at)
            return block, last.thread, last.site.place
    return None


def aligned(values: Array) -> Array:
    """A copy that begins where memory of a GPU does."""
    memory = np.zeros(values.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def outputs_of(program: Program, case: Case) -> dict[str, DTypeLike]:
    """The element types of the arrays that a case writes: those of the kernel's parameters; by a tensor map, fp16."""
    types = {p.of: p.ctype.rstrip("*") for p in program.kernels[0].parameters if p.ctype.endswith("*")}
    return {name: ELEMENTS[types.get(name, "fp16")] for name in case.expected}


def garbage(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array that nobody has written."""
    made = aligned(np.zeros(shape, dtype))
    made.reshape(-1).view(np.uint8)[...] = GARBAGE
    return made


def never_written(array: Array) -> Array:
    """For each element of an output, in order, whether the garbage is still there."""
    flat = np.ascontiguousarray(array).reshape(-1)
    whole: Array = np.all(flat.view(np.uint8).reshape(flat.size, -1) == GARBAGE, axis=1)
    return whole


def memory_of(name: str, array: Array, written: bool) -> Memory:
    """An array as the device sees it; `written`: kernels may write it."""
    found: ArrayView = view(array, name)
    return Memory(name, found.pointer, array.nbytes, written, array=found)


def _argument(parameter: Parameter, case: Case, addresses: Mapping[str, int]) -> Argument:
    if parameter.ctype in SCALARS:
        scalar: Argument = SCALARS[parameter.ctype](case.given[parameter.name])
        return scalar
    given = case.given.get(parameter.name)
    address = addresses[parameter.of]
    return MappedTensor(given, address) if isinstance(given, TensorMap) else ctypes.c_void_p(address)


@contextmanager
def printed_to_stderr() -> Iterator[None]:
    """What kernels print goes to stderr meanwhile: stdout is for the report. Each launch flushes what it has printed."""
    import os
    import sys

    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
