"""flex_attention in the kinds of programs that PyTorch's own tests of FlexAttention have, eager and by torch.compile."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402
from torch.nn.attention.experimental._paged_attention import PagedAttention  # noqa: E402

from attngen.torch import attention, create_block_mask, description, flex_attention, flex_operator  # noqa: E402
from attngen.torch.closures import Closure  # noqa: E402
from attngen.torch.graphs import ImportRefusal, graph_of, numbers_on  # noqa: E402
from attngen.torch.math import by_torch  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.flex import compiles, expected  # noqa: E402

pytestmark = pytest.mark.long
CLOSE = {"atol": 3e-5, "rtol": 3e-5}


@pytest.fixture(autouse=True)
def _by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = lambda tensors, key, describe, arguments, *_: by_torch(*arguments)  # noqa: E731
    monkeypatch.setattr(flex_operator._front, "call", computed)
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def both_ways(**keywords: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return flex_attention, compiles(flex_attention, **keywords)[0]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_pages() -> None:
    """torch's PagedAttention: lists of physical blocks, functions of logical positions, one batch of keys."""
    batch, heads, length, size, page = 2, 2, 64, 16, 16
    q, k, v = (randn(batch, heads, length, size).detach() for _ in range(3))
    pages = length // page * (batch + 3)
    paged = PagedAttention(pages, page, batch + 3, device="cpu")
    for part in (length // 2, length):
        for b in range(batch):
            paged.reserve(torch.tensor(b), torch.tensor(part))
    keys, values = torch.zeros(1, heads, pages * page, size), torch.zeros(1, heads, pages * page, size)
    positions = torch.arange(length, dtype=torch.int32).expand(batch, length)
    paged.assign(torch.arange(batch, dtype=torch.int32), positions, k, v, keys, values)
    score = lambda s, b, h, i, j: s + (i - j)  # noqa: E731
    lengths = torch.full((batch,), length)
    logical = theirs.create_block_mask(causal, batch, 1, length, length, "cpu", page)
    wanted = expected(q, k, v, score, logical)[0]
    for make in (theirs.create_block_mask, create_block_mask):
        blocks = paged.convert_logical_block_mask(make(causal, batch, 1, length, length, "cpu", page), kv_len=lengths)
        for attend in both_ways():
            found = attend(q, keys, values, paged.get_score_mod(score, kv_len=lengths), blocks)
            torch.testing.assert_close(found.double(), wanted.double(), **CLOSE)


def test_one_batch_of_keys_for_grouped_heads() -> None:
    q, k, v = randn(3, 4, 40, 16), randn(1, 2, 40, 16), randn(1, 2, 40, 16)
    blocks, score = create_block_mask(theirs.noop_mask, 3, 1, 40, 40, "cpu"), lambda s, b, h, i, j: s * s
    wanted = expected(q, k, v, score)[0]
    for attend in both_ways():
        found = attend(q, k, v, score, blocks, enable_gqa=True)
        torch.testing.assert_close(found.double(), wanted, **CLOSE)
        gradients = [torch.autograd.grad(o.square().sum(), (q, k, v), retain_graph=True) for o in (found, wanted)]
        for one, other in zip(*gradients, strict=True):
            largest = float(other.abs().max())
            torch.testing.assert_close(one, other, atol=1e-5 * largest, rtol=0)


def test_numbers_of_heads_change() -> None:
    attend = compiles(flex_attention, dynamic=True)[0]
    for heads in (4, 8):
        scales, (q, k, v) = randn(heads), (randn(2, heads, 40, 16) for _ in range(3))
        score = lambda s, b, h, i, j, scales=scales: s * scales[h]  # noqa: E731
        found, wanted = attend(q, k, v, score), expected(q, k, v, score)[0]
        torch.testing.assert_close(found.double(), wanted, **CLOSE)
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), scales)[0] for o in (found, wanted)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layouts", [(0, 0, 1), (1, 2, 3)], ids=str)
def test_strides_and_starts(layouts: tuple[int, int, int]) -> None:
    batch, heads, rows, size = 2, 4, 64, 16
    whole = heads * rows * size
    strides = (
        ((whole, rows * size, size, 1), 997),
        ((heads * size, size, batch * heads * size, 1), 499),
        ((whole, size, heads * size, 1), 0),
        ((rows * (size + 1), batch * rows * (size + 1), size + 1, 1), 293),
    )
    lengths = (rows // 2, rows, rows)
    q, k, v = (
        torch.as_strided(torch.randn(batch * whole * 2), (batch, heads, length, size), *strides[n]).requires_grad_()
        for n, length in zip(layouts, lengths, strict=True)
    )
    score = lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / 8))  # noqa: E731
    wanted = theirs.flex_attention(q.detach(), k.detach(), v.detach(), score)
    for attend in both_ways():
        found = attend(q, k, v, score, theirs._create_empty_block_mask(q, k))
        torch.testing.assert_close(found, wanted, **CLOSE)
        assert found.stride() == wanted.stride()
        found.sum().backward()


