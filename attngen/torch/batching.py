"""torch.vmap of the operators: the dimension that it adds is folded into batch, and one call of the kernels computes all of it.

A captured tensor that differs between the samples and has no batch dimension cannot be folded, nor can a spec that uses `b` or
`batch` in another way than to index a batch. Their samples are computed one after another.

`torch.autograd.grad(..., is_grads_batched=True)`, and with it `torch.autograd.functional.jacobian(..., vectorize=True)`, use
an older vmap of torch, with a dispatch key and tensors of its own (`Batched`). It is applied to the backward alone, and has the
same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attngen.emit.abi import input_tensors
from attngen.spec.expr import Gather, Name, walk
from attngen.torch.backward import FIRST_INPUT, Backward, BackwardArguments, backward_operator
from attngen.torch.operator import LIBRARY, Floats, Full, FullArguments, Ints, Pair, Tensors, full_operator
from attngen.torch.private import enter_vmap, leave_vmap, with_batch_dim, without_batch_dim
from attngen.torch.runtime import input_names, parsed

Dim = int | None  # the position of the added dimension; None: the tensor is the same for all samples
Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Rule = tuple[tuple[Tensor, ...], tuple[Dim, ...]]  # results, and their added dimensions


@lru_cache(maxsize=4096)
def batch_axes(spec: str) -> tuple[Dim, ...] | None:
    """The batch dimension of q, k, v and each input, None if it has none; None instead of all if the spec cannot be folded."""
    attention = parsed(spec)
    if attention.kernel.storage != "dense" or attention.dropout is not None:  # weights with dropout depend on b
        return None
    dims = {i.name: i.dims for i in attention.inputs}
    for node in walk(*attention.expressions.values()):
        if isinstance(node, Name) and node.name == "batch":
            return None
        for position, arg in enumerate(node.args):
            is_sample = isinstance(arg, Name) and arg.name == "b"
            indexes_batch = isinstance(node, Gather) and dims[node.input][position] == "batch"
            if is_sample != indexes_batch:
                return None
    names = [[axis.name for axis in tensor.axes] for tensor in input_tensors(attention)]
    return tuple(axes.index("batch") if "batch" in axes else None for axes in names)


def _by_sample(tensor: Tensor, dim: int) -> Tensor:
    """`tensor` with the added dimension first: a copy if it was the innermost in memory, since kernels copy whole rows."""
    moved = tensor.movedim(dim, 0)
    return moved.contiguous() if moved.stride(0) == 1 and moved.stride(-1) != 1 else moved


def _fold(tensor: Tensor | None, dim: Dim, axis: Dim, samples: int, batch: int) -> Any:
    """`tensor` with the added dimension as part of its dimension `axis`, which has `batch` elements or 1 in each sample."""
    if tensor is None or axis is None:
        return tensor
    moved = tensor.unsqueeze(0).expand(samples, *tensor.shape) if dim is None else _by_sample(tensor, dim)
    by_batch = moved.movedim(axis + 1, 1)
    return by_batch.expand(samples, batch, *by_batch.shape[2:]).flatten(0, 1).movedim(0, axis)


def _unfold(tensor: Tensor, axis: int, samples: int) -> Tensor:
    """The added dimension of a folded tensor, as its first."""
    return tensor.unflatten(axis, (samples, tensor.shape[axis] // samples)).movedim(axis, 0)


def _one_by_one(tensors: Sequence[Any], dims: Sequence[Dim], samples: int, compute: Compute) -> Rule:
    apart = [t if t is None or dim is None else _by_sample(t, dim) for t, dim in zip(tensors, dims, strict=True)]
    results = []
    for i in range(samples):
        results.append(compute([t if t is None or dim is None else t[i] for t, dim in zip(apart, dims, strict=True)]))
    stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _shared(axes: Sequence[Dim], dims: Sequence[Dim]) -> bool:
    """Whether all that differs between the samples has a batch dimension."""
    return all(axis is not None or dim is None for axis, dim in zip(axes, dims, strict=True))


def _batch(q: Tensor, dim: Dim) -> int:
    """The batch of one sample."""
    sizes = list(q.shape)
    if dim is not None:
        del sizes[dim]
    return sizes[0]


def _full(info: Any, in_dims: tuple[Any, ...], *arguments: *FullArguments) -> Rule:
    call = Full(*arguments)
    dims: tuple[Any, ...] = Full(*in_dims).tensors
    axes = batch_axes(call.spec)

    def compute(given: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v, *inputs = given
        return full_operator(*call._replace(q=q, k=k, v=v, inputs=inputs))

    if axes is None or not _shared(axes, dims):
        return _one_by_one(call.tensors, dims, info.batch_size, compute)
    batch = _batch(call.q, dims[0])
    results = compute([_fold(*each, info.batch_size, batch) for each in zip(call.tensors, dims, axes, strict=True)])
    is_empty = [result.dim() == 1 for result in results]  # an lse that nobody wants
    unfolded = (r if empty else _unfold(r, 0, info.batch_size) for r, empty in zip(results, is_empty, strict=True))
    return tuple(unfolded), tuple(None if empty else 0 for empty in is_empty)


def _backward(info: Any, in_dims: tuple[Any, ...], *arguments: *BackwardArguments) -> Rule:
    call, dims = Backward(*arguments), Backward(*in_dims).tensors
    names, known = input_names(call.spec), batch_axes(call.spec)

    def compute(given: Sequence[Tensor]) -> Sequence[Tensor]:
        return backward_operator(*call.with_tensors(given))

    by_name = dict(zip(names, known or (), strict=False))
    if known is None or not _shared(known, dims[FIRST_INPUT:]) or any(by_name[name] is None for name in call.wanted):
        return _one_by_one(call.tensors, dims, info.batch_size, compute)
    axes = (*(0,) * FIRST_INPUT, *known)
    batch = _batch(call.q, in_dims[2])
    results = compute([_fold(*each, info.batch_size, batch) for each in zip(call.tensors, dims, axes, strict=True)])
    unfolded = []
    for name, result in zip(call.wanted, results, strict=True):
        axis, dim = by_name[name], dims[FIRST_INPUT + names.index(name)]
        assert axis is not None
        tensor = call.inputs_by_name[name]
        of_sample = tensor if dim is None else tensor.select(dim, 0)
        gradient = _unfold(result, axis, info.batch_size)
        unfolded.append(gradient if of_sample.shape[axis] == batch else gradient.sum(axis + 1, keepdim=True))
    return tuple(unfolded), (0,) * len(unfolded)


def _backward_of_batched(*arguments: *BackwardArguments) -> list[Tensor]:
    """The backward in torch's older vmap: the rule of the newer one, by the tensors inside those of this level."""
    call = Backward(*arguments)
    level = leave_vmap() + 1  # what is called below is outside of it
    try:
        # a tensor that is the same for all samples gets a dimension of size 1
        inside = [None if t is None else without_batch_dim(t, level, 1, 0) for t in call.tensors]
        samples = max(t.shape[0] for t in inside if t is not None)
        dims = [None if t is None or t.shape[0] != samples else 0 for t in inside]
        given = [t.squeeze(0) if t is not None and dim is None else t for t, dim in zip(inside, dims, strict=True)]
        info = SimpleNamespace(batch_size=samples)
        results, out_dims = _backward(info, call.with_tensors(dims), *call.with_tensors(given))
        return [with_batch_dim(each, dim or 0, level) for each, dim in zip(results, out_dims, strict=True)]
    finally:
        enter_vmap()


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
    lists = ([*(inputs or ())], [*(ints or ())], [*(floats or ())])
    output, lse, _ = full_operator(q, k, v, spec, *lists, False, deterministic, copies)
    return output, lse


LIBRARY.impl("attention", _attention, "FuncTorchBatched")
LIBRARY.impl("attention_backward", _backward_of_batched, "Batched")
torch.library.register_vmap("attngen::attention.full", _full, lib=LIBRARY)
torch.library.register_vmap("attngen::attention_backward", _backward, lib=LIBRARY)
