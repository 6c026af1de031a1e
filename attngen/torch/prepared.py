"""The one cache of prepared launches. A call's checks and launches follow from its signature: shapes, strides and types of its
tensors, and a key for the rest. They are prepared once and kept; a later call with that signature fills in addresses.

A `Remembered` belongs to who can find a call by less than is below it, and all have the same `PreparedCall`s:

| of | key | tensors | a call that is found skips |
|---|---|---|---|
| a kernel (`Runtime`) | the numbers of the call | those of its program | checks and the arguments of launches |
| a function or layer (`Front`) | the caller's other arguments | the caller's | also its description, and the dispatcher |
| the backward | what autograd keeps beside tensors | those that it keeps | also which kernels compute the gradients |

No entry ever becomes wrong, as kernels do not change. The oldest are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from threading import Lock
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from attngen.device.binding import Bound
from attngen.device.cuda.memory import zero_for_ever
from attngen.torch.private import current_device, raw_stream

T = TypeVar("T")
Given = Sequence[Tensor | None]  # outputs of the caller, in the program's order: None, or none at all, for those to allocate
Recipe: TypeAlias = tuple[int | None, tuple[int, ...], tuple[int, ...], torch.dtype]
MAX_SIGNATURES = 4096  # calls of one kernel, function or layer: a length that was seen before costs no checks
WORKSPACE_ALIGNMENT = 256  # bytes, as torch's own allocations
_is_grad_enabled = torch.is_grad_enabled
_empty_like = torch.empty_like
_lock = Lock()


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


def signature(other: object, first: Tensor, second: Tensor, third: Tensor, *more: Tensor) -> tuple[object, ...]:
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


class Remembered(dict[tuple[object, ...], T]):
    """What is known of calls, by their signature; the oldest are dropped."""

    def __setitem__(self, key: tuple[object, ...], call: T) -> None:
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


def _recipe(tensor: Tensor, inputs: Sequence[Tensor]) -> Recipe:
    """How to allocate a tensor like `tensor`: the position of an input whose empty_like is one, which costs the host least, or
    None; shape, strides and element type."""
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    for position, one in enumerate(inputs):
        like = torch.empty_like(one, device="meta")
        if (tuple(like.shape), tuple(like.stride()), like.dtype) == layout:
            return position, *layout
    return None, *layout
