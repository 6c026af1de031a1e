"""What the functions of flex_attention reach: a change of it is seen, and what is the same is not traced again."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import math
import random
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attngen.torch import flex_attention, flex_spec  # noqa: E402
from attngen.torch.closures import Closure  # noqa: E402
from attngen.torch.graphs import ImportRefusal  # noqa: E402
from tests.torch.flex import check, expected, qkv, randn  # noqa: E402
from tests.torch.mods import HEADS, LENGTH, Mod, windowed  # noqa: E402


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


def test_numbers_of_numpy_are_numbers(by_torch_alone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    for size in (np.prod((5, 2)), np.int32(9)):
        check(Mod("window", mask=windowed(size)), atol=2e-5, rtol=2e-5)
    assert len(set(by_torch_alone)) == 1

    def of(cap: np.float32) -> Any:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)

    first, other = (flex_attention(q, k, v, of(np.float32(cap))) for cap in (30, 0.1))
    monkeypatch.setattr(flex_spec, "expression", None)
    torch.testing.assert_close(flex_attention(q, k, v, of(np.float32(30))), first)
    assert (first - other).abs().max() > 0.01


def test_sinks_of_another_type_are_read_as_they_are(by_torch_alone: list[str]) -> None:
    """Those of the first call are integers, to which those of the second one must not be converted."""
    q, k, v = qkv()
    for sinks in (torch.tensor([1, 2]), torch.tensor([1.5, 2.75])):
        logits = torch.cat([q @ k.mT / q.size(-1) ** 0.5, sinks[:, None, None].expand(len(q), -1, LENGTH, 1)], -1)
        torch.testing.assert_close(flex_attention(q, k, v, sinks=sinks), logits.softmax(-1)[..., :-1] @ v)


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


class Derived(Settings):
    """A method and a number that it has of its own, and those of the class that it is derived from."""

    scale = 7.0

    def __call__(self, s, b, h, i, j):
        return super().__call__(s, b, h, i, j) / self.scale

    def of_class(self, s, b, h, i, j):
        return s * super().scale


class Kinds(enum.Enum):
    """A method, and values that may change."""

    ONE, NONE = [1.0], []

    def scale(self) -> float:
        return Settings.scale


class Made:
    """What Python calls for a class, and for its objects by functions that name no method."""

    def __init__(self) -> None:
        self.held = elsewhere.SCALE

    def __floor__(self) -> float:
        return Settings.scale

    def __str__(self) -> str:
        return str(Settings.scale)

    def __class_getitem__(cls, i: int) -> float:
        return Settings.scale


class Renamed:
    """An attribute that is read by another name."""

    def __init__(self) -> None:
        self.held = 1.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("held" if name == "scale" else name)


class Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * Settings.scale

    @staticmethod
    def setup_context(ctx, inputs, output): ...


def imported(s, b, h, i, j):
    import elsewhere

    return s * elsewhere.SCALE


def imported_from_package(s, b, h, i, j):
    from .inner import SCALE

    return s * SCALE


def noted(s, b, h, i, j):
    return s * noted.scale


elsewhere = types.ModuleType("elsewhere")
exec("SCALE = 1.0\ndef scaled(s): return s * SCALE", vars(elsewhere))
table, layer, derived, made, renamed = Table(), Layer(), Derived(), Made(), Renamed()
hiding, graded, named = Settings(), torch.ones(1), {made: 1.0}
hiding.scale, kind = 7.0, Kinds.ONE
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
    "super": derived,
    "super's attribute": derived.of_class,
    "an attribute of the class under one of the object": lambda s, b, h, i, j: s * type(hiding).scale,
    "an object made inside": lambda s, b, h, i, j: s * Made().held,
    "an item of a class": lambda s, b, h, i, j: s * Made[0],
    "math.floor": lambda s, b, h, i, j: s * math.floor(made),
    "str": lambda s, b, h, i, j: s * float(str(made)),
    "a key of a dict": lambda s, b, h, i, j: s * sum(key.scale for key in named),
    "an attribute of another name": lambda s, b, h, i, j: s * renamed.scale,
    "a method of an enumeration's member": lambda s, b, h, i, j: s * kind.scale(),
    "the value of an enumeration's member": lambda s, b, h, i, j: s * kind.value[0],
    "hasattr": lambda s, b, h, i, j: s * (-2.0 if hasattr(made, "negative") else 1.0),
    "a function's globals": lambda s, b, h, i, j: s * imported.__globals__["Settings"].scale,
    "a random number": lambda s, b, h, i, j: s * random.choice([1.0, -2.0]),
    "torch.autograd.Function": lambda s, b, h, i, j: Scaled.apply(s),
    "a gradient": lambda s, b, h, i, j: s * graded.grad[0],
    "an import from the package": imported_from_package,
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_of_what_a_function_reaches_are_seen(
    name: str, by_torch_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it reaches it: the kernel of the first call has the number, or no call remembers it."""
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    monkeypatch.setitem(sys.modules, f"{__package__}.inner", elsewhere)
    monkeypatch.setattr(graded, "grad", torch.ones(1))
    q, k, v = qkv()
    for scale in (1.0, -2.0):
        monkeypatch.setattr(Settings, "scale", scale)
        monkeypatch.setattr(elsewhere, "SCALE", scale)
        monkeypatch.setattr(noted, "scale", scale, raising=False)
        monkeypatch.setitem(table.held, "scale", scale)
        monkeypatch.setattr(made, "scale", scale, raising=False)
        monkeypatch.setattr(random, "choice", lambda numbers, scale=scale: scale)
        Settings.table[0] = layer.biases[0].data[0] = layer.layers[0].scale = scale
        kind.value[0] = derived.own = renamed.held = graded.grad[0] = scale
        if scale < 0:
            monkeypatch.setattr(made, "negative", True, raising=False)
        right = expected(q, k, v, lambda s, b, h, i, j, scale=scale: s * scale)[0]
        found = flex_attention(q, k, v, CHANGED[name])
        torch.testing.assert_close(found.detach().double(), right, atol=1e-4, rtol=1e-4)


