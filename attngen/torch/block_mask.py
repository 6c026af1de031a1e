"""`BlockMask`: torch's, whose lists of blocks are made when somebody reads them. Until then it is its function alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from operator import index
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from attngen.device.arrays import ArgumentError
from attngen.torch.private import LISTS, blocks_of_mask, mask_of_blocks

Function = Callable[..., Tensor]  # a mask or a score of numbers
ROWS_AT_ONCE = 2**24  # pairs of a mask that is evaluated at once, where lists are made


class Unread(NamedTuple):
    """What is needed to make the lists of a function."""

    batch: int
    heads: int
    device: torch.device  # where the function computes: what it captures stays there
    separate_full_blocks: bool
    lists_on: torch.device


class BlockMask(theirs.BlockMask):
    """torch's BlockMask. One that `create_block_mask` of this package made holds its function and no lists: attention needs
    none, and they are made when an attribute, an index or a method reads them.

    With lists of the caller's (`from_kv_blocks`, or an attribute that was set), these are part of the meaning, as in torch: a
    pair takes part if its block is full, or if its block is partial and the function allows the pair.
    """

    _described: Unread | None = None  # if the function is all there is

    def __init__(self, *lists: Any, described: Unread | None = None, **named: Any) -> None:
        """As torch's; with `described` and without lists, a mask of `mask_mod` alone."""
        if not torch.compiler.is_compiling():  # Dynamo takes integers of numpy for arrays
            named |= {n: tuple(map(index, named[n])) for n in ("seq_lengths", "BLOCK_SIZE") if n in named}
        if described is None:
            super().__init__(*lists, **named)
            return
        self.seq_lengths = named["seq_lengths"]
        self.BLOCK_SIZE = named["BLOCK_SIZE"]
        self.mask_mod = named["mask_mod"]
        self.dq_kv_order_spt = None
        self._described = described

    @property
    def is_function(self) -> bool:
        """Whether the function alone says which pairs take part: there are no lists, or nobody wrote to those it has."""
        if self._described is None or "kv_indices" not in self.__dict__:
            return self._described is not None
        if torch.compiler.is_compiling():
            return False
        versions = versions_of([self.__dict__.get(name) for name in LISTS])
        return versions is not None and self.__dict__.get("_made") == versions

    def __getattr__(self, name: str) -> object:
        if name not in LISTS or self._described is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.__dict__.update(_lists_of(self))
        if not torch.compiler.is_compiling():
            self.__dict__["_made"] = versions_of([self.__dict__.get(name) for name in LISTS])
        return self.__dict__[name]

    def __setattr__(self, name: str, value: object) -> None:
        if self._described is not None and name in (*LISTS, "mask_mod", "BLOCK_SIZE"):
            self.__getattr__("kv_indices")  # lists of the function so far stay, as torch's do
            self.__dict__["_described"] = None
        object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        if self._described is None:
            return super().shape
        return (self._described.batch, self._described.heads, *self.seq_lengths)

    @property
    def ndim(self) -> int:
        """The number of dimensions of `shape`: models of transformers distinguish masks by it."""
        return len(self.shape)

    def to(self, device: torch.device | str) -> theirs.BlockMask:
        if not self.is_function:
            return super().to(device)
        assert self._described is not None
        return self._alike(self.seq_lengths, self._described._replace(lists_on=torch.device(device)))

    def _alike(self, lengths: tuple[int, int], described: Unread, mask_mod: Function | None = None) -> Self:
        mask_mod = self.mask_mod if mask_mod is None else mask_mod
        return type(self)(seq_lengths=lengths, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=mask_mod, described=described)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        shrinks = new_q_len <= self.seq_lengths[0] and new_kv_len <= self.seq_lengths[1]
        if not (self.is_function and self._described and shrinks):
            return super()._adjust(new_q_len, new_kv_len)
        return self._alike((new_q_len, new_kv_len), self._described)


