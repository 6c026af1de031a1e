"""`attngen.torch.flex_attention`: masks and scores of FlexAttention, unchanged, against torch's eager FlexAttention."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._higher_order_ops.flex_attention import _permute_strides  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

import attngen.torch  # noqa: E402
from attngen.torch import (  # noqa: E402
    AuxRequest,
    BlockMask,
    attention,
    checked_indices,
    create_block_mask,
    flex_attention,
    flex_spec,
)
from attngen.torch.importer import ImportRefusal  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.flex import check, compiles, expected, qkv, randn  # noqa: E402
from tests.torch.mods import BATCH, HEADS, LENGTH, Mod, causal, mods, windowed  # noqa: E402

MODS = {mod.name: mod for mod in mods()}
# Compiled for the emulated device: each reads captured tensors in another way.
QUICK = ("morton", "soft-cap as a function", "products", "t5", "padded", "object")
COMPILED = (
    "documents with an inner mask",
    "morton",
    "relative bias by a table",
    "shared prefix",
    "other types",
    "gelu",
    "divided by data",
)


@pytest.mark.parametrize("name", tiers.cases(MODS, quick=QUICK))
def test_a_mod_means_what_it_means_to_torch(name: str, by_torch_alone: list[str]) -> None:
    check(MODS[name], atol=2e-5, rtol=2e-5)
    assert len(by_torch_alone) == 1


@pytest.mark.filterwarnings("ignore:.*emulated")
@pytest.mark.parametrize("name", tiers.cases(COMPILED, quick=COMPILED[:1]))
def test_a_mod_in_a_kernel(name: str) -> None:
    check(MODS[name], {"mode": "naive" if name in (COMPILED[0], "gelu") else "fused"}, atol=5e-5, rtol=5e-5)


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
        with pytest.raises(ImportRefusal, match=r"aten\.(add|copy)_ changes a tensor that (.|\n)*test_flex_attention.py"):
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


def test_operators_without_meaning_are_named_with_their_place() -> None:
    q, k, v = qkv()
    with pytest.raises(ImportRefusal, match=r"torch\.ops\.aten\.lgamma") as refused:
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.lgamma(s))
    assert "test_flex_attention.py" in str(refused.value)
    with pytest.raises(ImportRefusal, match=r"torch\.ops\.aten\.atan2 is not available"):  # not what it is decomposed into
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.atan2(s, s))
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
        with pytest.raises(ImportRefusal, match=r"detach\(\) of what has a gradient(.|\n)*test_flex_attention.py"):
            flex_attention(q, k, v, score)
    with pytest.raises(ImportRefusal, match=r"the bits of torch.float32 as torch.int32(.|\n)*test_flex_attention.py"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + bias.view(torch.int32)[j])
    with pytest.raises(ImportRefusal, match="is a `return` missing"):
        flex_attention(q, k, v, lambda s, b, h, i, j: None)


def test_code_without_a_hash_may_call(by_torch_alone: list[str]) -> None:
    """Dynamo makes such code in Python 3.11, in which a slice has no hash."""

    def call() -> torch.Tensor:
        return attend(q, q, q, lambda s, b, h, i, j: s + i)

    q, attend = qkv()[0], compiles(flex_attention)[0]
    call.__code__ = call.__code__.replace(co_consts=(*call.__code__.co_consts, slice(1)))
    assert call().shape == q.shape


def test_layouts_sizes_and_heads(by_torch_alone: list[str]) -> None:
    q, k, v = (randn(1, 40, 4, 20).transpose(1, 2), randn(1, 40, 2, 20).transpose(1, 2), randn(1, 2, 40, 12))
    found, lse = flex_attention(q, k, v, enable_gqa=True, scale=0.3, return_lse=True)
    wanted, wanted_lse, _ = expected(q, k, v, scale=0.3)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)
    assert found.transpose(1, 2).is_contiguous()
    one = create_block_mask(causal, 3, None, 40, 40, "cpu")
    queries = randn(3, 2, 40, 20)
    torch.testing.assert_close(
        flex_attention(queries, k, v, block_mask=one).double(), expected(queries, k, v, mask=one)[0], atol=1e-5, rtol=1e-5
    )


def test_outputs_lie_as_torchs(by_torch_alone: list[str]) -> None:
    """In the order of the query's dimensions, those of one element too, with the last one innermost."""
    for shape, order in itertools.product([(2, 1, 5, 8), (2, 3, 1, 8), (1, 3, 5, 8)], itertools.permutations(range(4))):
        memory = torch.randn([shape[d] for d in order], requires_grad=True)
        q = memory.permute([order.index(d) for d in range(4)])
        found, there = flex_attention(q, q, q), q.contiguous()
        torch.testing.assert_close(found, attention(there, there, there, mode="math"))
        assert found.stride() == _permute_strides(torch.empty(shape), q.stride()).stride()
        found.sum().backward()


