"""Whole models on the GPU: logits, gradients of all parameters and loss curves are those with torch's attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import Attention  # noqa: E402
from tests.torch import models  # noqa: E402
from tests.torch.curves import difference, loss_curve  # noqa: E402
from tests.torch.gpt import torch_attend  # noqa: E402

LENGTH, SCALE = 200, 8  # heads of 64 numbers
WAYS = ("eager", "compiled", "checkpointed", "padded", "captured")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "way"), [(n, w) for n in models.MODELS for w in WAYS if (n, w) != ("gpt", "padded")])
def test_logits_and_gradients_of_all_parameters(name: str, way: str, dtype: torch.dtype) -> None:
    if name != "gpt":
        pytest.importorskip("transformers")
    tokens = models.some_tokens(LENGTH, "cuda")
    ours = models.model(name, "auto", way, SCALE).to("cuda", dtype)
    if way == "captured":
        found = captured(lambda given: models.results(ours, given), tokens)
    else:
        torch._dynamo.reset()
        call = torch.compile(ours, fullgraph=True) if way == "compiled" else ours
        found = models.results(ours, tokens, call)
    assert not models.wrong(found, models.expected(name, way, dtype, tokens, SCALE), dtype)


def captured(step: Callable[..., dict[str, torch.Tensor]], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a CUDA graph of `step`, captured with other tokens, computes of `tokens`."""
    given, stream = torch.zeros_like(tokens), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(given)
    given.copy_(tokens)
    graph.replay()
    return found


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_loss_curves_fall_on_each_other(autocast: torch.dtype | None) -> None:
    sizes = {"steps": 200, "length": 12, "width": 16, "heads": 2, "layers": 2, "device": "cuda"}
    exact = loss_curve(torch_attend, dtype=torch.float64, **sizes)
    theirs = loss_curve(torch_attend, autocast=autocast, **sizes)
    ours = loss_curve(Attention(mask="causal", layout="bshd"), autocast=autocast, **sizes)
    assert exact[-1] < 0.02
    assert difference(ours, exact) <= 2 * difference(theirs, exact)
