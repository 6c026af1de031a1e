"""A spec printed as text parses to the equal spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.diagnostics import DiagnosticError
from attngen.language import load_file, load_text, to_text
from attngen.spec.attention import AttentionSpec, Input, KernelRequest, Param, S
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES, FP8_E4M3, FP8_E5M2
from attngen.spec.expr import Expr, Type, constant, gather, inputs_in, name, names_in
from attngen.spec.operator import apply
from tests.conftest import ROOT
from tests.expressions import INDEX, attempt, booleans, integers

SLOPE = gather("slopes", Type.FLOAT, (INDEX["h"],))
INPUTS = (
    Input("doc", DTYPES["int32"], ("kv_len",)),
    Input("slopes", DTYPES["fp32"], ("q_heads",)),
    Input("table", DTYPES["bf16"], ("own", 16)),
)
PARAMS = (Param("window", Type.INT, 5), Param("cap", Type.FLOAT, 30.0), Param("free", Type.FLOAT))
TABLE_ENTRY = gather("table", Type.FLOAT, (constant(0), apply("mod", INDEX["q"], constant(16))))


OPERATORS = tuple("add sub mul div neg min max abs exp exp2 log tanh sigmoid sin pow floor where float int".split())  # noqa: SIM905


@st.composite
def scores(draw, depth: int = 3) -> Expr:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        leaves = [S, S, SLOPE, TABLE_ENTRY, name("cap", Type.FLOAT), name("free", Type.FLOAT)]
        number = st.floats(allow_nan=False, width=32).map(lambda v: constant(float(v)))
        return draw(st.sampled_from(leaves) | number | integers(1))
    op = draw(st.sampled_from(OPERATORS))
    if op == "where":
        return attempt(op, draw(booleans(depth - 1)), draw(scores(depth - 1)), draw(scores(depth - 1)))
    unary = op in ("neg", "abs", "exp", "exp2", "log", "tanh", "sigmoid", "sin", "floor", "float", "int")
    return attempt(op, *(draw(scores(depth - 1)) for _ in range(1 if unary else 2)))


@st.composite
def specs(draw) -> AttentionSpec:
    mask = draw(st.none() | booleans(3))
    score = attempt("float", draw(st.just(S) | scores()))
    sink = draw(st.none() | st.sampled_from([SLOPE, constant(-1.5)]))
    normalize = draw(st.sampled_from(["softmax", "softmax", "sigmoid", "none"]))
    scale = draw(st.sampled_from([constant(0.125), constant(1e-30), name("cap", Type.FLOAT)]))
    softmax = normalize == "softmax"
    sink = sink if softmax else None
    given = [e for e in (mask, score, sink, scale) if e is not None]
    used = names_in(*given) | inputs_in(*given)
    heads = draw(st.sampled_from([(None, None), (8, 2), (1, 1)]))
    block = draw(st.sampled_from([(None, None), (64, 32)]))
    return AttentionSpec(
        name="example",
        dtype=DTYPES[draw(st.sampled_from(["fp16", "bf16", "fp32"]))],
        head_dim=draw(st.sampled_from([8, 64, 80, 256])),
        head_dim_v=draw(st.sampled_from([8, 96])),
        scale=scale,
        q_heads=heads[0],
        kv_heads=heads[1],
        inputs=tuple(i for i in INPUTS if i.name in used),
        params=tuple(p for p in PARAMS if p.name in used),
        mask=mask,
        score=score,
        normalize=normalize,
        sink=sink,
        lse=softmax and draw(st.booleans()),
        kernel=KernelRequest(draw(st.sampled_from(["auto", "fused"])), *block, draw(st.sampled_from([None, 2]))),
        k_dtype=draw(st.sampled_from([None, None, FP8_E4M3, FP8_E5M2])),
    )


@given(specs())
def test_printing_and_parsing_gives_the_equal_spec(spec: AttentionSpec) -> None:
    try:
        check(spec)
    except DiagnosticError:  # a mask that divides by data, say: text is refused as well
        with pytest.raises(DiagnosticError):
            load_text(to_text(spec))
        return
    assert load_text(to_text(spec)) == (spec,)


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.attn")), ids=lambda p: p.stem)
def test_shipped_specs_survive(path) -> None:
    for spec in load_file(path):
        assert load_text(to_text(spec)) == (spec,)


@pytest.mark.parametrize("score", ["s * -inf", "s + (inf - inf)", "s - (q - (k - 1))", "-(-9223372036854775807 - 1) * 1.0 + s"])
def test_numbers_at_the_edge_survive(score: str) -> None:
    text = f"attention e {{ dtype fp16 head_dim 64 score {score} }}"
    try:
        (spec,) = load_text(text)
    except DiagnosticError:
        return
    assert load_text(to_text(spec)) == (spec,)


def test_a_text_is_readable() -> None:
    (spec,) = load_text("""attention e { dtype bf16 head_dim 64, v 32 heads 8 over 2
        input slopes: fp32[heads] param w: int = 7 mask (q >= k and (q - k) < w) or not (k > 3) score s+slopes[h]*(k-q) }""")
    assert (
        to_text(replace(spec, scale=constant(0.5)))
        == """attention e {
    dtype     bf16
    head_dim  64, v 32
    heads     8 over 2
    input     slopes: fp32[heads]
    param     w: int = 7
    scale     0.5
    mask      q >= k and q - k < w or not k > 3
    score     s + slopes[h] * float(k - q)
}
"""
    )
