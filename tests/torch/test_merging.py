"""Merging the attention of two sets of keys."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attngen.device.arrays import ArgumentError, ArgumentTypeError  # noqa: E402
from attngen.torch import merge  # noqa: E402


def attended(q, k, v):
    """(O, lse) by definition; without a key 0 and -inf."""
    scores = q @ k.mT
    lse = scores.logsumexp(-1)
    return torch.nan_to_num(scores.softmax(-1)) @ v, lse


def tensors(dtype=torch.float64, rows=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, n, 4, generator=generator, dtype=dtype) for n in (rows, 7, 7, 6, 6)]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_it_is_the_attention_of_all_keys(layout: str) -> None:
    q, k1, v1, k2, v2 = tensors()
    q = 40 * q  # lse far from 0
    expected, expected_lse = attended(q, torch.cat([k1, k2], 2), torch.cat([v1, v2], 2))
    (o1, lse1), (o2, lse2) = attended(q, k1, v1), attended(q, k2, v2)
    if layout == "bshd":
        o1, o2, expected = (o.transpose(1, 2) for o in (o1, o2, expected))
    for o, lse in (merge(o1, lse1, o2, lse2, layout=layout), merge(o2, lse2, o1, lse1, layout=layout)):
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
def test_rows_without_a_key(size: float) -> None:
    """In the first, the second, in both: O there may be anything."""
    o1, o2 = torch.ones(1, 1, 3, 2), torch.full((1, 1, 3, 2), 2.0)
    lse1, lse2 = torch.tensor([[[-torch.inf, size, -torch.inf]]]), torch.tensor([[[size, -torch.inf, -torch.inf]]])
    o1[..., 0, :], o2[..., 1, :], o1[..., 2, :], o2[..., 2, :] = torch.nan, torch.inf, torch.nan, torch.nan
    given = [t.requires_grad_() for t in (o1, lse1, o2, lse2)]
    o, lse = merge(*given)
    assert o[0, 0].tolist() == [[2, 2], [1, 1], [0, 0]]
    assert lse[0, 0].tolist() == [size, size, -torch.inf]
    gradients = torch.autograd.grad(o.sum() + lse[..., :2].sum(), given)
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][0, 0].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert gradients[1][0, 0].tolist() == [0, 1, 0]


def test_derivatives() -> None:
    q, k1, v1, k2, v2 = tensors(rows=2)
    (o1, lse1), (o2, lse2) = attended(q, k1, v1), attended(q, k2, v2)
    lse2[0, 0, 0] = -torch.inf  # a row that has no key in the second set
    live = torch.isfinite(lse2)

    def merged(o1, lse1, o2, finite):
        return merge(o1, lse1, o2, torch.where(live, finite, -torch.inf))

    given = [t.detach().requires_grad_() for t in (o1, lse1, o2, torch.where(live, lse2, 0.0))]
    assert torch.autograd.gradcheck(merged, given)
    assert torch.autograd.gradgradcheck(merged, given)


def test_types_and_shapes() -> None:
    q, k1, v1, k2, v2 = tensors(torch.float32)
    (o1, lse1), (o2, lse2) = attended(q, k1, v1), attended(q, k2, v2)
    o, lse = merge(o1.bfloat16(), lse1, o2.bfloat16(), lse2)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o.float(), merge(o1, lse1, o2, lse2)[0], atol=0.02, rtol=0.02)
    with pytest.raises(ArgumentError, match=r"`lse2` is \[2, 3, 4\]"):
        merge(o1, lse1, o2, lse2[..., :4])
    with pytest.raises(ArgumentError, match="`o2`"):
        merge(o1, lse1, o2[:1], lse2)
    with pytest.raises(ArgumentTypeError, match="`o1` is a ndarray"):
        merge(o1.numpy(), lse1, o2, lse2)
    with pytest.raises(ArgumentTypeError, match="`lse1` has elements of int64"):
        merge(o1, lse1.long(), o2, lse2)
    with pytest.raises(ArgumentError, match="`o2` is on meta and `o1` on cpu"):
        merge(o1, lse1, o2.to("meta"), lse2)
    with pytest.raises(ArgumentError, match=r"`o1` is \[4\]; expected"):
        merge(o1[0, 0, 0], lse1, o2, lse2)


def test_packed_sequences() -> None:
    """O is [total, heads, size] and lse [heads, total], as the functions of packed sequences return them."""
    q, k1, v1, k2, v2 = tensors(rows=3)  # with as many rows as heads, which a wrong order of axes would confuse
    pairs = attended(q, k1, v1), attended(q, k2, v2)
    expected, expected_lse = merge(*pairs[0], *pairs[1])
    packed = [one for o, lse in pairs for one in (o[0].transpose(0, 1), lse[0])]
    found, lse = merge(*packed, layout="bshd")
    torch.testing.assert_close(found, expected[0].transpose(0, 1))
    torch.testing.assert_close(lse, expected_lse[0])
