"""The operator table: types, folding, derivatives against finite differences, bounds against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from attngen.language import load_text
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Shape, sample
from attngen.spec.bounds import ranges
from attngen.spec.derivative import derivatives
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Apply, Const, ExpressionError, Type, constant, name, walk
from attngen.spec.operator import TABLE, apply
from attngen.spec.operators import ROWS
from attngen.spec.torch_namespace import TorchNamespace
from tests.expressions import SMOOTH, arity, divides_by_window, floats, integers

X, Y = name("x", Type.FLOAT), name("y", Type.FLOAT)


def value(expr, x: float, y: float) -> float:
    with np.errstate(all="ignore"):
        return float(evaluate(expr, {"x": np.float64(x), "y": np.float64(y)}, lambda *_: None, np))


CHOICES = ("min", "max", "lt", "le", "gt", "ge", "eq", "ne")


def has_tie(expr, x: float, y: float) -> bool:
    """Whether a part of `expr` has a kink here, which the whole may hide: min(max(y, x), x) is x, but max and min have one."""
    choices = (node for node in walk(expr) if isinstance(node, Apply) and node.op in CHOICES)
    return any(abs(value(n.args[0], x, y) - value(n.args[1], x, y)) < 1e-4 for n in choices)


def check_derivative(expr, x: float, y: float) -> bool:
    """The derivative column against a central difference of two step sizes; False at a point near a kink or a pole."""
    gradients = derivatives(expr)
    here = value(expr, x, y)
    if not (math.isfinite(here) and abs(here) < 1e4) or has_tie(expr, x, y):
        return False
    for symbol, (dx, dy) in ((X, (1.0, 0.0)), (Y, (0.0, 1.0))):
        steps = [1e-5, 5e-6]
        slopes = [(value(expr, x + h * dx, y + h * dy) - value(expr, x - h * dx, y - h * dy)) / (2 * h) for h in steps]
        if not all(map(math.isfinite, slopes)) or abs(slopes[0]) > 1e4:
            return False
        kink_between = abs(slopes[0] - slopes[1]) > 1e-4 * (1 + abs(slopes[1]))
        one_sided = [(value(expr, x + s * 1e-6 * dx, y + s * 1e-6 * dy) - here) * s / 1e-6 for s in (1, -1)]
        kink_here = abs(one_sided[0] - one_sided[1]) > 1e-3 * (1 + abs(slopes[1]))
        if kink_between or kink_here:
            return False
        found = value(gradients[symbol], x, y) if symbol in gradients else 0.0
        assert found == pytest.approx(slopes[1], rel=2e-3, abs=2e-3)
    return True


@pytest.mark.parametrize("op", SMOOTH)
def test_derivative_of_each_operator(op: str) -> None:
    assert {row.name for row in ROWS if row.cuda.get(Type.FLOAT) and row.typing is not TABLE["lt"].typing} >= set(SMOOTH)
    operands = [X, Y] if arity(op) == 2 else [X] if arity(op) == 1 else [apply("lt", X, Y), X, Y]
    for x, y in ((0.7, 1.9), (1.3, 0.4), (2.2, 2.6)):
        assert check_derivative(apply(op, *operands), x, y)


def test_constant_factors_of_a_derivative_are_one() -> None:
    scaled = apply("tanh", apply("div", X, constant(50.0)))
    slope = apply("sub", constant(1.0), apply("mul", scaled, scaled))
    assert derivatives(apply("mul", constant(50.0), scaled))[X] is slope
    assert derivatives(apply("mul", constant(-25.0), scaled))[X] is apply("mul", slope, constant(-0.5))
    assert derivatives(apply("div", apply("mul", X, constant(3.0)), Y))[X] is apply(
        "mul", apply("div", constant(1.0), Y), constant(3.0)
    )


@pytest.mark.parametrize("op", SMOOTH)
def test_derivatives_at_kinks_and_at_zero_are_those_of_torch(op: str) -> None:
    torch = pytest.importorskip("torch")
    operands = [X, Y] if arity(op) == 2 else [X] if arity(op) == 1 else [apply("lt", X, Y), X, Y]
    expr = apply(op, *operands)
    gradients = derivatives(expr)
    namespace = TorchNamespace(torch.float64, torch.device("cpu"))
    for x, y in ((0.0, 0.0), (1.5, 1.5), (0.0, 1.0), (1.0, 0.0), (0.0, 2.0)):
        leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, y)]
        names = dict(zip("xy", leaves, strict=True))
        result = evaluate(expr, names, lambda *_: None, namespace, namespace.literal)
        expected = torch.autograd.grad(result, leaves, allow_unused=True)
        for symbol, wanted in zip((X, Y), expected, strict=True):
            found = value(gradients[symbol], x, y) if symbol in gradients else 0.0
            np.testing.assert_allclose(found, 0.0 if wanted is None else float(wanted), err_msg=f"{expr} at {x}, {y}")


def test_a_node_of_several_nested_branches_has_gradient_0_if_none_is_taken() -> None:
    branches = (
        apply(
            "where",
            apply("lt", Y, outer),
            constant(0.0),
            apply("where", apply("lt", inner, X), apply("sqrt", X), constant(0.0)),
        )
        for outer, inner in ((constant(0.0), constant(0.0)), (constant(1.0), constant(1.0)))
    )
    slope = derivatives(apply("add", *branches))[X]
    assert [value(slope, x, 2.0) for x in (-2.0, 0.25, 4.0)] == [0.0, 1.0, 0.5]


@given(floats(), st.floats(0.3, 2.5), st.floats(0.3, 2.5))
def test_derivatives_match_finite_differences(expr, x: float, y: float) -> None:
    if expr.type is Type.FLOAT:
        assume(check_derivative(expr, x, y))


@given(integers(), st.data())
def test_bounds_hold_every_value(expr, data) -> None:
    low = {n: data.draw(st.integers(-30, 30), label=n) for n in ("q", "k", "window")}
    spans = {n: (v, v + data.draw(st.integers(0, 4))) for n, v in low.items()}
    assume(not spans["window"][0] <= 0 <= spans["window"][1] or not divides_by_window(expr))
    doc = np.arange(-40, 60) // 7
    names = {n: (int(a), int(b)) for n, (a, b) in spans.items()}
    try:
        found = ranges(expr, names, {"doc": (int(doc.min()), int(doc.max()))})[expr]
    except ExpressionError:
        return
    grid = np.meshgrid(*(np.arange(a, b + 1) for a, b in spans.values()), indexing="ij")
    arrays = dict(zip(spans, grid, strict=True))
    values = np.asarray(evaluate(expr, arrays, lambda _, at: doc[np.asarray(at[0]) + 40], np))
    assert found[0] <= values.min()
    assert values.max() <= found[1]


MONOTONIC = ("add", "sub", "mul", "div", "exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "floor", "ceil", "min", "max")


def of_whole_numbers(operands):
    """Floats made of `operands` by an operator with a bound."""
    unary = st.builds(apply, st.sampled_from([op for op in MONOTONIC if arity(op) == 1]), operands)
    return unary | st.builds(apply, st.sampled_from([op for op in MONOTONIC if arity(op) == 2]), operands, operands)


leaves = st.sampled_from([apply("float", name(n, Type.INT)) for n in "qk"]) | st.sampled_from([0.0, 0.5, 3.0, 16.0, -2.0]).map(
    constant
)


@example(apply("max", apply("float", name("q", Type.INT)), constant(8886110.520507872)), 0, 0)  # 8886111 in fp32
@given(st.recursive(leaves, of_whole_numbers, max_leaves=6), st.integers(-3, 40), st.integers(0, 30))
@np.errstate(all="ignore")
def test_bounds_hold_what_fp32_makes_of_whole_numbers(expr, least: int, width: int) -> None:
    """Also the integers made of these floats, some of which are infinite."""
    torch = pytest.importorskip("torch")
    namespace = TorchNamespace(torch.float32, torch.device("cpu"))
    whole = apply("int", expr)
    assume(not isinstance(whole, Const))
    found = ranges(whole, dict.fromkeys("qk", (least, least + width)), {})
    grid = np.meshgrid(*(np.arange(least, least + width + 1, dtype=np.int32),) * 2, indexing="ij")
    arrays = {n: torch.from_numpy(a).flatten() for n, a in zip("qk", grid, strict=True)}
    values = {
        n: np.broadcast_to(evaluate(n, arrays, lambda *_: None, namespace, namespace.literal), (grid[0].size,))
        for n in walk(whole)
    }
    is_number = ~np.any(
        [np.isnan(v) for v in values.values()], axis=0
    )  # torch's min and max of NaN are NaN, a kernel's are not
    for node in (whole, expr):
        low, high = found[node]
        if (low, high) != (-np.inf, np.inf):
            of_numbers = values[node][is_number]
            assert np.all(low <= of_numbers), expr
            assert np.all(of_numbers <= high), expr


def test_a_branch_is_bounded_under_its_condition() -> None:
    """T5's buckets: the logarithm is that of distances from 8 on, and the distances are those below 8."""
    distance = apply("abs", apply("sub", name("k", Type.INT), name("q", Type.INT)))
    logarithm = apply("div", apply("log", apply("div", distance, constant(8.0))), constant(2.772588722239781))
    far = apply("min", apply("add", constant(8), apply("int", apply("mul", logarithm, constant(8.0)))), constant(15))
    names = dict.fromkeys("qk", (0, 2**29 - 1))
    for condition, branches in (
        (apply("lt", distance, constant(8)), (distance, far)),
        (apply("not", apply("or", apply("ge", distance, constant(8)), apply("ge", X, Y))), (distance, constant(0))),
        (apply("gt", constant(8), distance), (distance, far)),
        (apply("ge", distance, constant(8)), (far, distance)),
    ):
        bucket = apply("where", condition, *branches)
        found = ranges(bucket, names, {})
        assert found[bucket] == (0, 7 if constant(0) in branches else 15)
        assert found[distance] == (0, 2**29 - 1)  # its range in other uses
    assert ranges(apply("where", apply("lt", X, Y), distance, constant(0)), names, {})[distance] == (0, 2**29 - 1)


