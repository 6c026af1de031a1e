"""`Call`: one attention, or its gradients, as a text that XLA's custom call carries, and what that call does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Literal

from attngen.api import CompiledAttention, compile_later
from attngen.backward import CompiledBackward
from attngen.device.arrays import CPU, ArrayView, Location
from attngen.device.binding import Bound
from attngen.device.cuda.memory import zero_for_ever
from attngen.device.params import Number
from attngen.jax.repeated import RepeatedCall, RepeatedCalls, signature
from attngen.language import load_text
from attngen.spec.gradient import gradient_argument, gradients_of_call

ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")  # arguments whose axes are those of the layout
Does = Literal["forward", "saving", "backward"]


@dataclass(frozen=True, slots=True)
class Call:
    """What a custom call computes: a text of it is enough in any process, so that compiled programs may be kept on disk.

    `inputs` and `outputs` name the call's arrays in order: arguments of a spec, or gradients. `wanted` are the gradients of a
    backward. `arch` is the architecture that both forward and backward are planned for, since they share results.
    """

    spec: str
    arch: str
    kernel: str | None
    deterministic: bool
    params: tuple[tuple[str, Number], ...]
    layout: str
    inputs: tuple[str, ...]
    does: Does = "forward"
    wanted: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))

    def view(self, name: str, array: ArrayView) -> ArrayView:
        """`array` under its name, with the axes that kernels expect."""
        if name not in ROWS or self.layout == "bhsd":
            return replace(array, name=name)
        order = (0, 2, 1, 3)
        shape, strides = (tuple(sizes[i] for i in order) for sizes in (array.shape, array.strides))
        return replace(array, name=name, shape=shape, strides=strides)

    def compiled(self, device: str) -> CompiledAttention:
        """The forward, whose kernels are compiled when they are first needed. Raises PlanRefusal, DeviceError."""
        return compiled_of(self.spec, device, self.kernel, self.arch)

    def parts(self, device: str, shapes: Mapping[str, Sequence[int]]) -> list[CompiledBackward]:
        """The programs of a backward, compiled when they are first needed; `shapes` are those of arrays as kernels expect them.
        Raises PlanRefusal."""
        compiled = self.compiled(device)
        _, computed = gradients_of_call(compiled.spec, self.wanted)
        parts = compiled.gradient_parts(computed, self.deterministic, shapes)
        return [compiled.gradients(names, self.deterministic) for names in parts]


@lru_cache(maxsize=4096)
def call_of(text: str) -> Call:
    """The call that has this text."""
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()}
    return Call(**{**fields, "params": tuple((name, value) for name, value in fields["params"])})


@lru_cache(maxsize=1024)
def compiled_of(text: str, device: str, kernel: str | None = None, arch: str | None = None) -> CompiledAttention:
    """The spec of a text, planned for `arch` (by default the device's own); its kernels are compiled when they are first
    needed. Raises PlanRefusal, DeviceError."""
    return compile_later(load_text(text)[0], device, kernel, arch)


def device_of(location: Location) -> str:
    return "emulated" if location == CPU else str(location)


def run(text: str, location: Location, inputs: Sequence[ArrayView], outputs: Sequence[ArrayView], stream: int | None) -> None:
    """Computes a call on the driver's `stream`. Raises ArgumentError, DeviceError."""
    arrays = (*inputs, *outputs)
    key = signature(text, location, arrays)
    prepared = _prepared.get(key)
    if stream is not None and prepared is not None and all(one(arrays, inputs[0].owner, stream) for one in prepared):
        return
    call = call_of(text)
    views = {name: call.view(name, array) for name, array in zip(call.inputs, inputs, strict=True)}
    results = {name: call.view(name, array) for name, array in zip(call.outputs, outputs, strict=True)}
    bounds = _bound(call, device_of(location), views, results)
    for bound in bounds:
        bound.run(stream)
    if stream is not None:
        names = (*call.inputs, *call.outputs)
        calls = tuple(RepeatedCall(bound, names, partial(_counter_of, location)) for bound in bounds)
        with _lock:
            _prepared[key] = calls


_prepared = RepeatedCalls()
_counters: dict[tuple[Location, int], int] = {}  # addresses, by GPU and stream
_lock = Lock()


def _counter_of(location: Location, stream: int) -> int:
    with _lock:
        if (location, stream) not in _counters:
            _counters[location, stream] = zero_for_ever(stream)
        return _counters[location, stream]


def _bound(call: Call, device: str, views: Mapping[str, ArrayView], results: Mapping[str, ArrayView]) -> list[Bound]:
    """The programs of a call, in order."""
    params = dict(call.params)
    if call.does != "backward":
        forward = call.compiled(device) if call.does == "forward" else call.compiled(device).saving()
        return [forward.bind({**views, **results}, params)]
    bounds = []
    for part in call.parts(device, {name: array.shape for name, array in views.items()}):
        written = {gradient_argument(name): results[gradient_argument(name)] for name in part.plan.wanted}
        bounds.append(part.bind({**part.inputs_of(views), **written}, params))
    return bounds
