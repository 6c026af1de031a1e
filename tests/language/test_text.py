"""Texts of the language that are accepted, and their specs; tests/diagnostics has those that are refused."""

from __future__ import annotations

import re

import pytest

from attngen.diagnostics import DiagnosticError
from attngen.emit.emitter import emit
from attngen.language import load_text, to_text
from attngen.plan.arch import ARCHES
from attngen.schedules import choose
from attngen.spec.obligations import check_obligations

HEAD = "dtype fp16 head_dim 64"


@pytest.mark.parametrize("title", ["b", "h", "q", "k", "s", "batch", "heads", "V", "out"])
def test_an_attention_may_have_the_name_of_an_index_a_size_or_a_tensor(title: str) -> None:
    (spec,) = load_text(f"attention {title} {{ {HEAD} mask causal }}")
    assert load_text(to_text(spec)) == (spec,)
    assert f"{title}_fused(" in emit(spec, choose(spec, ARCHES["sm_80"], "fused")).text


def test_as_many_key_value_heads_as_query_heads_need_no_second_number() -> None:
    assert load_text(f"attention a {{ {HEAD} heads 8 }}") == load_text(f"attention a {{ {HEAD} heads 8 over 8 }}")


@pytest.mark.parametrize("score", ["s / 0", "tanh(s / 0.0)", "s * 3e38", "softcap(0.0)"])
@pytest.mark.parametrize(("arch", "schedule"), [("sm_80", "fused"), ("sm_90a", "hopper")])
def test_a_constant_that_the_scale_cannot_take_stays_in_the_score(score: str, arch: str, schedule: str) -> None:
    (spec,) = load_text(f"attention a {{ {HEAD} score {score} }}")
    assert emit(spec, choose(spec, ARCHES[arch], schedule)).text


def test_as_many_mistakes_as_there_are_statements() -> None:
    wrong = "".join(f"  def f{i} = q && k\n" for i in range(12))
    with pytest.raises(DiagnosticError) as caught:
        load_text(f"attention a {{ {HEAD}\n{wrong}\n  mask cusal\n}}")
    assert [d.code for d in caught.value.diagnostics] == ["E008"] * 12 + ["E201"]


@pytest.mark.parametrize(
    ("written", "help"), [("mask None", "leave the statement out"), ("param n: float = nan", "write a number")]
)
def test_what_has_no_value_is_not_to_be_declared(written: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        load_text(f"attention a {{ {HEAD} {written} }}")
    (mistake,) = caught.value.diagnostics
    assert help in str(mistake)
    assert "declare" not in str(mistake)


def test_a_skipped_statement_has_no_consequences() -> None:
    with pytest.raises(DiagnosticError) as caught:
        load_text("attention a {\n  dtype: fp16\n  head_dim 64\n  input x: fp32(heads)\n  score s + x[h]\n}")
    assert [d.span.line for d in caught.value.diagnostics if d.span] == [2, 4]


@pytest.mark.parametrize("name", ["NULL", "linux", "NAN"])
def test_a_refused_name_is_one_mistake(name: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        load_text(f"attention a {{ {HEAD} input {name}: fp32[heads] score s + {name}[h] }}")
    assert [d.code for d in caught.value.diagnostics] == ["E112"]


@pytest.mark.parametrize(
    "far",
    [
        "min(8 + int(log(n / 8.0) / log(16.0) * 8.0), 15)",  # as T5's authors wrote it
        "8 + clamp(int(log(n / 8.0) / log(16.0) * 8.0), 0, 7)",
        "int(clamp(8.0 + log(n / 8.0) / log(16.0) * 8.0, 8.0, 15.0))",
        "8 + int(min(log(max(n, 8) / 8.0) / log(16.0), 0.99) * 8.0)",
    ],
)
def test_the_index_of_a_logarithm_is_inside_if_a_clamp_says_so(far: str) -> None:
    declared = f"{HEAD} input table: fp32[heads, 16] def n = abs(k - q)"
    (spec,) = load_text(f"attention a {{ {declared} score s + table[h, where(n < 8, n, {far})] }}")
    sizes = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 3000, "kv_len": 5000}
    check_obligations(spec, sizes, {})


def test_each_tensor_may_have_an_element_type_of_its_own() -> None:
    (stated,) = load_text("attention a { dtype q bf16  v fp8_e4m3  k fp8_e5m2  head_dim 64 }")
    assert {t: d.name for t, d in stated.dtypes.items()} == {"q": "bf16", "k": "fp8_e5m2", "v": "fp8_e4m3", "o": "bf16"}
    (alike,) = load_text("attention a { dtype q fp16 k fp16 o fp16 head_dim 64 }")
    assert (alike,) == load_text("attention a { dtype fp16 head_dim 64 }")


@pytest.mark.parametrize(
    ("dtype", "says", "position"),
    [
        ("k fp16", "no `dtype q`", (1, 15)),
        ("q fp16 k fp16 k bf16", "`dtype k` is given twice", (1, 35)),
        ("q fp16 o fp8_e4m3", "not an element type of O", (1, 30)),
        ("q fp16 k fp8_e4m3fn", "did you mean `fp8_e4m3`", (1, 30)),
        ("fp8_e4m3", "not an element type of Q, K and V", (1, 21)),
        ("q int32", "not an element type of Q", (1, 23)),
    ],
)
def test_mistakes_in_the_element_type_of_a_tensor(dtype: str, says: str, position: tuple[int, int]) -> None:
    with pytest.raises(DiagnosticError, match=re.escape(says)) as refused:
        load_text(f"attention a {{ dtype {dtype} head_dim 64 }}")
    (found,) = refused.value.diagnostics
    assert (found.span.line, found.span.column) == position
