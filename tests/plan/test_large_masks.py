"""Masks and scores of hundreds and thousands of operations: planned and printed in time that grows with their size alone."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

import attngen
from attngen.device.emulated import EmulatedDevice
from attngen.diagnostics import DiagnosticError
from attngen.emit.emitter import emit
from attngen.keywords import ScheduleName
from attngen.language import load_text
from attngen.plan import ARCHES, PlanRefusal
from attngen.plan.block_map import EMPTY, PARTIAL, classify_tiles
from attngen.plan.code_size import INLINED_UP_TO
from attngen.plan.facts import facts_of
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.tile_intervals import LARGEST, MOST_DIVISIONS, MOST_VECTORS
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import MAX_DEPTH, MAX_SIZE, Type, constant, intern_apply
from attngen.spec.operator import either
from tests import tiers
from tests.harness import call
from tests.plan.test_planning_cost import calls


def joined(op: str, terms: list[str]) -> str:
    """`terms` joined as a balanced tree."""
    while len(terms) > 1:
        terms = [f"({f' {op} '.join(terms[i : i + 2])})" for i in range(0, len(terms), 2)]
    return terms[0]


def windows(count: int) -> str:
    return joined("or", [f"(q - k >= {9 * i} and q - k < {9 * i + 4})" for i in range(count)])


def spec_of(text: str) -> AttentionSpec:
    (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 {text} }}")
    return spec


LARGE = {
    "1000 windows under a causal mask": f"mask causal and {windows(1000)}",
    "400 affine terms": f"mask {joined('+', [f'{i % 9 + 1} * min(q, {i})' for i in range(400)])} >= 3 * k",
    "400 wheres": f"score {joined('+', [f'where(q - k > {i}, s, s + {i}.0)' for i in range(400)])}",
    "nested wheres": f"mask {''.join(f'where(q - k > {i}, q % {i + 2} == 0, ' for i in range(90))}true{')' * 90}",
    "nested negations": f"mask {'not (' * 60}{windows(70)}{')' * 60}",
    "300 elements": f"input t: int32[kv_len] mask {joined('or', [f't[q] + {i} == t[k]' for i in range(300)])}",
    "products": f"mask {joined('or', [f'min(abs(q - k), 3) * min(abs(q - {i}), 3) * min(k, {i}) > 2' for i in range(150)])}",
}


SOLVED = ("400 affine terms",)  # a number of each row, with which a pair is compared


@pytest.mark.parametrize("name", tiers.cases(LARGE, quick=["400 wheres", "300 elements"]))
def test_large_texts_are_planned_and_printed(name: str) -> None:
    spec = spec_of(LARGE[name])
    assert (facts_of(spec).pair_cost > INLINED_UP_TO) == (name not in SOLVED)
    plan = choose(spec, ARCHES["sm_90a"])
    assert plan.keyword == ("hopper" if name in SOLVED else "fused")
    bounds = plan.bounds
    assert all(e.size <= LARGEST + 8 for e in (bounds.begin, bounds.end, bounds.may, bounds.must))
    text = emit(spec, plan).text
    kind = "float score" if spec.mask is None else "bool mask"
    assert (f"__noinline__ {kind}(" in text) == (name not in SOLVED)  # one copy, not one for each of a thread's pairs
    assert len(text) < 400_000


SEVERAL_TENSORS = " ".join(f"input d{i}: int32[batch, kv_len]" for i in range(60))
SAME_DOCUMENTS = f"{SEVERAL_TENSORS} mask {joined('and', [f'd{i}[b, q] == d{i}[b, k]' for i in range(60)])}"
SINES = f"sink {joined('+', [f'sin(float(h) + {i}.0)' for i in range(500)])}"


@pytest.mark.parametrize(("schedule", "body"), [("naive", SINES), ("fused", "score s + sin(s)")])
def test_dear_functions_are_in_a_file_once(schedule: ScheduleName, body: str) -> None:
    """A sine has a branch and a loop for large arguments: the compiler takes 20 s for one in each pair, minutes for 3,000."""
    text = emit(spec_of(body), choose(spec_of(body), ARCHES["sm_80"], schedule)).text
    assert len(re.findall(r"\bsinf\(", text)) == 1
    assert "__noinline__ float called_sin(float x)" in text


def test_many_captured_vectors_have_few_ranges_and_a_mask_that_is_called() -> None:
    """Each range is a kernel of its own."""
    spec = spec_of(SAME_DOCUMENTS)
    source = emit(spec, choose(spec, ARCHES["sm_80"], "fused"))
    assert len(source.kernels) == 1 + MOST_VECTORS
    assert "__noinline__ bool mask(" in source.text


@pytest.mark.parametrize("body", ["score s + sin(s)", f"score {joined('+', [f'{i}.5 / (s + {i}.25)' for i in range(8)])}"])
def test_hopper_leaves_pairs_of_much_code_to_fused(body: str) -> None:
    """One sine in each pair takes the compiler 20 s."""
    assert choose(spec_of(body), ARCHES["sm_90a"]).keyword == "fused"


def test_functions_of_pairs_share_what_may_be_inlined() -> None:
    """A mask, a score and its derivative that are inlined one by one are not, if they cost too much together."""
    terms = joined("+", [f"where(q - k > {i}, s * {i}.5, s)" for i in range(15)])
    spec = spec_of(f"mask {windows(15)} score {terms}")
    assert facts_of(spec, ("q", "k", "v")).pair_cost > INLINED_UP_TO
    text = backward_text(spec)
    assert "__forceinline__ float score(" in text
    assert "__noinline__ float score_derivative(" in text


def backward_text(spec: AttentionSpec) -> str:
    return emit(spec, choose(spec, ARCHES["sm_80"], "fused", wanted=("q", "k", "v"), deterministic=False)).text


@pytest.mark.parametrize("term", ["where(q - k > {i}, s * {i}.5, s)", "where(q - k > {i}, tanh(s) * {i}.5, 0.0)"])
def test_a_score_that_is_used_often_has_a_derivative(term: str) -> None:
    """Deeper than Python's stack: each use adds a term, and each term has a branch in which it is 0."""
    spec = spec_of(f"score {joined('+', [term.format(i=i) for i in range(400)])}")
    assert len(backward_text(spec)) < 400_000


