"""Operators of torch in masks and scores of `flex_attention`: what they mean, and which are refused with their place."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from attngen.torch import checked_indices, create_block_mask, flex_attention  # noqa: E402
from attngen.torch.graphs import ImportRefusal  # noqa: E402
from tests.torch.flex import check, expected, qkv, randn  # noqa: E402
from tests.torch.mods import HEADS, LENGTH, Mod  # noqa: E402

BYTES = torch.arange(LENGTH).mul(37).to(torch.uint8)
SIGNED, SHORT = BYTES.to(torch.int8), torch.arange(LENGTH).mul(4001).to(torch.int16)
NARROW = {
    "difference": lambda b, h, i, j: BYTES[i] - BYTES[j] < 60,
    "product": lambda b, h, i, j: SIGNED[i] * SIGNED[j] > 10,
    "shift": lambda b, h, i, j: (SIGNED[i] << 2) > SIGNED[j],
    "negative": lambda b, h, i, j: -BYTES[i] > BYTES[j],
    "inverse": lambda b, h, i, j: ~BYTES[i] > BYTES[j],
    "short": lambda b, h, i, j: SHORT[i] * SHORT[j] > 10,
    "sum": lambda b, h, i, j: BYTES.view(-1, 4)[i // 4].sum(-1, dtype=torch.uint8) > BYTES[j],
    "conversion": lambda b, h, i, j: ((i - j) * 11).to(torch.int8) > 0,
}


@pytest.mark.parametrize("name", NARROW)
def test_integers_wrap_in_their_type(name: str, by_torch_alone: list[str]) -> None:
    check(Mod("narrow", mask=lambda b, h, i, j: NARROW[name](b, h, i, j) | (i == j)), atol=2e-5, rtol=2e-5)


def test_indices_outside_are_kept_inside(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    table, far = torch.arange(4.0), torch.tensor([-100, -4, 3, 100])
    near = torch.tensor([0, 0, 3, 3])
    found = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[far[j % 4]])
    wanted = expected(q, k, v, lambda s, b, h, i, j: s + table[near[j % 4]])[0]
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    with checked_indices():
        flex_attention(q, k, v, lambda s, b, h, i, j: s + table[near[j % 4]])
        with pytest.raises(IndexError, match=r"`far\[k % 4\]`, which is -100 to 100, in a dimension of 4"):
            flex_attention(q, k, v, lambda s, b, h, i, j: s + table[far[j % 4]])
    found = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j])  # an index that no bound proves inside
    clamped = expected(q, k, v, lambda s, b, h, i, j: s + table[torch.where(i < j, i - j + 4, i - j).clamp(0, 3)])[0]
    torch.testing.assert_close(found.double(), clamped, atol=1e-5, rtol=1e-5)


def test_integers_of_64_bits(by_torch_alone: list[str]) -> None:
    """Times in milliseconds do not fit 32 bits."""
    times = torch.arange(LENGTH).mul(700) + 2**41
    check(Mod("times", mask=lambda b, h, i, j: (times[i] - times[j] < 5000) & (i >= j)), atol=2e-5, rtol=2e-5)


NEGATIVE = {
    "computed": lambda s, b, h, i, j: s + torch.arange(LENGTH)[i - j] * 0.1,
    "cut out": lambda s, b, h, i, j: s + PLACES[3 : 3 + LENGTH][(i - j).clamp(-2, 9)] * 0.1,
    "stacked": lambda s, b, h, i, j: s + torch.stack([i, j, b])[(i - j).clamp(-3, 2)] * 0.1,
    "reversed": lambda s, b, h, i, j: s + PLACES.flip(0)[(i - j).clamp(-2, 9)] * 0.1,
}
PLACES = torch.arange(2 * LENGTH)


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_indices_count_from_the_end(name: str, by_torch_alone: list[str]) -> None:
    """Of what a function makes of its numbers and of captured tensors too."""
    check(Mod("negative", NEGATIVE[name]), atol=2e-5, rtol=2e-5)


PLACES_OF_HEADS = torch.arange(HEADS * LENGTH * 2.0).view(HEADS, LENGTH, 2)
MIXED = {
    "an ellipsis": lambda s, b, h, i, j: s + PLACES_OF_HEADS[..., b % 2][h, j] * 0.1,
    "slices": lambda s, b, h, i, j: s + PLACES_OF_HEADS[h, :, 1][i] * 0.1,
    "apart": lambda s, b, h, i, j: s + PLACES_OF_HEADS[h, 3:, b][j - 3] * 0.1,
    "none": lambda s, b, h, i, j: s + PLACES_OF_HEADS[None, h, ..., None, 0][0, -1 - j, 0] * 0.1,
    "a sum": lambda s, b, h, i, j: s + PLACES_OF_HEADS[h, i, :].sum() * 0.1,
}


@pytest.mark.parametrize("name", MIXED)
def test_indices_among_slices(name: str, by_torch_alone: list[str]) -> None:
    check(Mod("mixed", MIXED[name]), atol=5e-5, rtol=5e-5)


def accumulated(b, h, i, j):
    near = torch.zeros_like(i, dtype=torch.bool)
    for distance in (0, 3, 9):
        near |= i - j == distance
    near ^= j == 5
    place = j * 1
    place <<= 1
    return near & (place < 70)


def bucketed(s, b, h, i, j):
    bucket = (i > j).to(torch.long) * 4
    bucket += torch.where(i - j < 3, (i - j).abs(), 3)
    return s + TABLE[h, bucket]


def renamed(s, b, h, i, j):
    x = y = torch.zeros(()).copy_(s).mul_(0.5)
    y += TABLE[h, j]
    row = TABLE[h]
    row *= 3
    return x.masked_fill_(i == j, 0.25) + row[i].fill_(0.5) * row.clamp_(-1, 1)[j]


TABLE = torch.linspace(-1, 1, HEADS * LENGTH).view(HEADS, LENGTH)
CHANGED = {  # functions that change their own numbers, and others that mean the same
    "truth values": (
        Mod("truth values", mask=accumulated),
        lambda b, h, i, j: (((i == j) | (i - j == 3) | (i - j == 9)) ^ (j == 5)) & (j < 35),
    ),
    "integers": (
        Mod("integers", bucketed),
        lambda s, b, h, i, j: s + TABLE[h, (i > j) * 4 + torch.where(i - j < 3, (i - j).abs(), 3)],
    ),
    "two names": (
        Mod("two names", renamed),
        lambda s, b, h, i, j: torch.where(i == j, 0.25, s * 0.5 + TABLE[h, j]) + 0.5 * (TABLE[h, j] * 3).clamp(-1, 1),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_numbers_that_a_function_changes(name: str, by_torch_alone: list[str]) -> None:
    mod, same = CHANGED[name]
    q, k, v = qkv()
    blocks = [None if mod.mask is None else create_block_mask(m, None, None, LENGTH, LENGTH, "cpu") for m in (mod.mask, same)]
    found = flex_attention(q, k, v, mod.score, blocks[0])
    wanted = expected(q, k, v, same if mod.score else None, blocks[1])[0]
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)
    pairs = zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, wanted)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=5e-5, rtol=5e-5)


def test_what_others_see_cannot_be_changed() -> None:
    """A captured tensor; a view, or what it shows. Python catches a TypeError of `x += 1` and computes x = x + 1."""

    def of_captured(s, b, h, i, j):
        TABLE.add_(1)
        return s

    def of_a_row(s, b, h, i, j):
        row = TABLE[0]
        row += 1
        return s + TABLE[0, i]

    def by_a_view(s, b, h, i, j):
        x = s.view(1)
        x += 1
        return s

    def of_an_element(s, b, h, i, j):
        row = torch.zeros(2)
        row[1] = s
        return row.sum()

    for score in (of_captured, of_a_row, by_a_view, of_an_element):
        with pytest.raises(ImportRefusal, match=r"aten\.(add|copy)_ changes a tensor that (.|\n)*test_flex_operators.py"):
            flex_attention(*qkv(), score)


POINTS = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(2))
STARTS = torch.tensor([0, 9, 9, 26])
COMPOSED = {  # operators that consist of others
    "several places": lambda s, b, h, i, j: s + POINTS.T[torch.tensor([2, 0]), j].prod() - POINTS[i, torch.arange(3)][1],
    "parts": lambda s, b, h, i, j: s + [x * y for x, y in zip(POINTS[i], POINTS[j].unbind(), strict=True)][2],
    "split": lambda s, b, h, i, j: s + (lambda x, y, z: x[1] * y[0])(*POINTS[i].repeat(2).split([2, 3, 1])),
    "chunks": lambda s, b, h, i, j: s + POINTS.T.chunk(2, -1)[1][h, j // 2],
    "searched": lambda s, b, h, i, j: s + 0.3 * torch.searchsorted(STARTS, i, right=True) - 0.2 * torch.bucketize(j, STARTS),
    "bounds of a batch": lambda s, b, h, i, j: s + torch.searchsorted(torch.stack([STARTS, STARTS + 5])[b], i, side="right"),
    "strides of heads": lambda s, b, h, i, j: torch.where((i - j) % 2 ** (h + 1) == 0, s, s * torch.pow(4, j % 3 - 1)),
    "members": lambda s, b, h, i, j: torch.where(torch.isin(j // 8, STARTS[:3]) | (i == j), s, -math.inf),
    "softmax": lambda s, b, h, i, j: s + (POINTS[i].softmax(-1) * POINTS[j]).sum(-1),
    "linear": lambda s, b, h, i, j: s + torch.nn.functional.linear(POINTS[i], POINTS[:2], POINTS[:2, 0])[h],
    "cosine": lambda s, b, h, i, j: s + torch.cosine_similarity(POINTS[i], POINTS[j], -1),
    "largest": lambda s, b, h, i, j: s + POINTS[i].max(-1).values - POINTS[j].min(0)[0],
    "made": lambda s, b, h, i, j: s + torch.ones(8, 8).tril()[i % 8, j % 8] + torch.linspace(0, 1, LENGTH)[j],
    "activations": lambda s, b, h, i, j: torch.nn.functional.mish(s) + torch.nn.functional.hardswish(s),
    **{
        f"norm {p}": lambda s, b, h, i, j, p=p: s - torch.linalg.vector_norm(POINTS[i] - POINTS[j] + 0.01, p) * 0.1
        for p in (0, 1, 2, 3, math.inf, -math.inf)
    },
}


@pytest.mark.parametrize("name", COMPOSED)
def test_operators_that_consist_of_others(name: str, by_torch_alone: list[str]) -> None:
    check(Mod("composed", COMPOSED[name]), atol=5e-5, rtol=5e-5)


def test_a_distance_of_0_has_the_derivative_0(by_torch_alone: list[str]) -> None:
    points = POINTS.clone().requires_grad_()
    q, k, v = qkv()
    found = flex_attention(q, k, v, lambda s, b, h, i, j: s - (points[i] - points[j]).norm())
    distance = torch.linalg.vector_norm(points[:, None] - points, dim=-1).double()
    wanted = (q.double() @ k.double().mT / 4 - distance).softmax(-1) @ v.double()
    torch.testing.assert_close(found.double(), wanted, atol=5e-5, rtol=5e-5)
    one, other = (torch.autograd.grad(o.square().sum(), points)[0] for o in (found, wanted))
    torch.testing.assert_close(one, other, atol=5e-4, rtol=5e-4)


def test_angles_and_hyperbolic_functions(by_torch_alone: list[str]) -> None:
    """Their values and derivatives are torch's, of both signs, and of numbers of which a short formula cancels the digits."""
    points = torch.tensor([-0.9, -0.3, -0.01, 0.0, 0.02, 0.5, 0.8])
    functions = {
        **dict.fromkeys((torch.asin, torch.acos, torch.atanh), points),
        **dict.fromkeys((torch.atan, torch.sinh, torch.cosh, torch.asinh), points * 5),
        torch.acosh: points + 2.0,
        **dict.fromkeys((torch.atan2, torch.hypot), points.flip(0) + 0.7),
    }
    q, k, v = (torch.randn(1, 1, 7, 8) for _ in range(3))
    for function, at in functions.items():
        x = at.clone().requires_grad_()
        call = (lambda a: function(a, points)) if function in (torch.atan2, torch.hypot) else function  # noqa: B023
        found = flex_attention(q, k, v, lambda s, b, h, i, j: s + call(x)[i] * call(x)[j])  # noqa: B023
        wide = x.double()
        wanted = (q.double() @ k.double().mT / 8**0.5 + call(wide)[:, None] * call(wide)).softmax(-1) @ v.double()
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5, msg=lambda m, f=function: f"{f}: {m}")
        one, other = (torch.autograd.grad(o.square().sum(), x)[0] for o in (found, wanted))
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, msg=lambda m, f=function: f"{f}: {m}")


