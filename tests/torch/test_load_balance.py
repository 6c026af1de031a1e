"""Blocks of rows of one sequence, divided among processes by the tiles of the mask."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

from attngen.device.arrays import ArgumentError, ArgumentTypeError  # noqa: E402
from attngen.plan.balance import balanced, slowest  # noqa: E402
from attngen.torch import TileBalancer, create_block_mask, flex_attention  # noqa: E402
from tests.torch.mods import causal, windowed  # noqa: E402


def documents(length: int, seed: int, longest: float = 0.25) -> Any:
    """The number of each row's document, whose lengths are uneven: uniform in their logarithm."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(16), np.log(longest * length), length // 16)).astype(int)
    return torch.from_numpy(np.searchsorted(lengths.cumsum(), np.arange(length), side="right").astype(np.int32))


def in_documents(ids: Any) -> Any:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_slowest_process_is_within_5_percent_of_the_mean(ranks: int) -> None:
    length = 2**16
    masks = [in_documents(documents(length, seed)) for seed in range(3)]
    masks += [causal, windowed(1000), lambda b, h, q, k: (q >= k) | (k < 700), lambda b, h, q, k: q // 8192 == k // 8192]
    for mask in masks:
        balancer = TileBalancer(create_block_mask(mask, None, None, length, length, "cpu"), ranks)
        assert balancer.slowest < 1.05
    assert torch.equal(balancer._generate_indices()[0], torch.arange(length)), "even as it is: rows stay in order"


def test_few_uneven_blocks_are_divided_evenly() -> None:
    drawn = np.exp(np.random.default_rng(0).uniform(0, 5, (50, 64))).astype(int)
    for work in drawn:
        assigned = balanced(work, 8)
        assert sorted(assigned.ravel()) == list(range(64))
        assert slowest(work, assigned) < 1.008  # 1.012 without exchanges
    alone = np.array([100, 1, 1, 1])
    assert sorted(balanced(alone, 2).ravel()) == [0, 1, 2, 3], "no assignment is even"


@pytest.mark.parametrize("kind", ["one assignment", "of each sequence", "of lists"])
def test_parts_together_are_the_whole(kind: str, by_torch_alone: list[str]) -> None:
    length, block, ranks = 96, 8, 3
    of_sequences = torch.stack([documents(length, seed) for seed in range(2)])
    mask, batch = (lambda b, h, q, k: (of_sequences[b, q] == of_sequences[b, k]) & (q >= k)), 2
    if kind != "of each sequence":
        mask, batch = in_documents(of_sequences[0]), None
    make = theirs.create_block_mask if kind == "of lists" else create_block_mask
    whole = make(mask, batch, None, length, length, "cpu", BLOCK_SIZE=block)
    balancer = TileBalancer(whole, ranks)
    assert balancer.slowest < 1.25  # blocks are few here
    q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
    expected = flex_attention(q, k, v, block_mask=whole)
    order = balancer._generate_indices()
    assert len(order) == (batch or 1)

    def moved(tensor: Any, indices: Any) -> Any:
        return tensor.gather(2, indices[:, None, :, None].expand(2, 2, -1, 8))

    keys, values = moved(k, order), moved(v, order)
    parts = []
    for rank in range(ranks):
        part = balancer.part(rank)
        dense = theirs.create_mask(part.mask_mod, batch, None, length // ranks, length)
        listed = (part.to_dense() > 0).repeat_interleave(block, 2).repeat_interleave(block, 3)
        assert not (dense & ~listed).any()
        assert listed.float().mean() < 0.6, "tiles that the mask leaves empty are skipped"
        assert torch.equal(balancer.rows(rank), order.chunk(ranks, 1)[rank])
        parts.append(flex_attention(moved(q, balancer.rows(rank)), keys, values, block_mask=part))
    found = moved(torch.cat(parts, 2), balancer._generate_indices(restore=True))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_mistakes() -> None:
    def mask(*lengths: int, **named: Any) -> Any:
        return create_block_mask(causal, None, None, *lengths, "cpu", **named)

    with pytest.raises(ArgumentError, match=r"3 processes cannot have as many blocks each: .* 1024 rows in blocks of 128"):
        TileBalancer(mask(1024, 1024), 3)
    for given in (mask(1024, 512), mask(1024, 1024, BLOCK_SIZE=(128, 64))):
        with pytest.raises(ArgumentError, match="expected as many keys as rows, and square blocks"):
            TileBalancer(given, 2)
    with pytest.raises(ArgumentError, match="depends on `h`; state H in create_block_mask"):
        TileBalancer(create_block_mask(lambda b, h, q, k: q >= k + h, None, None, 256, 256, "cpu"), 2)
    with pytest.raises(ArgumentTypeError, match="`block_mask` is a function"):
        TileBalancer(causal, 2)


def test_it_has_what_torch_calls() -> None:
    """torch's load balancers are classes that it does not export; it calls one method of them."""
    base = pytest.importorskip("torch.distributed.tensor.experimental._attention")._LoadBalancer
    assert base.__abstractmethods__ == {"_generate_indices"}
    assert list(inspect.signature(base._generate_indices).parameters) == ["self", "restore"]
    assert list(inspect.signature(TileBalancer._generate_indices).parameters) == ["self", "restore"]
