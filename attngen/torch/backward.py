"""The operator `attngen::attention_backward`: the gradients of every attention of this package.

It returns the gradients of `wanted`, names of q, k, v and inputs, in that order. `out`, `lse` and `lse_rest` are the forward's
results that the plan of the backward names (`saved_by`); `dlse` is None if nobody used lse.

With `deterministic`, every gradient has the same bits in every run; without, a faster plan may add terms up in any order.
None is what `is_deterministic` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attngen.plan.facts import DETERMINISTIC
from attngen.spec.gradient import gradient_argument
from attngen.torch.copies import empty_as, in_place
from attngen.torch.operator import lse_shape, operator, runs_on
from attngen.torch.prepared import PreparedCall, Remembered, signature
from attngen.torch.runtime import backward_runtime, input_names, parsed, runtime

SCHEMA = (
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, str spec, Tensor[] inputs, SymInt[] ints, "
    "float[] floats, Tensor? out, Tensor? lse, Tensor? lse_rest, str[] wanted, bool? deterministic) -> Tensor[]"
)


def is_deterministic(said: bool | None) -> bool:
    """What a call says about its gradients; if it says nothing, what torch's global switch says when the call is made."""
    return DETERMINISTIC or torch.are_deterministic_algorithms_enabled() if said is None else said


def saved_by(spec: str, device: torch.device, wanted: Sequence[str], deterministic: bool) -> tuple[str, ...]:
    """The results of the forward that the gradients `wanted` are computed from. Raises GradientError, PlanRefusal."""
    place = runs_on(device)
    plans = [
        backward_runtime(spec, place, part, deterministic).compiled.plan
        for part in _parts(spec, place, tuple(wanted), deterministic)
    ]
    return tuple(dict.fromkeys(name for plan in plans for name in plan.saved))


BackwardArguments: TypeAlias = tuple[
    Tensor, Tensor | None, Tensor, Tensor, Tensor, str, Sequence[Tensor], Sequence[int], Sequence[float], Tensor | None,
    Tensor | None, Tensor | None, Sequence[str], bool | None,
]  # fmt: skip


class Backward(NamedTuple):
    """The arguments of `attention_backward`."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    spec: str
    inputs: Sequence[Tensor]
    ints: Sequence[int]
    floats: Sequence[float]
    out: Tensor | None
    lse: Tensor | None
    lse_rest: Tensor | None
    wanted: Sequence[str]
    deterministic: bool | None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All tensors, from `FIRST_INPUT` on those that have gradients."""
        return self.dout, self.dlse, self.out, self.lse, self.lse_rest, self.q, self.k, self.v, *self.inputs

    def with_tensors(self, tensors: Sequence[Any]) -> Backward:
        """The same call of other tensors, in the order of `tensors`."""
        dout, dlse, out, lse, lse_rest, q, k, v, *inputs = tensors
        return self._replace(dout=dout, dlse=dlse, out=out, lse=lse, lse_rest=lse_rest, q=q, k=k, v=v, inputs=inputs)

    @property
    def inputs_by_name(self) -> dict[str, Tensor]:
        """The tensors that have gradients."""
        return dict(zip(input_names(self.spec), self.tensors[FIRST_INPUT:], strict=True))


FIRST_INPUT = 5
Said = tuple[str, tuple[int, ...], tuple[float, ...], tuple[str, ...], bool]  # the arguments that are no tensors


@lru_cache(maxsize=4096)
def _parts(
    spec: str, device: torch.device, wanted: tuple[str, ...], deterministic: bool, shapes: tuple[torch.Size, ...] = ()
) -> tuple[tuple[str, ...], ...]:
    """`wanted` in the parts that have a program each, in a call whose inputs have these `shapes`, if they are given."""
    named = dict(zip(input_names(spec), shapes, strict=False))
    return runtime(spec, device).compiled.gradient_parts(wanted, deterministic, named)


