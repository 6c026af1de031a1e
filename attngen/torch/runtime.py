"""Programs called with tensors, as the operator calls them: bound with all checks, or by launches that are prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from threading import Lock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attngen.api import CompiledAttention, compile_later
from attngen.backward import CompiledBackward
from attngen.device import params
from attngen.device.arrays import ArgumentError, ArrayView, mark_written, view
from attngen.device.binding import Bound
from attngen.device.params import Number
from attngen.device.protocol import Device
from attngen.device.select import warn_emulated
from attngen.emit.program import Program
from attngen.language import load_source
from attngen.source import SourceFile
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type
from attngen.spec.gradient import GradientError
from attngen.torch.prepared import Given, PreparedCall, Remembered, signature
from attngen.torch.private import forward_ad


class Compiled(Protocol):
    """What has a program and binds calls of it, as CompiledAttention and CompiledBackward."""

    @property
    def device(self) -> Device: ...
    @property
    def source(self) -> Program: ...
    def number_names(self, kind: Type) -> tuple[str, ...]: ...
    def bind(self, arrays: Mapping[str, ArrayView], params: Mapping[str, Number]) -> Bound: ...


C = TypeVar("C", bound=Compiled)
SAME_NAMES: Mapping[str, str] = {}


@lru_cache(maxsize=4096)
def parsed(text: str) -> AttentionSpec:
    """The one attention of `text`. Raises DiagnosticError, ArgumentError."""
    loaded = load_source(SourceFile("<spec>", text))  # whoever wrote the spec was warned about it
    if len(loaded) != 1:
        raise ArgumentError(f"the operator takes one attention, not {len(loaded)}")
    return loaded[0].spec


@lru_cache(maxsize=4096)
def input_names(text: str) -> tuple[str, ...]:
    """The names of the operator's tensors for a spec's text, in order."""
    return ("q", "k", "v", *params.input_names(parsed(text)))


def refuse_tangents(names: str | Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raises GradientError if one of `tensors` has a tangent, which a kernel would lose. `names` are theirs, or the spec's text
    if they are those of the operator."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in zip(input_names(names) if isinstance(names, str) else names, tensors, strict=False):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise GradientError(
                f'`{name}` has a tangent, and no kernel has a forward-mode derivative; mode="math" has one, and so has a '
                "compiled spec's math()"
            )


runtimes: dict[tuple[str, torch.device], Runtime[CompiledAttention]] = {}
_lock = Lock()


def runtime(text: str, device: torch.device) -> Runtime[CompiledAttention]:
    """The kernel of a spec's text on a device: planned on first use, and compiled by the first call that fits it."""
    found = runtimes.get((text, device))
    if found is None:
        with _lock:
            found = runtimes.get((text, device))
            if found is None:
                if device.type != "cuda":
                    warn_emulated(
                        "attngen's attention on tensors of the CPU",
                        "Move the tensors to a GPU; torch's own attention is torch.nn.functional.scaled_dot_product_attention.",
                    )
                found = runtimes[text, device] = Runtime(compile_later(parsed(text), name_of(device)))
    return found


def name_of(device: torch.device) -> str:
    """attngen's name of the device that computes for tensors on `device`."""
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "emulated"


@cache
def saving_runtime(text: str, device: torch.device) -> Runtime[CompiledAttention]:
    """The kernel that also returns what a backward reads."""
    usual = runtime(text, device)
    return Runtime(usual.compiled.saving(), usual.repeats)


@cache
def backward_runtime(
    text: str, device: torch.device, wanted: tuple[str, ...], deterministic: bool
) -> Runtime[CompiledBackward]:
    """The kernels that compute the gradients `wanted`, by the names of the tensors. `deterministic`: the same bits in each run.

    Raises GradientError, PlanRefusal.
    """
    usual = runtime(text, device)
    return Runtime(usual.compiled.gradients(wanted, deterministic), usual.repeats)


