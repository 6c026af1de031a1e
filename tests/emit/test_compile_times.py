"""Drawn specs that are as large as they may be: what NVRTC is given is small, by numbers that do not depend on a machine."""

from __future__ import annotations

import random
import re

import pytest

from attngen.diagnostics import ArgumentError, DiagnosticError, SpecWarning
from attngen.plan.code_size import INLINED_UP_TO
from attngen.spec.operator import TABLE
from tests import tiers
from tests.compile_times import draw

LARGEST_TEXT = 500_000  # characters of a file
DEAR = {row.name: next(iter(row.cuda.values())).text.split("(")[0] for row in TABLE.values() if row.cost > INLINED_UP_TO}


def test_the_dear_operators_have_functions() -> None:
    assert DEAR == {"sin": "sinf", "cos": "cosf", "pow": "powf", "atan2": "atan2f"}


@pytest.mark.filterwarnings(f"ignore::{SpecWarning.__module__}.{SpecWarning.__name__}")
@pytest.mark.parametrize("part", tiers.cases(range(8), quick=[0]))
def test_large_specs_are_small_files_or_refused(part: int) -> None:
    accepted = 0
    for seed in range(10 * part, 10 * part + 10):
        try:
            text = draw(random.Random(seed)).program().text
        except (DiagnosticError, ArgumentError) as error:
            assert str(error)  # noqa: PT017
            continue
        accepted += 1
        assert len(text) < LARGEST_TEXT, seed
        inlined = re.findall(r"__forceinline__ \w+ (?:score|mask|score_derivative)\((.*?)\n}", text, re.S)
        assert not re.search(rf"\b(?:{'|'.join(DEAR.values())})\(", "".join(inlined)), seed
    assert accepted >= 3
