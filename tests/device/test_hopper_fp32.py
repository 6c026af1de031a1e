"""The Hopper schedule for fp32: three terms of bf16 for each number, six products of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.device.cuda.compiler import compile_text
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.plan.plan import PlanRefusal
from attngen.plan.problem import Problem
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Draw, Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import differentiable
from tests import tiers
from tests.harness import call, compared, compiled, run, spills, wrong_gradients

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal", "lse": True},
    "heads of 128": {"head_dim": 128, "head_dim_v": 128, "mask": "causal_bottom_right"},
    "soft-capped heads of 128": {"head_dim": 128, "head_dim_v": 128, "score": "softcap(5.0)", "lse": True},
    "heads of 72 and 24": {"head_dim": 72, "head_dim_v": 24, "mask": "causal"},
    "a scale of the call": {"params": {"size": ("float", 0.3)}, "scale": "size", "lse": True},
    "window": {"mask": "causal and window(70)"},
    "documents": {"inputs": {"ids": ("int32", ("batch", "places"))}, "mask": "same_document(ids)", "lse": True},
    "alibi": {"inputs": {"z": ("fp32", ("heads",))}, "score": "alibi(z)", "mask": "causal"},
    "bias and sink": {
        "inputs": {"bias": ("fp32", ("heads", "q_len", "kv_len")), "z": ("fp32", ("heads",))},
        "score": "s + bias[h, q, k]",
        "sink": "z[h]",
        "lse": True,
    },
    "keys' bias": {"inputs": {"bias": ("fp32", ("batch", "kv_len"))}, "score": "s + bias[b, k]"},
    "classified": {"mask": "(q - k) % 3 != 0 or q == k"},
    "sigmoid": {"normalize": "sigmoid", "mask": "causal"},
    "dropout": {"dropout": 0.2, "mask": "causal"},
}
SHAPES = ((133, 300), (3, 5), (300, 129), (1, 128))


def of_fp32(form: str = "plain", **more: Any) -> AttentionSpec:
    return attngen.define(**({"dtype": "fp32", "head_dim": 64, "head_dim_v": 64} | FORMS[form] | more))


@pytest.mark.parametrize("form", tiers.cases([*FORMS], quick=["causal"]))
def test_against_the_oracle(form: str) -> None:
    """Lengths around tiles, grouped heads."""
    spec = of_fp32(form)
    for q_len, kv_len in SHAPES:
        found = run(spec, "hopper", with_free_sizes(spec, Shape(2, 4, 2, q_len, kv_len), {"places": 300}), arch="sm_90a")
        assert found.passed, (q_len, kv_len, found)


# A statement of the kernel, without one of the products of smaller terms, or with fewer terms of a number
DROPPED = {
    "a smallest term of Q": ("int of_q = TERMS - 1 - term; of_q", "int of_q = max(1, TERMS - 1 - term); of_q"),
    "a smallest term of P": ("int of_p = TERMS - 1 - term; of_p", "int of_p = max(1, TERMS - 1 - term); of_p"),
    "the middle terms of Q and K": ("int of_q = TERMS - 1 - term; of_q", "int of_q = term == 1 ? 2 : TERMS - 1 - term; of_q"),
    "the smallest terms": (
        "return {pack(low_rest - low_of(second), high_rest - high_of(second)), second, first};",
        "return {0, second, first};",
    ),
}


def altered(kernel: CompiledAttention, own: str, other: str) -> CompiledAttention:
    text = kernel.source.text
    assert text.count(own) == 1, own
    program = replace(kernel.source, text=text.replace(own, other))
    return CompiledAttention(kernel.spec, kernel.plan, kernel.device.compile(program), kernel.device)


def smaller_terms() -> Sample:
    """Elements whose smaller terms have one sign, of keys that two kinds of values belong to: no error cancels."""
    rows, keys = np.arange(64)[:, None] / 64, np.arange(192)[:, None] % 2
    more = 0.45 * (2.0**-8 + 2.0**-17)
    ones = np.ones((1, 1, 1, 64))
    q, k, v = (
        0.25 * (1 + more * (1 + rows) / 2) * ones,
        np.where(keys, 0.5, 1 + more) * ones,
        (6 * keys - 3) * (1 + more) * ones,
    )
    return Sample(*(t.astype(np.float32) for t in (q, k, v)), {})


@pytest.mark.parametrize("term", tiers.cases([*DROPPED], quick=["a smallest term of P"]))
def test_each_product_of_terms_is_needed(term: str) -> None:
    """Errors of the kernel as it is are a quarter of those without one of its products."""
    kernel, problem = compiled(of_fp32(), "hopper", "sm_90a"), smaller_terms()
    expected = numpy_attention(kernel.spec, problem).output
    errors = [np.abs(call(k, problem)[0] - expected).max() for k in (kernel, altered(kernel, *DROPPED[term]))]
    assert 4 * errors[0] < errors[1], errors


@pytest.mark.quick
def test_errors_are_those_of_fp32() -> None:
    """At most those of the same computation by numpy in fp32."""
    for form in ("plain", "heads of 128"):
        kernel = compiled(of_fp32(form), "hopper", "sm_90a")
        problem = sample(kernel.spec, Shape(1, 2, 2, 64, 500))
        exact, in_fp32 = (numpy_attention(kernel.spec, problem, compute=c).output for c in (np.float64, np.float32))
        assert np.abs(call(kernel, problem)[0] - exact).max() <= np.abs(in_fp32 - exact).max(), form


def special(number: float, tensor: str) -> Sample:
    problem = sample(of_fp32(), Shape(1, 1, 1, 70, 130))
    arrays = {"q": problem.q.copy(), "k": problem.k.copy(), "v": problem.v.copy()}
    arrays[tensor][0, 0, 9, 5] = number
    return replace(problem, **arrays)


@pytest.mark.parametrize(
    "number", tiers.cases([np.inf, -np.inf, np.nan, 3.4e38, -3.4028235e38, 1e-38, 1e-44], quick=[np.inf, 3.4e38])
)
def test_numbers_of_any_size(number: float) -> None:
    """As numpy has them in fp32: a score of -inf is a weight of 0, one value of infinity makes a column infinite, and what is
    finite stays finite."""
    kernel = compiled(of_fp32(), "hopper", "sm_90a")
    # O is divided by the sum of weights in the end: before, the largest values of V exceed fp32
    for tensor in "qk" if 1e38 < abs(number) < np.inf else "qkv":
        problem = special(number, tensor)
        with np.errstate(all="ignore"):
            # by einsum: a product by BLAS makes NaN of all rows that share a block with infinity
            s = np.einsum("bhqd,bhkd->bhqk", problem.q, problem.k) * np.float32(0.125)
            p = np.exp(s - s.max(-1, keepdims=True))
            expected = np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), problem.v)
        found = call(kernel, problem)[0]
        assert np.array_equal(np.isnan(found), np.isnan(expected)), tensor
        usual = np.abs(expected) < 1e30
        assert np.allclose(found[usual], expected[usual], rtol=1e-4, atol=1e-5), tensor
        large = ~usual & ~np.isnan(expected)
        assert np.allclose(found[large], expected[large], rtol=1e-4), tensor


def test_small_numbers_lose_what_bf16_has_not() -> None:
    """Terms are multiples of 2^-133: each number has an error of up to 2^-134, in addition to errors of fp32."""
    kernel, problem = compiled(of_fp32(), "hopper", "sm_90a"), sample(of_fp32(), Shape(1, 1, 1, 66, 100))
    of_usual = np.abs(call(kernel, problem)[0] - numpy_attention(kernel.spec, problem).output).max()
    for v in (2.0**-112, 2.0**-125, 2.0**-132):
        small = replace(problem, v=problem.v * np.float32(v))
        error = np.abs(call(kernel, small)[0] - numpy_attention(kernel.spec, small).output).max()
        assert error <= 2 * of_usual * v + 2.0**-133, v
    for q, k in ((2.0**-125, 2.0**120), (2.0**120, 2.0**-125)):
        far_apart = replace(problem, q=problem.q * np.float32(q), k=problem.k * np.float32(k))
        exact = numpy_attention(kernel.spec, far_apart).output
        # a score is a sum of 64 products, O less than twice as wrong as the scores times its values
        of_scores = 64 * 0.125 * 2.0**-134 * 2.0**120 * max(np.abs(problem.q).max(), np.abs(problem.k).max())
        assert np.abs(call(kernel, far_apart)[0] - exact).max() <= 2 * (of_usual + of_scores * np.abs(problem.v).max()), (q, k)


def test_a_maximum_that_rises_with_every_tile() -> None:
    """Scores grow with the key, so that each tile rescales what was summed, and lose nothing of lse."""
    spec = of_fp32(params={"slope": ("float", 0.05)}, score="s + slope * k", lse=True)
    kernel, problem = compiled(spec, "hopper", "sm_90a"), sample(spec, Shape(1, 2, 1, 65, 700))
    for slope in (0.05, -0.05, 3.0):
        found = compared(kernel, problem, slope=slope)
        assert found.passed, (slope, found)


DIFFERENTIATED = ("causal", "bias and sink", "alibi", "a scale of the call", "classified", "dropout", "sigmoid")


@pytest.mark.parametrize("form", tiers.cases(DIFFERENTIATED, quick=[]))
def test_gradients_read_what_it_saves(form: str) -> None:
    """Those by auto, of a backward of another schedule: of scores of any size, lse has what the backward's weights need."""
    spec = of_fp32(form)
    kernel, wanted = compiled(spec, "auto", "sm_90a"), ("q", "k", "v", *differentiable(spec))
    assert kernel.saving().plan.schedule.name == "hopper_fp32"
    assert kernel.gradients(wanted).plan.schedule.name == "fused_mma_backward"
    for shape in (Shape(1, 2, 1, 70, 97), Shape(1, 1, 1, 1, 130)):
        for draw in (Draw(), Draw(magnitude=25.0), Draw(scores="equal"), Draw(scores="huge")):
            assert not wrong_gradients(kernel, sample(spec, shape, 3, draw), wanted), (shape, draw)


