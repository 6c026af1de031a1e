"""Lesson kernels of a spec: their text, how they differ, and their counts on the emulated device."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from attngen.diagnostics import ArgumentError
from attngen.emit.comment_text import equations
from attngen.emit.comments import strip_comments
from attngen.emit.cuda_text import literal
from attngen.emit.emitter import emit, environment
from attngen.emit.program import KernelEntry, Parameter, Product, Program
from attngen.inspect.tracing import Totals, totals
from attngen.keywords import PORTABLE_SCHEDULES
from attngen.lessons.steps import STEPS, Step
from attngen.plan import ARCHES
from attngen.puzzles.folder import with_primitives
from attngen.puzzles.puzzle import Case
from attngen.puzzles.running import compile_program, run_case
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage
from attngen.spec.expr import Const

MOST_HEAD = 128
_FUNCTION = re.compile(
    r"^(?:// [^\n]*\n)*__device__ __forceinline__ (?:bool|float) (mask|score)\((.*?)\) \{\n.*?^}\n", re.M | re.S
)
NOTHING = {"mask": "true", "score": "s"}


def why_not(spec: AttentionSpec) -> str:
    """Why the ladder has no kernels of a spec; empty if it has."""
    if spec.dtype.name not in ("fp16", "bf16") or len({dtype.name for dtype in spec.dtypes.values()}) > 1:
        return "they are of fp16 or bf16"
    if spec.head_dim != spec.head_dim_v or spec.head_dim % 32 or spec.head_dim > MOST_HEAD:
        return f"heads have a multiple of 32 elements, at most {MOST_HEAD}, of K and V alike"
    if spec.inputs or spec.params:
        return "they read no captured tensors and no params"
    if spec.normalize != "softmax" or spec.sink is not None or spec.dropout is not None or spec.rotary is not None or spec.lse:
        return "they have a plain softmax, without a sink, dropout or rotation, and do not return lse"
    if not isinstance(spec.scale, Const):
        return "the scale is a number"
    return ""


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of one spec: `text` is the file, `own` the same without primitives."""

    step: Step
    spec: AttentionSpec
    own: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.spec.name}_{self.step.number}_{self.step.name}"

    def changed(self, before: Rung) -> tuple[int, int]:
        """Lines of code that `before` has and this one has not, and the other way round: without comments and primitives."""
        old, new = (_code(rung.own) for rung in (before, self))
        marks = [line[:2] for line in difflib.ndiff(old, new)]
        return marks.count("- "), marks.count("+ ")


def _code(text: str) -> list[str]:
    return [line.rstrip() for line in strip_comments(text).splitlines() if line.strip()]


def rungs(spec: AttentionSpec) -> tuple[Rung, ...]:
    """All steps of a spec. Raises ArgumentError if the ladder has no kernels of it."""
    reason = why_not(spec)
    if reason:
        raise ArgumentError(
            f"the ladder has no kernels of {spec.name}: {reason}; `attngen diff` compares schedules of any spec"
        )
    functions, calls = _variant(spec)
    assert isinstance(spec.scale, Const)
    names = {"spec": spec, "t": spec.dtype.name, "functions": functions, "scale": literal(spec.scale)[0], **calls}
    found = []
    for step in STEPS:
        made = environment().get_template(step.template).render(step=step, equations=equations(spec, False), **names)
        own = re.sub(r"\n{3,}", "\n\n", made)
        found.append(Rung(step, spec, own, with_primitives(own, ())))
    return tuple(found)


def _variant(spec: AttentionSpec) -> tuple[str, dict[str, str]]:
    """The functions of mask and score as the simplest schedule has them, and how they are called."""
    naive = emit(spec, choose(spec, ARCHES[STEPS[0].arch], PORTABLE_SCHEDULES[0])).text
    texts, calls = [], dict(NOTHING)
    for found in _FUNCTION.finditer(naive):
        texts.append(found[0])
        calls[found[1]] = f"{found[1]}({', '.join(argument.split()[-1] for argument in found[2].split(', '))})"
    return "\n".join(texts).rstrip(), calls


def program(rung: Rung) -> Program:
    """The file as a program of the emulated device: of one batch, rows one after another."""
    t = rung.spec.dtype.name
    arrays = [Parameter(name, f"{t}*", "data", name) for name in ("Q", "K", "V", "O")]
    sizes = [Parameter(name, "int", "size", "") for name in ("q_heads", "kv_heads", "q_len", "kv_len")]
    entry = KernelEntry(f"{rung.spec.name}_ladder", (*arrays, *sizes), (Product(()),) * 3, (rung.step.threads, 1, 1))
    return Program(rung.name, rung.text, rung.step.arch, (entry,), ())


def case(spec: AttentionSpec, step: Step, heads: tuple[int, int], q_len: int, kv_len: int) -> Case:
    """A launch of one batch, and the float64 result."""
    shape = Shape(1, *heads, q_len, kv_len)
    problem = sample(spec, shape)
    exact = np.asarray(numpy_attention(spec, problem, {}).output)[0]
    given = {name: np.ascontiguousarray(array[0]) for name, array in problem.arrays(spec).items()}
    sizes: Mapping[str, int] = {"q_heads": heads[0], "kv_heads": heads[1], "q_len": q_len, "kv_len": kv_len}
    blocks = (-(-q_len // step.rows), heads[0])
    arrays = {name.upper(): given[name] for name in ("q", "k", "v")}
    return Case(f"{q_len} rows, {kv_len} keys", {**arrays, **sizes}, {"O": exact}, blocks, (step.threads,))


@dataclass(frozen=True, slots=True)
class Counted:
    """A step that ran: its largest error, and what it asks of the machine."""

    rung: Rung
    error: float
    totals: Totals


def counted(rung: Rung, q_len: int, kv_len: int, heads: tuple[int, int] = (1, 1)) -> Counted:
    """Raises EmulationError for races and accesses outside of arrays, CompilationError, DeviceError."""
    one = case(rung.spec, rung.step, heads, q_len, kv_len)
    ran = run_case(compile_program(program(rung)), one)
    found = from_storage(ran.written["O"]).astype(np.float64)
    return Counted(rung, float(np.abs(found - one.expected["O"]).max()), totals(ran.counters, ran.traced.sites))


def all_counted(spec: AttentionSpec, q_len: int, kv_len: int) -> Iterator[Counted]:
    for rung in rungs(spec):
        yield counted(rung, q_len, kv_len)
