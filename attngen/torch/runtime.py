"""Programs called with tensors, as the operator calls them: allocation, checks remembered by signature, launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, cached_property, lru_cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngen.api import compile_later
from attngen.device import params
from attngen.device.arrays import ArgumentError, ArrayView, mark_written, view
from attngen.device.binding import Bound
from attngen.device.cuda.memory import zero_for_ever
from attngen.device.select import warn_emulated
from attngen.language import load_source
from attngen.source import SourceFile
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type
from attngen.spec.gradient import GradientError
from attngen.torch.private import current_device, forward_ad, raw_stream

T = TypeVar("T")
Compiled = Any  # CompiledAttention or CompiledBackward: what has a program and binds calls of it
Given = Sequence[Tensor | None]  # outputs of the caller, in the program's order: None, or none at all, for those to allocate
SAME_NAMES: Mapping[str, str] = {}
MAX_SIGNATURES = 4096  # call signatures remembered by one kernel: a length that was seen before costs no checks
WORKSPACE_ALIGNMENT = 256  # bytes, as torch's own allocations
_is_grad_enabled = torch.is_grad_enabled
_empty_like = torch.empty_like


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


runtimes: dict[tuple[str, torch.device], Emulated | OnGpu] = {}
_lock = Lock()


def runtime(text: str, device: torch.device) -> Emulated | OnGpu:
    """The kernel of a spec's text on a device: planned on first use, and compiled by the first call that fits it."""
    found = runtimes.get((text, device))
    if found is None:
        with _lock:
            found = runtimes.get((text, device))
            if found is None:
                if device.type == "cuda":
                    found = OnGpu(compile_later(parsed(text), f"cuda:{device.index or 0}"))
                else:
                    warn_emulated(
                        "attngen's attention on tensors of the CPU",
                        "Move the tensors to a GPU; torch's own attention is torch.nn.functional.scaled_dot_product_attention.",
                    )
                    found = Emulated(compile_later(parsed(text), "emulated"))
                runtimes[text, device] = found
    return found


@cache
def saving_runtime(text: str, device: torch.device) -> Emulated | OnGpu:
    """The kernel that also returns what a backward reads."""
    usual = runtime(text, device)
    return type(usual)(usual.compiled.saving())


@cache
def backward_runtime(text: str, device: torch.device, wanted: tuple[str, ...], deterministic: bool) -> Emulated | OnGpu:
    """The kernels that compute the gradients `wanted`, by the names of the tensors. `deterministic`: the same bits in each run.

    Raises GradientError, PlanRefusal.
    """
    usual = runtime(text, device)
    return type(usual)(usual.compiled.gradients(wanted, deterministic))


_counters: dict[tuple[int, int], int] = {}  # addresses, by device and stream


def counter_of(device: torch.device, stream: int) -> int:
    """The address of a zero in the device's memory for the launches on a stream, each of which leaves it zero.

    It is no tensor: torch.compile's CUDA graphs are warmed up in a pool in which no memory may outlive the call.
    """
    found = _counters.get((device.index, stream))
    if found is None:
        with _lock, torch.cuda.device(device):
            found = _counters.get((device.index, stream))
            if found is None:
                found = _counters[device.index, stream] = zero_for_ever(stream)
    return found


class Runtime:
    """A compiled spec as a function of its program's inputs, its int and its float params, each in order.

    It returns the program's outputs, `output_names`. They are written to those of `outputs` that are not None, on the driver's
    `stream`, by default the current one.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.input_names = tuple(t.argument for t in compiled.source.of_role("input"))
        self.output_names = tuple(t.argument for t in compiled.source.of_role("output"))
        self._ints, self._floats = (compiled.number_names(kind) for kind in (Type.INT, Type.FLOAT))

    @cached_property
    def copied(self) -> frozenset[str]:
        """Those of q, k and v that may be copied for a kernel that cannot read them in place; pages may not."""
        names = ("q",) if self.compiled.spec.kernel.is_paged else ("q", "k", "v")
        aligned = {t.argument for t in self.compiled.source.of_role("input") if t.alignment}
        return frozenset(aligned.intersection(names))

    @cached_property
    def no_lse(self) -> Tensor:
        """What the operator returns if the program has no lse. Made by the first kernel that runs: a trace or a transform, in
        which this object may be made, would wrap it."""
        return self._nothing()

    @cached_property
    def no_lse_rest(self) -> Tensor:
        """As `no_lse`: two results of an operator must not be the same tensor."""
        return self._nothing()

    def _nothing(self) -> Tensor:
        name = self.compiled.device.name
        with torch.inference_mode(False):  # a later call may record gradients
            return torch.empty((0,), dtype=torch.float32, device=name if name.startswith("cuda") else "cpu")

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
        bound: Bound = self.compiled.bind(arrays, numbers)
        return bound


class Emulated(Runtime):
    """On the CPU, by the emulated device."""

    def __call__(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        outputs: Given = (),
        stream: int | None = None,
    ) -> Sequence[Tensor]:
        bound = self.bind(tensors, ints, floats, outputs)
        bound.run()
        if outputs:
            mark_written(outputs)
        return tuple(bound.outputs.values())


class OnGpu(Runtime):
    """On a GPU. Checks and launches are remembered by a call's signature: shapes, strides, types, params."""

    def __init__(self, compiled: Compiled) -> None:
        super().__init__(compiled)
        self._calls: Remembered[PreparedCall] = Remembered()

    def __call__(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        outputs: Given = (),
        stream: int | None = None,
    ) -> Sequence[Tensor]:
        key = signature((*ints, *map(float, floats)) if ints or floats else None, *tensors)
        for tensor in outputs:
            key += (
                (None,)
                if tensor is None
                else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            )
        call = self._calls.get(key)
        result = call(tensors, outputs, stream) if call is not None else None
        if result is None:
            call = self._calls[key] = PreparedCall(self.bind(tensors, ints, floats, outputs))
            result = call(tensors, outputs, stream, checked=True)
            assert result is not None
        if outputs:
            mark_written(outputs)
        return result

    def prepared(self, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> PreparedCall | None:
        """The remembered call with this signature."""
        return self._calls.get(signature((*ints, *map(float, floats)) if ints or floats else None, *tensors))


def signature(other: Any, first: Tensor, second: Tensor, third: Tensor, *more: Tensor) -> tuple[Any, ...]:
    """What a call's checks and launches depend on, except addresses; `other` is the part that is not in the tensors.

    Every program has three inputs: for these, a loop would cost 0.4 us a call.
    """
    key = (
        other, first.shape, first.stride(), second.shape, second.stride(), third.shape, third.stride(),
        first.dtype, second.dtype, third.dtype, first.device, second.device, third.device,
    )  # fmt: skip
    for t in more:
        key += (t.shape, t.stride(), t.dtype, t.device)  # type: ignore[assignment]
    if _is_grad_enabled() and (
        first.requires_grad or second.requires_grad or third.requires_grad or (more and any(t.requires_grad for t in more))
    ):
        key += (True,)  # type: ignore[assignment]
    return key


class Remembered(dict[tuple[Any, ...], T]):
    """What is known of calls, by their signature; the oldest are dropped."""

    def __setitem__(self, key: tuple[Any, ...], call: T) -> None:
        while len(self) >= MAX_SIGNATURES:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, call)