def test_starts_between_two_chunks_under_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes remove a clone that has the same strides, and kernels copy chunks of 16 bytes."""
    monkeypatch.undo()  # by the emulated device
    q, base = torch.randn(1, 2, 32, 16).half(), torch.randn(5000).half()
    k = torch.as_strided(base, (1, 2, 64, 16), (2048, 1024, 16, 1), 997).requires_grad_()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    (gradient,) = torch.autograd.grad(wanted.sum(), k)
    found = torch.compile(flex_attention, fullgraph=True)(q, k, k)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), k)[0], gradient, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("size", [17, 121])
def test_head_sizes_of_any_number(size: int) -> None:
    q, k, v = (randn(1, 2, 24, size) for _ in range(3))
    score = lambda s, b, h, i, j: s + (i - j)  # noqa: E731
    wanted = expected(q, k, v, score)[0]
    for attend in both_ways():
        found = attend(q, k, v, score)
        torch.testing.assert_close(found.double(), wanted, **CLOSE)
        gradients = [torch.autograd.grad(o.square().sum(), q, retain_graph=True)[0] for o in (found, wanted)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_integers_of_python_among_indices_make_no_tensors() -> None:
    """On a GPU these would be tensors there, which are read by kernels."""
    table = torch.randn(4, 3, 40)
    number, *indices = numbers_on("cpu", torch.float32)
    for read in (
        lambda s, b, h, i, j: s + table[0][h][i] + table[-1, 2, 3],
        lambda s, b, h, i, j: s + table[1, h, j] + table[..., 5][b, -1] + table[2, h, :][i],
    ):
        targets = [str(node.target) for node in graph_of(read, [number, *indices], Closure()).graph.nodes]
        assert not any("lift_fresh" in target for target in targets), targets


def test_indices_that_are_numbers() -> None:
    q, k, v = (randn(2, 4, 40, 16) for _ in range(3))
    bias, other, which = torch.randn(4, 2, 4, 40), torch.randn(2, 4, 4, 40), torch.tensor(0)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    scores = (
        lambda s, b, h, i, j: s + bias[0][b, h][i],
        lambda s, b, h, i, j: s + other[b][h][which, i],
        lambda s, b, h, i, j: s + mask[b, h.new_zeros(h.shape), i, j],
        lambda s, b, h, i, j: torch.where(((i / 8 - j / 8).abs() <= 3) | ((i % 8 - j % 8).abs() <= 3), s, -math.inf),
    )
    for score in scores:
        for attend in both_ways():
            torch.testing.assert_close(attend(q, k, v, score).double(), expected(q, k, v, score)[0], **CLOSE)


def test_a_mask_that_is_made_by_torch_compile() -> None:
    blocks = compiles(create_block_mask)[0](causal, 1, 1, 512, 512, device="cpu")
    wanted = theirs.create_block_mask(causal, 1, 1, 512, 512, device="cpu")
    assert torch.equal(blocks.kv_num_blocks, wanted.kv_num_blocks)
    assert torch.equal(blocks.kv_indices, wanted.kv_indices)


def test_two_attentions_of_one_graph() -> None:
    def call(attend: Any, q: Any, k: Any, v: Any) -> Any:
        x = torch.arange(40.0) * 0.02
        first = attend(q.sin(), k, v, lambda s, b, h, i, j: s + x[j] + (i - j))
        return attend(first, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf)).cos()

    q, k, v = (randn(1, 4, 40, 16).detach() for _ in range(3))
    wanted = call(theirs.flex_attention, q, k, v)
    torch.testing.assert_close(call(flex_attention, q, k, v), wanted, **CLOSE)
    torch.testing.assert_close(compiles(lambda *a: call(flex_attention, *a))[0](q, k, v), wanted, **CLOSE)


def test_a_partial_of_flex_attention_is_compiled() -> None:
    """Dynamo names what the score captures by its place in the partial: a long name, which is cut before an underscore."""
    q, k, v, bias = (randn(1, 2, 24, 16), randn(1, 2, 24, 16), randn(1, 2, 24, 16), randn(24))
    call = partial(flex_attention, score_mod=lambda s, b, h, i, j: s + bias[i - j])
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v), **CLOSE)


def test_lengths_that_change_are_compiled_once() -> None:
    """A default that is a float would be a number that changes: torch.compile would begin again."""
    call, graphs = compiles(partial(flex_attention, score_mod=lambda s, b, h, i, j: s + (i - j)), dynamic=True)
    for length in (24, 40):
        q, k, v = (randn(2, 2, length, 16) for _ in range(3))
        call(q, k, v).sum().backward()
    assert len(graphs) == 1


def test_numbers_of_a_mask_may_change() -> None:
    """Of a mask that is an argument, dynamic=True makes a symbol of each number: the sizes of blocks choose the kernel."""
    q, (k, v) = randn(2, 2, 1, 16), (randn(2, 2, 64, 16) for _ in range(2))
    attend, _ = compiles(flex_attention, dynamic=True)
    for size, row in ((16, 20), (32, 40)):
        whole = theirs.create_block_mask(causal, 2, None, 64, 64, "cpu", size)
        blocks, position = whole[:, :, row // size], torch.tensor(row)
        blocks.mask_mod = lambda b, h, i, j, position=position: causal(b, h, i + position, j)
        blocks.seq_lengths = (1, 64)
        seen = expected(q, k[:, :, : row + 1], v[:, :, : row + 1])[0]
        torch.testing.assert_close(attend(q, k, v, block_mask=blocks).double(), seen, **CLOSE)


def test_a_mask_is_sliced_by_torch_compile() -> None:
    """A step of decoding: the block of rows of its position is cut out of a mask whose lists nobody has read yet."""
    blocks = create_block_mask(causal, 1, 1, 64, 64, "cpu", 16)
    q, k, v = (randn(1, 2, 64, 16) for _ in range(3))

    def step(row: Any, k: Any, v: Any, blocks: Any, position: Any) -> Any:
        part = blocks[:, :, position // 16]
        part.mask_mod = lambda b, h, i, j: blocks.mask_mod(b, h, i + position[0], j)
        part.seq_lengths = (1, 64)
        return flex_attention(row, k, v, block_mask=part)

    compiled, graphs = compiles(step)
    wanted = expected(q, k, v, mask=blocks._adjust(64, 64))[0]
    for at in (3, 16, 50):
        found = compiled(q[:, :, at : at + 1], k, v, blocks, torch.tensor([at]))
        torch.testing.assert_close(found.double(), wanted[:, :, at : at + 1], **CLOSE)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks).double(), wanted, **CLOSE)
    assert len(graphs) == 1


def test_microbatches_of_pipelines() -> None:
    """PyTorch splits a mask by full_like(b, START), in which START becomes a symbol of torch.compile."""
    from torch.distributed.pipelining.microbatch import _split_block_mask

    documents = torch.tensor([[0] * 16, [0] * 9 + [1] * 7, [0] * 3 + [1] * 13, [0, 1] * 8])
    blocks = create_block_mask(lambda b, h, i, j: documents[b, i] == documents[b, j], 4, None, 16, 16, "cpu", 8)
    q, k, v = (randn(4, 1, 16, 16) for _ in range(3))
    wanted, attend = flex_attention(q, k, v, block_mask=blocks), compiles(flex_attention)[0]
    for start, part in enumerate(_split_block_mask(blocks, 4)):
        own = (t[start : start + 1] for t in (q, k, v))
        torch.testing.assert_close(attend(*own, block_mask=part), wanted[start : start + 1], **CLOSE)


def searched(row: torch.Tensor) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s + torch.bucketize(i / 8, row) * 0.1


SHAPED = {  # functions of a captured tensor [length, length] in which its shape is a number
    "flattened": lambda t: lambda s, b, h, i, j: s + t.flatten()[i * t.shape[1] + j],
    "reversed": lambda t: lambda s, b, h, i, j: s + t.flip(0)[i, j],
    "sliced": lambda t: lambda s, b, h, i, j: s + t[-3:][i % 3, j],
    "divided": lambda t: lambda s, b, h, i, j: s + t.unflatten(0, (2, -1))[i % 2, i // 2, j],
    "a product": lambda t: lambda s, b, h, i, j: s + torch.dot(t[i], t[j]),
    "searched": lambda t: searched(t[0].sort().values),
    "a norm": lambda t: lambda s, b, h, i, j: s - (t[i] - t[j]).norm(),
}
OF_ANY_SHAPE = {
    "transposed": lambda t: lambda s, b, h, i, j: s + t.T[-1 - i][j],
    "converted": lambda t: lambda s, b, h, i, j: s + (2 * t).half().float()[-1 - i, j],
}


@pytest.mark.parametrize("name", tiers.cases([*SHAPED, *OF_ANY_SHAPE], one_of=3))
def test_shapes_of_captured_tensors_may_change(name: str) -> None:
    """torch.compile begins again if the expression would be another one, and only then."""
    make = (SHAPED | OF_ANY_SHAPE)[name]
    attend, graphs = compiles(lambda q, k, v, t: flex_attention(q, k, v, make(t)), dynamic=True)
    for length in (24, 40):
        q, k, v, t = (*(randn(1, 2, length, 16) for _ in range(3)), (torch.randn(length, length) * 64).round() / 64)
        torch.testing.assert_close(attend(q, k, v, t).double(), expected(q, k, v, make(t))[0], **CLOSE)
    assert len(graphs) == 1 + (name in SHAPED)


def test_an_end_of_clamp_may_change() -> None:
    """torch.clamp of a tensor and a length, which is a symbol: one graph for all lengths, and no number read on the host."""

    def call(q: Any, k: Any, v: Any, documents: Any) -> Any:
        end = documents.shape[0] - 1
        kept = (lambda x: x.clamp(0, end), lambda x: torch.clamp(x, max=end), lambda x: end - torch.clip(end - x, min=end // 4))
        outputs = []
        for clamp in kept:
            mask = lambda b, h, i, j, clamp=clamp: documents[clamp(i)] == documents[clamp(j)]  # noqa: E731
            blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], "cpu")
            outputs.append(flex_attention(q, k, v, block_mask=blocks))
        return torch.stack(outputs)

    compiled, graphs = compiles(call, dynamic=True)
    for length in (40, 56, 24):
        tensors = (*(randn(1, 2, length, 16) for _ in range(3)), torch.arange(length - 8) // 7)
        torch.testing.assert_close(compiled(*tensors), call(*tensors))
    assert len(graphs) == 1


def test_floats_that_change_are_read_at_each_call() -> None:
    """torch.compile captures a float of another value than before as a tensor, whose item it takes."""

    class Capped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cap = 1.5

        def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            near = (i - j).abs() < 20 * self.cap
            scale = math.sqrt(self.cap) + self.cap**2
            return torch.where(near, torch.tanh(s / self.cap) * scale, s.clamp(-self.cap, self.cap))

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return flex_attention(q, k, v, self.score)

    capped = Capped()
    compiled, _ = compiles(capped)
    q, k, v = (randn(1, 2, 40, 16) for _ in range(3))
    for capped.cap in (1.5, 2.5, 0.5):
        torch.testing.assert_close(compiled(q, k, v).double(), expected(q, k, v, capped.score)[0], **CLOSE)
    trained = randn()
    attend = compiles(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s * trained.item()))[0]
    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.raises(torch._dynamo.exc.TorchRuntimeError):
        attend(q, k, v)


def test_a_length_that_is_read_on_the_host_is_refused() -> None:
    """The slope of leaky_relu is a number of the host: the kernel would keep that of one length."""
    leaky = torch.nn.functional.leaky_relu
    call = compiles(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: leaky(s, q.shape[2])), dynamic=True)[0]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="may change from call to call is read on the host"):
        call(*(randn(1, 2, 24, 16) for _ in range(3)))


class Sizes(enum.IntEnum):
    ALL = 16


def test_a_function_that_dynamo_cannot_trace_is_called_in_a_break_of_the_graph() -> None:
    q, k, v, factor = randn(1, 2, 16, 16), randn(1, 2, 16, 16), randn(1, 2, 16, 16), randn(16)

    def with_a_break(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        torch._dynamo.graph_break()
        return s * factor[k]

    def of_a_member(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(k < Sizes.ALL, s * factor[k], 0.0)

    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    wanted = flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: s * factor[k], block_mask=mask)
    for score in (with_a_break, of_a_member):
        torch._dynamo.reset()
        output = torch.compile(flex_attention, backend="aot_eager")(q, k, v, score_mod=score, block_mask=mask)
        torch.testing.assert_close(output, wanted, **CLOSE)
        gradients = (torch.autograd.grad(o.sum(), (q, k, v, factor), retain_graph=True) for o in (output, wanted))
        for found, expected_ in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected_, **CLOSE)

    def clamped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.clamp(s, 0, factor[k])

    with pytest.raises(ImportRefusal, match=r"torch\.minimum and torch\.maximum in the place of clamp"):
        torch.compile(flex_attention, backend="aot_eager")(q, k, v, score_mod=clamped)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_double_precision_by_torchs_operations(is_compiled: bool) -> None:
    q, k, v, bias = (torch.randn(*shape, 4, dtype=torch.float64, requires_grad=True) for shape in [(1, 2, 6)] * 3 + [(2,)])
    blocks = create_block_mask(causal, 1, 1, 6, 6, device="cpu")
    attend = both_ways()[is_compiled]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = attend(
            q, k, v, lambda s, b, h, i, j: s * bias[h, j % 4], blocks, kernel_options={"mode": "math"}
        )
        return output

    assert torch.autograd.gradcheck(call, (q, k, v, bias), atol=1e-8, rtol=1e-8)
    wanted = expected(q, k, v, lambda s, b, h, i, j: s * bias[h, j % 4], blocks)[0]
    torch.testing.assert_close(call(q, k, v, bias), wanted, atol=1e-12, rtol=1e-12)


def test_another_process_finds_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache on disk knows a graph by the functions, what they capture, and attngen's sources."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flex_operator._front, "call", lambda tensors, *_: (tensors[0] @ tensors[1].mT @ tensors[2],) * 2)
    q = torch.randn(1, 2, 32, 16)
    table = torch.randn(32)

    def is_found(call: Callable[..., Any]) -> bool:
        torch._dynamo.reset()  # what another process does not know either
        counters.clear()
        torch.compile(call, fullgraph=True)(q, q, q)
        hits, misses = (counters["aot_autograd"][f"autograd_cache_{which}"] for which in ("hit", "miss"))
        assert hits + misses == 1
        return bool(hits)

    def flex(factor: float = 2.0, table: torch.Tensor = table, window: int = 8, **options: Any) -> Callable[..., Any]:
        blocks = create_block_mask(lambda b, h, i, j: i - j < window, None, None, 32, 32, "cpu")
        return partial(flex_attention, score_mod=lambda s, b, h, i, j: s * factor + table[j], block_mask=blocks, **options)

    assert [is_found(flex()), is_found(flex()), is_found(flex(table=table + 1))] == [False, True, True]
    others = flex(3.0), flex(table=table.double()), flex(window=9), flex(scale=0.5), flex(kernel_options={"mode": "naive"})
    assert not any(map(is_found, others))
    plain = partial(attention, is_causal=True, mode="naive")
    assert [is_found(plain), is_found(plain)] == [False, True]
    for module in ("description", "flex"):
        monkeypatch.setattr(f"attngen.torch.{module}.sources", lambda: "others")
    for texts in (description.standard_text, description.spec_text):
        texts.cache_clear()
    assert [is_found(flex()), is_found(plain)] == [False, False]
    for texts in (description.standard_text, description.spec_text):
        texts.cache_clear()
