"""Eager calls: repeated calls skip all checks, and skip torch's dispatcher if nothing observes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from attngen.torch.arguments import unpacked
from attngen.torch.copies import ROW_BYTES
from attngen.torch.description import Mode
from attngen.torch.math import by_torch, check_by_torch
from attngen.torch.observed import are_plain, is_observed
from attngen.torch.operator import Pair, as_read, attention_operator, full_operator
from attngen.torch.runtime import OnGpu, PreparedCall, Remembered, runtime, runtimes, signature

Tensor = Any
_autocasts = torch._C._is_any_autocast_enabled
Check = Callable[[Any], None]
Others = tuple[Any, ...] | None  # what the launches depend on besides the tensors; None if the call cannot be repeated


def _call(arguments: tuple[Any, ...], deterministic: bool | None, copies: bool) -> Pair:
    """The operator. It is `full` if a transform of torch.func is active or an input is a subclass or a negated view: the
    dispatcher does not look for these in an optional list."""
    q, k, v, text, *lists = arguments
    inputs = (lists[0] or ()) if lists and not torch.compiler.is_compiling() else ()
    is_hidden = not are_plain(inputs) and not any(t.is_nested for t in inputs)  # nested tensors are refused by their name
    if is_hidden or torch._C._are_functorch_transforms_active():
        output, lse, _ = full_operator(q, k, v, text, *map(list, unpacked(lists)), False, deterministic, copies)
        return output, lse
    named = {} if deterministic is None else {"deterministic": deterministic}
    if copies:
        named["copies"] = True
    result: Pair = attention_operator(*arguments, **named)
    return result


OF_CACHE = {"k": "k_cache", "v": "v_cache"}  # a caller's names for tensors of the operator: `k` and `v` are the new rows


def check_call(arguments: tuple[Any, ...], mode: Mode, copies: bool) -> None:
    """Raises what a call of the operator that reads a cache would raise for its arguments; nothing runs. A call that torch
    observes is checked when it runs, and tensors on meta have nothing that could be overwritten."""
    if mode == "math":
        return check_by_torch(*arguments)
    q, k, v, text, *lists = arguments
    inputs, ints, floats = unpacked(lists)
    if q.device.type != "meta" and not is_observed() and are_plain((q, k, v, *inputs)):
        found = runtime(text, q.device)
        if copies:
            q, k, v = as_read(found, q, k, v)
        found.bind((q, k, v, *inputs), ints, floats, names=OF_CACHE)


class EagerCalls:
    """Earlier eager calls of one function or module, by everything that their launches depend on."""

    def __init__(self) -> None:
        self._calls: Remembered[PreparedCall] = Remembered()
        self._checked: Remembered[bool] = Remembered()

    def repeat(self, tensors: Sequence[Tensor], others: Others) -> Any:
        """The outputs of a call like an earlier one; None if there was none, or if torch must see the call."""
        if others is None or is_observed() or _autocasts() or not are_plain(tensors):
            return None
        try:
            call = self._calls.get(signature(others, *tensors))
        except (RuntimeError, TypeError):  # a nested tensor, which has no sizes, or a list as a scale: refused later
            return None
        return None if call is None else call(tensors)

    def make(
        self,
        tensors: Sequence[Tensor],
        others: Others,
        arguments: tuple[Any, ...],
        mode: Mode,
        deterministic: bool | None = None,
        copies: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(O, lse) of the operator with `arguments`, which are made of `tensors`. The call is remembered for `repeat`, unless
        torch's own operations compute it."""
        if mode == "math":
            return by_torch(*arguments)
        result = _call(arguments, deterministic, copies)
        if others is not None and not is_observed() and not _autocasts() and are_plain(tensors):
            q, k, v, text, *lists = arguments
            found = runtimes.get((text, q.device))
            if isinstance(found, OnGpu):
                inputs, ints, floats = unpacked(lists)
                call = found.prepared((q, k, v, *inputs), ints, floats)
                if call is not None:
                    are_same = all(map(is_, tensors, (q, k, v, *inputs)))
                    self._calls[signature(others, *tensors)] = call if are_same else call.of_views()
        return result

    def once(self, tensors: Sequence[Tensor], others: Any, check: Check) -> Check | None:
        """`check`, which raises if a call would be refused; None if it passed for a call of such tensors and `others`, and for
        torch.compile, which refuses a call before it runs."""
        if torch.compiler.is_compiling():
            return None
        if not are_plain(tensors):  # nor have all of them an address
            return check
        try:
            places = 0  # the lowest bits of all addresses: a signature has none, and kernels refuse odd ones
            for tensor in tensors:
                places |= tensor.data_ptr() & (ROW_BYTES - 1)
            key = signature((others, _autocasts(), places), *tensors)
            if key in self._checked:
                return None
        except (AttributeError, RuntimeError, TypeError):  # such arguments are refused later
            return check

        def checked(given: Any) -> None:
            check(given)
            self._checked[key] = True

        return checked

    def __reduce__(self) -> tuple[type[EagerCalls], tuple[()]]:
        """A copy, in this process or another, starts without remembered calls."""
        return EagerCalls, ()