def test_a_score_may_decide_by_itself(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    limits = torch.tensor([0.5, 1.0])
    score = lambda s, b, h, i, j: torch.where((s <= limits[b]) | (i == j), torch.where(i >= j, s, -math.inf), -math.inf)  # noqa: E731
    out, wanted = flex_attention(q, k, v, score), expected(q, k, v, score)[0]
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_torch_compile_computes_with_lengths(by_torch_alone: list[str]) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        rows, keys = q.size(-2), k.size(-2)

        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i < (rows // 8 + keys // 8) * 4) | (i == j)

        return flex_attention(q, k, v, block_mask=create_block_mask(mask, 1, 1, rows, keys, q.device))

    compiled, count = compiles(call, dynamic=True)
    compiled(*qkv(56, 48))
    graphs = len(count)  # Dynamo may begin again within the first call
    for rows, keys in ((48, 32), (40, 24), (64, 40)):
        tensors = qkv(rows, keys)
        torch.testing.assert_close(compiled(*tensors), call(*tensors))
    assert len(count) == graphs


def test_sinks_are_one_more_logit(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    sinks = randn(HEADS)
    call = lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 1, LENGTH, LENGTH), sinks=sinks)  # noqa: E731
    out, lse, _ = expected(q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf))
    wanted = out * torch.sigmoid(lse - sinks.double()[:, None])[..., None]
    for function in (call, compiles(call)[0]):
        found = function(q, k, v)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        gradients = [torch.autograd.grad(o.sum(), (q, sinks), retain_graph=True) for o in (found, wanted)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_dropout_is_that_of_attention(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    call = lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 1, LENGTH, LENGTH), dropout_p=0.25)  # noqa: E731
    torch.manual_seed(5)
    wanted = attention(q, k, v, is_causal=True, dropout_p=0.25, mode="math")
    for function in (call, compiles(call)[0]):
        torch.manual_seed(5)
        torch.testing.assert_close(function(q, k, v), wanted)
    assert not torch.allclose(call(q, k, v), wanted)


def test_transforms_of_torch(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    bias = randn(LENGTH)

    def loss(q: Any, bias: Any) -> Any:
        return flex_attention(q, k.detach(), v.detach(), lambda s, b, h, i, j: s + bias[j]).square().sum()

    wanted = torch.autograd.grad(loss(q, bias), (q, bias))
    given = (q.detach(), bias.detach())
    flex_spec._prepared.clear()  # the function is traced under the transform
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(*given), wanted)
    flex_spec._prepared.clear()
    several = torch.vmap(torch.func.grad(loss, 1), (None, 0))(given[0], torch.stack([given[1], 0 * given[1]]))
    torch.testing.assert_close(several[0], wanted[1])
    zero = torch.zeros_like(bias).requires_grad_()
    torch.testing.assert_close(several[1], torch.autograd.grad(loss(q, zero), zero)[0])
    torch.testing.assert_close(torch.func.grad(lambda q: loss(q, given[1]))(given[0]), wanted[0])


def test_gradients_of_tensors_that_no_name_reaches(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    bias = randn(2)

    def loss(bias: Any) -> Any:
        held = types.SimpleNamespace(bias=bias)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + getattr(held, "bi" + "as")[h] * j).square().sum()

    expected = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * j).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss(bias), bias), torch.autograd.grad(expected, bias))
    with pytest.raises(ImportRefusal, match=r"a tensor of a transform of torch.func is reached by another way"):
        torch.func.grad(loss)(bias.detach())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_tensors_without_memory_and_recorded_calls(by_torch_alone: list[str]) -> None:
    """On meta, and in torch.jit.trace, a score and a mask are traced as in any other call."""
    q, k, v = qkv()
    bias = randn(LENGTH)

    def call(q: Any, k: Any, v: Any, bias: Any = bias.detach()) -> Any:  # noqa: B008
        mask = create_block_mask(causal, None, None, LENGTH, LENGTH, q.device)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], mask)

    meta = [t.detach().to("meta").requires_grad_() for t in (q, k, v, bias)]
    call(*meta).sum().backward()
    assert [t.grad.shape for t in meta] == [t.shape for t in (q, k, v, bias)]
    recorded = torch.jit.trace(call, [torch.zeros_like(t) for t in (q, k, v)], check_trace=False)
    assert torch.equal(recorded(q, k, v), call(q, k, v))


