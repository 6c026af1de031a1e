"""Dropout on the GPU: the same weights by every schedule, gradients, CUDA graphs, torch.compile."""

from __future__ import annotations

import pytest

import attngen
from attngen.device.select import device_by_name
from attngen.plan import ARCHES
from attngen.reference.problems import Shape
from attngen.schedules import schedules_for
from attngen.spec.gradient import QKV
from tests.device.test_dropout import WINDOW
from tests.harness import wrong_gradients

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import attention  # noqa: E402

P = 0.3


def schedules(spec: attngen.AttentionSpec, wanted: tuple[str, ...] = ()) -> tuple[str, ...]:
    return schedules_for(spec, ARCHES[device_by_name("cuda").arch], wanted)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_schedule_keeps_the_same_weights(dtype: str) -> None:
    spec = attngen.define(dtype=dtype, dropout=P)
    element = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    q, k = (torch.randn(2, 3, 333, 64, device="cuda").to(element) for _ in range(2))
    for first in (0, 64, 250):
        v = torch.zeros(2, 3, 333, WINDOW, device="cuda", dtype=element)
        v[:, :, first : first + WINDOW] = torch.eye(WINDOW, device="cuda", dtype=element)
        expected = attention(q, k, v, None, P, mode="math", seed=5, offset=7) != 0
        for schedule in schedules(spec):
            kept = attention(q, k, v, None, P, mode=schedule, seed=5, offset=7) != 0
            assert torch.equal(kept, expected), (schedule, first)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_gradients(dtype: str, head_dim: int, mask: str | None) -> None:
    spec = attngen.define(dtype=dtype, head_dim=head_dim, mask=mask, dropout=P)
    for schedule in schedules(spec, QKV):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for deterministic in (True, False):
            assert not wrong_gradients(kernel, Shape(2, 4, 2, 300, 257), deterministic=deterministic), schedule


def test_a_graph_draws_at_each_replay() -> None:
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))

    def step() -> tuple[torch.Tensor, ...]:
        o = attention(q, k, v, None, P)
        return o.detach(), *torch.autograd.grad(o.float().square().sum(), (q, k, v))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        graph.replay()
        replays.append([r.clone() for r in results])
    for first, other, again in zip(*replays, strict=True):
        assert not torch.equal(first, other)
        assert torch.equal(first, again)
    torch.manual_seed(1)
    o = attention(q, k, v, None, P)
    assert torch.equal(o, replays[0][0])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, None, P, is_causal=True), fullgraph=True, mode=mode)
    outputs = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()  # nothing of the last step is kept
        o = compiled(q, k, v)
        gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
        outputs.append(o.detach().clone())
        assert all(t.isfinite().all() for t in gradients)
    assert all(not torch.equal(outputs[-1], o) for o in outputs[:-1])