class Runtime(Generic[C]):
    """A compiled spec as a function of its program's inputs, its int and its float params, each in order.

    It returns the program's outputs, `output_names`. They are written to those of `outputs` that are not None, on the driver's
    `stream`, by default the current one. If kernels repeat launches, as those of GPUs do, these are prepared once for calls of
    the same signature.
    """

    def __init__(self, compiled: C, repeats: bool | None = None) -> None:
        self.compiled = compiled
        self.repeats = compiled.device.name.startswith("cuda") if repeats is None else repeats
        self._calls: Remembered[PreparedCall] | None = Remembered() if self.repeats else None
        self.input_names = tuple(t.argument for t in compiled.source.of_role("input"))
        self.output_names = tuple(t.argument for t in compiled.source.of_role("output"))
        self._ints, self._floats = (compiled.number_names(kind) for kind in (Type.INT, Type.FLOAT))

    @cached_property
    def copied(self: Runtime[CompiledAttention]) -> frozenset[str]:
        """Those of q, k and v that may be copied for a kernel that cannot read them in place; pages may not."""
        names = ("q",) if self.compiled.spec.kernel.is_paged else ("q", "k", "v")
        aligned = {t.argument for t in self.compiled.source.of_role("input") if t.alignment}
        return frozenset(aligned.intersection(names))

    @cached_property
    def nothing(self) -> tuple[Tensor, Tensor]:
        """What the operator returns for lse and lse_rest that the program has not: two results must not be the same tensor.
        Made by the first kernel that runs: a trace or a transform, in which this object may be made, would wrap them."""
        name = self.compiled.device.name
        place = name if name.startswith("cuda") else "cpu"
        with torch.inference_mode(False):  # a later call may record gradients
            lse, lse_rest = (torch.empty((0,), dtype=torch.float32, device=place) for _ in range(2))
        return lse, lse_rest

    def __call__(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        outputs: Given = (),
        stream: int | None = None,
    ) -> Sequence[Tensor]:
        calls = self._calls
        if calls is None:
            bound = self.bind(tensors, ints, floats, outputs)
            bound.run()
            result: Sequence[Tensor] | None = tuple(bound.outputs.values())
        else:
            key = signature((*ints, *map(float, floats)) if ints or floats else None, *tensors)
            for tensor in outputs:
                key += (
                    (None,)
                    if tensor is None
                    else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
                )
            call = calls.get(key)
            result = call(tensors, outputs, stream) if call is not None else None
            if result is None:
                call = calls[key] = PreparedCall(self.bind(tensors, ints, floats, outputs))
                result = call(tensors, outputs, stream, checked=True)
        assert result is not None
        if outputs:
            mark_written(outputs)
        return result

    def prepared(self, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> PreparedCall | None:
        """The launches of a call with this signature, if they are prepared."""
        if self._calls is None:
            return None
        return self._calls.get(signature((*ints, *map(float, floats)) if ints or floats else None, *tensors))

    def bind(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        outputs: Given = (),
        names: Mapping[str, str] = SAME_NAMES,
    ) -> Bound:
        """The call, checked; nothing runs. `names` are the caller's for tensors that have other names there. Raises
        ArgumentError, ObligationError, PlanRefusal."""
        wanted = {"tensors": (self.input_names, tensors), "ints": (self._ints, ints), "floats": (self._floats, floats)}
        for what, (expected, given) in wanted.items():
            if len(given) != len(expected):
                all_of_them = ", ".join(expected)
                raise ArgumentError(f"{len(given)} {what} were given; this attention takes {len(expected)}: {all_of_them}")
        refuse_tangents(self.input_names, tensors)
        inputs = zip(self.input_names, tensors, strict=True)
        arrays: dict[str, ArrayView] = {name: view(t, names.get(name, name)) for name, t in inputs}
        arrays |= {name: view(t, name) for name, t in zip(self.output_names, outputs, strict=False) if t is not None}
        numbers: Mapping[str, int | float] = dict(zip((*self._ints, *self._floats), (*ints, *floats), strict=True))
        return self.compiled.bind(arrays, numbers)
