"""`TileBalancer`: which rows each process of context parallelism computes, by the tiles of their mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.plan.balance import balanced, slowest, tile_classes, work_of_blocks
from attngen.plan.block_map import FULL, PARTIAL, Array
from attngen.spec.expr import names_in
from attngen.torch.block_mask import BlockMask, tables_of
from attngen.torch.closures import Closure
from attngen.torch.flex_spec import Described, Functions, prepare
from attngen.torch.private import mask_of_blocks

MASK_ALONE = Described(torch.float16, 64, 64, lse=False, block_size=None, mode="auto", dropout=0.0)


class TileBalancer:
    """A load balancer of torch's context parallelism for `flex_attention`: whole blocks of rows, as many for each process, so
    that all processes have about as many tiles to compute.

        balancer = TileBalancer(block_mask, mesh.size())
        q, k, v = _context_parallel_shard(mesh, [q, k, v], [2, 2, 2], load_balancer=balancer)
        o = parallel_module(q, k, v, block_mask=balancer.part(mesh.get_local_rank()))
        (o,) = context_parallel_unshard(mesh, [o], [2], load_balancer=balancer)

    `block_mask` is that of the whole sequence, [B, H, length, length], of `attngen.torch.create_block_mask` or of torch's. Its
    blocks are those that are assigned: of the function of attngen's, tiles of this size are classified as kernels classify
    them, and no pair is evaluated; of torch's, its lists are counted. Tensors that the function captures are copied to the
    host. If parts in order are even within 1%, they are left as they are. A full tile counts 1, a partial one `partial`.
    Sequences of a batch have assignments of their own if their masks differ; heads have one, by the sum over heads.

    Every process must make it from the same mask. Raises ArgumentError unless length is a multiple of ranks * block size and
    blocks are as long in keys as in rows, ImportRefusal for a mask that cannot be an expression.
    """

    def __init__(self, block_mask: theirs.BlockMask, ranks: int, *, partial: float = 1.0) -> None:
        if not isinstance(block_mask, theirs.BlockMask):
            raise ArgumentTypeError(f"`block_mask` is a {type(block_mask).__name__}; expected what create_block_mask returns")
        (rows, keys), sizes = block_mask.seq_lengths, block_mask.BLOCK_SIZE
        if rows != keys or sizes[0] != sizes[1]:
            raise ArgumentError(
                f"`block_mask` has {rows} rows and {keys} keys in blocks of {sizes[0]} by {sizes[1]}; expected as many keys as "
                "rows, and square blocks: rows and keys of a process are the same part of the sequence"
            )
        if ranks < 1 or rows % (ranks * sizes[0]):
            raise ArgumentError(
                f"{ranks} processes cannot have as many blocks each: `block_mask` has {rows} rows in blocks of {sizes[0]}. Pad "
                "the sequence, or make the mask with a smaller BLOCK_SIZE"
            )
        self.ranks = ranks
        self._mask_mod, self._block, self._length = block_mask.mask_mod, sizes[0], rows
        self._classes, self._device = _classes(block_mask)
        self._work = work_of_blocks(self._classes, partial)
        self._assigned = np.stack([balanced(work, ranks) for work in self._work])  # [B or 1, ranks, blocks of a rank]

    @property
    def slowest(self) -> float:
        """The tiles of the process that has the most, divided by the mean of all processes."""
        return slowest(self._work, self._assigned)

    def rows(self, rank: int) -> Tensor:
        """The positions of a process's rows in the sequence, int64 [B or 1, length / ranks], on the mask's device."""
        return self._positions(self._assigned[:, rank])

    def part(self, rank: int) -> theirs.BlockMask:
        """The mask of a process's rows beside all keys, in the order in which torch's plan gathers them. Its lists are made of
        the classes of tiles: torch's own plan evaluates the mask for all pairs, and compiles that."""
        own, order = self._assigned[:, rank], self._assigned.reshape(len(self._assigned), -1)
        classes = np.take_along_axis(self._classes, own[:, None, :, None], 2)
        classes = np.take_along_axis(classes, order[:, None, None, :], 3)
        partial, full = (torch.from_numpy((classes == kind).astype(np.int8)).to(self._device) for kind in (PARTIAL, FULL))
        lengths = self._length // self.ranks, self._length
        mask_mod = _moved(self._mask_mod, self.rows(rank), self._positions(order))
        return mask_of_blocks((partial, full), mask_mod, lengths, self._block, self._block)

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """What torch calls: the position of each row in the new order, [B or 1, length]; with `restore` the inverse."""
        order = self._positions(self._assigned.reshape(len(self._assigned), -1))
        return order.argsort(1) if restore else order

    def _positions(self, blocks: Array) -> Tensor:
        rows = blocks[..., None] * self._block + np.arange(self._block)
        return torch.from_numpy(rows.reshape(len(blocks), -1)).to(self._device)


def _moved(mask_mod: Any, rows: Tensor, keys: Tensor) -> Any:
    """A mask of rows and keys in another order."""
    if len(rows) == 1:
        rows, keys = rows[0], keys[0]
        return lambda b, h, q, k: mask_mod(b, h, rows[q], keys[k])
    return lambda b, h, q, k: mask_mod(b, h, rows[b, q], keys[b, k])


def _classes(mask: theirs.BlockMask) -> tuple[Array, torch.device]:
    """The class of each tile, [B or 1, H or 1, blocks, tiles], and the device of the mask."""
    if not (isinstance(mask, BlockMask) and mask.is_function):
        partial, full = tables_of(mask)
        found = np.where(partial.cpu().numpy(), np.int8(PARTIAL), np.int8(0))
        return (found if full is None else np.where(full.cpu().numpy(), np.int8(FULL), found)), partial.device
    assert mask._described is not None
    batch, heads, length, device = mask.shape[0], mask.shape[1], mask.seq_lengths[0], mask._described.device
    closure = Closure()
    functions = Functions(None, mask.mask_mod, closure, closure.key_of(None, mask.mask_mod))
    sizes = {"batch": batch, "q_heads": heads, "kv_heads": heads, "q_len": length, "kv_len": length}
    prepared = prepare(functions, MASK_ALONE, {}, sizes, device)
    spec, captured = prepared.spec, [tensor for _, tensor in closure.tensors]
    used = names_in(spec.mask) if spec.mask is not None else frozenset()
    for index, size, option in (("b", batch, "B"), ("h", heads, "H")):
        if index in used and size == 1:
            raise ArgumentError(f"the mask depends on `{index}`; state {option} in create_block_mask")
    inputs = zip(spec.inputs, prepared.inputs(captured, {}, device, keeps_fp64=False), strict=True)
    arrays = {declared.name: _array(tensor) for declared, tensor in inputs}
    names = {**sizes, **spec.own_sizes({n: a.shape for n, a in arrays.items()}), **prepared.int_params(captured)}
    return tile_classes(spec, mask.BLOCK_SIZE[0], names, arrays), device


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    array: Array = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return array
