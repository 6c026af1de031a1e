"""What `attngen list` says is complete and true: every example is a right spec, every mask is a truth value."""

from __future__ import annotations

import json
from functools import partial

import pytest

from attngen.language import load_text
from attngen.language.catalogue import catalogue
from attngen.language.prelude import prelude
from attngen.spec.expr import Type
from attngen.spec.operator import TABLE
from tests.conftest import ROOT
from tests.harness import cli

ENTRIES = [(section, entry) for section, entries in catalogue().items() for entry in entries]


invoke = partial(cli, "list")


@pytest.mark.parametrize(("section", "entry"), ENTRIES, ids=lambda x: x if isinstance(x, str) else x.usage)
def test_every_entry_says_what_it_means_and_its_example_is_right(section: str, entry) -> None:
    assert entry.meaning
    assert entry.value
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
