"""A spec defined in Python equals the spec of the corresponding text."""

from __future__ import annotations

import pickle
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import where
from attngen.diagnostics import DiagnosticError
from attngen.language import load_text
from attngen.language.prelude import prelude
from attngen.language.trace import TraceError
from attngen.spec.expr import constant

table = np.arange(10, dtype=np.float32)
document = np.zeros((2, 50), np.int32)
doubles = np.zeros(50)
WINDOW = 128


def body_of(text: str, declarations: str = ""):
    (spec,) = load_text(f"attention attention {{ dtype fp16 head_dim 64 {declarations} {text} }}")
    return spec


def causal(b, h, q, k):
    return q >= k


def test_a_function_is_its_text() -> None:
    assert attngen.define(mask=causal) == body_of("mask causal") == attngen.define(mask="causal")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda b, h, q, k: (q >= k) & (q - k < WINDOW), "mask q >= k and q - k < 128"),
        (lambda b, h, q, k: (q >= k) | ~(k > 5), "mask q >= k or not k > 5"),
        (lambda b, h, q, k: q > 3, "mask q > 3"),
        (lambda b, h, q, k: (q - k) % 4 == 0, "mask (q - k) % 4 == 0"),
        (lambda b, h, q, k: abs(q - k) // 2 != 3, "mask abs(q - k) // 2 != 3"),
        (lambda b, h, q, k: max(q, k, 7) > min(q, k), "mask max(max(q, k), 7) > min(q, k)"),
    ],
)
def test_masks(function, text: str) -> None:
    assert attngen.define(mask=function) == body_of(text)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, b, h, q, k: 30.0 * attngen.tanh(s / 30.0), "score 30.0 * tanh(s / 30.0)"),
        (lambda s, b, h, q, k: where(q >= k, s, -1e4), "score where(q >= k, s, -10000.0)"),
        (lambda s, b, h, q, k: s - 0.5 * (q - k), "score s - 0.5 * (q - k)"),
        (lambda s, b, h, q, k: s**2, "score s * s"),
        (lambda s, b, h, q, k: -s + float(q), "score -s + float(q)"),
    ],
)
def test_scores(function, text: str) -> None:
    assert attngen.define(score=function) == body_of(text)


@pytest.mark.parametrize("name", prelude())
def test_names_of_the_prelude_in_python(name: str) -> None:
    """They are functions, or their absence says what to write."""
    if name == "clamp":
        assert attngen.define(score=lambda s, b, h, q, k: attngen.clamp(s, -2.0, 3.0)) == body_of("score clamp(s, -2.0, 3.0)")
        assert name in dir(attngen)
        with pytest.raises(attngen.TraceError, match="clamp needs a least"):
            attngen.define(score=lambda s, b, h, q, k: attngen.clamp(s))
        return
    with pytest.raises(AttributeError, match=f"'{name}': it reads s or indices.*write {re.escape(prelude()[name].text)}$"):
        getattr(attngen, name)


def test_globals_and_closures_are_captured() -> None:
    slopes = np.ones(4, np.float32)
    spec, captured = attngen.traced(score=lambda s, b, h, q, k: s + slopes[h] * table[where(q > k, 9, 0)])
    assert spec == body_of("score s + slopes[h] * table[where(q > k, 9, 0)]", "input slopes: fp32[4] input table: fp32[10]")
    assert captured["slopes"] is slopes
    assert captured["table"] is table


@pytest.mark.parametrize("name", [*"sbhqk", "P", "lse", "kv_len", "atan2"])
def test_captured_arrays_may_be_called_as_words_of_the_language(name: str) -> None:
    made: dict[str, Any] = {"table": table}
    exec(f"def of({name}):\n    return lambda score, b_, h_, i, j: score + {name}[j % 10]", made)
    spec, captured = attngen.traced(score=made["of"](table))
    assert spec == body_of(f"score s + captured_{name}[k % 10]", f"input captured_{name}: fp32[10]")
    assert captured == {f"captured_{name}": table}


def test_a_captured_number_is_an_input_without_dimensions() -> None:
    temperature, steps, flag = np.array(0.5, np.float32), np.array(3, np.int32), np.array(True)
    spec, captured = attngen.traced(
        mask=lambda b, h, q, k: flag | (q - k < steps), score=lambda s, b, h, q, k: s * temperature + table[-1] + np.float32(2)
    )
    declared = "input flag: bool[] input steps: int32[] input temperature: fp32[] input table: fp32[10]"  # mask first
    assert spec == body_of("mask flag or q - k < steps[] score s * temperature + table[9] + 2.0", declared)
    assert captured["temperature"] is temperature
    assert load_text(attngen.to_text(spec)) == (spec,)


def test_arrays_of_arrays_are_indexed_one_by_one() -> None:
    bias = np.zeros((2, 4, 50), np.float32)
    spec = attngen.define(score=lambda s, b, h, q, k: s + bias[b][h, k] + sum(table))
    terms = " + ".join(f"table[{i}]" for i in range(10))
    assert spec == body_of(f"score s + bias[b, h, k] + (0 + {terms})", "input bias: fp32[2, 4, 50] input table: fp32[10]")