def test_rows_without_keys_are_zero(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    out, aux = flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(j < i, s, -math.inf), return_aux=AuxRequest(lse=True))
    assert (out[:, :, 0] == 0).all()
    assert (aux.lse[:, :, 0] == -math.inf).all()


@pytest.mark.parametrize("types", [(torch.float32, torch.float16, torch.bfloat16), (torch.float16, torch.float8_e4m3fn)])
def test_keys_and_values_may_be_of_other_float_types(types: Sequence[Any], by_torch_alone: list[str]) -> None:
    q, k, v = (t.detach().to(kind) for t, kind in zip(qkv(), (*types, types[-1])[:3], strict=True))
    wanted = expected(q, k.to(q.dtype), v.to(q.dtype))[0]
    for call in (flex_attention, compiles(flex_attention)[0]):
        found = call(q, k, v)
        assert found.dtype is q.dtype
        torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=1e-3)
    if k.itemsize == 1:
        with pytest.raises(ValueError, match=r"types of 8 bits, but `key` has torch\.float8_e4m3fn: detach it"):
            flex_attention(q, k.requires_grad_(), v)
        return
    flex_attention(q, k.requires_grad_(), v).sum().backward()
    assert k.grad is not None
    assert k.grad.dtype is k.dtype


def test_programs_import_the_same_names() -> None:
    assert set(theirs.__all__) <= set(attngen.torch.__all__)
    q = qkv()[0]
    options = {"SPLIT_KV": 4, "fwd_BLOCK_M": 64, "num_consumer_groups": 2}
    assert flex_attention(q.to("meta"), q.to("meta"), q.to("meta"), kernel_options=options).shape == q.shape


def test_mistakes_are_torchs_own() -> None:
    q, k, v = qkv(kv_heads=1)
    with pytest.raises(TypeError, match="`block_mask` is a Tensor; expected what create_block_mask returns"):
        flex_attention(q, k, v, block_mask=torch.ones(9, 9, dtype=torch.bool), enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    with pytest.raises(ValueError, match="smaller length"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 1, 8, 8, "cpu"), enable_gqa=True)
    with pytest.raises(ValueError, match="`kernel_options` has 'mod'; expected \"mode\" or torch's"):
        flex_attention(q, k, v, enable_gqa=True, kernel_options={"mod": "naive"})
    with pytest.raises(TypeError, match="`scale` is a tensor; expected a number"):  # which would have no gradient
        flex_attention(q, q, q, scale=torch.tensor(0.5, requires_grad=True))
    with pytest.raises(TypeError, match="`kernel_options` is a str; expected a dict"):
        flex_attention(q, k, v, enable_gqa=True, kernel_options="naive")
    with pytest.raises(AssertionError, match="requires a mask_mod"):
        create_block_mask(lambda s, b, h, q, k: s, 1, 1, 8, 8, "cpu")
    assert issubclass(BlockMask, theirs.BlockMask)


@pytest.mark.long
def test_torch_compile_takes_a_call_whole(by_torch_alone: list[str]) -> None:
    bias = randn(HEADS, 20)

    def call(q: Any, k: Any, v: Any, size: int) -> Any:
        blocks = create_block_mask(windowed(size), None, None, q.shape[2], k.shape[2], q.device, 16)
        score = lambda s, b, h, i, j: s + bias[h, (i - j).clamp(-9, 9) + 9]  # noqa: E731
        out, aux = flex_attention(q * 1.0, k, v, score, blocks, return_aux=AuxRequest(lse=True, max_scores=True))
        return out, aux.lse, aux.max_scores

    compiled, count = compiles(call, dynamic=True)
    for length, size in ((40, 5), (56, 5), (72, 9), (64, 12)):
        tensors = qkv(length, length)
        found, wanted = compiled(*tensors, size), call(*tensors, size)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        gradients = [torch.autograd.grad(r[0].sum() + r[1].sum(), (*tensors, bias)) for r in (found, wanted)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)
    assert len(count) <= 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*emulated")
@pytest.mark.parametrize("name", ["documents with an inner mask", "relative bias by a table", "object", "other types", "t5"])
def test_torch_compile_of_mods_in_kernels(name: str) -> None:
    mod = MODS[name]
    tensors = (*qkv(), *mod.captured)
    blocks = None if mod.mask is None else create_block_mask(mod.mask, BATCH, HEADS, LENGTH, LENGTH, "cpu", 16)

    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q * 1.0, k, v, mod.score, blocks, kernel_options={"mode": "naive"})

    results = [function(*tensors[:3]) for function in (call, compiles(call)[0])]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(r.square().sum(), tensors) for r in results]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
