"""The backend for vLLM, against stand-ins of vLLM's interfaces: an engine's steps, by the emulated device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attngen.api import CompiledAttention  # noqa: E402
from attngen.device.select import device_by_name  # noqa: E402
from attngen.torch import append, flash_attn_func, runtime  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch import vllm_interfaces as vllm  # noqa: E402

PAGE, HEADS, KV_HEADS, SIZE, PAGES = 16, 4, 2, 16, 90
# Axes of a layer's pages [pages, heads, rows, K and V] in the order of memory, as vLLM's KVCacheLayout has them
LAYOUTS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3), "LHBNC": (1, 0, 2, 3)}
ROOM = 20  # pages of a sequence: enough keys for the schedule that splits them


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that vLLM imports."""
    for name, module in vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm, "OVERRIDES", {})
    monkeypatch.delitem(sys.modules, "attngen.vllm.backend", raising=False)
    yield import_module("attngen.vllm.backend")
    sys.modules.pop("attngen.vllm.backend", None)


@dataclass
class Sequence:
    """Its pages, and the keys and values that it has so far."""

    pages: list[int]
    keys: Any
    values: Any


class Engine:
    """Steps of sequences that share a cache, as vLLM's runner makes them. What belongs to no sequence is NaN, or rubbish."""

    def __init__(self, backend: Any, dtype: Any, device: str = "cpu", layout: str = "LBNHC", **layer: Any) -> None:
        self.dtype, self.layer, self.device = dtype, layer, torch.device(device)
        shape, order = (PAGES, KV_HEADS, PAGE, 2 * SIZE), LAYOUTS[layout]
        inverse = [order.index(i) for i in range(len(order))]
        self.stored = backend.QUANTIZED.get(layer.get("kv_cache_dtype"))  # in 8 bits, whose bytes vLLM has
        self.scales = SimpleNamespace(_k_scale=torch.tensor(0.25, device=device), _v_scale=torch.tensor([0.5], device=device))
        fill, of = (float("nan"), dtype) if self.stored is None else (0xFF, torch.uint8)
        self.cache = torch.full([shape[i] for i in order], fill, dtype=of, device=device).permute(inverse)
        made = backend.AttngenBackend.get_impl_cls()
        self.impl = made(HEADS, SIZE, 0.3, KV_HEADS, **layer)
        spec = SimpleNamespace(block_size=PAGE)
        cls = backend.AttngenBackend.get_builder_cls()
        self.builder = cls(spec, ["layer"], vllm.config(64), self.device)
        self.random = torch.Generator().manual_seed(0)
        self.free = torch.randperm(PAGES, generator=self.random).tolist()
        self.sequences: list[Sequence] = []

    def randn(self, *shape: int) -> Any:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def add(self, count: int) -> None:
        none = self.randn(0, KV_HEADS, SIZE)
        self.sequences += [Sequence([self.free.pop() for _ in range(ROOM)], none, none) for _ in range(count)]

    def forward(self, q: Any, k: Any, v: Any, common: Any) -> Any:
        """A layer's output for a step."""
        output = torch.full((q.shape[0], HEADS * SIZE), 7.0, dtype=self.dtype, device=self.device)
        found = self.impl.forward(self.scales, q, k, v, self.cache, self.builder.build(0, common), output)
        assert found is output
        return output

    def step(self, rows: list[int], padding: int = 0) -> None:
        """Each sequence gets so many rows; all rows are checked. `padding` more rows belong to no sequence. q, k and v lie side
        by side in memory, as one projection writes them."""
        tokens = sum(rows) + padding
        q, k, v = self.randn(tokens, HEADS + 2 * KV_HEADS, SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q[sum(rows) :] = float("nan")
        begins = torch.tensor([0, *rows]).cumsum(0).int()
        slots, table = torch.full((tokens,), -1), torch.full((len(rows), ROOM), -(2**31), dtype=torch.int32)
        for b, (one, n) in enumerate(zip(self.sequences, rows, strict=True)):
            new = slice(int(begins[b]), int(begins[b + 1]))
            old = one.keys.shape[0]
            slots[new] = torch.tensor([one.pages[i // PAGE] * PAGE + i % PAGE for i in range(old, old + n)]).long()
            one.keys = torch.cat([one.keys, self.as_stored(k[new], self.scales._k_scale)])
            one.values = torch.cat([one.values, self.as_stored(v[new], self.scales._v_scale)])
            used = -(-(old + n) // PAGE)
            table[b, :used] = torch.tensor(one.pages[:used], dtype=torch.int32)
        lengths = torch.tensor([one.keys.shape[0] for one in self.sequences], dtype=torch.int32)
        common = vllm.CommonAttentionMetadata(
            begins.to(self.device), begins, lengths.to(self.device), len(rows), tokens, max(rows), int(lengths.max()),
            table.to(self.device), slots.to(self.device),
        )  # fmt: skip
        output = self.forward(q, k, v, common)
        assert (output[sum(rows) :] == 7).all()
        for b, one in enumerate(self.sequences):
            mine = slice(int(begins[b]), int(begins[b + 1]))
            right = self.right(q[mine], one)
            atol = 1e-5 if self.dtype is torch.float32 else 2e-2
            found = output[mine].view(-1, HEADS, SIZE).double()
            torch.testing.assert_close(found, right, atol=atol, rtol=0, msg=lambda said, b=b: f"sequence {b}: {said}")

    def as_stored(self, rows: Any, scale: Any) -> Any:
        """`rows` as the cache has them."""
        return rows if self.stored is None else ((rows.float() / scale).to(self.stored).float() * scale).to(self.dtype)

    def right(self, q: Any, one: Sequence) -> Any:
        """By torch's operations in float64."""
        window, slopes, sinks = (self.layer.get(name) for name in ("sliding_window", "alibi_slopes", "sinks"))
        options = {
            "softmax_scale": 0.3, "causal": True, "window_size": (-1 if window is None else window - 1, -1), "mode": "math",
            "softcap": self.layer.get("logits_soft_cap") or 0.0, "return_attn_probs": True,
            "alibi_slopes": None if slopes is None else torch.tensor(slopes, device=self.device),
        }  # fmt: skip
        out, lse, _ = flash_attn_func(*(t[None].double() for t in (q, one.keys, one.values)), **options)
        out = out[0]
        return out if sinks is None else out * torch.sigmoid(lse[0] - sinks.double()[:, None]).T[..., None]


PLAIN: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "sliding_window": 30, "logits_soft_cap": 5.0, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
    "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
}  # fmt: skip
LAYERS = [(torch.float16, PLAIN, "LBNHC"), (torch.float16, EVERYTHING, "LBHNC"), (torch.float32, PLAIN, "LHBNC"),
          *((torch.float16, {"kv_cache_dtype": name}, "LBNHC") for name in ("fp8", "fp8_e5m2"))]  # fmt: skip


@pytest.mark.parametrize(("dtype", "layer", "layout"), tiers.cases(LAYERS, quick=lambda dtype, layer, layout: bool(layer)))
def test_steps_of_an_engine(backend: Any, dtype: Any, layer: dict[str, Any], layout: str) -> None:
    """Prompts in pieces beside sequences that decode, one after another and several rows at once; padding; no row at all."""
    engine = Engine(backend, dtype, layout=layout, **layer)
    engine.add(2)
    engine.step([40, 17])
    engine.add(2)
    engine.step([1, 1, 20, 7], padding=3)
    engine.step([1, 3, 1, 1])
    engine.step([1, 0, 16, 1], padding=12)
    engine.step([0, 0, 0, 0])
    engine.step([1, 2, 1, 40])


def schedules(kernel: CompiledAttention) -> set[str]:
    """Of a kernel and of those that it has for other sizes and scales."""
    return {kernel.plan.keyword}.union(*(schedules(other) for other in kernel._others.values()))


@pytest.mark.long
def test_few_rows_take_the_schedule_that_splits_keys(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes: dict[Any, Any] = {}
    monkeypatch.setattr(runtime, "runtimes", runtimes)
    engine = Engine(backend, torch.float16)
    engine.add(1)
    engine.step([20])
    (((text, _), used),) = runtimes.items()
    assert f"page_size {PAGE}" in text
    assert "decode" not in schedules(used.compiled)
    engine.step([1])
    assert "decode" in schedules(used.compiled)
    padded = torch.empty(2, 100_003, dtype=torch.float16).as_strided(
        (2, PAGE, KV_HEADS, SIZE), (1000, KV_HEADS * SIZE, SIZE, 1)
    )
    assert "page_size" not in engine.impl._text(torch.float16, padded)  # TMA cannot read such pages


@pytest.mark.long
def test_a_sequence_of_128k_in_a_pool_of_more_than_2_to_the_31_elements(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside short sequences, with rubbish in unused entries of the page table. Most of the pool is memory that nobody touches;
    the kernel that appends runs without checks, which keep a state of each byte that may be written."""
    monkeypatch.setattr(append, "device_by_name", lambda _: device_by_name("emulated:fast"))
    append._runtime.cache_clear()
    lengths = [3, 2**17, 1, PAGE + 1]  # with the new row
    used = [-(-n // PAGE) for n in lengths]
    pages = 2**31 // (2 * PAGE * SIZE) + sum(used)
    cache = torch.empty(pages, 1, PAGE, 2 * SIZE, dtype=torch.float16)
    table, slots = torch.full((4, max(used)), -(2**31), dtype=torch.int32), []
    q, new = torch.randn(4, 2, SIZE).half(), torch.randn(2, 4, 1, SIZE).half()
    sequences = []
    for b, (n, count) in enumerate(zip(lengths, used, strict=True)):
        first = pages - sum(used[: b + 1])
        table[b, :count] = torch.arange(first, first + count)
        rows = torch.randn(2, count * PAGE, 1, SIZE).half()
        rows[:, n - 1 :] = float("nan")
        cache[first : first + count, 0] = torch.cat([*rows[:, :, 0]], -1).unflatten(0, (count, PAGE))
        rows[:, n - 1] = new[:, b]
        sequences.append(rows[:, :n])
        slots.append(first * PAGE + n - 1)
    begins = torch.arange(5, dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    common = vllm.CommonAttentionMetadata(begins, begins, ends, 4, 4, 1, max(lengths), table, torch.tensor(slots))
    builder = backend.AttngenMetadataBuilder(SimpleNamespace(block_size=PAGE), ["layer"], vllm.config(64), torch.device("cpu"))
    impl, output = backend.AttngenImpl(2, SIZE, 0.3, 1), torch.empty(4, 2 * SIZE, dtype=torch.float16)
    impl.forward(None, q, *new, cache, builder.build(0, common), output)
    append._runtime.cache_clear()
    for b, (keys, values) in enumerate(sequences):
        exact = flash_attn_func(*(t[None].double() for t in (q[b : b + 1], keys, values)), softmax_scale=0.3, mode="math")
        torch.testing.assert_close(output[b].view(2, SIZE).double(), exact[0, 0], atol=4e-3, rtol=4e-3)


def test_a_step_is_a_call_of_few_rows_and_one_of_many(backend: Any) -> None:
    builder = Engine(backend, torch.float16).builder

    def parts(rows: list[int], longest: int = 300, **changed: Any) -> Any:
        begins = torch.tensor([0, *rows]).cumsum(0).int()
        table, lengths = torch.zeros(len(rows), 8, dtype=torch.int32), torch.full((len(rows),), longest, dtype=torch.int32)
        slots = torch.arange(sum(rows))
        common = vllm.CommonAttentionMetadata(
            begins, begins, lengths, len(rows), sum(rows), max(rows), longest, table, slots, **changed
        )
        return builder.build(0, common), builder.build_for_cudagraph_capture(common)

    (step, graph) = parts([1, 1, 16, 17, 2])
    few, many = step.parts
    assert (few.cu_seqlens.tolist(), few.max_q_len, few.max_kv_len) == ([0, 1, 2, 18], 16, 512)
    assert (many.cu_seqlens.tolist(), many.max_q_len, many.page_table.shape[0]) == ([18, 35, 37], 17, 2)
    assert step.slots.dtype is torch.int32
    assert step.slots.tolist() == list(range(37))
    assert step.slots.data_ptr() == graph.slots.data_ptr()  # a graph reads the same memory in each step
    (step, graph) = parts([1, 1, 1], longest=40)
    assert (len(step.parts), step.parts[0].max_kv_len, graph.parts[0].max_kv_len) == (1, 256, 256)
    with pytest.raises(NotImplementedError, match="causal"):
        parts([1], causal=False)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 64"):
        parts([65])


def test_vllm_extends_the_metadata(backend: Any) -> None:
    """Its builder for chunked attention sets an attribute; the one for fast prefill copies all fields to a class of its own."""
    begins, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    common = vllm.CommonAttentionMetadata(begins, begins, lengths, 1, 2, 2, 2, table, torch.arange(2))
    metadata = Engine(backend, torch.float16).builder.build(0, common)
    metadata.make_virtual_batches_block_table = None

    class FastPrefill(type(metadata)):  # type: ignore[misc]
        def __init__(self) -> None:
            for field in fields(type(metadata)):
                setattr(self, field.name, getattr(metadata, field.name))

    assert FastPrefill().parts == metadata.parts


def test_what_vllm_is_told(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import attngen.vllm

    made = backend.AttngenBackend
    attngen.vllm.register()
    attngen.vllm.register()
    assert vllm.OVERRIDES[vllm.AttentionBackendEnum.CUSTOM] == f"{made.__module__}.{made.__qualname__}"
    assert made.get_name() == vllm.AttentionBackendEnum.CUSTOM.name  # by which layers find it in the registry
    monkeypatch.setitem(vllm.OVERRIDES, vllm.AttentionBackendEnum.CUSTOM, "another.Backend")
    with pytest.warns(UserWarning, match=r"CUSTOM is another\.Backend, not attngen"):
        attngen.vllm.register()
    assert vllm.OVERRIDES[vllm.AttentionBackendEnum.CUSTOM] == "another.Backend"
    assert [made.supports_head_size(n) for n in (8, 80, 512, 4, 20, 584)] == [True, True, True, False, False, False]
    capabilities = [vllm.DeviceCapability(*pair) for pair in ((9, 0), (8, 6), (7, 0))]
    assert [made.supports_compute_capability(one) for one in capabilities] == [True, True, False]
    for wrong in (
        {"kv_cache_dtype": "fp8_inc"},
        {"attn_type": vllm.AttentionType.ENCODER_ONLY},
        {"use_alibi_sqrt": True},
        {"sliding_window": 0},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(wrong))):
            backend.AttngenImpl(HEADS, SIZE, 1.0, **wrong)
    impl, q = backend.AttngenImpl(HEADS, SIZE, 1.0), torch.ones(2, HEADS, SIZE)
    assert not impl.forward(None, q, q, q, torch.empty(0), None, torch.ones(2, HEADS * SIZE)).any()
    with pytest.raises(NotImplementedError, match="element type"):
        impl.forward(None, q, q, q, torch.empty(0), None, torch.ones(2, HEADS * SIZE), torch.ones(1))


def test_the_entry_points() -> None:
    """As pyproject.toml declares it."""
    import tomllib

    from tests.conftest import ROOT

    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert list(targets) == ["attngen", "attngen_latent"]
    assert all(callable(metadata.EntryPoint(name, at, "vllm.general_plugins").load()) for name, at in targets.items())
