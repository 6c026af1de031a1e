"""The operator `attngen::attention`: every attention of this package, in every mode of torch.

    attention(Tensor q, Tensor k, Tensor v, str spec, Tensor[]? inputs=None, SymInt[]? ints=None, float[]? floats=None)
        -> (Tensor o, Tensor lse)

`spec` is an `.attn` text with one attention, so that an exported graph says by itself what it computes; `inputs` are its
captured tensors, `ints` and `floats` its params of either type, all in the order of their declaration. O lies in memory as q
does ([batch, heads, length, size] or [batch, length, heads, size]); lse has no element where the spec does not say `output
lse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngen.api import preload
from attngen.device.arrays import ArgumentError, dimensions
from attngen.torch.observed import are_plain, is_observed
from attngen.torch.runtime import lse_like, named_inputs, output_like, parsed, refuse_grad, runtime, runtimes

Tensor = Any  # torch.Tensor; torch is imported without its types

SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, str spec, Tensor[]? inputs=None, SymInt[]? ints=None, float[]? floats=None) "
    "-> (Tensor, Tensor)"
)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Sequence[Tensor] | None = None,
    ints: Sequence[int] | None = None,
    floats: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    found = runtimes.get((spec, q.device)) or runtime(spec, q.device)
    return found(q, k, v, inputs or (), ints or (), floats or ())


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Sequence[Tensor] | None = None,
    ints: Sequence[int] | None = None,
    floats: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes and strides alone."""
    refuse_grad(q, k, v, inputs, spec)
    for name, tensor in (("k", k), ("v", v), *named_inputs(spec, inputs)):
        if tensor.device != q.device:
            raise ArgumentError(f"`q` is on {q.device} and `{name}` on {tensor.device}; move them to one place")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ArgumentError(f"`{name}` has {dimensions(tensor.dim())}; expected [batch, heads, length, head size]")
    return output_like(q, v.shape[3]), lse_like(q, parsed(spec).lse)


def _autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Sequence[Tensor] | None = None,
    ints: Sequence[int] | None = None,
    floats: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator without derivatives. Transforms of `torch.func` and forward mode are refused here: below autograd their
    tensors are unwrapped, and nothing tells that a derivative is lost."""
    refuse_grad(q, k, v, inputs, spec)
    if not is_observed() and are_plain((q, k, v, *(inputs or ()))) and q.device.type in ("cuda", "cpu"):
        return _run(q, k, v, spec, inputs, ints, floats)  # a second walk through the dispatcher would double what a call costs
    with torch._C._AutoDispatchBelowAutograd():
        result: tuple[Tensor, Tensor] = attention_operator(q, k, v, spec, inputs, ints, floats)
    return result


_LIBRARY = torch.library.Library("attngen", "FRAGMENT")
_LIBRARY.define(SCHEMA)
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("attention", _run, _key)
_LIBRARY.impl("attention", _autograd, "Autograd")
torch.library.register_fake("attngen::attention", _fake, lib=_LIBRARY)

attention_operator = torch.ops.attngen.attention.default


preload()  # whoever imports this will call it: the first call should not pay for what all calls need
if torch.cuda.is_available():
    import cuda.core  # noqa: F401
