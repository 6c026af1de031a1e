"""A debug switch: captured tensors that flex_attention reads by indices from data are checked for indices outside.

Kernels keep such an index inside its dimension, and never say so. With the switch on, each eager call first computes every such
index by torch's operations and waits for the result, so it is for debugging alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Expr, inputs_in, names_in
from attngen.spec.print_attn import expression_to_text
from attngen.torch.math import by_rows, call_of

PAIRS = 2**24  # indices in memory at once
_on = bool(os.environ.get("ATTNGEN_CHECK_INDICES"))


@contextmanager
def checked_indices() -> Iterator[None]:
    """Within this `with` statement, flex_attention raises IndexError for a read outside a captured tensor, as the environment
    variable ATTNGEN_CHECK_INDICES=1 makes every call do. Calls that torch.compile compiled are not checked."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


def are_checked() -> bool:
    return _on


@torch.no_grad()
def check_indices(
    spec: AttentionSpec,
    reads: Sequence[tuple[Expr, Expr]],
    q: Tensor,
    k: Tensor,
    inputs: Sequence[Tensor],
    params: Mapping[str, int],
) -> None:
    """Raises IndexError for an index of `reads`, pairs of an index and a size, that is outside in some row, key, head or
    batch."""
    named = dict(zip((i.name for i in spec.inputs), inputs, strict=True))
    call = call_of(spec, q, k, named, params, torch.float32)
    for index, size in dict.fromkeys(reads):
        if not inputs_in(index) <= named.keys():
            continue
        count = int(call.value(size, {}))
        for _, part in by_rows(call, q, k, PAIRS):
            low, high = part.value(index, {}).aminmax()
            if int(low) < -count or int(high) >= count:
                raise IndexError(
                    f"a captured tensor is read at `{expression_to_text(index)}`, which is {int(low)} to {int(high)}, in a "
                    f"dimension of {count}; without this check, the kernel reads its first or last element instead"
                )
            if "q" not in names_in(index):
                break