def test_functions_may_call_functions() -> None:
    def near(q, k):
        return q - k < 64

    spec = attngen.define(mask=lambda b, h, q, k: causal(b, h, q, k) & near(q, k))
    assert spec == body_of("mask causal and q - k < 64")


def test_declared_inputs_and_params_by_name() -> None:
    spec = attngen.define(
        mask=lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q - k < reach),  # noqa: F821
        inputs={"ids": ("int32", ("batch", "kv_len"))},
        params={"reach": ("int", 7)},
    )
    expected = body_of("mask ids[b, q] == ids[b, k] and q - k < reach", "input ids: int32[batch, kv_len] param reach: int = 7")
    assert spec == expected


def test_every_statement_has_its_keyword() -> None:
    spec = attngen.define(
        name="all", dtype="bf16", head_dim=64, head_dim_v=32, heads=(8, 2), scale=0.5, sink="sinks[h]", lse=True,
        kernel="fused", inputs={"sinks": ("fp32", ("heads",))}, tile=(64, 32), stages=2, warps=4,
    )  # fmt: skip
    (text,) = load_text("""attention all { dtype bf16 head_dim 64, v 32 heads 8 over 2 scale 0.5 input sinks: fp32[heads]
        sink sinks[h] output lse kernel fused { tile 64 x 32 stages 2 warps 4 } }""")
    assert spec == text
    assert attngen.define(scale=2).scale is constant(2.0)


def forever(b, h, q, k):
    return forever(b, h, q, k)


def test_a_param_is_its_default() -> None:
    described = attngen.define(dtype="fp16", head_dim=64, mask="q - k < n", score="s * x", params={"n": 7, "x": 0.5})
    assert [(p.name, str(p.type), p.default) for p in described.params] == [("n", "int", 7), ("x", "float", 0.5)]
    (of_numpy,) = attngen.define(dtype="fp16", head_dim=64, score="s * x", params={"x": np.float64(0.5)}).params
    assert of_numpy == described.params[1]
    with pytest.raises(DiagnosticError, match="not a type of a param"):
        attngen.define(dtype="fp16", head_dim=64, mask="q < 3 or n", params={"n": True})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, q, k: q >= k if q > 3 else k > q, "where"),
        (lambda b, h, q, k: q >= k and q < 5, "a & b"),
        (lambda b, h, q, k: 0 <= q < 5, "two comparisons"),
        (lambda b, h, q, k: [1, 2, 3][q] > 2, "not captured"),
        (lambda b, h, q, k: "yes", "cannot be part of an expression"),
        (lambda b, h, q: q > 3, "takes 3 arguments"),
        (lambda b, h, q, k: table[q, k] > 0, "1 dimension and is indexed with 2"),
        (lambda b, h, q, k: table[1:][q] > 0, "expected one integer"),
        (lambda b, h, q, k: table.max() > q, "`table.max` would be computed once"),
        (lambda b, h, q, k: doubles[k] > 0, "`doubles` has elements of float64.*Convert it"),
        (lambda b, h, q, k: k < np.array(3), "would have no effect"),
        (lambda b, h, q, k: k < int(np.array(3)), "would have no effect"),
        (lambda b, h, q, k: attngen.tanh(q > k) > 0, "takes numbers"),
        (lambda b, h, q, k: table[q * 0.5] > 0, "not int"),
        (lambda b, h, q, k: q // 0 > 1, "by zero"),
        (forever, "calls itself"),
        (print, "plain Python function"),
    ],
)
def test_what_cannot_be_traced_says_what_to_write(function, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        attngen.define(mask=function)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp8"}, "not an element type"),
        ({"dtype": np.float16}, "did you mean `fp16`"),
        ({"dtype": "torch.bfloat16"}, "did you mean `bf16`"),
        ({"head_dim": 100}, "multiple of 8"),
        ({"name": "a/b"}, "cannot be used"),
        ({"name": "float"}, "cannot be used"),
        ({"mask": "q >="}, "ends too early"),
        ({"mask": "q >= limit"}, "limit"),
        ({"mask": lambda b, h, q, k: q - k}, "truth value"),
        ({"kernel": "fast"}, "no kernel"),
        ({"heads": (32, 12)}, "cannot share"),
        ({"scale": float("nan")}, "finite"),
        ({"score": lambda s, b, h, q, k: s * 1e300}, "too large"),
        ({"tile": (700, 7)}, "out of range"),
        ({"params": {"n": ("int", 2**31)}, "mask": "q < n"}, "too large"),
        ({"params": {"n": ("int", 1.5)}, "mask": "q < n"}, "default"),
        ({"inputs": {"x": ("fp99", ("heads",))}, "score": "s + x[h]"}, "not an element type"),
        ({"inputs": {"x": ("fp32", ("heads/../..",))}, "score": "s + x[h]"}, "cannot be used"),
        ({"normalize": "softmx"}, "not a row normalization"),
    ],
)
def test_mistakes_are_the_diagnostics_of_the_text(arguments, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message) as caught:
        attngen.define(**arguments)
    assert "help: " in str(caught.value)


