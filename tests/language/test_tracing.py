"""Traced functions mean what Python, numpy and torch mean by them, or are refused with the place and what to write."""

from __future__ import annotations

import decimal
import fractions
import functools
import math
import re
import threading
import types
import warnings

import numpy as np
import pytest
import torch

import attngen
from attngen.diagnostics import DiagnosticError
from attngen.language import load_text
from attngen.language.trace import TraceError
from attngen.spec.evaluate import evaluate

table = np.arange(16, dtype=np.float32)
matrix = np.zeros((4, 16), np.float32)
q_len = 7


def text_of(written: str, declarations: str = ""):
    (spec,) = load_text(f"attention attention {{ dtype fp16 head_dim 64 {declarations} {written} }}")
    return spec


class Window:
    """An object with a `__call__`, and a method."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, b, h, q, k):
        return q - k < self.size

    def method(self, b, h, q, k):
        return k - q < self.size


def five(b, h, q, k, n=5):
    return q - k < n


def by_keyword(b, h, q, k, *, n=6):
    return q - k < n


def leading(n, b, h, q, k):
    return q - k < n


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (five, "q - k < 5"),
        (by_keyword, "q - k < 6"),
        (lambda b, h, q, k, n=3, m=4: (q - k < n) | (k < m), "q - k < 3 or k < 4"),
        (lambda b, h, q, k, *rest, **options: q - k < 5 + len(rest), "q - k < 5"),
        (functools.partial(five, n=9), "q - k < 9"),
        (functools.partial(leading, 8), "q - k < 8"),
        (Window(4), "q - k < 4"),
        (Window(4).method, "k - q < 4"),
        (decorated(five), "q - k < 5"),
        (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "q >= k"),
        (lambda b, h, q, k: k < q_len, "k < 7"),  # Python's own meaning: the variable of this module
        (lambda b, h, q, k: k < kv_len - 3, "k < kv_len - 3"),  # noqa: F821 - a size of the call
        (lambda b, h, q, k: k < heads, "k < heads"),  # noqa: F821
    ],
)
def test_parameters_with_defaults_keep_them(mask, text: str) -> None:
    assert attngen.define(mask=mask) == text_of(f"mask {text}")


def test_a_score_with_a_default_is_still_a_score() -> None:
    slope = 0.5
    score = attngen.define(score=lambda s, b, h, q, k, slope=slope: s + slope * (k - q)).score
    assert score == text_of("score s + 0.5 * (k - q)").score
    assert attngen.define(score=lambda b, h, q, k, slope=slope: slope * (k - q)) == text_of("score 0.5 * (k - q)")


def test_arrays_in_defaults_and_partials_are_captured() -> None:
    expected = text_of("score s + slopes[h]", "input slopes: fp32[4]")
    slopes = np.ones(4, np.float32)
    spec, captured = attngen.traced(score=lambda s, b, h, q, k, slopes=slopes: s + slopes[h])
    assert (spec, captured["slopes"] is slopes) == (expected, True)

    def biased(s, b, h, q, k, *, slopes):
        return s + slopes[h]

    spec, captured = attngen.traced(score=functools.partial(biased, slopes=slopes))
    assert (spec, captured["slopes"] is slopes) == (expected, True)


class Biases:
    """Arrays in attributes, a private one and one of the class too, and in a list and a dict."""

    shared = np.ones(9, np.float32)

    def __init__(self) -> None:
        self.slopes, self._sinks = np.ones(4, np.float32), np.zeros(4, np.float32)
        self.tables, self.n = [np.ones(5, np.float32), np.zeros(6, np.float32)], 2
        self.named = {"bias": np.ones((7, 8), np.float32)}

    def __call__(self, s, b, h, q, k):
        return s + self.n * self.slopes[h] + self._sinks[h] + self.tables[1][q] + self.named["bias"][q, k] + self.other(q)

    def other(self, q):
        return self.tables[0][q] + self.shared[q]


def test_arrays_in_attributes_and_in_lists_are_captured() -> None:
    biases = Biases()
    dims = {"slopes": "4", "sinks": "4", "tables_1": "6", "bias": "7, 8", "tables_0": "5", "shared": "9"}
    inputs = "\n".join(f"input {name}: fp32[{sizes}]" for name, sizes in dims.items())
    expected = text_of("score s + 2 * slopes[h] + sinks[h] + tables_1[q] + bias[q, k] + (tables_0[q] + shared[q])", inputs)
    for score in (biases, biases.__call__):
        spec, captured = attngen.traced(score=score)
        assert spec.score == expected.score
        assert {i.name for i in spec.inputs} == set(dims)
        assert captured["tables_0"] is biases.tables[0]
    assert isinstance(biases.slopes, np.ndarray)
    tables = ((biases.slopes, 3), [lambda h: h * 2])
    expected = text_of("score s + tables_0_0[h]", "input tables_0_0: fp32[4]")
    assert attngen.define(score=lambda s, b, h, q, k: s + tables[0][0][h]) == expected


class Model:
    """Objects in each other, one of them in itself, and an array that a property names."""

    def __init__(self) -> None:
        self.config, self.owner = types.SimpleNamespace(slopes=np.ones(4, np.float32), window=8), self
        self.window, self._bias, self.lock = np.ones(3, np.float32), np.ones(5, np.float32), threading.Lock()

    @property
    def bias(self):
        return self._bias

    def score(self, s, b, h, q, k):
        return s + self.config.slopes[h] + self.bias[0]


def test_arrays_in_attributes_of_captured_objects() -> None:
    """Of those that an object has, a function captures the ones that it reads: `window` is a number of `config`, too."""
    model = Model()
    expected = text_of("score s + slopes[h] + bias[0]", "input slopes: fp32[4] input bias: fp32[5]")

    def score(s, b, h, q, k):
        return s + model.config.slopes[h] + getattr(model, "bias")[0]  # noqa: B009

    for given in (score, model.score, lambda s, b, h, q, k: score(s, b, h, q, k)):
        spec, captured = attngen.traced(score=given)
        assert spec == expected
        assert captured["slopes"] is model.config.slopes
    assert isinstance(model.config.slopes, np.ndarray)
    assert attngen.define(mask=lambda b, h, q, k: q - k < model.config.window) == text_of("mask q - k < 8")
    other = types.SimpleNamespace(slopes=np.ones(4, np.float32))
    with pytest.raises(TraceError, match="two different arrays are called `slopes`"):
        attngen.define(score=lambda s, b, h, q, k: s + model.config.slopes[h] + other.slopes[h])

    class Uncopied(Model):
        def __copy__(self):
            raise RuntimeError

    uncopied = Uncopied()
    with pytest.raises(TraceError, match=r"test_tracing\.py"):
        attngen.define(score=lambda s, b, h, q, k: s + uncopied.config.slopes[h])


@pytest.mark.parametrize(
    ("keyword", "function", "message"),
    [
        ("mask", lambda b, h, q, k, n: q - k < n, "takes 5 arguments without a default.*a mask takes \\(b, h, q, k\\)"),
        ("mask", lambda b, h, q, k, *, n: q - k < n, "requires `n` by keyword"),
        ("mask", lambda *where: where[2] >= where[3], "takes 0 arguments"),
        ("mask", lambda b, h, k, q: q >= k, "argument 3 of `<lambda>` is called `k` but is `q`"),
        ("mask", functools.partial(leading, n=8), "by keyword"),
        ("score", lambda score, h, q, k: score, "is called `score` but is `b`"),
        ("score", lambda s, b, h, q, k, n: s, "takes 6 arguments"),
        ("sink", lambda s, b, h, q, k: s, "a sink takes \\(b, h, q, k\\)"),
        ("scale", lambda: 0.5, "no function"),
        ("mask", Window, "plain Python function, not a type"),
    ],
)
def test_other_parameters_are_refused(keyword: str, function, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        attngen.define(**{keyword: function})


SCORES = [
    # conversions mean what torch means
    (lambda s, b, h, q, k: s + (q / 16).to(torch.int32), "s + int(q / 16)"),
    (lambda s, b, h, q, k: s + (q / 16).to(dtype=torch.int64, device="cuda"), "s + int(q / 16)"),
    (lambda s, b, h, q, k: s + (q / 16).to("cuda:0", torch.int64), "s + int(q / 16)"),
    (lambda s, b, h, q, k: s + (q / 16).long() + (k / 16).int(), "s + int(q / 16) + int(k / 16)"),
    (lambda s, b, h, q, k: s + (q / 16).type(torch.int32), "s + int(q / 16)"),
    (lambda s, b, h, q, k: s + (q / 16).astype(np.int32), "s + int(q / 16)"),
    (lambda s, b, h, q, k: s + q.float() / k.to(torch.float32), "s + q / k"),
    (lambda s, b, h, q, k: s * (q > k).float(), "s * float(q > k)"),
    (lambda s, b, h, q, k: s + (q > k).int(), "s + int(q > k)"),
    (lambda s, b, h, q, k: s + (s * (q % 3).bool().float()), "s + s * float(q % 3 != 0)"),
    (lambda s, b, h, q, k: s + math.floor(q / 16), "s + int(floor(q / 16))"),
    (lambda s, b, h, q, k: s + math.trunc(s), "s + int(s)"),
    (lambda s, b, h, q, k: s + int(q / 16) if isinstance(3, int) else s, "s + int(q / 16)"),
    # functions of torch and numpy
    (lambda s, b, h, q, k: 20 * np.tanh(s / 20), "20 * tanh(s / 20)"),
    (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), "20 * tanh(s / 20)"),
    (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), "where(q >= k, s, -inf)"),
    (lambda s, b, h, q, k: np.where(q >= k, s, -1e4), "where(q >= k, s, -10000.0)"),
    (lambda s, b, h, q, k: np.minimum(q, k) + np.float32(0.5) * s, "min(q, k) + 0.5 * s"),
    (lambda s, b, h, q, k: torch.clamp(s, min=-1.0), "max(s, -1.0)"),
    (lambda s, b, h, q, k: s.clamp(max=5.0), "min(s, 5.0)"),
    (lambda s, b, h, q, k: np.clip(s, -1.0, 5.0), "min(max(s, -1.0), 5.0)"),
    (lambda s, b, h, q, k: s.clip(-1.0, 5.0), "min(max(s, -1.0), 5.0)"),
    (lambda s, b, h, q, k: s.tanh().abs() - s.exp(), "abs(tanh(s)) - exp(s)"),
    (lambda s, b, h, q, k: torch.div(q, 16, rounding_mode="floor") + s, "q // 16 + s"),
    (lambda s, b, h, q, k: s.where(q >= k, 0.0), "where(q >= k, s, 0.0)"),
    (lambda s, b, h, q, k: torch.where(q >= k, s, torch.zeros_like(s)), "where(q >= k, s, 0.0)"),
    (lambda s, b, h, q, k: torch.square(s) + torch.reciprocal(s), "s * s + 1.0 / s"),
    (lambda s, b, h, q, k: s.item(), "s"),
    (lambda s, b, h, q, k: torch.add(s, q, alpha=2), "s + q * 2"),
    (lambda s, b, h, q, k: s * (q > k) + torch.div(q, 16, rounding_mode="trunc"), "s * float(q > k) + q // 16"),
    (lambda s, b, h, q, k: s.masked_fill(q > k, -1e4), "where(q > k, -10000.0, s)"),
    # Python's operators
    (lambda s, b, h, q, k: s + (q**2 - k**2), "s + (q * q - k * k)"),  # integers are exact
    (lambda s, b, h, q, k: s + (q >> 4) + (k << 2), "s + q // 16 + k * 4"),
    (lambda s, b, h, q, k: where((q > k) ^ (k > 3), s, 0.0), "where((q > k) != (k > 3), s, 0.0)"),
    (lambda s, b, h, q, k: s + ((q & k) | (q ^ 3)) + ~k, "s + bit_or(bit_and(q, k), bit_xor(q, 3)) + (-1 - k)"),
    (lambda s, b, h, q, k: s + 2 ** (h / 2) + s**0.5, "s + exp2(h / 2) + sqrt(s)"),
    (lambda s, b, h, q, k: s + sum(divmod(q, 3)), "s + (0 + q // 3 + q % 3)"),
    (lambda s, b, h, q, k: max([q, k, 7]) + s, "max(max(q, k), 7) + s"),
    (lambda s, b, h, q, k: s + max(3, 4), "s + 4"),
]


def where(c, a, b):
    return attngen.where(c, a, b)


@pytest.mark.parametrize(("function", "text"), SCORES, ids=[text for _, text in SCORES])
def test_what_other_libraries_mean(function, text: str) -> None:
    assert attngen.define(score=function) == text_of(f"score {text}")


def on_tensors(function, names):
    """What torch makes of `function`; None if it is for traced values or numpy alone."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return function(*names.values())
        except (TypeError, RuntimeError, AttributeError, ValueError, AssertionError):
            return None


