"""`Attention.decode`: any attention of the last rows of sequences to a cache, as the same rows of the attention of all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import attngen  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.diagnostics import DiagnosticError  # noqa: E402
from attngen.torch import Attention, rotary_tables  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HEADS, KV_HEADS, SIZE, ROOM, PAGE = 4, 2, 32, 160, 16
BEFORE = torch.tensor([150, 7], dtype=torch.int32)  # keys in the cache; after the last row there is room for few
TABLES = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", 8)))
ANGLES = torch.arange(ROOM)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
# By name: the keywords of a layer, and the inputs and params of its calls
ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch's": ({"is_causal": True}, {}),
    "window": ({"mask": "causal and q - k < size", "params": {"size": "int"}, "return_lse": True}, {"size": 40}),
    "rotary": (
        {
            "mask": "causal", "score": "softcap(20.0) + slopes[h] * (k - q)", "rotary": "16 halves by cosines, sines",
            "inputs": {**TABLES, "slopes": ("fp32", ("heads",))},
        },
        {**dict(zip(TABLES, rotary_tables(ROOM, 16), strict=True)), "slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    ),
    "documents": (
        {"mask": "causal and ids[b, q] == ids[b, k]", "sink": "0.5", "inputs": {"ids": ("int32", ("batch", ROOM))}},
        {"ids": torch.arange(2 * ROOM).view(2, ROOM).int() // 100},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A call of two sequences: how many rows it has, whether they are appended, and how the cache lies."""

    rows: int
    appends: bool = True
    lies: str = "dense"  # or "pages", or "numbered": each sequence in another cache
    leftpad: int = 0


