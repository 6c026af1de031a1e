"""What `attngen list` says is complete and true: every example is a right spec, every mask is a truth value."""

from __future__ import annotations

import json
import warnings
from functools import partial

import pytest

from attngen.diagnostics import SpecWarning
from attngen.language import load_text
from attngen.language.catalogue import catalogue
from attngen.language.prelude import Documented, prelude
from attngen.language.resolve import Scope, definition_of
from attngen.language.syntax import parse
from attngen.plan.plan import DoesNotFit
from attngen.source import SourceFile
from attngen.spec import mistakes
from attngen.spec.expr import Type
from attngen.spec.mistakes.examples import EXAMPLES
from attngen.spec.obligations import ObligationError, check_obligations
from attngen.spec.operator import TABLE
from tests.conftest import ROOT
from tests.diagnostics.goldens import mistakes_of
from tests.harness import cli

ENTRIES = [(section, entry) for section, entries in catalogue().items() for entry in entries]


invoke = partial(cli, "list")


@pytest.mark.parametrize(("section", "entry"), ENTRIES, ids=lambda x: x if isinstance(x, str) else x.usage)
def test_every_entry_says_what_it_means_and_its_example_is_right(section: str, entry) -> None:
    assert entry.meaning
    assert entry.value
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)
        (spec,) = load_text(f"attention example {{ dtype fp16 head_dim 64 {entry.example} }}")
    assert entry.name in entry.example
    if section == "prelude":
        assert set(entry.arguments) == set(prelude()[entry.name].parameters)
        assert all(entry.arguments.values())
        assert (spec.mask is not None and spec.mask.type is Type.BOOL) or not entry.value.startswith("a mask")


def test_every_name_is_there() -> None:
    assert {entry.name for section, entry in ENTRIES if section == "prelude"} == set(prelude())
    assert len(ENTRIES) == len(prelude()) + len(TABLE)


def test_list_shows_one_name() -> None:
    shown = invoke("alibi").output
    assert all(part in shown for part in ("s + slopes[h] * (k - q)", "a complete score", "input slopes", "Press et al."))
    assert "aligned top-left" in " ".join(invoke("causal").output.split())
    assert "One-sided" in invoke("window(64)").output
    assert "int, int -> int" in invoke("//").output
    assert "attention gpt2 {" in invoke("gpt2").output
    unknown = invoke("softcp")
    assert (unknown.exit_code, "softcap" in unknown.output) == (2, True)


def test_json_carries_the_same() -> None:
    listed = json.loads(invoke("--json").output)
    assert all(entry["meaning"] for entries in listed.values() for entry in entries.values())
    for section, entry in ENTRIES:
        found = listed[section][entry.usage if section == "operators" else entry.name]
        assert (found["meaning"], found["example"], found["usage"]) == (entry.meaning, entry.example, entry.usage)
    assert json.loads(invoke("softcap", "--json").output)["prelude"]["softcap"]["definition"] == "c * tanh(s / c)"


@pytest.mark.parametrize(
    "score",
    ["alibi(slopes)", "where(q > k, alibi(slopes), s)", "0.5 * alibi(slopes)", "30.0 * tanh(alibi(slopes) / 30.0)",
     "softcap(30.0) + slopes[h]", "min(alibi(slopes), softcap(30.0) + slopes[h])", "clamp(s, -5.0, 5.0) + s * slopes[h]"],
)  # fmt: skip
def test_scores_of_the_prelude_are_combined(score: str) -> None:
    declared = "input slopes: fp32[heads]"
    assert load_text(f"attention example {{ dtype fp16 head_dim 64 {declared} score {score} }}")


def test_the_language_s_page_has_every_definition_and_what_it_gives() -> None:
    page = (ROOT / "docs" / "language.md").read_text()
    for section, entry in ENTRIES:
        if section == "prelude":
            kind = next(word for word in ("mask", "score", "number") if word in entry.value)
            assert f"| `{entry.usage}` | {kind} |" in page


@pytest.mark.parametrize("text", ["q >= k and k < 4", "not q > k", "(q == k or k < 4)", "q >= k"])
def test_a_definition_of_truth_values_is_a_mask(text: str) -> None:
    (node,) = parse(SourceFile("a prelude", f"def mine = {text}"))
    assert Documented(definition_of(node, Scope(prelude=prelude), builtin=True), "", {}, "").gives == "a mask"


IN_NO_LINE = {"E004", "E005", "E007", "E113", "E212", "E224", "E230"}  # mistakes of long texts
OF_A_CALL = {"E127": {"p": 1.5}, "E227": {}, "E228": {"d": 0}}
SIZES = {"batch": 2, "q_heads": 8, "kv_heads": 8, "q_len": 64, "kv_len": 64}


def codes_of(statements: str, params: dict[str, float] | None = None) -> list[str]:
    """The mistakes and warnings of an example, and of a call with `params`."""
    head = "" if "dtype" in statements else "dtype fp16 head_dim 64"
    is_whole = statements.startswith(("attention", "def past"))
    found = mistakes_of(statements if is_whole else f"attention example {{ {head} {statements} }}")
    if not found and params is not None:
        (spec,) = load_text(f"attention example {{ {head} {statements} }}")
        try:
            check_obligations(spec, SIZES, params)
        except ObligationError as error:
            found = (error.diagnostic,)
    return [d.code for d in found]


@pytest.mark.parametrize("code", EXAMPLES)
def test_every_mistake_is_explained_by_an_example(code: str) -> None:
    example = EXAMPLES[code]
    assert example.why.endswith(".")
    assert bool(example.wrong) == bool(example.right) == (code not in IN_NO_LINE)
    if code not in IN_NO_LINE:
        assert {*codes_of(example.wrong, OF_A_CALL.get(code))} == {code}
        if code != "E127":  # a mistake of the call alone
            assert codes_of(example.right, OF_A_CALL.get(code)) == []


def test_every_code_has_an_example() -> None:
    kinds = [k for k in (*vars(mistakes).values(), DoesNotFit) if isinstance(k, type) and "code" in vars(k)]
    assert {kind.code for kind in kinds} == set(EXAMPLES)


def test_list_explains_mistakes_schedules_and_types() -> None:
    shown = invoke("E215").output
    assert "made of a float" in " ".join(shown.split())
    assert "t[clamp(ids[b, k], 0, 15)]" in shown
    assert invoke("e215").output == shown
    assert "scaled twice" in invoke("W203").output
    fused = invoke("fused").output
    assert all(part in fused for part in ("fused_mma", "fused_simt", "sm_80", "128 x 64", "stages", "backward"))
    assert "sm_90a" in invoke("hopper").output
    assert "sm_80" not in invoke("hopper").output
    assert "hopper" in invoke("auto").output
    assert "2 bytes" in invoke("bf16").output
    for wrong, near in (("E251", "E22"), ("fusd", "fused"), ("hoper", "hopper"), ("fp8", "fp")):
        result = invoke(wrong)
        assert (result.exit_code, near in result.output) == (2, True), result.output
    assert "attngen list E215" in invoke().output
