"""torch's context parallelism with attngen's kernels: `python -m tests.torch.context_parallel gloo 4` or `nccl 2`.

Each process has a part of every sequence. Exits with an error if an output or a gradient differs from that of one process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as package
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention import flex_attention as theirs

from attngen.torch import TileBalancer, activated, create_block_mask, flex_attention, registry
from attngen.torch.replacement import flash_operator
from tests.torch.processes import group, together

CASES = {  # (key/value heads, causal, how keys travel)
    "causal": (4, True, "allgather"),  # rows are exchanged between processes for equal work: the first part and the last
    "causal, in a ring, grouped heads": (2, True, "alltoall"),
    "all keys, in a ring": (4, False, "alltoall"),
}
HEADS = 4
BLOCK = 128  # block size of masks that torch's plan divides: it allows no other
DOCUMENTS, SMALL_BLOCK = (3, 70, 5, 30, 20), 8  # rows of documents of uneven lengths, and the block size of their mask


def results(q: Any, k: Any, v: Any, direction: Any, is_causal: bool, mask: Any = None) -> list[Any]:
    """O and the gradients."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    output = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), direction)]


def compare(name: str, found: list[Any], expected: list[Any]) -> None:
    tolerance = 1e-4 if found[0].dtype == torch.float32 else 0.03
    for part, right in zip(found, expected, strict=True):
        torch.testing.assert_close(part.double(), right, atol=tolerance, rtol=tolerance, msg=lambda m: f"{name}: {m}")


class Flex(torch.nn.Module):
    """What torch makes parallel: a module that calls flex_attention."""

    def forward(self, query: Any, key: Any, value: Any, block_mask: Any) -> Any:
        return flex_attention(query, key, value, block_mask=block_mask)


def by_flex(tensors: list[Any], mask: Any, direction: Any, attend: Any) -> list[Any]:
    """O and the gradients."""
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    output = attend(q, k, v, block_mask=mask)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), direction)]


def compare_flex(mesh: Any, device: str, dtype: torch.dtype, size: int) -> None:
    """flex_attention by torch's plan for modules, whose keys each process gathers, beside one process: of a mask that torch
    divides, and of one whose rows are assigned by their tiles."""
    plan = parallel._ContextParallel(2, parallel._ContextParallel.AttentionType.FLEX)
    module = parallelize_module(Flex(), mesh, plan)
    rows = BLOCK * mesh.size()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, rows, rows, device=device)
    package._compiled_create_block_mask = theirs.create_block_mask  # torch compiles it, which takes a minute
    tensors = [torch.randn(1, 1, rows, size, device=device).to(dtype) for _ in range(4)]
    expected = results(*(t.double() for t in tensors), True)
    *parts, direction, part_of_mask = parallel._context_parallel_shard(mesh, [*tensors, mask], [2] * 5)
    found = by_flex(parts, part_of_mask, direction, module)
    compare("flex_attention", parallel.context_parallel_unshard(mesh, found, [2] * 4), expected)

    ids = torch.arange(len(DOCUMENTS), device=device).repeat_interleave(torch.tensor(DOCUMENTS, device=device)).int()
    mask = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, *[len(ids)] * 2, device, SMALL_BLOCK)
    balancer = TileBalancer(mask, mesh.size())
    tensors = [t[:, :, : len(ids)].contiguous() for t in tensors]
    allowed = (ids[:, None] == ids) & torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).tril()
    expected = results(*(t.double() for t in tensors), False, allowed)
    *parts, direction = parallel._context_parallel_shard(mesh, tensors, [2] * 4, balancer)
    found = by_flex(parts, balancer.part(mesh.get_local_rank()), direction, module)
    again = by_flex(parts, balancer.part(mesh.get_local_rank()), direction, module)
    assert all(map(torch.equal, found, again)), "two runs have different bits"
    compare("documents", parallel.context_parallel_unshard(mesh, found, [2] * 4, balancer), expected)


def compile_first() -> None:
    """The kernels of the CPU, once for all processes."""
    q = torch.randn(1, HEADS, 4, 8)
    for is_causal in (False, True):
        with activated(emulated=True):
            q.requires_grad_()
            output = flash_operator(q, q, q, 0.0, is_causal)[0]
            output.sum().backward()


def work(rank: int, processes: int, store: str, backend: str) -> None:
    with group(rank, processes, store, backend):
        compare_all(processes, on_gpu=backend == "nccl")


def compare_all(processes: int, on_gpu: bool) -> None:
    device, dtype, rows, size = ("cuda", torch.bfloat16, 256, 64) if on_gpu else ("cpu", torch.float32, 4, 8)
    calls = []
    runtime = registry.runtime
    registry.runtime = lambda *arguments: calls.append(arguments) or runtime(*arguments)
    whole = dist.device_mesh.init_device_mesh(device, (processes,))
    meshes = [whole]
    if processes > 2:
        meshes.append(dist.device_mesh.init_device_mesh(device, (processes // 2, 2), mesh_dim_names=("data", "keys"))["keys"])
    torch.use_deterministic_algorithms(True)
    for mesh in meshes:
        for name, (kv_heads, is_causal, rotation) in list(CASES.items())[: None if mesh is whole else 1]:
            torch.manual_seed(0)
            shapes = [(2, heads, rows * mesh.size(), size) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
            tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            expected = results(*(t.double() for t in tensors), is_causal)
            parallel.set_rotate_method(rotation)
            parallel._cp_options.enable_load_balance = is_causal
            calls.clear()
            with activated(emulated=True), parallel.context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
                found = results(*tensors, is_causal)
                assert len(calls) == mesh.size(), f"{name}: {len(calls)} forwards by attngen"
                again = results(*tensors, is_causal)
                assert all(map(torch.equal, found, again)), f"{name}: two runs have different bits"
                found = parallel.context_parallel_unshard(mesh, found, [2] * 4)
            compare(name, found, expected)
    compare_flex(whole, device, dtype, size)
    calls.clear()
    with activated(emulated=True):  # heads divided among the processes
        found = results(*(distribute_tensor(t, whole, [Shard(1)]) for t in tensors), is_causal)
    compare("tensor parallel", [t.full_tensor() for t in found], expected)
    assert len(calls) == 1, f"{len(calls)} forwards by attngen"


if __name__ == "__main__":
    if sys.argv[1] == "gloo":
        compile_first()
    together(work, int(sys.argv[2]), sys.argv[1])
