"""Whole models on the emulated device: logits, gradients of all parameters and loss curves are those with torch's attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attngen.torch import Attention  # noqa: E402
from tests.torch import models  # noqa: E402
from tests.torch.curves import difference, loss_curve  # noqa: E402
from tests.torch.gpt import torch_attend  # noqa: E402

pytestmark = pytest.mark.long
LENGTH = 9
WAYS = [(name, way) for name in models.MODELS for way in ("eager", "compiled", "checkpointed", "padded")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "way"), [one for one in WAYS if one != ("gpt", "padded")])
def test_logits_and_gradients_of_all_parameters(name: str, way: str, dtype: torch.dtype) -> None:
    if name != "gpt":
        pytest.importorskip("transformers")
    tokens = models.some_tokens(LENGTH, "cpu")
    ours = models.model(name, "naive", way).to(dtype)
    call = ours
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = models.results(ours, tokens, call)
    assert not models.wrong(found, models.expected(name, way, dtype, tokens), dtype)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_loss_curves_fall_on_each_other(autocast: torch.dtype | None) -> None:
    sizes = {"steps": 200, "length": 9, "width": 16, "heads": 2, "layers": 1}
    exact = loss_curve(torch_attend, dtype=torch.float64, **sizes)
    theirs = loss_curve(torch_attend, autocast=autocast, **sizes)
    ours = loss_curve(Attention(mask="causal", layout="bshd", mode="naive"), autocast=autocast, **sizes)
    assert exact[-1] < 0.02
    assert difference(ours, exact) <= 2 * difference(theirs, exact)
