"""Every kind of mistake has a golden; every golden is what a user sees today."""

from __future__ import annotations

import re

import pytest

from attngen.spec import mistakes
from tests.diagnostics.cures import cured
from tests.diagnostics.goldens import HERE, NAMES, error_of, mistakes_of, rendered

# Mistakes of a file as a whole, shown in tests/language/test_hostile.py.
OF_THE_FILE = {"NotAText", "TextTooLong"}
# Mistakes of a call, shown in tests/test_cli.py.
OF_A_CALL = {"CallIndexOutOfRange", "CallDividesByZero", "CallDropoutOutOfRange"}
KINDS = {k.__name__: k for k in vars(mistakes).values() if isinstance(k, type) and "code" in vars(k)}


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str) -> None:
    assert rendered(name) == (HERE / f"{name}.err").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_diagnostic_has_a_place_and_help(name: str) -> None:
    for block in rendered(name).strip().split("\n\n"):
        lines = block.split("\n")
        assert re.match(r"(error\[E|warning\[W)\d{3}\]: \S", lines[0]), block
        assert re.match(r" +--> \w+\.attn:\d+:\d+$", lines[1]), block
        assert any("^" in line for line in lines), block
        assert re.match(r"help: \S", lines[-1]), block
        assert not re.search(r"\{\w", lines[0]), block  # a field that is not filled in


def test_every_kind_has_a_golden() -> None:
    shown = {type(d).__name__ for name in NAMES for d in error_of(name).diagnostics}
    assert set(KINDS) - OF_THE_FILE - OF_A_CALL - shown == set()
    assert len(shown) >= 30


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in KINDS.values()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_help_line_says_to_write_is_no_mistake(name: str) -> None:
    """A text that a cure gives is accepted, or its mistakes are elsewhere."""
    for found in error_of(name).diagnostics:
        for one in cured(found):
            left = mistakes_of(one.text)
            again = [d for d in left if d.span and d.span.line == one.line and d.span.column in one.columns]
            assert again == [], "\n".join([found.render(), one.text, *(d.render() for d in again)])


def test_most_kinds_have_a_cure_that_can_be_typed() -> None:
    typed = {d.code for name in NAMES for d in error_of(name).diagnostics if any(True for _ in cured(d))}
    assert {"E001", "E008", "E103", "E104", "E106", "E107", "E108", "E201", "E208", "E210", "E301"} <= typed