def _cached(value: float) -> Any:
    @functools.cache
    def scale() -> float:
        return value

    return lambda s, b, h, i, j: s * scale()


def _by_default(value: float) -> Any:
    scales = collections.defaultdict(lambda: value)
    return lambda s, b, h, i, j: s * scales["any"]


def _of_activation(value: float) -> Any:
    activation = torch.nn.LeakyReLU(value)
    return lambda s, b, h, i, j: activation(s)


def _hooked(value: float) -> Any:
    module = torch.nn.Identity()
    module.register_forward_hook(lambda module, given, output: output * value)
    return lambda s, b, h, i, j: module(s)


def _of_attribute(value: float) -> Any:
    tensor = torch.ones(3)
    tensor.scale = value
    return lambda s, b, h, i, j: s * tensor.scale


def _of_stride(value: float) -> Any:
    tensor = torch.ones(3, 8)[:, :: int(value)].T
    return lambda s, b, h, i, j: s * tensor.stride(0)


class _Rows(torch.nn.Embedding):
    """A module of torch's whose method is called by another one: of more elements than a constant may have."""

    def forward(self, x):
        return super().forward(x)[0]


def _of_rows(value: float) -> Any:
    rows = _Rows.from_pretrained(torch.full((99, 1), value))
    return lambda s, b, h, i, j: s * rows(j)


class _Numbers(list):
    """A list with a number beside its items."""

    def __init__(self, value: float) -> None:
        super().__init__([1.0])
        self.scale = value


def _of_items(value: float) -> Any:
    numbers = _Numbers(value)
    return lambda s, b, h, i, j: s * numbers.scale * numbers[0]


@pytest.mark.parametrize(
    "make", [_cached, _by_default, _of_activation, _hooked, _of_attribute, _of_stride, _of_rows, _of_items]
)
def test_functions_of_one_code_that_differ_elsewhere(make: Any, by_torch_alone: list[str]) -> None:
    """What differs is neither in the code nor in an attribute that it names."""
    q, k, v = qkv()
    for value in (1.0, 4.0):
        score = make(value)
        torch.testing.assert_close(flex_attention(q, k, v, score).double(), expected(q, k, v, score)[0], atol=1e-4, rtol=1e-4)


