"""Eager calls: repeated calls skip all checks, and skip torch's dispatcher if nothing observes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attngen.torch.observed import are_plain, is_observed
from attngen.torch.operator import attention_operator
from attngen.torch.runtime import OnGpu, Remembered, runtimes, signature

Tensor = Any
Said = tuple[Any, ...] | None


class EagerCalls:
    """Earlier eager calls of one function or module, by everything that their launches depend on."""

    def __init__(self) -> None:
        self._calls = Remembered()

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], said: Said) -> Any:
        """(O, lse) of a call like an earlier one; None if there was none, or if torch must see the call.

        `said` is what the launches depend on besides the tensors; None if the call cannot be repeated.
        """
        if said is None or is_observed() or not are_plain((q, k, v, *inputs)):
            return None
        call = self._calls.get(signature(said, q, k, v, inputs))
        return None if call is None else call(q, k, v, inputs)

    def make(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], said: Said, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """(O, lse) of the operator with `arguments`; the call is remembered by `said` and by the tensors' shapes and types."""
        result: tuple[Tensor, Tensor] = attention_operator(*arguments)
        if said is not None and not is_observed() and are_plain((q, k, v, *inputs)):
            queries, keys, values, text, *lists = arguments
            found = runtimes.get((text, queries.device))
            if isinstance(found, OnGpu):
                listed = [of or () for of in (*lists, None, None, None)[:3]]
                call = found.made(queries, keys, values, *listed)
                if call is not None:
                    self._calls[signature(said, q, k, v, inputs)] = call
        return result

    def __reduce__(self) -> tuple[type[EagerCalls], tuple[()]]:
        """A copy, in this process or another, starts without remembered calls."""
        return EagerCalls, ()
