"""Tiers of tests: `quick`, which covers each schedule, dtype, device, command and page once; `long`, the rest; and `turns`,
what long leaves out of large matrices.

`pytest` runs quick, `pytest --tier long` the rest, `pytest --tier all` all. A test is in quick unless it is marked `long`. Of
matrices whose cases take minutes together (`one_of`), each version of the package has a part in long: after some versions each
case has had its turn. The others are marked `turns`, and `pytest --tier turns` runs them.

Property tests are in both tiers, with few examples in quick and many in long. A test named on the command line
(`file.py::test`) always runs. What ptxas makes of kernels (spills, registers, the order of products) belongs to long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("quick", "long", "turns", "all")
EXAMPLES = {"quick": 50, "long": 500, "turns": 50, "all": 500}  # per property test

for name, count in EXAMPLES.items():
    settings.register_profile(name, deadline=None, max_examples=count)  # no deadline: no test measures time


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        help="quick (default): each schedule, dtype, device, command and page once, in minutes; long: the rest, which is the "
        "matrix of specs, dtypes and schedules, mutations and long random searches; turns: what long leaves out of large "
        "matrices, of which each version runs another part; all: all. Without --tier, a test that is named with `::` runs "
        "whatever its tier",
    )


def chosen(config: pytest.Config) -> str:
    """The tier of this run."""
    tier = config.getoption("--tier")
    return tier or ("all" if config.args and all("::" in argument for argument in config.args) else "quick")


def header(config: pytest.Config) -> str | None:
    """The line of the report's header: the tests that are left out, and how to run them."""
    return {
        "quick": "tier: quick; tests marked long are left out, `python -m pytest -n auto --tier long` runs them",
        "long": "tier: long; tests of the quick tier are left out, `python -m pytest -n auto` runs them; and parts of large "
        "matrices, `python -m pytest -n auto --tier turns` runs these",
        "turns": "tier: turns, what the long tier leaves out of large matrices",
        "all": None,
    }[chosen(config)]


def is_in(item: pytest.Item, tier: str) -> bool:
    is_long, waits = any(item.iter_markers("long")), any(item.iter_markers("turns"))
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return {
        "quick": not is_long and not waits, "long": (is_long or is_property) and not waits, "turns": waits, "all": True
    }[tier]  # fmt: skip


def cases(every: Iterable[Any], *, quick: Callable[..., bool] | Sequence[Any] = (), one_of: int = 1) -> list[Any]:
    """Arguments of `parametrize`: the cases of a matrix `every`, marked long unless they are `quick`.

    A case is a value, or a tuple of the values of several parameters. `quick` is a list of cases, or a predicate of the values
    of a case. If it is `one_of` several, each version of the package has a part of the long ones in the long tier.
    """
    every = [*every]
    is_quick = [bool(quick(*_values(case))) if callable(quick) else case in quick for case in every]
    waits = {*_waiting([number for number, is_quick in enumerate(is_quick) if not is_quick], one_of, str(every))}
    marks = [() if is_quick[n] else (pytest.mark.long, *([pytest.mark.turns] if n in waits else [])) for n in range(len(every))]
    return [pytest.param(*_values(case), marks=of_case) for case, of_case in zip(every, marks, strict=True)]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def _waiting(numbers: list[int], one_of: int, matrix: str) -> list[int]:
    """Those that this version leaves out: all but one of so many, in an order of its own for each version and matrix."""
    order = Random(version() + matrix).sample(numbers, len(numbers)) if one_of > 1 else numbers
    return order[-(-len(order) // one_of) :]


@cache
def version() -> str:
    """A digest of what decides which kernels are emitted and how they run."""
    return sha256(b"\0".join(path.read_bytes() for path in package_files())).hexdigest()


def package_files() -> Iterator[Path]:
    """The files that decide what is emitted."""
    for pattern in ("attngen/**/*.py", "attngen/device/emulated/runtime/*", "templates/**/*", "specs/*.attn"):
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.is_file())