class Repeat(NamedTuple):
    """The launches of a call's parts, each with the places of its inputs among the call's tensors, and the places of the
    gradients wanted among all outputs."""

    parts: Sequence[tuple[PreparedCall, Sequence[int]]]
    written: Sequence[int]

    def __call__(self, tensors: Sequence[Any]) -> list[Tensor] | None:
        """The gradients; None if the launches cannot read these tensors."""
        outputs: list[Tensor] = []
        for call, read in self.parts:
            found = call([tensors[at] for at in read])
            if found is None:
                return None
            outputs += found
        return [outputs[at] for at in self.written]


_calls: Remembered[Repeat] = Remembered()


def run(*arguments: *BackwardArguments) -> list[Tensor]:
    """The gradients by the kernels of a spec on q's device."""
    dout, dlse, q, k, v, spec, inputs, ints, floats, out, lse, lse_rest, wanted, deterministic = arguments
    said = spec, tuple(ints), tuple(floats), tuple(wanted), is_deterministic(deterministic)
    return gradients(said, (dout, dlse, out, lse, lse_rest, q, k, v, *inputs))


def gradients(said: Said, tensors: Sequence[Any]) -> list[Tensor]:
    """The gradients of a call, in the order of `Backward.tensors`. A call like an earlier one repeats its launches."""
    _, dlse, out, lse, *_ = tensors
    # with their number, three say which optional tensors there are
    key = signature((said, dlse is None, out is None, lse is None), *[t for t in tensors if t is not None])
    repeat = _calls.get(key)
    found = repeat(tensors) if repeat is not None else None
    if found is None:
        found, repeat = _checked(said, tensors)
        if repeat is not None:
            _calls[key] = repeat
    return found


def _checked(said: Said, tensors: Sequence[Any]) -> tuple[list[Tensor], Repeat | None]:
    """`gradients` by all checks; and how to repeat the launches, if they are prepared and read `tensors` as they are."""
    spec, ints, floats, wanted, deterministic = said
    dout, dlse, *others = tensors
    q, k, *_ = tensors[FIRST_INPUT:]
    q_len, kv_len = ints[:2] if parsed(spec).kernel.is_packed else (q.shape[2], k.shape[2])
    if parsed(spec).lse:
        dlse = q.new_zeros(lse_shape(spec, q), dtype=torch.float32) if dlse is None else dlse.contiguous()
    made = (dout, dlse, *others)
    names = ("dout", "dlse", "out", "lse", "lse_rest", *input_names(spec))
    shapes = tuple([t.shape for t in tensors[FIRST_INPUT:]]) if len(tensors) > FIRST_INPUT + 3 else ()
    outputs: list[Tensor] = []
    places: dict[str, int] = {}  # places of gradients among the outputs
    parts: list[tuple[PreparedCall | None, Sequence[int]]] = []
    for part in _parts(spec, q.device, wanted, deterministic, shapes):
        found = backward_runtime(spec, q.device, part, deterministic)
        if not deterministic and found.compiled.is_faster_in_order(q_len, kv_len):
            found = backward_runtime(spec, q.device, part, True)
        read = tuple(map(names.index, found.input_names))
        aligned = {t.argument for t in found.compiled.source.of_role("input") if t.alignment}
        # callers choose neither where a gradient begins nor how hooks of saved tensors return one
        given = [in_place(made[at]) if names[at] in aligned else made[at] for at in read]
        places |= {name: len(outputs) + found.output_names.index(gradient_argument(name)) for name in part}
        outputs += found(given, ints, floats)
        is_same = all(one is tensors[at] for one, at in zip(given, read, strict=True))
        parts.append((found.prepared(given, ints, floats) if is_same else None, read))
    written = [places[name] for name in wanted]
    prepared = [(call, read) for call, read in parts if call is not None]
    return [outputs[at] for at in written], Repeat(prepared, written) if len(prepared) == len(parts) else None


def fake(*arguments: *BackwardArguments) -> list[Tensor]:
    """Shapes and strides alone."""
    call = Backward(*arguments)
    given = call.inputs_by_name
    order = {"q": call.q, "k": call.k, "v": call.k}  # as `bind` allocates them: as the first input with the same heads and rows
    return [empty_as(given[name], given[name].shape, order.get(name)) for name in call.wanted]


backward_operator = operator(SCHEMA, run, fake)