def _lists_of(mask: BlockMask) -> dict[str, Tensor | None]:
    """The lists of a mask's function, in parts of whole blocks of rows: no mask of all pairs is made."""
    assert mask._described is not None
    batch, heads, device, separate, place = mask._described
    (q_len, kv_len), (rows, keys) = mask.seq_lengths, mask.BLOCK_SIZE
    count = max(1, ROWS_AT_ONCE // max(1, batch * heads * kv_len * rows)) * rows
    parts: list[tuple[Tensor, Any]] = []
    for start in range(0, max(q_len, 1), count):
        length = min(count, q_len - start)
        dense = theirs.create_mask(_from_row(mask.mask_mod, start), batch, heads, length, kv_len, device)
        parts.append(blocks_of_mask(dense, rows, keys, separate))
    partial = torch.cat([p for p, _ in parts], 2)
    full = torch.cat([f for _, f in parts], 2) if separate else None
    made = mask_of_blocks((partial, full), mask.mask_mod, mask.seq_lengths, rows, keys)
    lists = {name: getattr(made, name) for name in LISTS}
    return {name: None if found is None else found.to(place) for name, found in lists.items()}


def _from_row(mask_mod: Function, start: int) -> Function:
    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx + start, kv_idx)

    return moved


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether `function` may be called with `count` arguments, those of a pair."""
    try:
        signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def create_block_mask(
    mask_mod: Function,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """torch's create_block_mask; nothing is evaluated. `_compile` and the orders of torch's own backward have no effect."""
    if not torch.compiler.is_dynamo_compiling() and not takes(mask_mod, 4):
        raise AssertionError(f"create-block_mask requires a mask_mod function! Got {mask_mod}")
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    size = tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, Sequence) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(size) != 2 or min(size) < 1:
        raise ArgumentError(f"BLOCK_SIZE is {BLOCK_SIZE}; expected a positive integer, or two")
    described = Unread(B or 1, H or 1, torch.device(device), separate_full_blocks, torch.device(device))
    return BlockMask(seq_lengths=(Q_LEN, KV_LEN), BLOCK_SIZE=size, mask_mod=mask_mod, described=described)


def versions_of(lists: Sequence[Tensor | None]) -> list[int] | None:
    """How often each list was written to; None if torch does not count that, as for tensors that inference mode made."""
    there = [t for t in lists if t is not None]
    return None if any(t.is_inference() for t in there) else [t._version for t in there]


def tables_of(mask: theirs.BlockMask) -> tuple[Tensor, Tensor | None]:
    """Whether each block is in the list of partial blocks, and in that of full ones: [B, H, blocks of rows, blocks of keys].
    O(blocks), on the lists' device; remembered until a list changes."""
    partial, full = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    blocks = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    lists = (*partial, *full)
    if torch.compiler.is_compiling():
        return _tables(partial, full, blocks)
    versions = versions_of(lists)
    key = (blocks, versions)
    found = mask.__dict__.get("_attngen_tables")
    if found is None or versions is None or found[0] != key or any(a is not b for a, b in zip(found[1], lists, strict=True)):
        found = mask.__dict__["_attngen_tables"] = (key, lists, _tables(partial, full, blocks))
    return found[2]


def _tables(
    partial: tuple[Tensor, Tensor], full: tuple[Tensor | None, Tensor | None], blocks: int
) -> tuple[Tensor, Tensor | None]:
    counts, indices = full
    return _table(*partial, blocks), None if counts is None or indices is None else _table(counts, indices, blocks)


def _table(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Which of `blocks` blocks of keys a list names. Entries of a row after its first `counts` are not part of the list, and
    others may name no block: torch's PagedAttention writes -1 for a page that a sequence lacks."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    listed = listed & (indices >= 0) & (indices < blocks)
    at = torch.where(listed, indices, blocks).long()
    table = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
    table = table.scatter(-1, at, True)[..., :blocks]
    return table.reshape((1,) * (4 - table.dim()) + tuple(table.shape))
