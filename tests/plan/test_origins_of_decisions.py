"""Who has made a decision, and which rule of lengths selects a plan."""

from __future__ import annotations

from attngen import define
from attngen.plan import ARCHES, Decision, Plan, Problem
from attngen.plan.choices import decided
from attngen.schedules import candidates, choice_of, choose, tuned_plan
from attngen.spec.attention import KernelRequest

AMPERE, HOPPER = ARCHES["sm_80"], ARCHES["sm_90a"]
SPEC = define(dtype="bf16", head_dim=64, mask="causal")
SMS = 132


def reasons(plan: Plan) -> str:
    return "\n".join(d.because for d in plan.decisions)


def test_what_a_spec_states_is_its_own_reason_and_what_tuning_finds_is_not_stated() -> None:
    stated = choose(SPEC, AMPERE, KernelRequest("fused", 64, 64, 2, 4, q="shared"))
    of_stages = next(d for d in stated.decisions if d.field == "stages")
    assert (of_stages.origin, of_stages.because.partition("; ")[0]) == ("stated", "stated in the spec")
    assert next(d for d in stated.decisions if d.field == "Q").because == "stated in the spec"
    usual = choose(SPEC, AMPERE)
    assert "stated" not in reasons(usual)
    other = next(k for k in candidates(SPEC, AMPERE) if (k.block_q, k.block_kv) != (usual.block_q, usual.block_kv))
    found = tuned_plan(usual, other, Decision("by tuning", "another tile", "it was the fastest"))
    assert found.decisions[0].field == "by tuning"
    assert "as tuned" in reasons(found)
    assert "stated in the spec" not in reasons(found)


def test_short_rows_are_the_reason_for_their_tile() -> None:
    short = choose(SPEC, HOPPER, problem=Problem(1000, 49, 49, SMS))
    assert next(d for d in short.decisions if d.field == "BLOCK_Q x BLOCK_KV").because == "for short rows"
    assert "stated in the spec" not in reasons(short)


def test_the_first_rule_that_serves_a_call_selects_its_plan() -> None:
    """Few rows, then short rows, then the fastest tile; a backward cannot read what the first saves."""
    choice = choice_of(define(dtype="bf16", head_dim=64), HOPPER)
    few, short, tile = choice.rules
    calls = {"decode": Problem(1000, 8, 4096, SMS), "fused": Problem(1000, 49, 49, SMS), "hopper": Problem(8, 4096, 4096, SMS)}
    assert {keyword: choice.at(problem).keyword for keyword, problem in calls.items()} == {k: k for k in calls}
    assert choice.at(calls["decode"], saves_lse=True).keyword == "hopper"
    assert [rule.when(calls["fused"]) is not None for rule in (few, short, tile)] == [False, True, True]
    assert {choice.has_own(problem) for keyword, problem in calls.items() if keyword != "hopper"} == {True}
    assert not choice.has_own(calls["hopper"])


def test_choices_of_a_plan_are_among_its_decisions_once() -> None:
    for arch, keyword in ((HOPPER, "hopper"), (AMPERE, "fused"), (HOPPER, "decode")):
        plan = choose(SPEC, arch, keyword)
        own = [*decided(plan.own, plan.facts)]
        assert own or keyword != "hopper"
        assert all(plan.decisions.count(d) == 1 for d in own)


def test_a_schedule_says_why_the_preferred_one_of_its_keyword_does_not_suit() -> None:
    first = choose(SPEC, ARCHES["sm_75"], "fused").decisions[0]
    assert (first.field, first.value) == ("schedule", "fused_simt")
    assert first.because.startswith("sm_75 has no cp.async")
