"""Backwards of `check` and `trace`, run on one problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attngen.backward import CompiledBackward
from attngen.device.arrays import view
from attngen.plan import Plan
from attngen.reference.compare_gradients import gradient_dtype
from attngen.reference.gradients import Loss
from attngen.reference.numpy_oracle import Reference
from attngen.reference.problems import Array, Sample
from attngen.reference.stored import Layout, apart, begins_of, unpacked, with_layout, with_wrong_lengths
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import nans, round_to_storage
from attngen.spec.gradient import QKV, gradient_argument


def backward_inputs(spec: AttentionSpec, plan: Plan, problem: Sample, loss: Loss, forward: Reference) -> dict[str, Array]:
    """The arrays of a call by the names of its arguments; what the plan reads of `forward`, in float64, is rounded."""
    v = problem.v if spec.values is None else spec.values_of(problem.k, None)
    arrays = {"q": problem.q, "k": problem.k, "v": v, **problem.inputs, "dout": loss.dout}
    if loss.dlse is not None:
        arrays["dlse"] = loss.dlse
    return arrays | {name: array for name, array in _saved(spec, forward).items() if name in plan.saved}


def _saved(spec: AttentionSpec, forward: Reference) -> dict[str, Array]:
    """The forward's results as a backward may read them; lse as two numbers whose sum it is."""
    saved = {"out": round_to_storage(forward.output, spec.dtypes["o"])}
    if forward.lse is not None:
        saved["lse"] = forward.lse.astype(np.float32)
        with np.errstate(invalid="ignore"):  # -inf of rows without keys
            rest = np.where(np.isfinite(forward.lse), forward.lse - saved["lse"], 0.0)
        saved["lse_rest"] = rest.astype(np.float32)
    return saved


def run_backward(
    compiled: CompiledBackward,
    arrays: Mapping[str, Array],
    params: Mapping[str, int | float],
    is_apart: bool = False,
    laid_out: tuple[str, Layout] | None = None,
) -> dict[str, Array]:
    """The gradients as numpy storage arrays, wherever the kernels ran. An element that no thread writes is NaN. `is_apart`:
    tensors of rows have strides of their own on the emulated device; `laid_out`: one of them has another layout there."""
    if not compiled.spec.kernel.is_packed:
        return _run(compiled, arrays, params, is_apart, laid_out)
    batch, _, q_len, _ = arrays["q"].shape
    kv_len = arrays["k"].shape[2]
    begins = {"cu_seqlens_q": begins_of([q_len] * batch), "cu_seqlens_k": begins_of([kv_len] * batch)}
    arrays = {name: _packed(array) if name in OF_ROWS else array for name, array in arrays.items()} | begins
    found = _run(compiled, arrays, {**params, "max_q_len": q_len, "max_kv_len": kv_len}, is_apart)
    lengths = {"q": q_len, "k": kv_len, "v": kv_len}
    return found | {
        name: array.reshape(batch, lengths[name], *array.shape[1:]).swapaxes(1, 2)
        for name, array in found.items()
        if name in lengths
    }


def run_sequences(
    compiled: CompiledBackward,
    sequences: Sequence[Mapping[str, Array]],
    captured: Mapping[str, Array],
    params: Mapping[str, int | float],
    wrong_lengths: bool = False,
) -> list[dict[str, Array]]:
    """The gradients of Q, K and V of packed sequences, [1, heads, length, size] each. The arrays of a sequence are [heads,
    length] or [heads, length, size]; `captured` are those of the call. `wrong_lengths`: see `with_wrong_lengths`."""
    spec = compiled.spec
    lengths = {name: [one[name].shape[1] for one in sequences] for name in QKV}
    joined = {name: np.concatenate([one[name] for one in sequences], axis=1) for name in sequences[0]}
    arrays = {name: array.swapaxes(0, 1) if array.ndim == 3 else array for name, array in joined.items()}
    begins = {"cu_seqlens_q": begins_of(lengths["q"]), "cu_seqlens_k": begins_of(lengths["k"])}
    begins = with_wrong_lengths(spec, begins) if wrong_lengths else begins
    longest = {"max_q_len": max(lengths["q"]), "max_kv_len": max(lengths["k"])}
    found = _run(compiled, {**arrays, **captured, **begins}, {**params, **longest}, is_apart=True)
    each = {name: unpacked(found[name], lengths[name], 0) for name in QKV if name in found}
    return [{name: parts[b].swapaxes(0, 1)[None] for name, parts in each.items()} for b in range(len(sequences))]


OF_ROWS = (*QKV, "dout", "out", "lse", "lse_rest", "dlse")
APART = (*OF_ROWS, *map(gradient_argument, QKV))


def _packed(array: Array) -> Array:
    """[batch, heads, length, size] -> [total, heads, size], and [batch, heads, length] -> [heads, total]."""
    batch, heads, length, *size = array.shape
    joined = array.swapaxes(0, 1).reshape(heads, batch * length, *size)
    return joined.swapaxes(0, 1) if joined.ndim == 3 else joined


def _run(
    compiled: CompiledBackward,
    arrays: Mapping[str, Array],
    params: Mapping[str, int | float],
    is_apart: bool,
    laid_out: tuple[str, Layout] | None = None,
) -> dict[str, Array]:
    if compiled.device.name.startswith("cuda"):
        from attngen.inspect.gpu_memory import from_gpu, to_gpu

        found = compiled.run({name: view(to_gpu(array), name) for name, array in arrays.items()}, dict(params))
        return {name: from_gpu(array) for name, array in found.items()}
    given = {**arrays, **_poisoned(compiled, arrays)}
    if is_apart:
        captured = [declared.name for declared in compiled.spec.inputs]
        own = {*APART, *captured, *map(gradient_argument, captured)}
        given |= apart({name: array for name, array in given.items() if name in own})
    if laid_out:
        given[laid_out[0]] = with_layout(given[laid_out[0]], laid_out[1])
    return compiled.run({name: view(array, name) for name, array in given.items()}, dict(params))


def _poisoned(compiled: CompiledBackward, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs full of NaN; those of params are numbers."""
    return {
        gradient_argument(name): nans(arrays[name].shape if name in arrays else (), gradient_dtype(compiled.spec, name).numpy)
        for name in compiled.plan.wanted
    }
