"""The arguments of a case's programs, the forward and backwards, and calls of them as torch's operators make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attngen.api import CompiledAttention
from attngen.spec.attention import AttentionSpec
from attngen.torch.arguments import NamedArguments, unpacked
from attngen.torch.runtime import Emulated, OnGpu, Runtime

Tensors = dict[str, torch.Tensor]
Compiled = Any  # CompiledAttention or CompiledBackward


@dataclass(frozen=True, slots=True)
class Arguments:
    """Tensors by the names of the programs' arguments, int and float params in order."""

    tensors: Tensors
    ints: tuple[int, ...]
    floats: tuple[float, ...]

    def call(self, compiled: Compiled) -> Callable[[], Tensors]:
        """A call of a program: its outputs by the names of their arguments."""
        run: Runtime = (OnGpu if compiled.device.name.startswith("cuda") else Emulated)(compiled)
        return partial(_outputs, run, [self.tensors[name] for name in run.input_names], self.ints, self.floats)

    def with_loss(self, spec: AttentionSpec) -> Arguments:
        """With the gradients of a loss: randn by O, 0 by an lse that is an output."""
        q = self.tensors["q"]
        loss = {"dout": torch.randn(*q.shape[:3], spec.head_dim_v, device=q.device).to(q.dtype)}
        if spec.lse:
            loss["dlse"] = torch.zeros(q.shape[:3], device=q.device)
        return replace(self, tensors={**self.tensors, **loss})

    def with_results(self, forward: CompiledAttention) -> Arguments:
        """With what a backward reads of a forward, which runs now."""
        return replace(self, tensors={**self.tensors, **self.call(forward.saving())()})


def arguments(
    spec: AttentionSpec,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: Tensors,
    params: Mapping[str, int | float],
) -> Arguments:
    """Those of a forward."""
    captured, ints, floats = unpacked(NamedArguments(spec).lists({**inputs, **params}, {}))
    names = ("q", "k", "v", *(i.name for i in spec.inputs))
    return Arguments(dict(zip(names, (*qkv, *captured), strict=True)), tuple(ints), tuple(floats))


def _outputs(run: Any, tensors: list[torch.Tensor], ints: tuple[int, ...], floats: tuple[float, ...]) -> Tensors:
    return dict(zip(run.output_names, run(tensors, ints, floats), strict=True))