def test_operators_without_meaning_are_named_with_their_place() -> None:
    q, k, v = qkv()
    with pytest.raises(ImportRefusal, match=r"torch\.ops\.aten\.lgamma") as refused:
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.lgamma(s))
    assert "test_flex_operators.py" in str(refused.value)
    with pytest.raises(ImportRefusal, match=r"torch\.ops\.aten\.copysign is not available"):  # not what it is decomposed into
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.copysign(s, s))
    with pytest.raises(ImportRefusal, match=r"only the first result of torch\.max"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + POINTS[i].max(-1).indices)
    with pytest.raises(ImportRefusal, match=r"boundaries of one dimension"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.searchsorted(POINTS.T, POINTS.T)[0, i])
    with pytest.raises(ImportRefusal, match=r"pow of integers") as refused:
        flex_attention(q, k, v, lambda s, b, h, i, j: s + i**j)
    assert "s + i**j" in str(refused.value)
    with pytest.raises(ImportRefusal, match=r"torch\.where"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s if i > j else s * 2)
    with pytest.raises(ImportRefusal, match=r"torch\.round with decimals is not available"):
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.round(s, decimals=1))
    bias = randn(LENGTH)
    for score in (lambda s, b, h, i, j: s + bias.detach()[i], lambda s, b, h, i, j: s - s.detach() * bias[i]):
        with pytest.raises(ImportRefusal, match=r"detach\(\) of what has a gradient(.|\n)*test_flex_operators.py"):
            flex_attention(q, k, v, score)
    with pytest.raises(ImportRefusal, match=r"the bits of torch.float32 as torch.int32(.|\n)*test_flex_operators.py"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + bias.view(torch.int32)[j])
    with pytest.raises(ImportRefusal, match="is a `return` missing"):
        flex_attention(q, k, v, lambda s, b, h, i, j: None)
