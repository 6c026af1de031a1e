"""Exact counts of the emulated device, without a GPU: operations and bytes of each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attngen.api import CompiledAttention, compile
from attngen.backward import CompiledBackward
from attngen.device.arrays import view
from attngen.device.emulated import EmulatedDevice
from attngen.device.params import check_params, declared_params
from attngen.plan import find_arch
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import stored
from attngen.schedules import default_arch, schedules_for
from attngen.spec.attention import PORTABLE_SCHEDULES, AttentionSpec


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one schedule on one problem. `tensor_core_instructions` count those of warps."""

    schedule: str
    template: str
    global_read: int
    global_written: int
    shared_read: int
    shared_written: int
    barriers: int
    tensor_core_instructions: int
    workspace: int


def count(
    spec: AttentionSpec, shape: Shape, params: Mapping[str, int | float], wanted: tuple[str, ...] = ()
) -> Iterator[Counted]:
    """The counts of every schedule: of its forward, or of its backward alone with the gradients `wanted`. Bytes are those that
    each thread requests, before any cache."""
    problem = sample(spec, shape)
    for schedule in _schedules(spec, wanted):
        compiled: Any = compile(spec, kernel=schedule, device=EmulatedDevice())
        if wanted:
            compiled = _ran_backward(compiled, problem, params, wanted)
        else:
            compiled(**stored(spec, problem), **params)
        counters = compiled.kernel.counters
        workspaces = {t.name for t in compiled.source.tensors if t.role == "workspace"}
        yield Counted(
            schedule,
            compiled.plan.schedule.name,
            sum(counters.bytes_read.values()),
            sum(counters.bytes_written.values()),
            counters.shared_bytes_read,
            counters.shared_bytes_written,
            counters.barriers,
            sum(n for op, n in counters.instructions.items() if op.startswith("mma")) // 32,
            sum(n for name, n in counters.bytes_written.items() if name in workspaces),
        )


def _schedules(spec: AttentionSpec, wanted: tuple[str, ...]) -> Sequence[str]:
    """The portable schedules; of backwards, those that compute the gradients."""
    arch = find_arch(default_arch(None))
    assert arch is not None
    suitable = schedules_for(spec, arch, wanted) if wanted else PORTABLE_SCHEDULES
    return [schedule for schedule in PORTABLE_SCHEDULES if schedule in suitable]


def _ran_backward(
    forward: CompiledAttention, problem: Sample, params: Mapping[str, int | float], wanted: tuple[str, ...]
) -> CompiledBackward:
    """The backward of a forward, after both have run once."""
    spec = forward.spec
    loss, numbers = sample_loss(spec, problem), check_params(declared_params(spec), params)
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    views = {name: view(array, name) for name, array in arrays.items()}
    backward = forward.gradients(wanted)
    saved = forward.saving().run(views, numbers) if backward.plan.saved else {}
    given = {"dout": loss.dout, **({} if loss.dlse is None else {"dlse": loss.dlse}), **saved}
    backward.run({**views, **{name: view(array, name) for name, array in given.items() if name in _read(backward)}}, numbers)
    return backward


def _read(backward: CompiledBackward) -> set[str]:
    """The names of the arguments that a backward reads."""
    return {tensor.argument for tensor in backward.source.of_role("input")}