@pytest.mark.parametrize(
    "step", ["d{j}(tanh(x) * x)", "d{j}(where(q > {i}, x * 1.5, x + 1.0))", "where(q > {i}, d{j}(x) * 1.5, d{j}(x) + 1.0)"]
)
def test_derivatives_share_what_their_expression_shares(step: str) -> None:
    """Each definition uses another one or its argument twice: as a tree, the derivative has millions of nodes."""
    definitions = " ".join(f"def d{i}(x) = {step.format(i=i, j=i - 1)}" for i in range(1, 10))
    assert len(backward_text(spec_of(f"def d0(x) = x {definitions} score d9(s)"))) < 400_000


def test_accepted_specs_cannot_become_too_large_later() -> None:
    """Floats of indices by steps have more nodes than those that were written: here more than a text may have."""
    squares = " ".join(f"def f{i}(x) = {f'f{i - 1}(x * x)' if i else 'x'}" for i in range(12))
    spec = spec_of(f"{squares} score f11(s + float(q - k))")
    assert 10_000 < spec.score.size < MAX_SIZE
    assert emit(spec, choose(spec, ARCHES["sm_80"], "fused")).text


def test_gradients_that_cost_too_much_are_refused_with_words() -> None:
    inputs = " ".join(f"input t{i}: fp32[heads]" for i in range(60))
    spec = spec_of(f"{inputs} score {joined('+', [f'tanh(s * t{i}[h])' for i in range(60)])}")
    assert choose(spec, ARCHES["sm_80"], "fused", wanted=("q",), deterministic=False)
    with pytest.raises(DiagnosticError, match="the gradient would take compilers too long") as error:
        choose(spec, ARCHES["sm_80"], "fused", wanted=tuple(f"t{i}" for i in range(60)), deterministic=False)
    assert "request fewer gradients" in str(error.value)


