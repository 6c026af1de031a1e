"""The front door: from the arguments of a function or a layer to the operator, or straight to launches that are remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.torch.arguments import unpacked
from attngen.torch.copies import ROW_BYTES
from attngen.torch.description import Mode, head_size
from attngen.torch.layout import needs_padding, padded_heads
from attngen.torch.math import by_torch, check_by_torch
from attngen.torch.observed import are_plain, is_observed
from attngen.torch.operator import Pair, as_read, attention_operator, full_operator
from attngen.torch.prepared import PreparedCall, Remembered, signature
from attngen.torch.private import autocasts, transforms_active
from attngen.torch.runtime import runtime, runtimes

Key = tuple[object, ...] | None  # what the launches depend on besides the tensors; None if the call cannot be repeated
OF_CACHE = {"k": "k_cache", "v": "v_cache"}  # a caller's names for tensors of the operator: `k` and `v` are the new rows


class Call(NamedTuple):
    """A call of the operator, or of torch's own operations in mode "math". `arguments` are those of the operator up to floats,
    of which trailing empty lists may be missing."""

    arguments: tuple[Any, ...]
    mode: Mode = "auto"
    deterministic: bool | None = None
    copies: bool = False
    head_size: int | None = None  # the size of O's heads, if heads were padded: such a call is not remembered

    def padded(self) -> Call:
        """The call with head sizes that are multiples of 8."""
        q, k, v, *others = self.arguments
        if not needs_padding(q, v):
            return self
        return Call((*padded_heads(q, k, v), *others), self.mode, self.deterministic, self.copies, head_size(v))

    def run(self) -> Pair:
        """(O, lse), padded as the tensors are.

        The operator is `full` if a transform of torch.func is active or an input is a subclass or a negated view: the
        dispatcher does not look for these in an optional list.
        """
        if self.mode == "math":
            return by_torch(*self.arguments)
        q, k, v, text, *lists = self.arguments
        inputs = (lists[0] or ()) if lists and not torch.compiler.is_compiling() else ()
        is_hidden = not are_plain(inputs) and not any(t.is_nested for t in inputs)  # nested tensors are refused by their name
        if is_hidden or transforms_active():
            given = (*map(list, unpacked(lists)), False, self.deterministic, self.copies)
            output, lse, _ = full_operator(q, k, v, text, *given)
            return output, lse
        named = {} if self.deterministic is None else {"deterministic": self.deterministic}
        if self.copies:
            named["copies"] = True
        return attention_operator(*self.arguments, **named)

    def check(self) -> None:
        """Raises what `run` would raise for the arguments of a call that reads a cache; nothing runs. A call that torch
        observes is checked when it runs, and tensors on meta have nothing that could be overwritten."""
        if self.mode == "math":
            check_by_torch(*self.arguments)
            return
        q, k, v, text, *lists = self.arguments
        inputs, ints, floats = unpacked(lists)
        if q.device.type != "meta" and not is_observed() and are_plain((q, k, v, *inputs)):
            found = runtime(text, q.device)
            if self.copies:
                q, k, v = as_read(found, q, k, v)
            found.bind((q, k, v, *inputs), ints, floats, names=OF_CACHE)


class Front:
    """The calls of one function or layer. A call whose tensors and key are like those of an earlier one repeats its launches:
    it is neither described nor checked, and skips torch's dispatcher if nothing observes it."""

    def __init__(self) -> None:
        self._calls: Remembered[PreparedCall] = Remembered()
        self._checked: Remembered[bool] = Remembered()

    def call(self, tensors: Sequence[Tensor], key: Key, describe: Callable[..., Call], *given: object) -> Sequence[Tensor]:
        """(O, lse) of the call that `describe(*given)` makes of `tensors`. Its launches are remembered, unless the key is None,
        torch must see the call or computes it itself, or heads are padded."""
        known = None
        if key is not None and not (is_observed() or autocasts()) and are_plain(tensors):
            try:
                known = signature(key, *tensors)
                call = self._calls.get(known)
            except (RuntimeError, TypeError):  # a nested tensor, which has no sizes, or a list as a scale: refused below
                known = call = None
            result = None if call is None else call(tensors)
            if result is not None:
                return result
        described = describe(*given)
        outputs = described.run()
        if described.head_size is not None:
            return (outputs[0][..., : described.head_size], *outputs[1:])
        if known is not None and described.mode != "math":
            q, k, v, text, *lists = described.arguments
            inputs, ints, floats = unpacked(lists)
            found, read = runtimes.get((text, q.device)), (q, k, v, *inputs)
            call = None if found is None else found.prepared(read, ints, floats)
            if call is not None:
                self._calls[known] = call if all(map(is_, tensors, read)) else call.of_views()
        return outputs

    def once(self, tensors: Sequence[Tensor], others: object, check: Callable[[], None], writes: bool) -> None:
        """Runs `check`, which raises if a call is refused, unless it passed for a call of such tensors and `others`. Addresses
        matter too if the call `writes`."""
        key = None
        try:
            if not writes:
                key = signature(others, *tensors)
            elif are_plain(tensors):  # others have no address
                places = 0  # the lowest bits of all addresses: a signature has none, and kernels refuse odd ones
                for tensor in tensors:
                    places |= tensor.data_ptr() & (ROW_BYTES - 1)
                key = signature((others, autocasts(), places), *tensors)
            if key in self._checked:
                return
        except (AttributeError, RuntimeError, TypeError):  # such arguments are refused by `check`, or later
            key = None
        check()
        if key is not None:
            self._checked[key] = True

    def __reduce__(self) -> tuple[type[Front], tuple[()]]:
        """A copy, in this process or another, starts without remembered calls."""
        return Front, ()
