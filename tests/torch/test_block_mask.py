"""`BlockMask`: lists of blocks, which are part of what a mask means, and masks that are a function alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

from attngen.torch import AuxRequest, BlockMask, create_block_mask, flex_attention  # noqa: E402
from tests.torch.flex import compiles, expected, qkv  # noqa: E402
from tests.torch.mods import HEADS, LENGTH, causal  # noqa: E402


def test_lists_are_part_of_the_meaning(by_torch_alone: list[str]) -> None:
    q, k, v = qkv(48, 48)
    counts, indices = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[1, 0, 0], [2, 0, 1], [0, 1, 2]]]])
    full, of_full = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 0]]]])
    for lists in ((counts, indices), (counts, indices, full, of_full)):
        blocks = theirs.BlockMask.from_kv_blocks(*(t.int() for t in lists), BLOCK_SIZE=16, mask_mod=causal)
        found, aux = flex_attention(q, k, v, block_mask=blocks, return_aux=AuxRequest(lse=True, max_scores=True))
        listed = _as_listed(lists, 16, 48)
        wanted, lse, largest = expected(q, k, v, lambda s, b, h, i, j, a=listed: torch.where(a[i, j], s, -math.inf))
        for one, other in ((found, wanted), (aux.lse, lse), (aux.max_scores, largest)):
            torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def _as_listed(lists: Any, size: int, length: int) -> torch.Tensor:
    """Pairs in full blocks, and in partial ones those that are causal."""
    allowed = torch.zeros(length, length, dtype=torch.bool)
    within = torch.arange(length)[:, None] >= torch.arange(length)
    for listed, is_full in ((lists[:2], False), (lists[2:], True)):
        for row in range(length // size) if listed else ():
            for block in listed[1][0, 0, row, : listed[0][0, 0, row]]:
                at = (slice(row * size, (row + 1) * size), slice(block * size, (block + 1) * size))
                allowed[at] |= True if is_full else within[at]
    return allowed


def test_lists_are_made_when_they_are_read() -> None:
    ours = create_block_mask(causal, 2, HEADS, 100, 130, "cpu", 32)
    assert "kv_indices" not in vars(ours)
    assert ours.shape == (2, HEADS, 100, 130)
    assert "kv_indices" not in vars(ours)
    wanted = theirs.create_block_mask(causal, 2, HEADS, 100, 130, "cpu", 32)
    assert repr(ours) == repr(wanted)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, name), getattr(wanted, name)), name
    assert torch.equal(ours.to_dense(), wanted.to_dense())
    assert ours.is_function
    assert torch.equal(ours[0, 1].kv_indices, wanted[0, 1].kv_indices)
    assert isinstance(ours, theirs.BlockMask)


def test_lists_are_made_where_the_function_computes() -> None:
    """What it captures stays there when the mask moves."""
    offset = torch.full((8,), 16)

    def moved(b, h, q, k):
        return q + offset[b] >= k

    blocks = create_block_mask(moved, 1, 1, 96, 96, "cpu", 32)
    elsewhere = blocks.to("meta")
    assert elsewhere.kv_indices.device.type == elsewhere.full_q_indices.device.type == "meta"
    back = elsewhere.to("cpu")
    assert torch.equal(back.to_dense(), theirs.create_block_mask(moved, 1, 1, 96, 96, "cpu", 32).to_dense())


def test_lists_may_name_no_block(by_torch_alone: list[str]) -> None:
    """-1 is a page that a sequence lacks, in torch's PagedAttention."""
    q, k, v = qkv(32, 48)
    counts, blocks = torch.tensor([2, 1]).expand(1, 1, 2), torch.tensor([[2, -1, 0], [3, 0, 1]]).expand(1, 1, 2, 3)
    mask = theirs.BlockMask.from_kv_blocks(
        counts.int(), blocks.int(), BLOCK_SIZE=16, seq_lengths=(32, 48), compute_q_blocks=False
    )
    found = flex_attention(q, k, v, block_mask=mask)
    wanted, _, _ = expected(q, k[:, :, 32:], v[:, :, 32:])
    torch.testing.assert_close(found[:, :, :16].double(), wanted[:, :, :16], atol=1e-5, rtol=1e-5)
    assert (found[:, :, 16:] == 0).all()