STEPS = (Step(1), Step(3, lies="pages"), Step(2, appends=False), Step(2, lies="numbered", leftpad=3))
TABLE = torch.arange(2 * ROOM // PAGE).flip(0).view(2, -1).int()
NUMBERS = torch.tensor([2, 1], dtype=torch.int32)


def stored(rows: torch.Tensor, lies: str) -> torch.Tensor:
    """The cache with rows [2, heads, ROOM, size] of two sequences."""
    if lies == "numbered":
        cache = torch.full((3, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
        cache[NUMBERS.long()] = rows
        return cache
    return rows if lies == "dense" else rows.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)[TABLE.flatten().argsort()]


def read(cache: torch.Tensor, lies: str) -> torch.Tensor:
    """The rows of `stored`."""
    if lies == "numbered":
        return cache[NUMBERS.long()]
    return cache if lies == "dense" else cache[TABLE.long()].transpose(1, 2).flatten(2, 3)


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., ROOM, size] whose first 16 elements are rotated, by complex numbers."""
    pairs = torch.complex(rows[..., :8].double(), rows[..., 8:16].double()) * torch.polar(torch.ones_like(ANGLES), ANGLES)
    return torch.cat([pairs.real, pairs.imag, rows[..., 16:].double()], -1).to(rows.dtype)


def check(name: str, step: Step, mode: str, layout: str = "bhsd", device: str = "cpu") -> None:
    """Fails if a step's rows are not the last rows of the whole sequence's attention, or the caches not what they should be."""
    keywords, named = ATTENTIONS[name]
    layer = Attention(mode=mode, layout=layout, enable_gqa=True, **keywords)
    mask = " and ".join([keywords.get("mask", "causal"), f"k >= {step.leftpad}"])
    plain = {key: value for key, value in keywords.items() if key != "is_causal"}
    whole = Attention(mode="math", enable_gqa=True, **{**plain, "mask": mask, "return_lse": True})
    q, k, v = randn(2, HEADS, ROOM, SIZE), randn(2, KV_HEADS, ROOM, SIZE), randn(2, KV_HEADS, ROOM, SIZE)
    ends = (BEFORE + step.rows).tolist()
    new = [torch.stack([t[b, :, n - step.rows : n] for b, n in enumerate(ends)]) for t in (q, k, v)]
    after = [turned(k) if "rotary" in keywords else k, v]
    caches = []
    for rows in after:
        filled = torch.full_like(rows, torch.nan)
        filled[:, :, : step.leftpad] = 0.0
        for b, n in enumerate(ends):
            held = n - step.rows * step.appends
            filled[b, :, :held] = rows[b, :, :held]
        caches.append(stored(filled, step.lies))
    swapped = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    given: dict[str, Any] = {"cache_seqlens": BEFORE + step.rows * (not step.appends), **named}
    given |= {"pages": {"block_table": TABLE}, "numbered": {"cache_batch_idx": NUMBERS}}.get(step.lies, {})
    given |= dict(zip("kv", map(swapped, new[1:]), strict=True)) if step.appends else {}
    given |= {"cache_leftpad": torch.full((2,), step.leftpad).int()} if step.leftpad else {}
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    caches = [cache.to(device) for cache in caches]
    found = layer.decode(*map(swapped, (new[0].to(device), *caches)), **given)
    caches = [cache.cpu() for cache in caches]
    output, lse = found if keywords.get("return_lse") else (found, None)
    for b, n in enumerate(ends):
        for cache, rows in zip(caches, after, strict=True):
            torch.testing.assert_close(read(cache, step.lies)[b, :, :n], rows[b, :, :n], rtol=1e-3, atol=1e-3)
        one = {key: value[b : b + 1] if key == "ids" else value for key, value in named.items()}
        exact, exact_lse = whole(*(t[b : b + 1, :, :n].double() for t in (q, k, v)), **one)
        torch.testing.assert_close(swapped(output)[b].cpu().double(), exact[0, :, n - step.rows :], rtol=4e-3, atol=4e-3)
        if lse is not None:
            torch.testing.assert_close(lse[b].cpu().double(), exact_lse[0, :, n - step.rows :], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "documents"])
def test_the_last_rows_of_the_whole(name: str) -> None:
    """By torch's operations, in both layouts."""
    for step in STEPS:
        check(name, step, "math")
    check(name, STEPS[1], "math", "bshd")


@pytest.mark.parametrize("mode", tiers.cases(["naive", "fused", "decode"], quick=["decode"]))
def test_kernels(mode: str) -> None:
    """With captured tensors that are read at the positions of rows too, in a cache that is no pool of pages."""
    check("rotary", STEPS[1], mode)
    check("documents", STEPS[0], mode)


def test_inputs_with_an_element_for_each_row_of_a_call() -> None:
    """A tree of three rows, two of which continue the first: a call has a row of the table for each of its own."""
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    layer = Attention(
        mode="naive", inputs={"tree": ("bool", ("q_len", 3))}, mask="k < kv_len - 3 or tree[q, clamp(k - kv_len + 3, 0, 2)]"
    )
    q, k = randn(1, 2, 3, SIZE), randn(1, 2, 50, SIZE)
    found = layer.decode(q, k, k, cache_seqlens=40, tree=tree)
    keys = k[:, :, :40]
    seen = torch.cat([torch.ones(3, 37).bool(), tree], 1)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, keys, keys, seen), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("mode", ["naive", "decode"])
def test_rows_that_a_short_sequence_lacks_read_nothing_outside(mode: str) -> None:
    """Sequences with fewer keys than a call has rows: the rows that exist are those of the sequence alone."""
    ids = torch.arange(60).view(2, 30).int() // 3
    layer = Attention(mask="causal and ids[q, b] == ids[k, b]", inputs={"ids": ("int32", (30, "batch"))}, mode=mode)
    q, k, used = randn(2, 1, 9, SIZE), randn(2, 1, 30, SIZE), [30, 4]
    found = layer.decode(q, k, k, cache_seqlens=torch.tensor(used, dtype=torch.int32), ids=ids.T.contiguous())
    for b, n in enumerate(used):
        rows, own = min(n, 9), ids[b, :n]
        keep = torch.ones(n, n).tril().bool() & (own[:, None] == own)
        queries, keys = q[b : b + 1, :, 9 - rows :], k[b : b + 1, :, :n]
        exact = functional.scaled_dot_product_attention(queries, keys, keys, keep[n - rows :])
        torch.testing.assert_close(found[b : b + 1, :, 9 - rows :], exact, rtol=4e-3, atol=4e-3)


