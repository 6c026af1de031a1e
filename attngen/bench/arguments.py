"""The arguments of a case's programs, the forward and backwards, and calls of them as torch's operators make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.reference.stored import PAGE_SIZE
from attngen.spec.attention import AttentionSpec
from attngen.torch.arguments import NamedArguments, unpacked
from attngen.torch.runtime import Runtime

Tensors = dict[str, torch.Tensor]
Compiled = CompiledAttention | CompiledBackward


@dataclass(frozen=True, slots=True)
class Arguments:
    """Tensors by the names of the programs' arguments, int and float params in order."""

    tensors: Tensors
    ints: tuple[int, ...]
    floats: tuple[float, ...]

    def call(self, compiled: Compiled) -> Callable[[], Tensors]:
        """A call of a program: its outputs by the names of their arguments."""
        run = Runtime(compiled)
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
    qkv, places = in_storage(spec, qkv)
    named = NamedArguments(spec)
    captured, ints, floats = unpacked(named.lists({**places, **inputs, **params}, {}))
    names = ("q", "k", "v", *named.inputs)
    return Arguments(dict(zip(names, (*qkv, *captured), strict=True)), tuple(ints), tuple(floats))


def in_storage(
    spec: AttentionSpec, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, torch.Tensor | int]]:
    """Dense q, k, v as the storage of `spec` has them, and a call's other arguments; pages lie in random order."""
    kernel, (q, k, v) = spec.kernel, qkv
    batch, _, kv_len, _ = k.shape
    places: dict[str, torch.Tensor | int] = {}
    if kernel.is_packed:
        places |= {"cu_seqlens_q": _begins(q), "max_q_len": q.shape[2]}
        q = q.transpose(1, 2).flatten(0, 1)
    if kernel.is_paged:
        page = kernel.page_size or PAGE_SIZE
        table = torch.randperm(batch * -(-kv_len // page), device=q.device)
        places |= {"page_table": table.int().view(batch, -1)}
        k, v = (_pool(t, table, page) for t in (k, v))
    elif kernel.is_packed:
        places |= {"cu_seqlens_k": _begins(k), "max_kv_len": kv_len}
        k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
    if kernel.is_counted:
        places["seqused"] = torch.full((batch,), kv_len, device=q.device, dtype=torch.int32)
    return (q, k, v), places


def _begins(rows: torch.Tensor) -> torch.Tensor:
    batch, _, length, _ = rows.shape
    return torch.arange(0, batch * length + 1, max(length, 1), device=rows.device, dtype=torch.int32)


def _pool(rows: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """[batch, heads, length, size] as pages where `table` says: [pages, heads, page, size], heads inside rows in memory."""
    whole = torch.nn.functional.pad(rows.transpose(1, 2), (0, 0, 0, 0, 0, -rows.shape[2] % page))
    pages = whole.unflatten(1, (-1, page)).flatten(0, 1)
    pool = torch.empty_like(pages)
    pool[table] = pages
    return pool.transpose(1, 2)


def _outputs(run: Runtime[Compiled], tensors: list[torch.Tensor], ints: tuple[int, ...], floats: tuple[float, ...]) -> Tensors:
    return dict(zip(run.output_names, run(tensors, ints, floats), strict=True))
