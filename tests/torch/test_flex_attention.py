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
    create_block_mask,
    flex_attention,
    flex_spec,
)
from attngen.torch.graphs import ImportRefusal  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.flex import check, compiles, expected, qkv, randn  # noqa: E402
from tests.torch.mods import BATCH, HEADS, LENGTH, causal, mods, windowed  # noqa: E402

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
    with pytest.raises(TypeError, match="`scale` is a tensor; expected a number"):  # it would have no gradient
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