def test_a_spec_that_states_everything() -> None:
    """With dropout by a param, which nothing drops, and a scale."""
    settings: dict[str, Any] = {"dtype": "fp16", "head_dim": SIZE, "mask": "causal", "scale": 0.25, "lse": True}
    spec = attngen.define(**settings, params={"p": "float"}, dropout="p")
    layer, plain = Attention(spec, mode="naive"), Attention(attngen.define(**settings), mode="naive")
    q, k = randn(2, 2, 3, SIZE), randn(2, 2, 40, SIZE)
    used = torch.tensor([40, 9], dtype=torch.int32)
    expected = plain.decode(q, k, k, cache_seqlens=used)
    for found, of in zip(layer.decode(q, k, k, cache_seqlens=used), expected, strict=True):
        assert torch.equal(found, of)


@pytest.mark.long
def test_compiled_by_torch_without_a_break() -> None:
    keywords, named = ATTENTIONS["rotary"]
    layer = Attention(mode="naive", enable_gqa=True, **keywords)

    def step(q: torch.Tensor, new: torch.Tensor, cache: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return layer.decode(q, cache, cache.clone(), new, new, cache_seqlens=used, **named) + cache.sum()

    q, new = randn(2, HEADS, 2, SIZE), randn(2, KV_HEADS, 2, SIZE)
    eager, traced = (randn(2, KV_HEADS, ROOM, SIZE) for _ in range(2))
    traced.copy_(eager)
    expected = step(q, new, eager, BEFORE)
    assert torch.equal(torch.compile(step, fullgraph=True, backend=BACKEND)(q, new, traced, BEFORE), expected)
    assert torch.equal(traced, eager)


def test_what_is_refused() -> None:
    q, k = randn(1, 2, 3, 16), randn(1, 2, 20, 16)
    tables = {"cosines": ANGLES.cos(), "sines": ANGLES.sin()}
    shifted = Attention(mode="math", rotary="16 halves by cosines, sines at q + 1, k", inputs=TABLES)
    for of_tables, message in (
        ((20, 24), "`rotary_dim` is 24"),
        ((-1, 16), "`positions` is -1"),
        ((20, 16, 0.0), "`base` is 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rotary_tables(*of_tables)
    for call, message in (
        (lambda: Attention().decode(q, k, k, q, q), r"appending needs `k`, `v` and `cache_seqlens`"),
        (lambda: Attention().decode(q, k, k, size=3), r"no input or param `size`"),
        (lambda: Attention().decode(q[0], k, k), r"`q` has 3 dimensions; expected 4"),
        (lambda: Attention().decode(q, k[:, :1], k[:, :1]), r"enable_gqa"),
        (lambda: shifted.decode(q, k, k, **tables), r"rotates rows at positions q \+ 1, k"),
        (lambda: Attention(attngen.define(head_dim=16, storage="packed")).decode(q, k, k), r"states storage packed"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    bias = {"score": "s + bias[k + kv_len]", "inputs": {"bias": ("fp32", ("n",))}}
    with pytest.raises(DiagnosticError, match="comes from data"):
        Attention(mode="math", **bias).decode(q, k, k, cache_seqlens=7, bias=torch.zeros(40))
    with pytest.raises(ArgumentError, match="can be 1 to 39, but the dimension"):
        Attention(mode="naive", **bias).decode(q, k, k, cache_seqlens=7, bias=torch.zeros(39))