def test_lists_may_be_narrower_than_the_keys(by_torch_alone: list[str]) -> None:
    """A selection of a few blocks of keys for each block of rows."""
    q, k, v = qkv(32, 64)
    counts, blocks = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[3, 0], [0, 2]]]], dtype=torch.int32)
    lists = {"BLOCK_SIZE": 16, "seq_lengths": (32, 64), "compute_q_blocks": False}
    found = flex_attention(q, k, v, block_mask=theirs.BlockMask.from_kv_blocks(counts, blocks, **lists))
    listed = torch.tensor([[False, False, False, True], [True, False, True, False]])
    wanted, _, _ = expected(q, k, v, lambda s, b, h, i, j: torch.where(listed[i // 16, j // 16], s, -math.inf))
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    mask = theirs.BlockMask.from_kv_blocks(counts[..., :1], blocks[..., :1, :], **lists)
    with pytest.raises(ValueError, match="partial_blocks of 1 blocks of 16 rows; expected blocks of all 32 rows"):
        flex_attention(q, k, v, block_mask=mask)


def test_lists_that_are_written_to_are_those_of_the_call(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    found = []
    for make in (create_block_mask, theirs.create_block_mask):
        blocks = make(causal, None, None, LENGTH, LENGTH, "cpu", 8)
        before = flex_attention(q, k, v, block_mask=blocks)
        blocks.full_kv_num_blocks[..., 2:].zero_()
        found += [
            flex_attention(q, k, v, block_mask=mask) for mask in (blocks, blocks.to("cpu"), blocks._adjust(LENGTH, LENGTH))
        ]
        assert not torch.allclose(found[-1], before)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def test_lists_that_inference_mode_made_are_read_in_each_call(by_torch_alone: list[str]) -> None:
    """torch does not count how often they were written to."""
    with torch.inference_mode():
        q, k, v = (t.detach() for t in qkv())
        ours, torchs = (
            make(causal, None, None, LENGTH, LENGTH, "cpu", 8) for make in (create_block_mask, theirs.create_block_mask)
        )
        for blocks in (ours, torchs):
            torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), expected(q, k, v, mask=torchs)[0].float())
            blocks.kv_num_blocks.zero_()
            blocks.full_kv_num_blocks.zero_()
            assert not flex_attention(q, k, v, block_mask=blocks).any()


def test_another_function_keeps_the_lists_of_the_first(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    ours, wanted = (
        make(causal, None, None, LENGTH, LENGTH, "cpu", 16) for make in (create_block_mask, theirs.create_block_mask)
    )
    for blocks in (ours, wanted):
        blocks.mask_mod = lambda b, h, i, j: i // 2 >= j
    found = [flex_attention(q, k, v, block_mask=blocks) for blocks in (ours, wanted)]
    torch.testing.assert_close(found[0], found[1])
    assert not ours.is_function
    alone = flex_attention(q, k, v, block_mask=create_block_mask(ours.mask_mod, None, None, LENGTH, LENGTH, "cpu", 16))
    assert not torch.allclose(alone, found[0])


def test_torch_compile_of_lists(by_torch_alone: list[str]) -> None:
    blocks = theirs.create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", 16)
    blocks.mask_mod = lambda b, h, i, j: i // 2 >= j
    tensors = qkv()
    compiled, _ = compiles(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks))
    torch.testing.assert_close(compiled(*tensors), flex_attention(*tensors, block_mask=blocks))


@pytest.mark.long
def test_lists_with_gradients_for_any_length_by_inductor() -> None:
    """The lengths of a mask and of its tensors are one symbol of torch.compile's: code that inductor made read another one."""
    from torch._inductor import config

    q, k, v = (torch.randn(2, 2, 48, 16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(causal, None, None, 48, 48, "cpu", 16)
    wanted = torch.autograd.grad(expected(q, k, v, mask=mask)[0].sum(), (q, k, v))
    assert mask.kv_indices.dim() == 4  # from now on, there are lists
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        whole = partial(flex_attention, block_mask=mask, kernel_options={"mode": "naive"})
        call = torch.compile(whole, dynamic=True)
        found = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_sizes_of_numpy_are_integers() -> None:
    """Dynamo takes a number of numpy for an array, so a block of np.prod(tile) would break the graph."""
    length, block = np.int64(LENGTH), np.prod((4, 2))
    made = create_block_mask(causal, None, None, length, length, "cpu", block)
    lists = BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=(block, block), seq_lengths=(length, length)
    )
    for mask in (made, lists):
        assert [*mask.BLOCK_SIZE, *mask.seq_lengths] == [8, 8, LENGTH, LENGTH]
        assert {type(n) for n in (*mask.BLOCK_SIZE, *mask.seq_lengths)} == {int}
