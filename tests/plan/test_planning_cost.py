"""The cost of planning in calls of Python functions: a spec is analyzed once, and a new length needs few calls."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest

from attngen.api import compile
from attngen.device.arrays import view
from attngen.plan import ARCHES, Problem, mask_bounds
from attngen.schedules import choose, plans_for
from tests.harness import SHIPPED, shipped

HOPPER = ARCHES["sm_90a"]
ALIBI = shipped("alibi")


def problem(length: int) -> Problem:
    return Problem(32, length, length, 132)


def calls(function: Callable[[], object]) -> int:
    """The number of calls that `function` makes, of built-in functions too.

    A weak reference calls a function when its object is freed: expressions of other tests, which a collection frees, or a cache
    that has no room for them. These are not counted.
    """
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        frees = any(f.f_code.co_filename == weakref.__file__ for f in (frame, frame.f_back) if f is not None)
        count += event in ("call", "c_call") and not frees

    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("name", SHIPPED)
def test_a_new_length_costs_little_and_a_seen_one_less(name: str, monkeypatch) -> None:
    spec = replace(shipped(name), name="not_seen_before")
    classified = []
    normalized = mask_bounds.normalized
    monkeypatch.setattr(mask_bounds, "normalized", lambda mask, fits: classified.append(mask) or normalized(mask, fits))
    assert calls(lambda: choose(spec, HOPPER)) < 15_000
    plans = plans_for(spec, HOPPER)
    found = {id(choose(spec, HOPPER, None, problem(999)))}
    for length in range(1000, 1040):
        assert calls(lambda length=length: found.add(id(choose(spec, HOPPER, None, problem(length))))) < 200
        assert calls(lambda length=length: choose(spec, HOPPER, None, problem(length))) < 40
    assert len(found) <= len(plans)
    assert len(classified) <= 1


def test_a_hundred_thousand_lengths_take_no_more_memory_than_a_few_thousand() -> None:
    def plan_all(lengths: range) -> int:
        for length in lengths:
            choose(ALIBI, HOPPER, None, problem(length))
        gc.collect()
        return len(gc.get_objects())

    few = plan_all(range(1, 6_000))
    assert plan_all(range(6_000, 106_000, 5)) < few + 1_000


class Nowhere:
    """A device that counts what it compiles, and launches nothing."""

    name, arch, multiprocessors = "emulated", "sm_90a", 132

    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, source):
        self.compiled += 1
        return Kernel(source)


class Kernel:
    def __init__(self, source) -> None:
        self.source = source

    def launch(self, launches, memory, stream=None) -> None:
        pass


def test_a_call_at_a_new_length_costs_little_outside_of_torch_too() -> None:
    """The steps before a launch: planning, checks, arguments."""
    device = Nowhere()
    compiled = compile(ALIBI, device=device)
    slopes = view(np.ones(32, np.float32), "slopes")

    def call(length: int) -> None:
        q, k = (np.empty((1, heads, length, 64), dtype=compiled.spec.dtype.numpy) for heads in (32, 32))
        arrays = {"q": view(q, "q"), "k": view(k, "k"), "v": view(k, "v"), "slopes": slopes}
        compiled.bind(arrays, {})

    call(100), call(20_000)
    assert all(calls(lambda length=length: call(length)) < 2_500 for length in range(101, 140))
    assert device.compiled <= len(plans_for(ALIBI, HOPPER))
