"""What flash-attention's function of a cache means, by torch's own operations, and cases along the axes of its own tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.torch.flash import Case, reference

Tensor = torch.Tensor
BATCH = 3
PLAIN = Case()


@dataclass(frozen=True)
class CacheCase:
    """A call of flash_attn_with_kvcache, without tensors."""

    q_len: int
    cache_len: int
    heads: tuple[int, int] = (4, 2)
    size: int = 64
    of: Case = PLAIN
    new_len: int = 0  # 0: nothing is appended
    rotary_dim: int = 0
    interleaved: bool = False
    has_batch_idx: bool = False
    has_leftpad: bool = False
    page_size: int = 0  # 0: each cache is one array
    num_splits: int = 0

    def call(self, dtype: Any, device: Any = None, seed: int = 0) -> Call:
        """Tensors for the case. Keys and values that belong to no sequence are large."""
        random = torch.Generator().manual_seed(seed)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype)

        q_heads, kv_heads = self.heads
        caches = 2 * BATCH if self.has_batch_idx else BATCH
        pages = -(-self.cache_len // self.page_size) if self.page_size else 0  # per sequence
        rows = max(self.new_len, self.q_len if self.rotary_dim and self.is_local else 0)
        most = self.cache_len - rows
        used = torch.randint(0, most + 1, (BATCH,), generator=random)
        used[-1] = most
        lengths = used + self.new_len
        places = (3 * BATCH * pages, self.page_size) if pages else (caches, self.cache_len)
        keys, values = made(*places, kv_heads, self.size), made(*places, kv_heads, self.size)
        named: dict[str, Any] = {"cache_seqlens": used.to(device, torch.int32), "num_splits": self.num_splits}
        if self.new_len:
            named |= {name: made(BATCH, self.new_len, kv_heads, self.size) for name in "kv"}
        if self.rotary_dim:
            angles = torch.rand(self.cache_len, self.rotary_dim // 2, generator=random, dtype=torch.float64) * 6.28
            named |= {"rotary_cos": angles.cos().to(device, dtype), "rotary_sin": angles.sin().to(device, dtype)}
            named["rotary_interleaved"] = self.interleaved
        if pages:
            table = torch.randperm(places[0], generator=random)[: BATCH * pages].view(BATCH, pages)
            named["block_table"] = table.to(device, torch.int32)
        if self.has_batch_idx:
            named["cache_batch_idx"] = torch.randperm(caches, generator=random)[:BATCH].to(device, torch.int32)
        if self.has_leftpad:
            pads = (torch.rand(BATCH, generator=random) * lengths).int()
            named["cache_leftpad"] = pads.to(device)
        named |= self.of.named(q_heads, BATCH, device)
        return Call(self, made(BATCH, self.q_len, q_heads, self.size), keys, values, named)

    @property
    def is_local(self) -> bool:
        """Whether a query has a position of its own."""
        return self.of.causal or self.of.window_size != (-1, -1)


@dataclass(frozen=True)
class Call:
    """The arguments of a call."""

    case: CacheCase
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    named: dict[str, Any]

    def run(self, function: Any, **others: Any) -> Any:
        """`function` of these arguments, with the caches copied: (its result, the keys and the values afterwards)."""
        keys, values = self.k_cache.clone(), self.v_cache.clone()
        return function(self.q, keys, values, **self.named, **others), keys, values

    def expected(self, precision: Any = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(O, lse, keys, values): the result, and the caches afterwards, in `precision` until they are stored."""
        case, named = self.case, self.named
        caches = keys, values = self.k_cache.clone(), self.v_cache.clone()
        table = named["block_table"].long() if case.page_size else None
        if table is not None:
            keys, values = (pool[table].flatten(1, 2) for pool in caches)
        used, pads = named["cache_seqlens"].tolist(), named.get("cache_leftpad")
        which = named["cache_batch_idx"].tolist() if "cache_batch_idx" in named else range(BATCH)
        outputs, sums = [], []
        for b, (n, place) in enumerate(zip(used, which, strict=True)):
            q, end = self.q[b].to(precision), n + case.new_len
            if case.new_len:
                new = named["k"][b]
                if case.rotary_dim:
                    positions = torch.arange(max(case.new_len, case.q_len), device=q.device) + n
                    new = self.rotated(new.to(precision), positions[: case.new_len])
                    of_rows = positions[: case.q_len] if case.is_local else positions[:1].expand(case.q_len)
                    q = self.rotated(q, of_rows).to(self.q.dtype)
                keys[place, n:end], values[place, n:end] = new.to(keys.dtype), named["v"][b]
            begin = 0 if pads is None else int(pads[b])
            slopes = named.get("alibi_slopes")
            slopes = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
            one = reference(q[None], keys[place, None, begin:end], values[place, None, begin:end], case.of, slopes, precision)
            outputs.append(one[0])
            sums.append(one[1])
        if table is not None:
            for pool, rows in zip(caches, (keys, values), strict=True):
                pool[table] = rows.unflatten(1, (-1, case.page_size))
        return torch.cat(outputs), torch.cat(sums), *caches

    def rotated(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rows [length, heads, size] at `positions`."""
        cos, sin = (self.named[f"rotary_{name}"][positions, None].to(rows.dtype) for name in ("cos", "sin"))
        part, rest = rows[..., : self.case.rotary_dim], rows[..., self.case.rotary_dim :]
        if self.case.interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        return torch.cat((turned, rest), -1)


OF = (PLAIN, Case(causal=True), Case(window_size=(13, 4)), Case(causal=True, softcap=20.0, slopes=2), Case(slopes=1))
LENGTHS = ((1, 128), (1, 339), (3, 70), (64, 80), (64, 128), (20, 61))


def dense_cases() -> Iterator[CacheCase]:
    """Cases of caches whose keys are all there."""
    for i, of in enumerate(OF):
        for j in range(2):
            q_len, cache_len = LENGTHS[(2 * i + j) % len(LENGTHS)]
            heads = ((6, 6), (6, 1), (6, 3))[(i + j) % 3]
            yield CacheCase(q_len, cache_len, heads, (64, 128, 80)[i % 3], of, has_leftpad=j == 1, num_splits=(0, 1, 3)[i % 3])


def appending_cases() -> Iterator[CacheCase]:
    """The same with rows that are appended, rotated or not."""
    for i, case in enumerate(dense_cases()):
        new_len = case.q_len if i % 3 else max(1, case.q_len // 2)
        rotary_dim = (0, case.size // 16 * 16, case.size // 32 * 16)[i % 3]
        yield replace(case, new_len=new_len, rotary_dim=rotary_dim, interleaved=i % 2 == 0)


def placed_cases() -> Iterator[CacheCase]:
    """The cases of both in pages, and in caches by their numbers."""
    for i, case in enumerate((*dense_cases(), *appending_cases())):
        if i % 3:
            yield replace(case, page_size=(1, 16, 256)[i % 3 if i % 2 else 0], has_leftpad=False)
        else:
            yield replace(case, has_batch_idx=True)