def test_a_traced_function_gives_what_it_gives_on_tensors() -> None:
    indices = dict(zip("bhqk", torch.meshgrid(*(torch.arange(n) for n in (2, 3, 40, 40)), indexing="ij"), strict=True))
    names = {"s": torch.linspace(-30.0, 30.0, 2 * 3 * 40 * 40, dtype=torch.float64).reshape(2, 3, 40, 40), **indices}
    expected = {function: on_tensors(function, names) for function, _ in SCORES}
    compared = {function: torch.as_tensor(value) for function, value in expected.items() if value is not None}
    assert len(compared) > 20
    for function, value in compared.items():
        found = evaluate(attngen.define(score=function).score, names, lambda *_: None, torch, torch.tensor)
        # torch divides integers in fp32
        torch.testing.assert_close(torch.as_tensor(found).double(), value.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_captured_array_of_which_only_a_fact_is_asked_is_no_input() -> None:
    spec, captured = attngen.traced(mask=lambda b, h, q, k: k < len(table) + matrix.ndim)
    assert (spec, captured) == (text_of("mask k < 18"), {})


def test_a_conversion_is_not_dropped() -> None:
    mask = attngen.define(mask=lambda b, h, q, k: (q / 16).to(torch.int32) == (k / 16).to(torch.int32))
    assert mask == text_of("mask int(q / 16) == int(k / 16)")


def recursive(s, b, h, q, k):
    return recursive(s, b, h, q, k)


def generator(s, b, h, q, k):
    yield s


def failing(s, b, h, q, k):
    return s + {"a": 1}["b"]


REFUSED = [
    (lambda s, b, h, q, k: s.half(), "half.*leave the conversion out"),
    (lambda s, b, h, q, k: s.to(torch.float16), "float16"),
    (lambda s, b, h, q, k: s.to(torch.bfloat16), "bfloat16"),
    (lambda s, b, h, q, k: s.double(), "double"),
    (lambda s, b, h, q, k: s.to(memory=3), "with `memory`"),
    (lambda s, b, h, q, k: s.sum(dim=0), "no `sum`"),
    (lambda s, b, h, q, k: s + q.shape[0], "no `shape`"),
    (lambda s, b, h, q, k: torch.max(q, 1), "torch.max cannot be traced"),
    (lambda s, b, h, q, k: q.max(1), "no `max`"),
    (lambda s, b, h, q, k: np.max(q, 1), "numpy.max cannot be traced"),
    (lambda s, b, h, q, k: np.add.reduce(q), "numpy.add.reduce"),
    (lambda s, b, h, q, k: torch.cumsum(s, 0), "torch.cumsum"),
    (lambda s, b, h, q, k: s.clamp(0, 1, 2), "clamp"),
    (lambda s, b, h, q, k: min(q, k, key=lambda x: -x), "no `key`"),
    (lambda s, b, h, q, k: {0: 1.0}[h] * s, "cannot be a key of a dict"),
    (lambda s, b, h, q, k: [1.0, 2.0][h] * s, "captured"),
    (lambda s, b, h, q, k: s + 10**400, "1329 bits"),
    (lambda s, b, h, q, k: s * 1j, "complex"),
    (lambda s, b, h, q, k: s * decimal.Decimal("0.5"), "Decimal"),
    (lambda s, b, h, q, k: s * fractions.Fraction(1, 2), "Fraction"),
    (lambda s, b, h, q, k: s + "1", "a str cannot be part"),
    (lambda s, b, h, q, k: np.complex64(1) * s, "complex64"),
    (lambda s, b, h, q, k: None, "returned None"),
    (lambda s, b, h, q, k: (s, q), "tuple"),
    (lambda s, b, h, q, k: table, "`table` is an array"),
    (lambda s, b, h, q, k: s + table, "`table` is an array"),
    (lambda s, b, h, q, k: s + matrix[h], "`matrix\\[h\\]` is an array"),
    (lambda s, b, h, q, k: s + np.tanh(table)[h], "`table` is an array"),
    (lambda s, b, h, q, k: s + table[h:][0], "one integer for each dimension"),
    (lambda s, b, h, q, k: torch.div(q, 16, rounding_mode="nearest"), "rounding_mode 'nearest'"),
    (lambda s, b, h, q, k: np.round(s, decimals=2), "numpy.round with `decimals`"),
    (lambda s, b, h, q, k: torch.nn.functional.relu(s, inplace=True), "with `inplace`"),
    (lambda s, b, h, q, k: round(s, 2), "with digits"),
    (lambda s, b, h, q, k: s + (q << 63), "expected 0 to 62"),
    (lambda s, b, h, q, k: s * (s & k), "takes integers"),
    (lambda s, b, h, q, k: s @ s, "multiplies matrices"),
    (lambda s, b, h, q, k: next(iter(s)), "iterated"),
    (lambda s, b, h, q, k: s[0], "cannot be indexed"),
    (lambda s, b, h, q, k: s if 3 in q else q, "`in`"),
    (lambda s, b, h, q, k: len(f"{s}") * s, "has no text"),
    (lambda s, b, h, q, k: math.exp(s), "not math's"),
    (lambda s, b, h, q, k: s if q == k else q, "where"),
    (failing, "`failing` raised KeyError"),
    (generator, "generator"),
    (recursive, "calls itself endlessly"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_cannot_be_traced_is_refused_by_its_name(function, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        attngen.define(score=function)


def test_the_place_is_shown() -> None:
    with pytest.raises(TraceError) as caught:
        attngen.define(score=failing)
    assert isinstance(caught.value.__cause__, KeyError)
    assert re.search(r"--> .*test_tracing\.py:\d+:16\n +\|\n\d+ \| .*\n +\| {16}\^{13} in `failing`$", str(caught.value))


@pytest.mark.parametrize("indices", ["b, k", "-1, k"])
def test_an_array_may_be_indexed_step_by_step(indices: str) -> None:
    at = {"b, k": lambda s, b, h, q, k: s + matrix[b][k], "-1, k": lambda s, b, h, q, k: s + matrix[-1][k]}[indices]
    expected = indices.replace("-1", "3")
    assert attngen.define(score=at) == text_of(f"score s + matrix[{expected}]", "input matrix: fp32[4, 16]")


def test_numbers_of_numpy_are_numbers() -> None:
    plain = attngen.define(scale=0.5, mask="q < n", score="s * x", params={"n": 3, "x": 0.5})
    given = {"n": np.int64(3), "x": ("float", np.float32(0.5))}
    assert attngen.define(scale=np.float32(0.5), mask="q < n", score="s * x", params=given) == plain
    assert attngen.define(sink=0.5) == attngen.define(sink="0.5")


@pytest.mark.parametrize("written", [3, ["q >= k"], True])
def test_what_is_neither_text_nor_a_function_is_refused(written) -> None:
    with pytest.raises(TypeError, match="expected text or a function"):
        attngen.define(mask=written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "1 / 0"}, "finite"),
        ({"dtype": ["fp16"]}, "not an element type"),
        ({"inputs": {"x": (["fp32"], ("heads",))}, "score": "s + x[h]"}, "not an element type"),
        ({"params": {"n": math.nan}, "score": "s * n"}, "NaN"),
        ({"scale": 10**400}, "10\\^400 is too large"),
        ({"mask": "q >= k\ndef x = 3"}, "expected the end"),
        ({"mask": "true) or (true"}, "expected the end"),
        ({"mask": ""}, "expected an expression"),
        ({"params": {"n": 10**400}, "mask": "q < n"}, "too large"),
        ({"params": {"n": ("float", 10**400)}, "score": "s * n"}, "too large"),
        ({"params": {"n": ("float", 1e300)}, "score": "s * n"}, "too large"),
        ({"params": {"n": ("float", 1j)}, "score": "s * n"}, "default"),
        ({"mask": lambda b, h, q, k: q < 2**62 * k}, "64 bits"),
    ],
)
def test_extreme_values_are_diagnostics(arguments, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        attngen.define(**arguments)
