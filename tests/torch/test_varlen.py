"""Packed sequences: flash-attention's functions of them and torch's varlen_attn, by the emulated device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.varlen import AuxRequest  # noqa: E402

from attngen import ArgumentError  # noqa: E402
from attngen.torch import (  # noqa: E402
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    runtime,
    varlen_attn,
)
from tests import tiers  # noqa: E402
from tests.torch.flash import Batch, Case, check, results  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BATCHES = (
    Batch(((3, 5), (0, 4), (70, 90), (5, 0), (0, 0), (33, 17))),
    Batch(((1, 130), (64, 64), (65, 63), (2, 1))),
)
CASE = Case(causal=True, window_size=(40, 0), softcap=20.0, slopes=1)


SCHEDULES = ("naive", "tiled", "fused", "wgmma", "hopper")
WITH_BACKWARD = ("naive", "tiled", "fused", "hopper")


@pytest.mark.parametrize("mode", tiers.cases(SCHEDULES, quick=["naive"]))
def test_each_sequence_is_an_attention_of_its_own(mode: str) -> None:
    """With gradients, if the schedule has them. The first sequence is NaN, and leaves no trace in its neighbours."""
    slopes = CASE.named(4, 1)["alibi_slopes"]
    options = {"causal": True, "window_size": (40, 0), "softcap": 20.0, "alibi_slopes": slopes, "mode": mode}
    for batch in BATCHES:
        tensors = batch.tensors(4, 2, 24, torch.float16)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch = batch) -> torch.Tensor:
            return flash_attn_varlen_func(q, k, v, **batch.named(), **options)

        found = results(attend, tensors) if mode in WITH_BACKWARD else [attend(*tensors)]
        exact, usual = (
            results(lambda *t, b=batch, p=p: b.reference(*t, CASE, slopes, p), tensors, p)[: len(found)]
            for p in (torch.float64, torch.float16)
        )
        check(found, exact, usual)
        q, k, v = (t.clone() for t in tensors)
        rows, keys = batch.lengths[0]
        q[:rows], k[:keys], v[:keys] = float("nan"), float("nan"), float("nan")
        beside = results(attend, [q, k, v]) if mode in WITH_BACKWARD else [attend(q, k, v)]
        for i, (one, other) in enumerate(zip(found, beside, strict=True)):
            own = keys if i > 1 else rows  # O, dQ, then dK, dV
            assert torch.equal(one[own:], other[own:])


def test_batches_share_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of sequences stay on the device: no batch compiles anything, and nothing reads a tensor on the host."""
    q_heads, size = 2, 8
    compiled: list[object] = []
    usual = runtime.Runtime.__init__
    monkeypatch.setattr(
        runtime.Runtime, "__init__", lambda self, made, *rest: (compiled.append(made), usual(self, made, *rest))[1]
    )
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    for i in range(100):
        lengths = tuple((i % 7, (3 * i + j) % 5) for j in range(i % 4))
        batch = Batch((*lengths, (i % 3 + 1, 4)))
        q, k, v = batch.tensors(q_heads, q_heads, size, torch.float32)
        out, lse, _ = flash_attn_varlen_func(q, k, v, **batch.named(), return_attn_probs=True, mode="naive")
        assert out.shape == q.shape
        assert lse.shape == (q_heads, q.shape[0])
    assert len(compiled) <= 1


def test_packed_projections_and_torchs_function_are_the_same() -> None:
    batch = BATCHES[0]
    same = Batch(tuple((n, n) for n, _ in batch.lengths))
    q, k, v = same.tensors(2, 2, 16, torch.float16)
    begins, longest = same.begins(0), max(n for n, _ in same.lengths)
    expected, expected_lse, _ = flash_attn_varlen_func(
        q, k, v, begins, begins, longest, longest, causal=True, return_attn_probs=True, mode="naive"
    )
    kv = torch.stack([k, v], 1)
    qkv = torch.cat([q[:, None], kv], 1)
    found = flash_attn_varlen_qkvpacked_func(qkv, begins, longest, causal=True, mode="naive")
    assert torch.equal(found, expected)
    found = flash_attn_varlen_kvpacked_func(q, kv, begins, begins, longest, longest, causal=True, mode="naive")
    assert torch.equal(found, expected)
    aux = AuxRequest(lse=True)
    lengths = (begins, begins, longest, longest)
    found, lse = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), return_aux=aux, mode="naive")
    close = {"atol": 1e-3, "rtol": 0.0}  # a window's end instead of a causal mask
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(lse, expected_lse, **close)


@pytest.mark.long
def test_compiled_by_torch_with_gradients() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, **named, causal=True, window_size=(40, 0), mode="naive")

    named = BATCHES[0].named()
    tensors = BATCHES[0].tensors(4, 2, 24, torch.float16)
    found = results(torch.compile(attend, fullgraph=True, backend=BACKEND), tensors)
    for one, other in zip(found, results(attend, tensors), strict=True):
        assert torch.equal(one, other)


