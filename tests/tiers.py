"""Two tiers of tests: `quick`, which covers each schedule, dtype, device, command and page once, and `long`, the rest.

`pytest` runs quick, `pytest --tier long` the rest, `pytest --tier all` both. A test is in quick unless it is marked `long`.
Property tests are in both tiers, with few examples in quick and many in long. A test named on the command line
(`file.py::test`) always runs. What ptxas makes of kernels (spills, registers, the order of products) belongs to long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

TIERS = ("quick", "long", "all")
EXAMPLES = {"quick": 50, "long": 500, "all": 500}  # of each property test

for name, count in EXAMPLES.items():
    settings.register_profile(name, deadline=None, max_examples=count)  # no deadline: no test measures time


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        help="quick (default): each schedule, dtype, device, command and page once, in minutes; long: the rest, which is the "
        "matrix of specs, dtypes and schedules, mutations and long random searches; all: both. Without --tier, a test that is "
        "named with `::` runs whatever its tier",
    )


def chosen(config: pytest.Config) -> str:
    """The tier of this run."""
    tier = config.getoption("--tier")
    return tier or ("all" if config.args and all("::" in argument for argument in config.args) else "quick")


def header(config: pytest.Config) -> str | None:
    """The line of the report's header: the tests that are left out, and how to run them."""
    return {
        "quick": "tier: quick; tests marked long are left out, `python -m pytest -n auto --tier long` runs them",
        "long": "tier: long; tests of the quick tier are left out, `python -m pytest -n auto` runs them",
        "all": None,
    }[chosen(config)]


def is_in(item: pytest.Item, tier: str) -> bool:
    is_long = any(item.iter_markers("long"))
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return {"quick": not is_long, "long": is_long or is_property, "all": True}[tier]


def cases(every: Iterable[Any], *, quick: Callable[..., bool] | Sequence[Any]) -> list[Any]:
    """Arguments of `parametrize`: the cases of a matrix `every`, marked long unless they are `quick`.

    A case is a value, or a tuple of the values of several parameters. `quick` is a list of cases, or a predicate of the values
    of a case.
    """
    marked = []
    for case in every:
        values = case if isinstance(case, tuple) else (case,)
        is_quick = quick(*values) if callable(quick) else case in quick
        marked.append(pytest.param(*values, marks=() if is_quick else pytest.mark.long))
    return marked