def test_bounds_with_many_divisions_are_dropped() -> None:
    """Bounds of a tile contain few divisions, also for 100 terms that divide by a param: the compiler takes 20 s for all."""
    terms = [f"(q + {i}) // n >= (k + {i}) // n" for i in range(100)]
    few, many = (mask_bounds(spec_of(f"param n: int mask {joined('and', terms[:count])}")) for count in (8, 100))
    assert repr(few.may).count("floordiv") > 8
    assert repr(many.may).count("floordiv") < 2 * MOST_DIVISIONS


def test_the_work_grows_with_the_size_alone() -> None:
    def work(count: int) -> int:
        spec = spec_of(f"mask {windows(count)}")
        return calls(lambda: emit(spec, choose(spec, ARCHES["sm_80"], "fused")))

    work(1)  # templates are read
    assert work(120) < 6 * work(30)


def test_terms_that_are_too_large_leave_the_bounds_of_others() -> None:
    """A union of 1000 windows is not analyzed, but its causal conjunct is."""
    names = {"b": 0, "h": 0, "q_len": 256, "kv_len": 256, "batch": 1, "q_heads": 1, "kv_heads": 1}
    kinds = classify_tiles(mask_bounds(spec_of(LARGE["1000 windows under a causal mask"])), 64, 64, names)
    assert np.array_equal(kinds != EMPTY, np.tril(np.ones((4, 4), bool)))


def test_a_moderate_union_is_classified_as_brute_force_does() -> None:
    names = {"b": 0, "h": 0, "q_len": 40, "kv_len": 40, "batch": 1, "q_heads": 1, "kv_heads": 1}
    kinds = classify_tiles(mask_bounds(spec_of(f"mask {windows(180)}")), 2, 2, names)
    distance = np.subtract.outer(np.arange(40), np.arange(40))
    allowed = ((distance >= 0) & (distance % 9 < 4)).reshape(20, 2, 20, 2).swapaxes(1, 2)
    some, every = allowed.any((2, 3)), allowed.all((2, 3))
    assert np.array_equal(kinds != EMPTY, some)
    assert not (every & (kinds == EMPTY)).any()
    assert not (~every & (kinds > PARTIAL)).any()


def test_a_mask_that_is_not_inlined_is_right() -> None:
    spec = spec_of(f"mask {windows(90)}")
    problem = sample(spec, Shape(1, 1, 1, 150, 150))
    compiled = attngen.compile(spec, kernel="fused", device=EmulatedDevice(checked=True))
    assert compare(*call(compiled, problem), truth(spec, problem)).passed


@pytest.mark.parametrize("schedule", ["wgmma", "hopper"])
def test_schedules_that_inline_all_code_of_pairs_say_how_much_they_take(schedule: str) -> None:
    with pytest.raises(PlanRefusal, match=f"at most {INLINED_UP_TO}"):
        choose(spec_of(f"mask {windows(90)}"), ARCHES["sm_90a"], schedule)


def test_a_mask_as_deep_as_any_is_planned() -> None:
    """A chain of alternatives, as Python code may join them one by one."""
    terms = [spec_of(f"mask q - k == {i}").mask for i in range(2 * MAX_DEPTH - 10)]
    spec = attngen.define(dtype="fp16", head_dim=64, mask=lambda b, h, q, k: q >= k)
    deep = reduce(either, [t for t in terms if t is not None])
    assert choose(replace(spec, mask=deep), ARCHES["sm_80"]).bounds.per_tile


def test_sums_of_any_depth_are_solved() -> None:
    """Deeper than Python's stack: q + 1 + 1 + ... >= k."""
    (spec,) = load_text("attention t { dtype fp16 head_dim 64 mask q >= k }")
    assert spec.mask is not None
    q, k = spec.mask.args
    deep = reduce(lambda total, _: intern_apply("add", Type.INT, (total, constant(1))), range(2000), q)
    bounds = mask_bounds(replace(spec, mask=intern_apply("ge", Type.BOOL, (deep, k))))
    assert repr(bounds.end) == "min(kv_len, add(q.hi, 2001))"


def test_elements_times_an_index_have_bounds_that_fit() -> None:
    spec = spec_of("input t: int32[kv_len] mask causal and t[min(2 * q, kv_len - 1)] * k > 5")
    assert "kv_range" in emit(spec, choose(spec, ARCHES["sm_80"])).text
