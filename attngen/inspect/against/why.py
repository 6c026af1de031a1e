"""Why a row of two attentions differs: the weights of its keys, found by values that are rows of the unit matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from attngen.inspect.against.calling import Call, Tensors
from attngen.reference.definition import Problem, weight_rows
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const

if TYPE_CHECKING:
    import torch

FIT = 1e-3  # relative residual of a line through logarithms of weights
SMALLEST = 1e-6  # a weight that takes part, relative to the largest of its row
FEW_KEYS = 4  # keys of a row whose weights show no rule
FEW = 3  # keys that a reason names


def why_different(
    spec: AttentionSpec,
    title: str,
    call: Call,
    tensors: Tensors,
    numbers: Mapping[str, int | float],
    rows: tuple[tuple[int, ...], tuple[int, ...]],
    limit: float,
) -> tuple[str, ...]:
    """What explains the difference of rows (b, h, q), in words; nothing if their weights cannot be found. The keys of the first
    row are compared, and the weights of the last one, which has more keys."""
    if not call.differentiable or spec.values is not None or spec.v_scale is not None:  # arrays, or V is no tensor of its own
        return ()
    for b, h, q in rows:
        ours = _weights(spec, tensors, numbers, b, h, q)
        try:
            theirs = _probed(call, tensors, b, h, q)
        except Exception:  # values of the unit matrix are no usual ones: the difference itself was found
            return ()
        row = f"query {q} (b = {b}, h = {h})"
        if found := _of_keys(title, row, ours, theirs, limit):
            return found
    return _of_heads(title, call, tensors, b, h, q) or _of_weights(spec, title, row, ours, theirs, limit)


def _of_keys(title: str, row: str, ours: np.ndarray, theirs: np.ndarray, limit: float) -> tuple[str, ...]:
    """The keys that one of the two reads alone."""
    least = max(SMALLEST, limit / 10) * max(float(ours.max(initial=0.0)), float(np.abs(theirs).max(initial=0.0)))
    extra = np.flatnonzero((np.abs(ours) <= 0) & (np.abs(theirs) > least))
    missing = np.flatnonzero((np.abs(theirs) <= 0) & (np.abs(ours) > least))
    found = []
    if extra.size:
        found.append(f"{row} reads {_keys(extra)} in {title}, which the mask of the spec excludes")
    if missing.size:
        found.append(f"{row} reads {_keys(missing)} in the spec, which {title} excludes")
    return tuple(found)


def _weights(spec: AttentionSpec, tensors: Tensors, numbers: Mapping[str, int | float], b: int, h: int, q: int) -> np.ndarray:
    """The weights of the keys of a row by the spec."""
    import torch

    from attngen.spec.torch_namespace import TorchNamespace

    inputs = {i.name: tensors[i.name] if tensors[i.name].is_floating_point() else _whole(tensors[i.name]) for i in spec.inputs}
    xp = TorchNamespace(torch.float64, tensors["q"].device)
    problem = Problem(spec, tensors["q"], tensors["k"], tensors["v"], inputs, numbers, xp)
    found: np.ndarray = weight_rows(problem, b, h, slice(q, q + 1)).weights[0].numpy()
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if str(tensor.dtype) == "torch.bool" else tensor.long()


def _probed(call: Call, tensors: Tensors, b: int, h: int, q: int) -> np.ndarray:
    """The weights of the keys of a row by the user's function: with V a part of the unit matrix, O is a part of the weights.
    A row of NaN is one without keys."""
    import torch

    kv_len, columns = tensors["v"].shape[2:]
    found = []
    for start in range(0, kv_len, columns):
        values = torch.zeros_like(tensors["v"])
        count = min(columns, kv_len - start)
        values[..., torch.arange(start, start + count), torch.arange(count)] = 1.0
        found.append(call(tensors | {"v": values})[b, h, q, :count])
    return torch.cat(found).nan_to_num(0.0).numpy()


def _keys(keys: np.ndarray) -> str:
    named = ", ".join(map(str, keys[:FEW]))
    rest = f" and {len(keys) - FEW} more" if len(keys) > FEW else ""
    return f"key{'s' * (len(keys) > 1)} {named}{rest}"


def _of_weights(
    spec: AttentionSpec, title: str, row: str, ours: np.ndarray, theirs: np.ndarray, limit: float
) -> tuple[str, ...]:
    """What distinguishes positive weights of the same keys."""
    keys = np.flatnonzero((ours > 0) & (theirs > 0))
    if keys.size < 1 or np.abs(ours - theirs).max() <= limit * np.abs(ours).max():
        return ()
    a, b = np.log(ours[keys]), np.log(theirs[keys])
    if spec.normalize != "softmax":
        worst = keys[np.abs(ours - theirs)[keys].argmax()]
        return (_of_key(title, row, worst, ours, theirs),)
    if np.ptp(b - a) < FIT:
        return (
            f"the weights of {row} add up to {theirs.sum():.4g} in {title}, to {ours.sum():.4g} in the spec: a sink differs",
        )
    if keys.size < FEW_KEYS:
        return (_of_key(title, row, keys[np.abs(ours - theirs)[keys].argmax()], ours, theirs),)
    slope, residual = _line(a, b)
    if residual < FIT:
        stated = (
            f", {spec.scale.value:.6g} * {slope:.4g} = {spec.scale.value * slope:.6g}" if isinstance(spec.scale, Const) else ""
        )
        return (f"scores of {title} are {slope:.4g} times those of the spec: its scale differs{stated}",)
    step, residual = _line(keys.astype(float), b - a)
    if residual < FIT:
        return (
            f"from key to key, scores of {title} grow by {step:.4g} more than those of the spec: a bias by distance differs",
        )
    off = b - a - np.median(b - a)
    few = np.flatnonzero(np.abs(off) > FIT)
    if few.size <= keys.size // 2:
        return (f"the score of {row} and {_keys(keys[few])} is {off[few[0]]:+.4g} in {title} beside the spec; others agree",)
    return (_of_key(title, row, keys[np.abs(ours - theirs)[keys].argmax()], ours, theirs),)


def _of_key(title: str, row: str, key: int, ours: np.ndarray, theirs: np.ndarray) -> str:
    return f"the weight of {row} and key {key} is {ours[key]:.4g} by the spec and {theirs[key]:.4g} by {title}"


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The slope of the line through points, and the largest distance from it relative to the extent of y."""
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(np.abs(y - slope * x - start).max() / max(float(np.ptp(y)), 1e-12))


def _of_heads(title: str, call: Call, tensors: Tensors, b: int, h: int, q: int) -> tuple[str, ...]:
    """Whether the row reads another key head: with values that are the number of their head, O is that number."""
    import torch

    heads = tensors["v"].shape[1]
    numbers = torch.arange(heads, dtype=torch.float64)[None, :, None, None].expand_as(tensors["v"])
    read, sums = (float(call(tensors | {"v": v})[b, h, q, 0]) for v in (numbers, torch.ones_like(tensors["v"])))
    group = tensors["q"].shape[1] // heads
    if sums and abs(read / sums - h // group) > 0.01:
        return (f"query head {h} reads values of key head {read / sums:.3g} in {title}, and of {h // group} in the spec",)
    return ()
