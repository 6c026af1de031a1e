"""Eager calls: past torch's dispatcher where nothing listens, and from memory where the same was called before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attngen.torch.observed import are_plain, is_observed
from attngen.torch.operator import attention_operator
from attngen.torch.runtime import OnGpu, Remembered, runtimes, signature

Tensor = Any
Said = tuple[Any, ...] | None


class EagerCalls:
    """The eager calls of one function or module that were made before, by all that was said in them."""

    def __init__(self) -> None:
        self._calls = Remembered()

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], said: Said) -> Any:
        """(O, lse) of a call like an earlier one; None where there was none, or where torch must see it.

        `said` is whatever else the launches depend on, None where that cannot be said.
        """
        if said is None or is_observed() or not are_plain((q, k, v, *inputs)):
            return None
        call = self._calls.get(signature(said, q, k, v, inputs))
        return None if call is None else call(q, k, v, inputs)

    def make(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], said: Said, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """(O, lse) of the operator with `arguments`, to be repeated for calls with the same `said` and the like of the rest."""
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
        """Copies, in this process or another, remember for themselves."""
        return EagerCalls, ()