def test_what_is_refused() -> None:
    q = randn(5, 2, 16)
    begins = torch.tensor([0, 5], dtype=torch.int32)
    lengths = (begins, begins, 5, 5)
    with pytest.raises(ArgumentError, match=r"dropout_p is -0\.1"):
        flash_attn_varlen_func(q, q, q, *lengths, -0.1)
    with pytest.raises(ArgumentError, match=r"`k` is \[5, 2, 16\]; expected \[pages, page_size, kv_heads, size\]"):
        flash_attn_varlen_func(q, q, q, *lengths, block_table=begins)
    with pytest.raises(ArgumentError, match="beginnings of the keys are None"):
        varlen_attn(q, q, q, begins, None, 5, 5, seqused_k=begins[1:])
    with pytest.raises(ArgumentError, match="no multiple of kv heads: `key` has 2"):
        varlen_attn(q[:, :1], q, q, *lengths, enable_gqa=True)
    with pytest.raises(ArgumentError, match="pass enable_gqa=True"):
        varlen_attn(q, q[:, :1], q[:, :1], *lengths)
    with pytest.raises(ArgumentError, match="does not support packed tensors"):
        flash_attn_varlen_func(q, q, q, *lengths, mode="math")
    with pytest.raises(ArgumentError, match=r"`qkv` is \[5, 2, 16\]; expected \[total, 3, heads, size\]"):
        flash_attn_varlen_qkvpacked_func(q, begins, 5)
    with pytest.raises(ArgumentError, match="`cu_seqlens_k` is"):
        flash_attn_varlen_func(q, q, q, begins, torch.tensor([0, 2, 5], dtype=torch.int32), 5, 5, mode="naive")
    with pytest.raises(TypeError, match="beginnings of the keys are None"):
        flash_attn_varlen_func(q, q, q, begins, None, 5, 5)
    for longest in (None, 5.0):
        with pytest.raises(TypeError, match=f"longest sequence is {longest}; expected an int"):
            varlen_attn(q, q, q, begins, begins, 5, longest)
    with pytest.raises(TypeError, match=r"longest sequence is tensor\(5.5000\); expected an int"):
        flash_attn_varlen_func(q, q, q, begins, begins, torch.tensor(5.5), 5)
    for changed, message in (
        ({"cu_seqlens_q": [0, 5]}, "beginnings of q are a list; expected a tensor"),
        ({"cu_seqlens_k": begins.numpy()}, "beginnings of k are a ndarray"),
        ({"block_table": [[0]]}, "`block_table` is a list"),
        ({"block_table": begins, "cu_seqlens_k": None}, "as `seqused_k`, or their beginnings"),
        ({"sinks": 0.5}, "`sinks` is a float; expected a tensor"),
        ({"q": q[None]}, r"`q` is \[1, 5, 2, 16\]; expected \[total, heads, size\]"),
    ):
        arguments = {"q": q, "k": q, "v": q, "cu_seqlens_q": begins, "cu_seqlens_k": begins, **changed}
        with pytest.raises(ArgumentError, match=message):
            flash_attn_varlen_func(**arguments, max_seqlen_q=5, max_seqlen_k=5)
    with pytest.raises(TypeError, match="`query` is a NoneType; expected a tensor"):
        varlen_attn(None, q, q, *lengths)
    apart = torch.tensor([[0, 1], [5, 6]], dtype=torch.int32)[:, 0]
    with pytest.raises(ArgumentError, match=r"`cu_seqlens_q` has stride 2 .* Pass a contiguous copy$"):
        flash_attn_varlen_func(q, q, q, apart, begins, 5, 5, mode="naive")
    with pytest.raises(ArgumentError, match="`max_q_len` is -1"):
        flash_attn_varlen_func(q, q, q, begins, begins, -1, 5, mode="naive")
    with pytest.raises(ArgumentError, match="`cu_seqlens_q` has elements of int64"):
        flash_attn_varlen_func(q, q, q, begins.long(), begins, 5, 5, mode="naive")


@pytest.mark.long
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "deterministic"), [(128, False), (256, True)])
def test_hopper_adds_up_and_splits_products(size: int, deterministic: bool, causal: bool) -> None:
    """The two other forms of its backward: dQ added up in global memory, and consumers that split products."""
    batch, case = Batch(((3, 5), (0, 4), (150, 290), (5, 0), (0, 0))), Case(causal=causal)
    rows, keys = (sum(pair[i] for pair in batch.lengths) for i in (0, 1))
    tensors = batch.tensors(2, 1, size, torch.float16, rest=70)
    real = [t[:n] for t, n in zip(tensors, (rows, keys, keys), strict=True)]

    def attend(*given: torch.Tensor) -> torch.Tensor:
        options = {"causal": causal, "deterministic": deterministic, "mode": "hopper"}
        return flash_attn_varlen_func(*given, **batch.named(), **options)[:rows]

    found = [one[:n] for one, n in zip(results(attend, tensors), (rows, rows, keys, keys), strict=True)]
    exact, usual = (
        results(lambda *t, p=p: batch.reference(*t, case, None, p), real, p) for p in (torch.float64, torch.float16)
    )
    check(found, exact, usual)
