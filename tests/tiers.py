"""Tiers of tests: `quick`, which covers each schedule, dtype, device, command and page once; `long`, the rest; and `turns`,
what long leaves out of tests with many cases.

`pytest` runs quick, `pytest --tier long` the rest, `pytest --tier all` all. A test is in quick unless it is marked `long`, or
took more than a second when it was last measured (`slow.tsv`) and is not marked `quick`. Each version of the package has
other parts in long: of a test's long cases one in 24, or in what `one_of` says; of a file's long tests a third, but all where
`one_of` is 1; and of slow tests a quarter, but all of those that lie in `tests` itself, which are of documents. After some
versions each has had its turn. The others are marked `turns`, and `pytest --tier turns` runs them.

Property tests are in both tiers, with few examples in quick and many in long. A test named on the command line
(`file.py::test`) always runs. What ptxas makes of kernels (spills, registers, the order of products) belongs to long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("quick", "long", "turns", "all")
ONE_OF = 24  # each version runs one of so many long cases of a test
TESTS_ONE_OF = 3  # and one of so many long tests of a file
SLOW = Path(__file__).with_name("slow.tsv")  # seconds and names of slow tests
SLOW_FROM = 1.0  # seconds, by two workers, with no kernel compiled before
SLOW_ONE_OF = 4  # each version runs one of so many slow tests
Drawn = TypeVar("Drawn")
EXAMPLES = {"quick": 50, "long": 500, "turns": 50, "all": 500}  # per property test

for name, count in EXAMPLES.items():
    settings.register_profile(name, deadline=None, max_examples=count)  # no deadline: no test measures time


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        help="quick (default): each schedule, dtype, device, command and page once, in minutes; long: the rest, which is the "
        "matrix of specs, dtypes and schedules, mutations and long random searches; turns: the cases that long leaves out, of "
        "which each version runs another part; all: all. Without --tier, a test that is named with `::` runs "
        "whatever its tier",
    )
    parser.addoption(
        "--measure",
        action="store_true",
        help=f"write which tests of this run are slow to {SLOW.name}; needs empty caches of kernels",
    )


def chosen(config: pytest.Config) -> str:
    """The tier of this run."""
    tier = config.getoption("--tier")
    return tier or ("all" if config.args and all("::" in argument for argument in config.args) else "quick")


def header(config: pytest.Config) -> str | None:
    """The line of the report's header: the tests that are left out, and how to run them."""
    return {
        "quick": "tier: quick; tests marked long are left out, `python -m pytest -n auto --tier long` runs them",
        "long": "tier: long; tests of the quick tier are left out, `python -m pytest -n auto` runs them; and most "
        "cases of tests that have many, of which each version runs others, `python -m pytest -n auto --tier turns` runs these",
        "turns": "tier: turns, the cases that the long tier leaves out",
        "all": None,
    }[chosen(config)]


def is_in(item: pytest.Item, tier: str) -> bool:
    is_long, waits = any(item.iter_markers("long")), any(item.iter_markers("turns"))
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return {
        "quick": not is_long and not waits, "long": (is_long or is_property) and not waits, "turns": waits, "all": True
    }[tier]  # fmt: skip


def cases(every: Iterable[Any], *, quick: Callable[..., bool] | Sequence[Any] = (), one_of: int = ONE_OF) -> list[Any]:
    """Arguments of `parametrize`: the cases of a matrix `every`, marked long unless they are `quick`.

    A case is a value, or a tuple of the values of several parameters. `quick` is a list of cases, or a predicate of the values
    of a case. Of the long ones, each version has one of so many in the long tier.
    """
    long = pytest.mark.long(one_of=one_of)

    def is_quick(case: Any) -> bool:
        return bool(quick(*_values(case))) if callable(quick) else case in quick

    return [pytest.param(*_values(case), marks=() if is_quick(case) else (long,)) for case in every]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def take_turns(items: Iterable[pytest.Item]) -> None:
    """Marks what this version leaves out of long, drawn for each version anew: of a test all but a part of its cases, of a
    file half of its tests, and of slow tests a quarter."""
    files: dict[str, dict[str, list[pytest.Item]]] = {}
    slow = dict.fromkeys(mark_slow(items))
    of_folders = [item for item in slow if item.nodeid.count("/") > 1]  # tests of documents lie in `tests` itself: all in long
    for item in _not_drawn(SLOW.name, of_folders, SLOW_ONE_OF):
        item.add_marker(pytest.mark.turns)
    for item in (item for item in items if item not in slow):
        if item.get_closest_marker("long"):
            test = item.nodeid.partition("[")[0]
            files.setdefault(test.partition("::")[0], {}).setdefault(test, []).append(item)
    for name, tests in files.items():
        parts = {test: max(_parts(cases)) for test, cases in tests.items()}
        waiting = _not_drawn(name, [test for test, one_of in parts.items() if one_of > 1], TESTS_ONE_OF)
        for test, cases in tests.items():
            for item in cases if test in waiting else _not_drawn(test, cases, parts[test]):
                item.add_marker(pytest.mark.turns)


def mark_slow(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those of `items` that are in quick by their marks, and slow: they are marked long."""
    found = [i for i in items if i.nodeid in slow_tests() and not any(any(i.iter_markers(name)) for name in ("long", "quick"))]
    for item in found:
        item.add_marker(pytest.mark.long)
    return found


@cache
def slow_tests() -> dict[str, float]:
    """Seconds of slow tests, by their names."""
    lines = SLOW.read_text(encoding="utf-8").splitlines()
    return {name: float(seconds) for seconds, _, name in (line.partition("\t") for line in lines)}


def write_slow(seconds: Mapping[str, float]) -> None:
    """Writes which tests are slow: of those that ran, with their seconds, and of the others what was known."""
    known = {name: s for name, s in slow_tests().items() if name not in seconds} | {
        name: s for name, s in seconds.items() if s >= SLOW_FROM
    }
    SLOW.write_text("".join(f"{s:.1f}\t{name}\n" for name, s in sorted(known.items())), encoding="utf-8")


def _parts(cases: Iterable[pytest.Item]) -> Iterator[int]:
    return (mark.kwargs.get("one_of", ONE_OF) for item in cases for mark in item.iter_markers("long"))


def _not_drawn(name: str, of: Sequence[Drawn], one_of: int) -> list[Drawn]:
    """All but one in so many, in an order of this version."""
    return Random(version() + name).sample(of, len(of))[-(-len(of) // one_of) :]


@cache
def version() -> str:
    """A digest of what decides which kernels are emitted and how they run."""
    return sha256(b"\0".join(path.read_bytes() for path in package_files())).hexdigest()


def package_files() -> Iterator[Path]:
    """The files that decide what is emitted."""
    for pattern in ("attngen/**/*.py", "attngen/device/emulated/runtime/*", "templates/**/*", "specs/*.attn"):
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.is_file())
