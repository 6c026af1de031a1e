"""The derivatives of `attngen::attention`: by `attngen::attention_backward`, once.

torch.library.register_autograd would make the same function, but one that torch.func.grad refuses; and without gradients it
would send a call through the dispatcher twice. A function of a single level of torch.func, as torch itself makes them for
autograd.Function, takes part in every transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from attngen.spec.gradient import GradientError
from attngen.torch import backward, operator
from attngen.torch.backward import Backward, BackwardArguments, Said, backward_operator, is_deterministic, saved_by
from attngen.torch.observed import are_plain, is_observed
from attngen.torch.operator import (
    LIBRARY,
    Floats,
    Full,
    FullArguments,
    Ints,
    Pair,
    Saved,
    Tensors,
    attention_operator,
    full_operator,
)
from attngen.torch.private import (
    BelowAutograd,
    SingleLevelFunction,
    set_forward_gradients,
    single_level_functions,
    transforms_active,
)
from attngen.torch.runtime import input_names, parsed, refuse_tangents

NO_SECOND_DERIVATIVE = (
    'no kernel computes the second derivative of attention; mode="math" computes any attention by torch\'s own operations, '
    "differentiable any number of times, and so does a compiled spec's math()"
)


def _applied(function: Any, *arguments: Any) -> Any:
    if not transforms_active():
        return function.apply(*arguments)
    with single_level_functions():
        return function.apply(*arguments)


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Operators called here pass this level of autograd. Those of torch.func further out see every derivative: a function's
    forward has turned them off for all levels."""
    with BelowAutograd():
        if not transforms_active():
            yield
            return
        with torch.enable_grad(), set_forward_gradients(True):
            yield


def _needs_gradients(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _is_direct(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel may be called without the dispatcher: a second walk through it would double what a call costs."""
    return not is_observed() and are_plain(tensors) and tensors[0].device.type in ("cuda", "cpu")


NO_GRADIENTS = (None,) * 6  # for the arguments of `_Attention` that are no tensors


class _Context(Protocol):
    """What a forward leaves to its backward, on torch's object."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    said: Said
    needed: tuple[bool, ...]
    is_transformed: bool

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _Attention(SingleLevelFunction):
    """The arguments of `attention.full`, the tensors last."""

    @staticmethod
    def forward(
        ctx: _Context,
        spec: str,
        ints: Sequence[int],
        floats: Sequence[float],
        saves: bool,
        deterministic: bool,
        copies: bool,
        *tensors: Tensor,
    ) -> Saved:
        q, k, v, *inputs = tensors
        names = input_names(spec)
        needed = ctx.needs_input_grad[-len(tensors) :]
        wanted = tuple(name for name, is_needed in zip(names, needed, strict=True) if is_needed)
        is_refused = parsed(spec).kernel.is_counted  # by the backward, if anybody calls it: serving need not turn gradients off
        saved = () if is_refused else saved_by(spec, q.device, wanted, deterministic)
        writes = saves or bool({"lse", "lse_rest"} & set(saved))
        out, lse, lse_rest = _full(q, k, v, spec, inputs, ints, floats, writes, deterministic, copies)
        results = {"out": out, "lse": lse, "lse_rest": lse_rest}
        ctx.save_for_backward(*tensors, *(tensor if name in saved else None for name, tensor in results.items()))
        ctx.set_materialize_grads(False)
        ctx.said = spec, tuple(ints), tuple(floats), wanted, deterministic
        ctx.needed = needed
        ctx.is_transformed = transforms_active()
        if not saves:
            lse_rest = lse.new_empty((0,))
            lse = lse if parsed(spec).lse else lse.new_empty((0,))
        ctx.mark_non_differentiable(*((lse_rest,) if parsed(spec).lse else (lse, lse_rest)))
        return out, lse, lse_rest

    @staticmethod
    def backward(ctx: _Context, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, *inputs, out, lse, lse_rest = ctx.saved_tensors
        if dout is None:
            dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        # torch.func.vjp calls this when its transform has ended, with tensors that only the dispatcher can unwrap
        is_direct = not ctx.is_transformed and _is_direct((dout, q, k, v, *inputs))
        if is_direct and not torch.is_grad_enabled():
            gradients = backward.gradients(ctx.said, (dout, dlse, out, lse, lse_rest, q, k, v, *inputs))
        else:
            spec, ints, floats, wanted, deterministic = ctx.said
            arguments = (dout, dlse, q, k, v, spec, inputs, ints, floats, out, lse, lse_rest, wanted, deterministic)
            gradients = (_attention_backward if is_direct else backward_operator)(*arguments)
        if False not in ctx.needed:
            return (*NO_GRADIENTS, *gradients)
        found = iter(gradients)
        return (*NO_GRADIENTS, *(next(found) if is_needed else None for is_needed in ctx.needed))


def _full(*arguments: *FullArguments) -> Saved:
    """`attention.full` below autograd."""
    if _is_direct(Full(*arguments).tensors):
        return operator.run_full(*arguments)
    with _below_autograd():
        return full_operator(*arguments)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Tensors = None,
    ints: Ints = None,
    floats: Floats = None,
    deterministic: bool | None = None,
    copies: bool = False,
) -> Pair:
    tensors = (q, k, v, *inputs) if inputs else (q, k, v)
    refuse_tangents(spec, tensors)
    if _needs_gradients(tensors):
        others = (spec, ints or (), floats or (), False, is_deterministic(deterministic), copies)
        output, lse, _ = _applied(_Attention, *others, *tensors)
        return output, lse
    if _is_direct(tensors):
        return operator.run(q, k, v, spec, inputs, ints, floats, None, copies)
    with _below_autograd():
        return attention_operator(q, k, v, spec, inputs, ints, floats, None, copies)


def _attention_full(*arguments: *FullArguments) -> Saved:
    call = Full(*arguments)
    refuse_tangents(call.spec, call.tensors)
    if _needs_gradients(call.tensors):
        deterministic = is_deterministic(call.deterministic)
        others = (call.spec, call.ints, call.floats, call.saves, deterministic, call.copies)
        return _applied(_Attention, *others, *call.tensors)
    return _full(*call)


class _Gradients(SingleLevelFunction):
    """`compute`(tensors) where somebody may ask for its derivative."""

    @staticmethod
    def forward(ctx: object, compute: Callable[..., list[Tensor]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(compute(*tensors))

    @staticmethod
    def backward(ctx: object, *_: object) -> None:
        raise GradientError(NO_SECOND_DERIVATIVE)


def _attention_backward(*arguments: *BackwardArguments) -> list[Tensor]:
    call = Backward(*arguments)
    there = [t for t in call.tensors if t is not None]
    if not _needs_gradients(there):
        return _gradients(arguments, there)

    def compute(*tensors: Tensor | None) -> list[Tensor]:
        return _gradients(call.with_tensors(tensors), [t for t in tensors if t is not None])

    return list(_applied(_Gradients, compute, *call.tensors))


def _gradients(arguments: BackwardArguments, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`attention_backward` below autograd. `tensors`: those of `arguments`."""
    if _is_direct(tensors):
        return backward.run(*arguments)
    with _below_autograd():
        return backward_operator(*arguments)


LIBRARY.impl("attention", _attention, "Autograd")
LIBRARY.impl("attention.full", _attention_full, "Autograd")
LIBRARY.impl("attention_backward", _attention_backward, "Autograd")