def test_every_row_has_every_column() -> None:
    with pytest.raises(TypeError, match="derivative"):
        type(ROWS[0])(name="x", typing=ROWS[0].typing, cuda={}, array=lambda xp: xp, bounds=ROWS[0].bounds)
    assert len(TABLE) == len(ROWS)


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("add", (constant(True), constant(1)), "takes numbers"),
        ("and", (constant(1), constant(True)), "takes truth values"),
        ("mod", (constant(1.5), constant(2)), "takes integers"),
        ("where", (constant(1), constant(1), constant(2)), "condition"),
        ("floordiv", (constant(1), constant(0)), "by zero"),
        ("exp", (constant(1.0), constant(1.0)), "takes 1 operand"),
    ],
)
def test_meaningless_operands_are_refused(op: str, args, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        apply(op, *args)


def test_constants_fold_as_python_computes() -> None:
    assert apply("floordiv", constant(-7), constant(2)) is constant(-4)
    assert apply("mod", constant(-7), constant(2)) is constant(1)
    assert apply("div", constant(1), constant(4)) is constant(0.25)
    assert apply("where", constant(True), X, Y) is X


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_become_integers_of_32_bits(dtype: str) -> None:
    """fp32 does not have 2^31 - 1; fp16 does not have 2^31."""
    torch = pytest.importorskip("torch")
    x = np.array([np.inf, -np.inf, np.nan, 3.9, -3.9, 60000.0], dtype)
    meant = [2**31 - 1, -(2**31), 0, 3, -3, 60000]
    expr = apply("int", name("x", Type.FLOAT))
    assert evaluate(expr, {"x": x}, lambda *_: None, np).tolist() == meant
    namespace = TorchNamespace(torch.float32, torch.device("cpu"))
    assert evaluate(expr, {"x": torch.from_numpy(x)}, lambda *_: None, namespace).tolist() == meant
    assert [apply("int", constant(float(one))).value for one in x] == meant  # type: ignore[attr-defined]


def test_equal_expressions_are_one_object() -> None:
    assert apply("add", X, Y) is apply("add", X, Y)
    assert constant(1) is not constant(1.0)


def test_floats_of_indices_are_as_exact_as_the_computation() -> None:
    """In fp32, 0.7 * 200 is wrong by 5e-6, in an oracle as in a kernel: bounds of errors follow from it."""
    (spec,) = load_text("attention a { dtype bf16 head_dim 16 score s + sin(0.7 * q) mask k < 30 output lse }")
    problem = sample(spec, Shape(1, 1, 1, 207, 40), 0)
    exact, single = (numpy_attention(spec, problem, compute=compute) for compute in (np.float64, np.float32))
    assert 2e-6 < np.abs(single.lse - exact.lse).max() < 2e-5
