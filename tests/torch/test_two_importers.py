"""A function means the same traced by `attngen.define` and imported by `flex_attention`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen.language.functions import DIVISIONS, FUNCTIONS  # noqa: E402
from attngen.spec.attention import S  # noqa: E402
from attngen.spec.derivative import derivatives  # noqa: E402
from attngen.spec.evaluate import evaluate  # noqa: E402
from attngen.spec.expr import Type, name  # noqa: E402
from attngen.spec.torch_namespace import TorchNamespace  # noqa: E402
from attngen.torch.aten import Context  # noqa: E402
from attngen.torch.captured import Inputs  # noqa: E402
from attngen.torch.closures import Closure  # noqa: E402
from attngen.torch.graphs import numbers_on  # noqa: E402
from attngen.torch.importer import expression  # noqa: E402

INDICES = tuple(name(n, Type.INT) for n in "bhqk")
ONLY_ATTNGEN = {"bit_and", "bit_or", "bit_xor", "fill"}
ONE = "f(s)"
TWO = "f(s, q) + f(q, 3)"
CALLS = {
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), "f(q, k) + f(q > k, k > 2)"),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), "f(q, k) + f(q, 3)"),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), "f(s, q) + f(q, k > 2)"),
    **dict.fromkeys(("add", "sub", "rsub"), "f(s, q) + f(q, k, alpha=3)"),
    **dict.fromkeys(("trunc", "floor", "ceil", "round", "square", "sign", "abs", "relu", "exp", "sin"), "f(s) + f(q)"),
    **dict.fromkeys(("maximum", "minimum"), "f(s, q) + f(q, k)"),
    **dict.fromkeys(("clamp_min", "clamp_max"), "f(s, 0.25)"),
    **dict.fromkeys(("atan2", "hypot"), "f(s, q) + f(k, s)"),
    "bitwise_not": "f(q) + f(q > k)",
    "clamp": "f(s, -1, 1.5) + f(q, max=7)",
    "div": "f(q, 3) + f(q, 3, rounding_mode='floor') + f(q - k, 3, rounding_mode='trunc') + f(s, 3.0, rounding_mode='trunc')",
    "full_like": "f(s, 2.5)",
    "gelu": "f(s) + f(s, approximate='tanh')",
    "masked_fill": "f(s, q > k, 0.5)",
    "pow": "f(s, q) + f(s, 2) + f(2, s) + f(q, 2) + f(s, 0.5) + f(s, -1)",
    "where": "f(q > k, s, k) + f(q > k, 1, k)",
}


def imported(function: Any) -> Any:
    closure = Closure()
    closure.key_of(function)
    return expression(function, numbers_on("cpu", torch.float32), (S, *INDICES), Inputs(closure, Context()))


def _call_of(title: str) -> str:
    operands = [p for p in inspect.signature(FUNCTIONS[title]).parameters.values() if p.default is p.empty]
    return CALLS.get(title, TWO if len(operands) == 2 or title in DIVISIONS else ONE)


def _function(title: str) -> Any:
    spaces = (torch, torch.nn.functional, torch.Tensor)
    return next(getattr(space, title) for space in spaces if hasattr(space, title))


@pytest.mark.parametrize("title", sorted(FUNCTIONS.keys() - ONLY_ATTNGEN))
def test_a_function_of_torch_means_one_thing(title: str) -> None:
    score = eval(f"lambda s, b, h, q, k: s + ({_call_of(title)})", {"f": _function(title)})
    assert attngen.define(score=score).score is imported(score)


@pytest.mark.parametrize("title", sorted(FUNCTIONS.keys() - ONLY_ATTNGEN - {"floor_divide"}))  # torch has no derivative of it
def test_the_derivative_of_a_function_is_that_of_torch(title: str) -> None:
    """At multiples of a half, where kinks are, and infinite where torch's is."""
    score = eval(f"lambda s, b, h, q, k: s + ({_call_of(title)})", {"f": _function(title)})
    at = torch.arange(-16, 17, dtype=torch.float64) / 2
    q, k = torch.tensor(2), torch.tensor(3)
    expected = torch.func.vmap(torch.func.grad(lambda s: score(s, q, q, q, k)))(at)
    slope = derivatives(attngen.define(score=score).score)[S]
    with np.errstate(all="ignore"):
        found = evaluate(slope, {"s": at.numpy(), "b": 2, "h": 2, "q": 2, "k": 3}, lambda *_: None, np)
    np.testing.assert_allclose(np.broadcast_to(found, at.shape), expected, rtol=1e-12, atol=1e-12)
    xp, leaf = TorchNamespace(torch.float64, at.device), at.clone().requires_grad_()
    names = {"s": leaf} | {name: xp.number(index) for name, index in {"b": 2, "h": 2, "q": 2, "k": 3}.items()}
    evaluate(attngen.define(score=score).score, names, lambda *_: None, xp, xp.literal).sum().backward()
    np.testing.assert_allclose(leaf.grad, expected, rtol=1e-12, atol=1e-12)
