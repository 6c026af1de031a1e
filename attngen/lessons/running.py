"""Lesson kernels that run: their program, its launches, and their counts on the emulated device."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from attngen.device.protocol import Argument, Launch
from attngen.device.tensor_map import MappedTensor, TensorMap
from attngen.emit.comments import strip_comments
from attngen.emit.program import MULTIPROCESSORS, KernelEntry, Parameter, Program, evaluate
from attngen.inspect.tracing import totals
from attngen.lessons.backward import BACKWARD
from attngen.lessons.ladder import Rung
from attngen.lessons.step import GROUP, HEAD
from attngen.puzzles.counts import COUNTS as OF_LAUNCH
from attngen.puzzles.running import aligned, compile_program, garbage, memory_of, parameters_of
from attngen.reference.gradients import numpy_gradients, sample_loss
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Array, Shape, sample
from attngen.spec.dtypes import DTYPES, from_storage, round_to_storage
from attngen.spec.gradient import QKV

AS_IN_PUZZLES = ("mma", "wgmma_async", "tma")  # `totals` has both kinds of products in one number
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(\w+\)\s+(\w+)\(([^()]*)\)')


def program(rung: Rung) -> Program:
    """The file as a program, its kernels in launch order."""
    parameters = {name: parameters_of(listed) for name, listed in _KERNEL.findall(strip_comments(rung.text))}
    entries = []
    for kernel in rung.step.kernels:
        name = f"{rung.spec.name}_ladder{kernel.suffix}"
        given = (Parameter(n, c, "size", "") if c == "int" else Parameter(n, c, "data", n) for c, n in parameters[name])
        threads = evaluate(kernel.threads, {HEAD: rung.spec.head_dim})
        entries.append(KernelEntry(name, tuple(given), kernel.grid, (threads, 1, 1)))
    return Program(rung.name, rung.text, rung.step.arch, tuple(entries), ())


def shapes(rung: Rung, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a step, by their names."""
    known, read = _known(rung, sizes), {p.name for entry in program(rung).kernels for p in entry.parameters}
    return {a.name: tuple(evaluate(axis, known) for axis in a.axes) for a in rung.ladder.arrays if a.name in read}


def launches(rung: Rung, source: Program, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> tuple[Launch, ...]:
    """The launches of a step for arrays at `addresses`."""
    known = _known(rung, sizes)
    values: dict[str, Argument] = {name: ctypes.c_void_p(address) for name, address in addresses.items()}
    values |= {name: MappedTensor(_map(rung, sizes, name, rows), addresses[name]) for name, rows in rung.step.mapped}
    values |= {name: ctypes.c_int(size) for name, size in sizes.items()}
    return tuple(
        Launch(entry, (x(known), y(known), z(known)), tuple(values[p.name] for p in entry.parameters))
        for entry in source.kernels
        for x, y, z in (entry.grid,)
    )


def _map(rung: Rung, sizes: Mapping[str, int], name: str, rows: int) -> TensorMap:
    """The tensor map of an array [heads, rows, head_dim], in boxes of so many rows of 128 bytes."""
    heads, length, columns = shapes(rung, sizes)[name]
    row = columns * rung.spec.dtype.bytes
    box = 128 // rung.spec.dtype.bytes
    strides = (row, length * row, heads * length * row)
    return TensorMap(name, rung.spec.dtype.name, (columns, length, heads, 1), strides, (box, rows, 1, 1))


def _known(rung: Rung, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that grids and arrays follow from; without a GPU there is one multiprocessor."""
    return {MULTIPROCESSORS: 1, **sizes, HEAD: rung.spec.head_dim, GROUP: sizes["q_heads"] // sizes["kv_heads"]}


def given_and_expected(rung: Rung, sizes: Mapping[str, int]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The inputs of a step, of random numbers, and its outputs in float64."""
    spec = replace(rung.spec, q_heads=None, kv_heads=None)  # the kernels take any number
    problem = sample(spec, Shape(1, sizes["q_heads"], sizes["kv_heads"], sizes["q_len"], sizes["kv_len"]))
    given = {name.upper(): problem.arrays(spec)[name] for name in QKV}
    if rung.ladder is not BACKWARD:
        return _of_batch(given), _of_batch({"O": numpy_attention(spec, problem, {}).output})
    spec = replace(spec, lse=True)
    forward, loss = numpy_attention(spec, problem, {}), sample_loss(rung.spec, problem)
    assert forward.lse is not None
    gradients = numpy_gradients(rung.spec, problem, loss, QKV)
    given |= {"O": round_to_storage(forward.output, spec.dtype), "dO": loss.dout, "lse": forward.lse.astype(np.float32)}
    return _of_batch(given), _of_batch({f"d{name.upper()}": gradients[name].value for name in QKV})


def _of_batch(arrays: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(np.asarray(array)[0]) for name, array in arrays.items()}


def problem_in_words(sizes: Mapping[str, int]) -> str:
    """Its heads, rows and keys."""
    q_heads, kv_heads = sizes["q_heads"], sizes["kv_heads"]
    heads = "one head" if q_heads == 1 else f"{q_heads} query heads over {kv_heads}"
    rows = "one row" if sizes["q_len"] == 1 else f"{sizes['q_len']} rows"
    return f"{heads}, {rows}, {sizes['kv_len']} keys"


@dataclass(frozen=True, slots=True)
class Counted:
    """A step that ran: its largest error, the largest magnitude of its results, and what it asks of the machine, by the names
    of COUNTS and of `Totals`."""

    rung: Rung
    error: float
    largest: float
    counts: Mapping[str, int]


def counted(rung: Rung, sizes: Mapping[str, int] | None = None) -> Counted:
    """Raises EmulationError for races and accesses outside of arrays, CompilationError, DeviceError."""
    sizes = sizes or rung.ladder.sizes()
    given, expected = given_and_expected(rung, sizes)
    types = {a.name: np.float32 if a.element == "float" else DTYPES[rung.spec.dtype.name].numpy for a in rung.ladder.arrays}
    arrays = {
        name: aligned(given[name]) if name in given else garbage(shape, types[name])
        for name, shape in shapes(rung, sizes).items()
    }
    kernel = compile_program(program(rung))
    memory = tuple(memory_of(name, array, name not in given) for name, array in arrays.items())
    kernel.launch(launches(rung, kernel.source, sizes, {n: a.ctypes.data for n, a in arrays.items()}), memory)
    assert kernel.traced is not None
    sites = kernel.traced.sites
    counts = {**asdict(totals(kernel.counters, sites)), "requests": sum(site.executions for site in sites if site.sectors)}
    counts |= {name: OF_LAUNCH[name].of_launch(kernel.counters, sites) for name in AS_IN_PUZZLES}
    errors = [np.abs(from_storage(arrays[name]).astype(np.float64) - exact).max() for name, exact in expected.items()]
    largest = max(float(np.abs(exact).max()) for exact in expected.values())
    return Counted(rung, float(np.max(errors)), largest, counts)