@pytest.mark.parametrize("head_dim", tiers.cases([64, 128], quick=[]))
@pytest.mark.parametrize("form", tiers.cases([*FORMS], quick=[]))
def test_it_compiles_without_spills(form: str, head_dim: int) -> None:
    plan = choose(of_fp32(form, head_dim=head_dim, head_dim_v=head_dim), ARCHES["sm_90a"], "hopper")
    found = compile_text(emit(plan.facts.spec, plan))
    assert not found.is_serialized
    assert not any(spills(kernel) for kernel in found.resources()), found.resources()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"head_dim": 136}, "at most 128 elements"),
        ({"normalize": "none"}, "cut off towards 0"),
        ({"dtype": {"q": "fp32", "k": "fp32", "v": "fp32", "o": "bf16"}}, "Q, K, V and O have this type"),
        ({"inputs": {"x": ("fp32", ("kv_len",))}, "v_scale": "x[k]"}, "multiplies no weights by a scale of V"),
        ({"inputs": dict.fromkeys(("c1", "s1"), ("fp32", ("rows", 16))), "rotary": "32 halves by c1, s1"}, "not rotated"),
        ({"storage": "packed"}, "only dense ones are"),
        ({"storage": "paged", "page_size": 16}, "only dense ones are"),
    ],
)
def test_what_it_lacks_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanRefusal, match=f"(?s){says}"):
        choose(of_fp32(**settings), ARCHES["sm_90a"], "hopper")


def test_auto_takes_it_but_for_short_rows() -> None:
    assert choose(of_fp32(), ARCHES["sm_90a"]).schedule.name == "hopper_fp32"
    for mask, longest in ((None, 192), ("causal", 384)):
        lengths = (Problem(heads=8, rows=n, keys=n, multiprocessors=132) for n in (longest, longest + 1))
        taken = [choose(of_fp32(mask=mask), ARCHES["sm_90a"], None, of_call).keyword for of_call in lengths]
        assert taken == ["fused", "hopper"], mask