def test_all_mistakes_of_a_param_are_reported_at_once() -> None:
    with pytest.raises(DiagnosticError) as error:
        attngen.define(params={"n": ("int", 1.5)})
    assert [d.code for d in error.value.diagnostics] == ["E118", "E219"]  # the default's type, and that nothing reads it


def test_a_captured_name_that_generated_code_could_misread_is_refused() -> None:
    lse__ = np.ones(3, np.float32)
    with pytest.raises(DiagnosticError, match="lse__"):
        attngen.define(score=lambda s, b, h, q, k: s + lse__[h])


def test_a_loop_that_builds_too_much_is_refused() -> None:
    def deep(s, b, h, q, k):
        for _ in range(100_000):
            s = attngen.tanh(s)
        return s

    with pytest.raises((TraceError, DiagnosticError), match=r"nested too deeply|nodes"):
        attngen.define(score=deep)


@pytest.mark.parametrize(
    "step",
    [
        lambda s, q: attngen.tanh(s),
        lambda s, q: s + 1.5 * q,
        lambda s, q: -(s + q),
        lambda s, q: attngen.where(q > 1, s * 2.0, -1),
        lambda s, q: attngen.float(attngen.int(q - s)) * 0.5,
    ],
)
def test_what_is_not_too_deep_is_not_too_deep_as_text(step) -> None:
    """torch's operator gets a spec as text."""

    def deep(s, b, h, q, k, times: int):
        for _ in range(times):
            s = step(s, q)
        return s

    def accepted(times: int) -> Any:
        try:
            return attngen.define(score=partial(deep, times=times))
        except DiagnosticError:
            return None

    specs = [spec for spec in map(accepted, range(20, 200)) if spec is not None]
    assert 0 < len(specs) < 180
    assert load_text(attngen.to_text(specs[-1])) == (specs[-1],)


def test_deep_expressions_are_pickled() -> None:
    def deep(s, b, h, q, k):
        for _ in range(190):
            s = s + table[k % 10]
        return s

    spec = attngen.define(score=deep)
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("keyword", "given", "said"),
    [
        ("name", 5, "`name` is 5; expected a str"),
        ("head_dim", "64", "`head_dim` is '64'; expected a whole number"),
        ("head_dim", 64.0, "`head_dim` is 64.0; expected a whole number"),
        ("head_dim_v", True, "`head_dim_v` is True; expected a whole number"),
        ("heads", 8, "`heads` is 8; expected two whole numbers, as in heads=(8, 8)"),
        ("heads", (8, 2, 1), "expected two whole numbers"),
        ("tile", (64, 64, 2), "expected two whole numbers"),
        ("tile", (64.0, 64), "`tile` is 64.0; expected a whole number"),
        ("stages", 2.5, "`stages` is 2.5; expected a whole number"),
        ("warps", True, "`warps` is True; expected a whole number"),
        ("lse", "no", "`lse` is 'no'; expected True or False"),
        ("inputs", ["ids"], "expected a mapping from names"),
        ("inputs", {5: ("int32", ("batch",))}, "`inputs` has the key 5; expected a name"),
        ("inputs", {"ids": "int32"}, "input `ids` is 'int32'; expected (element type, dimensions)"),
        ("inputs", {"ids": ("int32", "batch")}, "expected (element type, dimensions)"),
        ("inputs", {"ids": ("int32", (3.5,))}, "`input ids` is 3.5; expected a whole number"),
        ("params", ["window"], "expected a mapping from names"),
        ("params", {"window": ("int", 1, 2)}, "expected a type, a default, or both in a pair"),
    ],
)
def test_arguments_of_other_types_are_refused_with_words(keyword: str, given: object, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        attngen.define(**{keyword: given})


def test_numpy_s_whole_numbers_are_whole_numbers() -> None:
    assert attngen.define(head_dim=np.int64(80), heads=(np.int32(8), 2)).head_dim == 80


def test_the_element_type_of_each_tensor_is_a_mapping() -> None:
    assert attngen.define(dtype={"q": "bf16", "k": "fp8_e4m3"}).dtypes["k"].name == "fp8_e4m3"
    assert attngen.define(dtype={"q": "bf16", "k": "bf16"}) == attngen.define(dtype="bf16")
    for wrong in ({"k": "fp16"}, {"q": "fp16", "w": "fp16"}):
        with pytest.raises(TypeError, match=r'expected the element types of "q"'):
            attngen.define(dtype=wrong)
    with pytest.raises(DiagnosticError, match="not an element type of O"):
        attngen.define(dtype={"q": "bf16", "o": "fp8_e5m2"})
