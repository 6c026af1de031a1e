"""The operator `attngen::attention`: every attention of this package, in every mode of torch.

`SCHEMA` has its arguments; it returns (O, lse). `FULL_SCHEMA` is that of `attention.full`, which returns (O, lse, lse_rest).

`spec` is an `.attn` text with one attention, so that an exported graph is self-contained; `inputs` are its captured tensors,
`ints` and `floats` its params of either type, all in the order of their declaration. O lies in memory as q does ([batch, heads,
length, size] or [batch, length, heads, size]); lse has no element if the spec has no `output lse`.

In packed storage (`kernel NAME { storage packed }`) q, k, v and O are [total, heads, size] and lse [q_heads, total];
`cu_seqlens_q` and `cu_seqlens_k` are the first of `inputs`, `max_q_len` and `max_kv_len` the first of `ints`. In paged storage
k and v are [pages, kv_heads, page_size, size], `page_table` and `seqused` come instead of `cu_seqlens_k`, and queries are dense
without `max_q_len`, or packed (`packed_paged`).

`full` is what a call becomes that has gradients or is batched by vmap. With `saves` it returns what the backward reads, and lse
has elements; lse + lse_rest is more exact than one fp32 number, if the kernel writes lse_rest. `deterministic` is about
gradients: see `attngen.torch.backward`. With `copies`, a kernel gets copies of those of q, k and v, except pages, that it
cannot read in place; without, the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attngen.api import CompiledAttention
from attngen.device.arrays import ArgumentError, check_one_device
from attngen.diagnostics import counted
from attngen.language.prelude import prelude
from attngen.torch.copies import empty_as, in_place
from attngen.torch.runtime import Runtime, input_names, parsed, refuse_tangents, runtime, runtimes, saving_runtime

Tensors: TypeAlias = Sequence[Tensor] | None
Ints: TypeAlias = Sequence[int] | None
Floats: TypeAlias = Sequence[float] | None
Pair = tuple[Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor]  # O, lse, lse_rest
FullArguments: TypeAlias = tuple[
    Tensor, Tensor, Tensor, str, Sequence[Tensor], Sequence[int], Sequence[float], bool, bool | None, bool
]


class Full(NamedTuple):
    """The arguments of `attention.full`."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: str
    inputs: Sequence[Tensor]
    ints: Sequence[int]
    floats: Sequence[float]
    saves: bool
    deterministic: bool | None
    copies: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, *self.inputs


SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, str spec, Tensor[]? inputs=None, SymInt[]? ints=None, float[]? floats=None, "
    "bool? deterministic=None, bool copies=False) -> (Tensor, Tensor)"
)
FULL_SCHEMA = (
    "attention.full(Tensor q, Tensor k, Tensor v, str spec, Tensor[] inputs, SymInt[] ints, float[] floats, bool saves, "
    "bool? deterministic, bool copies=False) -> (Tensor, Tensor, Tensor)"
)


def run(
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
    """(O, lse) by the kernel of `spec` on q's device."""
    found = runtimes.get((spec, q.device)) or runtime(spec, q.device)
    if copies:
        q, k, v = as_read(found, q, k, v)
    results = found((q, k, v, *inputs) if inputs else (q, k, v), ints or (), floats or ())
    return results[0], results[1] if len(results) == 2 else found.nothing[0]


def run_full(*arguments: *FullArguments) -> Saved:
    """(O, lse, lse_rest) by the kernel of a spec on q's device."""
    call = Full(*arguments)
    found = (saving_runtime if call.saves else runtime)(call.spec, call.q.device)
    tensors = (*as_read(found, *call.tensors[:3]), *call.inputs) if call.copies else call.tensors
    results = dict(zip(found.output_names, found(tensors, call.ints, call.floats), strict=True))
    lse, lse_rest = found.nothing
    return results["out"], results.get("lse", lse), results.get("lse_rest", lse_rest)


def as_read(found: Runtime[CompiledAttention], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, with copies of those that the kernel cannot read in place. Pages are never copied."""
    q, k, v = (in_place(t) if name in found.copied else t for name, t in (("q", q), ("k", k), ("v", v)))
    return q, k, v


def fake(q: Tensor, k: Tensor, v: Tensor, spec: str, inputs: Tensors = None, *_: object, **__: object) -> Pair:
    """Shapes and strides alone."""
    tensors = (q, k, v, *(inputs or ()))
    refuse_tangents(spec, tensors)
    for name, tensor in zip(input_names(spec), tensors, strict=False):
        check_one_device("q", q.device, name, tensor.device)
        kernel = parsed(spec).kernel
        axes = PACKED_AXES if kernel.is_packed and (name == "q" or not kernel.is_paged) else DENSE_AXES
        if name in ("q", "k", "v") and tensor.dim() != len(axes):
            raise ArgumentError(f"`{name}` has {counted(tensor.dim(), 'dimension')}; expected [{', '.join(axes)}]")
    output = empty_as(q, (*q.shape[:-1], v.shape[-1]), q)
    return output, q.new_empty(lse_shape(spec, q) if parsed(spec).lse else (0,), dtype=torch.float32)


DENSE_AXES = ("batch", "heads", "length", "head size")
PACKED_AXES = ("total", "heads", "head size")


def lse_shape(spec: str, q: Tensor) -> Sequence[int]:
    """Of the lse of a spec's rows."""
    return (q.shape[1], q.shape[0]) if parsed(spec).kernel.is_packed else q.shape[:3]


def fake_full(*arguments: *FullArguments) -> Saved:
    """Shapes and strides alone."""
    q, k, v, spec, inputs, _, _, saves, _, _ = Full(*arguments)
    output, lse = fake(q, k, v, spec, inputs)
    written = saving_runtime(spec, runs_on(q.device)).output_names if saves else ()
    if "lse" in written:
        lse = q.new_empty(lse_shape(spec, q), dtype=torch.float32)
    return output, lse, q.new_empty(lse_shape(spec, q) if "lse_rest" in written else (0,), dtype=torch.float32)


def runs_on(device: torch.device) -> torch.device:
    """The device whose plans are used for tensors on `device`: that of the CPU for tensors without memory."""
    return torch.device("cpu") if device.type == "meta" else device


LIBRARY = torch.library.Library("attngen", "FRAGMENT")


def operator(schema: str, compute: Callable[..., object], shapes: Callable[..., object]) -> Any:
    """The operator of `schema`, which `compute` runs on GPUs and the CPU; `shapes` makes results without memory."""
    LIBRARY.define(schema)
    title, _, overload = schema.partition("(")[0].partition(".")
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(schema.partition("(")[0], compute, key)
    torch.library.register_fake(f"attngen::{schema.partition('(')[0]}", shapes, lib=LIBRARY)
    return getattr(getattr(torch.ops.attngen, title), overload or "default")


attention_operator = operator(SCHEMA, run, fake)
full_operator = operator(FULL_SCHEMA, run_full, fake_full)
# Whoever imports this will call it: the first call should take little longer than those of other variants.
prelude()
if torch.cuda.is_available():
    import cuda.core  # noqa: F401
