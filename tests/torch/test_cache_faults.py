"""What no sequence has in a pool of pages leaves no trace: any numbers in the page table, NaN in rows, untouched memory.

Pools are called by `flash_attn_with_kvcache` and by `Attention.decode`; `test_vllm.py` has the same of the backend for vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attngen.device.select import device_by_name  # noqa: E402
from attngen.torch import Attention, append, flash_attn_func, flash_attn_with_kvcache  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.tensors import randn  # noqa: E402

PAGE, SIZE = 16, 16
UNUSED = (-7, 10**6, 2**31 - 1, -(2**31))  # in entries of the page table that no key is in


def by_layer(q: Any, keys: Any, values: Any, k: Any, v: Any, **named: Any) -> Any:
    """`Attention.decode`, by pools that lie as those of flash-attention."""
    return Attention(is_causal=True, enable_gqa=True, layout="bshd", mode="decode").decode(q, keys, values, k, v, **named)


def by_function(q: Any, keys: Any, values: Any, k: Any, v: Any, **named: Any) -> Any:
    return flash_attn_with_kvcache(q, keys, values, k, v, **named, causal=True, mode="decode")


CALLS = [by_layer, by_function]


def check(call: Any, lengths: Sequence[int], pages: int, first: int = 0) -> None:
    """One row is appended to sequences of `lengths` keys, 2 query heads over 1. They lie in a pool of so many pages of memory
    that nobody has written, from page `first` on; rows that no sequence has are NaN."""
    rows = [n + 1 for n in lengths]
    room = max(-(-n // PAGE) for n in rows) + 1
    table = torch.tensor(UNUSED, dtype=torch.int32).repeat(len(rows) * room)[: len(rows) * room].view(len(rows), room)
    pools = [torch.empty(pages, PAGE, 1, SIZE, dtype=torch.float16) for _ in "kv"]
    q, new = randn(len(rows), 1, 2, SIZE), [randn(len(rows), 1, 1, SIZE) for _ in "kv"]
    order, written = torch.randperm(pages - first) + first if first == 0 else torch.arange(first, pages), 0
    sequences = []
    for b, n in enumerate(rows):
        used = -(-n // PAGE)
        table[b, :used] = order[written : written + used].int()
        whole = [torch.cat([randn(n - 1, 1, SIZE), one[b]]) for one in new]
        for pool, sequence in zip(pools, whole, strict=True):
            padded = torch.full((used * PAGE, 1, SIZE), torch.nan, dtype=torch.float16)
            padded[: n - 1] = sequence[:-1]
            pool[table[b, :used].long()] = padded.view(used, PAGE, 1, SIZE)
        written += used
        sequences.append(whole)
    named = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "block_table": table}
    found = call(q, *pools, *new, **named)
    for b, sequence in enumerate(sequences):
        exact = flash_attn_func(q[b : b + 1].double(), *(t[None].double() for t in sequence), mode="math")
        torch.testing.assert_close(found[b : b + 1].double(), exact, rtol=4e-3, atol=4e-3)
        last = rows[b] - 1
        page = table[b, last // PAGE].long()
        assert all(torch.equal(pool[page, last % PAGE], one[b, 0]) for pool, one in zip(pools, new, strict=True))
    none = {**named, "cache_seqlens": torch.zeros(len(rows), dtype=torch.int32)}
    assert not call(q, *pools, None, None, **none).any()


@pytest.mark.parametrize("call", tiers.cases(CALLS, quick=[by_layer]))
def test_sequences_of_any_length_beside_each_other(call: Any) -> None:
    check(call, [300, 0, 15, 16, 17], 40)


@pytest.mark.long
def test_one_sequence_of_128k_beside_short_ones() -> None:
    check(by_function, [5, 0, 2**17 - 1, 40, 1, 16], 2**17 // PAGE + 12)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_pools_of_more_than_2_to_the_31_elements(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a pool is memory that nobody touches. The kernel that appends runs without checks, which keep a state of each
    byte that may be written."""
    monkeypatch.setattr(append, "device_by_name", lambda _: device_by_name("emulated:fast"))
    append._runtime.cache_clear()
    pages = 2**31 // (PAGE * SIZE) + 64
    check(call, [300, 0, 15, 16, 17], pages, pages - 32)
    append._runtime.cache_clear()


@pytest.mark.parametrize(
    "mode", tiers.cases(["math", "naive", "tiled", "fused", "hopper", "decode"], quick=["math", "hopper", "decode"])
)
def test_rows_after_the_last_key_may_hold_nan(mode: Any) -> None:
    """In caches in the order of sequences, and in numbered ones."""
    q, cache = randn(2, 3, 2, SIZE), randn(3, 304, 1, SIZE)
    used, numbers = torch.tensor([270, 3], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    for which in (None, numbers):
        places = [0, 1] if which is None else which.tolist()
        exact = [
            flash_attn_func(q[b : b + 1], *2 * [cache[n, None, : used[b]]], causal=True, mode="naive")
            for b, n in enumerate(places)
        ]
        unused = cache.clone()
        for b, n in enumerate(places):
            unused[n, used[b] :] = torch.nan
        found = flash_attn_with_kvcache(q, unused, unused, cache_seqlens=used, cache_batch_idx=which, causal=True, mode=mode)
        torch.testing.assert_close(found, torch.cat(exact), rtol=4e-3, atol=4e-3)
