"""Calls of a user's attention: in the precision, on the device and in the layout that it takes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attngen.inspect.against.own import Own
from attngen.spec.attention import AttentionSpec

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


class NotComputed(ValueError):
    """The user's function raised an exception, or its result is none that can be compared."""


@dataclass(frozen=True)
class Call:
    """A function of float64 tensors q, k, v and inputs, [batch, heads, length, size], whose result is O in the same layout.
    `dtype` and `device` are those in which the user's function computes."""

    compute: Callable[[Tensors], torch.Tensor]
    dtype: str
    device: str
    differentiable: tuple[str, ...]  # the tensors that are passed to the function

    def __call__(self, tensors: Tensors) -> torch.Tensor:
        """O in float64 on the CPU."""
        import torch

        with torch.no_grad():
            return self.compute(self._placed(tensors)).detach().double().cpu()

    def with_gradients(self, tensors: Tensors) -> tuple[torch.Tensor, Tensors]:
        """O with its graph, and the tensors of which there are gradients."""
        import torch

        placed = self._placed(tensors)
        leaves = {n: placed[n].requires_grad_() for n in self.differentiable if placed[n].is_floating_point()}
        with torch.enable_grad():
            return self.compute(placed), leaves

    def _placed(self, tensors: Tensors) -> Tensors:
        import torch

        dtype = getattr(torch, self.dtype)
        return {n: t.to(self.device, dtype if t.is_floating_point() else None).clone() for n, t in tensors.items()}


def call_of(
    own: Own, spec: AttentionSpec, layout: str, device: str | None, numbers: Mapping[str, int | float], tensors: Tensors
) -> Call:
    """A call in the first precision and on the first device that the user's function takes. Raises NotComputed."""
    import torch

    if own.kind == "arrays":
        output = torch.as_tensor(own.values["o"]).double()
        return Call(lambda placed: output, "float32" if own.values["o"].dtype.itemsize > 2 else "float16", "cpu", ())
    compute = _by_mods(own, spec, numbers) if own.kind == "mods" else _by_attention(own, spec, layout, numbers)
    passed = ("q", "k", "v", *(i.name for i in spec.inputs if i.name in own.takes))
    devices = [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    dtypes = ("float64",) if own.kind == "mods" else ("float64", "float32", "bfloat16", "float16")
    refused: Exception | None = None
    for place in devices:
        for dtype in dtypes:
            call = Call(compute, dtype, place, passed)
            try:
                call(tensors)
            except NotComputed:
                raise
            except Exception as error:
                refused = refused or error
                continue
            return call
    assert refused is not None
    raise NotComputed(_said(refused, own, tensors)) from refused


def _said(error: Exception, own: Own, tensors: Tensors) -> str:
    """An exception of the user's function in words: where it was raised, and of which sizes."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/attngen/inspect/" not in frame.filename and "/torch/" not in frame.filename]
    place = f" (line {inside[-1].lineno} of {inside[-1].filename.rpartition('/')[2]})" if inside else ""
    shapes = ", ".join(f"{name} {[*tensors[name].shape]}" for name in ("q", "k", "v"))
    lines = str(error).strip().splitlines() or [""]
    return f"it raised {type(error).__name__}: {lines[0]}{place}, for {shapes}"


def _by_attention(
    own: Own, spec: AttentionSpec, layout: str, numbers: Mapping[str, int | float]
) -> Callable[[Tensors], torch.Tensor]:
    """O by a function of (q, k, v), with the inputs and params that it takes by name."""
    function = own.functions["attention"]
    known = {i.name for i in spec.inputs} | {*numbers}
    unknown = [name for name in own.requires if name not in known]
    if unknown:
        raise NotComputed(f"its arguments {', '.join(unknown)} are neither inputs nor params of the spec; give them defaults")

    def compute(placed: Tensors) -> torch.Tensor:
        named = {n: placed[n] if n in placed else numbers[n] for n in own.takes if n in placed or n in numbers}
        qkv = [placed[n] for n in ("q", "k", "v")]
        if layout == "bshd":
            qkv = [t.transpose(1, 2) for t in qkv]
        found = function(*qkv, **named)
        found = found[0] if isinstance(found, tuple | list) else found
        if not hasattr(found, "detach") or found.ndim != 4:
            raise NotComputed(
                f"its result is {type(found).__name__}; expected a tensor [batch, heads, length, size], or it first"
            )
        output: torch.Tensor = found.transpose(1, 2) if layout == "bshd" else found
        return output

    return compute


def _by_mods(own: Own, spec: AttentionSpec, numbers: Mapping[str, int | float]) -> Callable[[Tensors], torch.Tensor]:
    """O as FlexAttention defines it: softmax of score(s, b, h, q, k) over the keys that the mask allows, with scale 1 /
    sqrt(head_dim). Rows without keys are 0."""
    import torch

    score, mask = own.functions.get("score"), own.functions.get("mask")

    def compute(placed: Tensors) -> torch.Tensor:
        q, k, v = (placed[n] for n in ("q", "k", "v"))
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        at = [torch.arange(n, device=q.device) for n in scores.shape]
        if score is not None:
            scores = _of_pairs(score, 1)(scores, *at).to(scores.dtype)
        if mask is not None:
            scores = scores.masked_fill(~_of_pairs(mask, 0)(*at), float("-inf"))
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - torch.where(largest.isinf(), 0.0, largest)).exp()
        total = weights.sum(-1, keepdim=True)
        output: torch.Tensor = (weights / torch.where(total == 0, 1.0, total)) @ v
        return output

    return compute


def _of_pairs(function: Callable[..., torch.Tensor], leading: int) -> Callable[..., torch.Tensor]:
    """A function of one pair, as a function of all: of `leading` tensors [batch, heads, q_len, kv_len] and of b, h, q and k."""
    import torch

    for index in (3, 2, 1, 0):
        dims = (*(0,) * leading, *(0 if place == index else None for place in range(4)))
        function = torch.vmap(function, in_dims=dims)
    return function