class PreparedCall:
    """The launches of one signature, repeated with other tensors."""

    def __init__(self, bound: Bound) -> None:
        program = bound.kernel.source
        inputs, outputs, workspaces = (program.of_role(role) for role in ("input", "output", "workspace"))
        counters = program.of_role("counter")
        first = bound.arrays[inputs[0].key].owner
        # the inputs whose addresses must be aligned, the first ones and others, and the bits of an address that must then be 0
        self._aligned = next((i for i, t in enumerate(inputs) if not t.alignment), len(inputs))
        self._also_aligned = tuple(i for i, t in enumerate(inputs) if t.alignment and i > self._aligned)
        self._misaligned = max((t.alignment - 1 for t in (*inputs, *outputs) if t.alignment), default=0)
        read = [bound.arrays[t.key].owner for t in inputs]
        self._outputs = tuple((*_recipe(bound.arrays[t.key].owner, read), bool(t.alignment)) for t in outputs)
        starts, end = [], 0  # places of the workspaces in their one allocation
        for t in workspaces:
            starts.append(end)
            end += -(-bound.arrays[t.key].owner.nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self._starts, self._workspace_bytes = tuple(starts), end
        self._counted = bool(counters)
        self._device = first.device
        self._index: int = first.device.index
        self._overlap = bound.overlap
        self._repeat = None
        if bound.launches:
            order = tuple(t.name for t in (*inputs, *outputs, *workspaces, *counters))
            self._repeat = bound.kernel.repeat(bound.launches, order)  # type: ignore[attr-defined]

    def of_views(self) -> PreparedCall:
        """The same launches for tensors of which the program's are views: no output is made like one of them."""
        call = copy(self)
        call._outputs = tuple((None, *recipe[1:]) for recipe in self._outputs)
        return call

    def __call__(
        self, tensors: Sequence[Tensor], outputs: Given = (), stream: int | None = None, *, checked: bool = False
    ) -> Sequence[Tensor] | None:
        """The outputs, or None if an address is not aligned as the kernel's copies require and was not `checked`. Raises
        ArgumentError if an output shares memory with another tensor."""
        addresses, bits = [], 0
        for tensor in tensors[: self._aligned]:
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        for tensor in tensors[self._aligned :]:
            addresses.append(tensor.data_ptr())
        for position in self._also_aligned:
            bits |= addresses[position]
        results: list[Tensor] = []
        for like, shape, strides, dtype, aligned in self._outputs:
            result = outputs[len(results)] if outputs else None
            if result is None:
                if like is not None:
                    result = _empty_like(tensors[like])
                else:
                    result = tensors[0].new_empty_strided(shape, strides, dtype=dtype)
            elif aligned:
                bits |= result.data_ptr()
            results.append(result)
            addresses.append(result.data_ptr())
        if bits & self._misaligned and not checked:
            return None
        if self._starts:
            workspaces = tensors[0].new_empty(self._workspace_bytes, dtype=torch.uint8)  # kept until the launch
            start = workspaces.data_ptr()
            for offset in self._starts:
                addresses.append(start + offset)
        if self._overlap is not None:
            self._overlap.check(addresses)
        if self._repeat is not None:
            if stream is None:
                stream = raw_stream(self._index)
            if self._counted:
                if torch.cuda.is_current_stream_capturing():  # the graph sets its own to zero: it may be replayed on any stream
                    counter = torch.zeros(1, dtype=torch.int32, device=self._device)
                    addresses.append(counter.data_ptr())
                else:
                    addresses.append(counter_of(self._device, stream))
            if current_device() == self._index:
                self._repeat(addresses, stream)
            else:
                with torch.cuda.device(self._index):
                    self._repeat(addresses, stream)
        return results


def _recipe(tensor: Tensor, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """How to allocate a tensor like `tensor`: the position of an input whose empty_like is one, which costs the host least, or
    None; shape, strides and element type."""
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    for position, one in enumerate(inputs):
        like = torch.empty_like(one, device="meta")
        if (tuple(like.shape), tuple(like.stride()), like.dtype) == layout:
            return position, *layout
    return None, *layout
