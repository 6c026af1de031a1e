"""What can be counted without a GPU: operations, and bytes that each rung moves, exactly, on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attngen.api import compile
from attngen.device.emulated import EmulatedDevice
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import RUNGS, AttentionSpec


@dataclass(frozen=True, slots=True)
class Counted:
    """One rung on one problem. `tensor_core_instructions` are of a warp each."""

    rung: str
    schedule: str
    global_read: int
    global_written: int
    shared_read: int
    shared_written: int
    barriers: int
    tensor_core_instructions: int
    workspace: int


def count(spec: AttentionSpec, shape: Shape, params: Mapping[str, int | float]) -> Iterator[Counted]:
    """Every rung, one after the other. Bytes count each access of each thread, before any cache."""
    problem = sample(spec, shape)
    for rung in RUNGS:
        compiled = compile(spec, kernel=rung, device=EmulatedDevice())
        named: dict[str, Any] = {**problem.inputs, **params}
        compiled(problem.q, problem.k, problem.v, **named)
        counters = compiled.kernel.counters  # type: ignore[attr-defined]
        workspaces = {t.name for t in compiled.source.tensors if t.role == "workspace"}
        yield Counted(
            rung,
            compiled.plan.schedule,
            sum(counters.bytes_read.values()),
            sum(counters.bytes_written.values()),
            counters.shared_bytes_read,
            counters.shared_bytes_written,
            counters.barriers,
            sum(n for op, n in counters.instructions.items() if op.startswith("mma")) // 32,
            sum(n for name, n in counters.bytes_written.items() if name in workspaces),
        )
