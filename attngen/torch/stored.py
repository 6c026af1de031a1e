"""How the rows of a call's sequences are stored, as the torch functions tell each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attngen.spec.attention import Storage
from attngen.spec.cached import LEFTPAD, USED

# Tensors and ints of the operator before those of the spec, and what a mask says of keys, by names of `attngen.spec.cached`
Arguments = tuple[tuple[Tensor, ...], tuple[int, ...], tuple[str, ...]]


class Stored(NamedTuple):
    """Where sequences lie. `inputs` and `longest` are the arguments that their storage adds to a call: see `KernelRequest`.
    `leftpad` int32 [batch] says where the keys of a cache begin, if not at 0.

    In storage "dense" all rows belong to their sequence, unless `inputs` is one tensor int32 [batch]: numbers of keys, for a
    mask. A kernel would read the others too, and a NaN there would reach the result.
    """

    storage: Storage
    inputs: tuple[Tensor, ...] = ()
    longest: tuple[int, ...] = ()
    leftpad: Tensor | None = None

    @property
    def arguments(self) -> Arguments:
        known = (USED,) if self.storage == "dense" and self.inputs else ()
        if self.leftpad is None:
            return self.inputs, self.longest, known
        return (*self.inputs, self.leftpad), self.longest, (*known, LEFTPAD)


DENSE = Stored("dense")
