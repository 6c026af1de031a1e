"""`attngen.torch.flex_attention`: masks and scores of FlexAttention, unchanged, against torch's eager FlexAttention."""

from __future__ import annotations

import itertools
import math
import sys
import types
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._higher_order_ops.flex_attention import _permute_strides, math_attention  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from attngen.torch import (  # noqa: E402  # noqa: E402
    AuxRequest,
    BlockMask,
    attention,
    checked_indices,
    create_block_mask,
    flex_attention,
    flex_operator,
    flex_spec,
)
from attngen.torch.closures import Closure  # noqa: E402
from attngen.torch.importer import ImportRefusal  # noqa: E402
from attngen.torch.math import by_torch  # noqa: E402
from tests import tiers  # noqa: E402
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


def randn(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def qkv(length: int = LENGTH, kv_len: int = LENGTH, size: int = 16, kv_heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    return randn(BATCH, HEADS, length, size), randn(BATCH, kv_heads, kv_len, size), randn(BATCH, kv_heads, kv_len, size + 8)


@pytest.fixture
def by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attention by torch's operations of the very spec that a kernel would compute; the texts of the specs."""
    texts: list[str] = []

    def computed(tensors: Any, others: Any, arguments: Any, deterministic: Any = None) -> Any:
        q, k, v, text, *lists = arguments
        texts.append(text)
        return by_torch(q, k, v, text, lists)

    monkeypatch.setattr(flex_operator._calls, "make", computed)
    return texts


def expected(q: Any, k: Any, v: Any, score: Any = None, mask: Any = None, scale: float | None = None) -> tuple[Any, Any, Any]:
    """torch's eager FlexAttention in float64: (output, lse, largest scores)."""
    blocks = theirs._create_empty_block_mask(q, k) if mask is None else mask
    function = (lambda *a: blocks.mask_mod(*a), *blocks.as_tuple()[:-1])
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    out, lse, largest = math_attention(
        q.double(), k.double(), v.double(), score or theirs._identity, (*function[1:], function[0]), scale, {}
    )
    return out, lse * math.log(2), largest * math.log(2)


def check(mod: Mod, options: Any = None, **tolerance: float) -> None:
    """Output and gradients of a mod against torch's."""
    tensors = (*qkv(), *mod.captured)
    blocks = None if mod.mask is None else create_block_mask(mod.mask, BATCH, HEADS, LENGTH, LENGTH, "cpu", 16)
    found = flex_attention(*tensors[:3], mod.score, blocks, kernel_options=options)
    wanted = expected(*tensors[:3], mod.reference or mod.score, blocks)[0]
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    weights = randn(*found.shape).detach()
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    for tensor, one, other in zip(tensors, gradients, torch.autograd.grad((wanted * weights).sum(), tensors), strict=True):
        assert one.dtype is tensor.dtype
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", tiers.cases(MODS, quick=QUICK))
def test_a_mod_means_what_it_means_to_torch(name: str, by_torch_alone: list[str]) -> None:
    check(MODS[name], atol=2e-5, rtol=2e-5)
    assert len(by_torch_alone) == 1


@pytest.mark.filterwarnings("ignore:.*emulated")
@pytest.mark.parametrize("name", tiers.cases(COMPILED, quick=COMPILED[:1]))
def test_a_mod_in_a_kernel(name: str) -> None:
    check(MODS[name], {"mode": "naive" if name in (COMPILED[0], "gelu") else "fused"}, atol=5e-5, rtol=5e-5)


def test_another_integer_or_tensor_traces_and_compiles_nothing(
    by_torch_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv()
    for size in (5, 9):
        check(Mod("window", mask=windowed(size)), atol=2e-5, rtol=2e-5)
    assert len(set(by_torch_alone)) == 1
    assert "param size: int" in by_torch_alone[0]

    def of(table: torch.Tensor) -> Any:
        return lambda s, b, h, q, k: s + table[h, k]

    first = flex_attention(q, k, v, of(torch.zeros(HEADS, LENGTH)))
    monkeypatch.setattr(flex_spec, "expression", None)
    second = flex_attention(q, k, v, of(torch.full((HEADS, LENGTH), 3.0)))
    torch.testing.assert_close(first, second)
    third = flex_attention(q, k, v, of(torch.arange(LENGTH) * torch.ones(HEADS, 1)))
    assert (third - first).abs().max() > 0.1


def test_one_tensor_in_two_places_is_not_two_tensors(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    a, b = randn(LENGTH).detach(), randn(LENGTH).detach() * 2

    def of(x: torch.Tensor, y: torch.Tensor) -> Any:
        return lambda s, batch, h, i, j: s + x[i] * y[j]

    for x, y in ((a, a), (a, b), (b, a)):
        torch.testing.assert_close(
            flex_attention(q, k, v, of(x, y)).double(), expected(q, k, v, of(x, y))[0], atol=1e-5, rtol=1e-5
        )


def test_a_changed_attribute_is_seen(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()

    class Windows:
        def __init__(self) -> None:
            self.scale, self.flipped = 1.0, False

        def __call__(self, s, b, h, i, j):
            return s * self.scale + (j if self.flipped else i)

    windows = Windows()
    for scale, flipped in ((1.0, False), (2.5, False), (2.5, True)):
        windows.scale, windows.flipped = scale, flipped
        torch.testing.assert_close(
            flex_attention(q, k, v, windows).double(), expected(q, k, v, windows)[0], atol=1e-4, rtol=1e-4
        )


class Settings:
    """Numbers and a small tensor of the class, not of its objects."""

    scale, table = 1.0, torch.tensor([1.0, 2.0])

    def __init__(self) -> None:
        self.own = 1.0

    def __call__(self, s, b, h, i, j):
        return s * self.scale * self.own

    def of_table(self, s, b, h, i, j):
        return s * self.table[0]


class Table:
    """What `[]` and an attribute read is named by methods alone, which Python calls without their name."""

    def __init__(self) -> None:
        self.held = {"scale": 1.0}

    def __getitem__(self, i: int) -> float:
        return self.held["scale"]

    def __getattr__(self, name: str) -> float:
        return self.__dict__["held"][name]


class Layer(torch.nn.Module):
    """Modules in containers, whose names are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))])
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].scale = 1.0

    def of_list(self, s, b, h, i, j):
        return s * self.biases[0][0]

    def of_layer(self, s, b, h, i, j):
        return s * self.layers[0].scale


def imported(s, b, h, i, j):
    import elsewhere

    return s * elsewhere.SCALE


def noted(s, b, h, i, j):
    return s * noted.scale


elsewhere = types.ModuleType("elsewhere")
exec("SCALE = 1.0\ndef scaled(s): return s * SCALE", vars(elsewhere))
table, layer = Table(), Layer()
get, OF_SETTINGS = table.held.get, weakref.ref(Settings)
CHANGED = {
    "an attribute of the class": Settings(),
    "a tensor of the class": Settings().of_table,
    "the class": lambda s, b, h, i, j: s * Settings.scale,
    "another module": lambda s, b, h, i, j: s * elsewhere.SCALE,
    "a function of another module": lambda s, b, h, i, j: elsewhere.scaled(s),
    "an import inside": imported,
    "a function's attribute": noted,
    "an element of an object": lambda s, b, h, i, j: s * table[0],
    "an attribute that is looked up": lambda s, b, h, i, j: s * table.scale,
    "getattr": lambda s, b, h, i, j: s * getattr(Settings, "sca" + "le"),
    "globals": lambda s, b, h, i, j: s * globals()["Settings"].scale,
    "a method of a dict": lambda s, b, h, i, j: s * get("scale"),
    "a weak reference": lambda s, b, h, i, j, at=OF_SETTINGS: s * at().scale,
    "parameters in a list": layer.of_list,
    "modules in a list": layer.of_layer,
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_of_what_a_function_reaches_are_seen(
    name: str, by_torch_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it reaches it: the kernel of the first call has the number, or no call remembers it."""
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    q, k, v = qkv()
    for scale in (1.0, -2.0):
        monkeypatch.setattr(Settings, "scale", scale)
        monkeypatch.setattr(elsewhere, "SCALE", scale)
        monkeypatch.setattr(noted, "scale", scale, raising=False)
        monkeypatch.setitem(table.held, "scale", scale)
        Settings.table[0] = layer.biases[0].data[0] = layer.layers[0].scale = scale
        right = expected(q, k, v, lambda s, b, h, i, j, scale=scale: s * scale)[0]
        found = flex_attention(q, k, v, CHANGED[name])
        torch.testing.assert_close(found.detach().double(), right, atol=1e-4, rtol=1e-4)


def test_what_a_function_reaches_is_looked_into_once() -> None:
    """An object that is reached by very many ways costs no more than one that is reached by one."""
    deep: list[Any] = [1.0]
    for _ in range(30):
        deep = [deep, deep]
    by_lists = lambda s, b, h, i, j: s * len(deep)  # noqa: E731
    closures = Closure(), Closure()
    first, again = (closure.key_of(by_lists) for closure in closures)
    are_equal, opaque = first == again, closures[0].opaque  # no repr of any of these: it would be long
    assert are_equal
    assert opaque is None


FACTOR = torch.tensor(0.5)
READ_ON_THE_HOST = (
    lambda s, b, h, i, j: s * FACTOR.tolist(),
    lambda s, b, h, i, j: s * float(FACTOR.numpy()),
    lambda s, b, h, i, j: s * float(FACTOR),
    lambda s, b, h, i, j: s + j * (2 * FACTOR).item(),
    lambda s, b, h, i, j: s if FACTOR else s * 2,
    lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s, FACTOR),
    lambda s, b, h, i, j: s if torch.equal(FACTOR, FACTOR) else s * 2,
)


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


def test_operators_without_meaning_are_named_with_their_place() -> None:
    q, k, v = qkv()
    with pytest.raises(ImportRefusal, match=r"torch\.ops\.aten\.lgamma") as refused:
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.lgamma(s))
    assert "test_flex_attention.py" in str(refused.value)
    with pytest.raises(ImportRefusal, match=r"pow of integers") as refused:
        flex_attention(q, k, v, lambda s, b, h, i, j: s + i**j)
    assert "s + i**j" in str(refused.value)
    with pytest.raises(ImportRefusal, match=r"torch\.where"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s if i > j else s * 2)
    with pytest.raises(ImportRefusal, match="is a `return` missing"):
        flex_attention(q, k, v, lambda s, b, h, i, j: None)


@pytest.mark.parametrize("score", READ_ON_THE_HOST, ids=["tolist", "numpy", "float", "item", "if", "argument", "equal"])
def test_values_of_captured_tensors_do_not_become_constants(score: Any) -> None:
    """Another call may have another value, which the kernel of the first one would not see."""
    with pytest.raises(ImportRefusal, match=r"is read on the host; use the tensor itself(.|\n)*test_flex_attention.py:\d+"):
        flex_attention(*qkv(), score)


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


def test_dropout_is_that_of_attention(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    call = lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 1, LENGTH, LENGTH), dropout_p=0.25)  # noqa: E731
    torch.manual_seed(5)
    wanted = attention(q, k, v, is_causal=True, dropout_p=0.25, mode="math")
    for function in (call, compiles(call)[0]):
        torch.manual_seed(5)
        torch.testing.assert_close(function(q, k, v), wanted)
    assert not torch.allclose(call(q, k, v), wanted)


def test_rows_without_keys_are_zero(by_torch_alone: list[str]) -> None:
    q, k, v = qkv()
    out, aux = flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(j < i, s, -math.inf), return_aux=AuxRequest(lse=True))
    assert (out[:, :, 0] == 0).all()
    assert (aux.lse[:, :, 0] == -math.inf).all()


def test_mistakes_are_torchs_own() -> None:
    q, k, v = qkv(kv_heads=1)
    with pytest.raises(TypeError, match="`block_mask` is a Tensor; expected what create_block_mask returns"):
        flex_attention(q, k, v, block_mask=torch.ones(9, 9, dtype=torch.bool), enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    with pytest.raises(ValueError, match="smaller length"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 1, 8, 8, "cpu"), enable_gqa=True)
    with pytest.raises(AssertionError, match="requires a mask_mod"):
        create_block_mask(lambda s, b, h, q, k: s, 1, 1, 8, 8, "cpu")
    assert issubclass(BlockMask, theirs.BlockMask)


BACKEND = "aot_eager"


def compiles(function: Any, **keywords: Any) -> tuple[Any, list[int]]:
    """`function` without graph breaks, and one item for each of its graphs."""
    from torch._dynamo.backends.debugging import aot_eager

    count: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        count.append(1)
        return aot_eager(graph, examples)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **keywords), count


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


def test_torch_compile_of_lists(by_torch_alone: list[str]) -> None:
    blocks = theirs.create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", 16)
    blocks.mask_mod = lambda b, h, i, j: i // 2 >= j
    tensors = qkv()
    compiled, _ = compiles(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks))
    torch.testing.assert_close(compiled(*tensors), flex_attention(*tensors, block_mask=blocks))