class _Numbered(dict):
    """A dict whose items are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Sides(enum.Enum):
    scale = 1


GENERATOR = random.Random(0)
HELD = {
    "an enumeration": _Sides,
    "a member of an enumeration": _Sides.scale,
    "a namespace": types.SimpleNamespace(scale=2.0),
    "a named tuple": collections.namedtuple("Held", "scale")(2.0),
    "a dict": _Numbered(scale=2.0),
    "an ordered dict": collections.OrderedDict(scale=2.0),
    "a deque": collections.deque([2.0]),
    "a module": torch.nn.Linear(2, 2),
    "arguments": argparse.Namespace(scale=2.0),
    "a range": range(2),
    "an object of a class's values": type("Constants", (), {"scale": 2.0})(),
}


@pytest.mark.parametrize("name", HELD)
def test_usual_objects_are_looked_into(name: str) -> None:
    """A function that reaches them is not traced in each call."""
    held, closure = HELD[name], Closure()
    closure.key_of(lambda s, b, h, i, j: s * held.scale)
    assert closure.opaque is None


def test_a_global_that_is_called_as_an_attribute_is_not_reached() -> None:
    held = types.SimpleNamespace(GENERATOR=2.0)
    for score, is_opaque in ((lambda s, *_: s * held.GENERATOR, False), (lambda s, *_: s * GENERATOR.random(), True)):
        closure = Closure()
        closure.key_of(score)
        assert (closure.opaque is not None) == is_opaque


class _Halved:
    def __init__(self, scale: float) -> None:
        self._scale = scale

    @functools.cached_property
    def scale(self) -> float:
        return self._scale / 2


def test_changes_below_methods_of_python_are_seen() -> None:
    """Of objects of Python's own classes, all attributes are part of the key: their methods are not looked into."""
    arguments, chain, constants = (
        argparse.Namespace(scale=2.0),
        collections.ChainMap({"scale": 2.0}),
        type("Of", (), {"scale": 2.0}),
    )
    holder, halved, queue = constants(), _Halved(4.0), collections.deque([2.0, 3.0])
    scores = [
        (lambda s, b, h, i, j: s * arguments.scale, lambda: setattr(arguments, "scale", 3.0)),
        (lambda s, b, h, i, j: s * chain["scale"], lambda: chain.update(scale=3.0)),
        (lambda s, b, h, i, j: s * queue[0], lambda: queue.rotate()),
        (lambda s, b, h, i, j: s * holder.scale, lambda: setattr(constants, "scale", 3.0)),
        (lambda s, b, h, i, j: s * halved.scale, lambda: setattr(halved, "_scale", 6.0)),
    ]
    for score, change in scores:
        closure = Closure()
        before, again = closure.key_of(score), Closure().key_of(score)
        assert closure.opaque is None
        assert before == again
        change()
        assert Closure().key_of(score) != before


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


def test_threads_trace_at_the_same_time(by_torch_alone: list[str]) -> None:
    """Each its own functions, although torch.fx has one state for all."""
    q, k, v = (t.detach() for t in qkv())

    def of(factor: float) -> torch.Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * factor)

    factors = [0.5 + n / 16 for n in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(of, factors))
    for factor, one in zip(factors, found, strict=True):
        torch.testing.assert_close(one, flex_attention(q * factor, k, v))


FACTOR, FACTORS = torch.tensor(0.5), torch.tensor([0.5, 0.25])
READ_ON_THE_HOST = (
    lambda s, b, h, i, j: s * FACTOR.tolist(),
    lambda s, b, h, i, j: s * float(FACTOR.numpy()),
    lambda s, b, h, i, j: s * float(FACTOR),
    lambda s, b, h, i, j: s + j * (2 * FACTOR).item(),
    lambda s, b, h, i, j: s * float(FACTORS[0]),
    lambda s, b, h, i, j: s * (2 * FACTORS[1]).item(),
    lambda s, b, h, i, j: s if FACTOR else s * 2,
    lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s, FACTOR),
    lambda s, b, h, i, j: s if torch.equal(FACTOR, FACTOR) else s * 2,
)


@pytest.mark.parametrize(
    "score", READ_ON_THE_HOST, ids=["tolist", "numpy", "float", "item", "element", "of an element", "if", "argument", "equal"]
)
def test_values_of_captured_tensors_do_not_become_constants(score: Any) -> None:
    """Another call may have another value, which the kernel of the first one would not see."""
    with pytest.raises(ImportRefusal, match=r"is read on the host; use the tensor itself(.|\n)*test_reached.py:\d+"):
        flex_attention(*qkv(), score)
