"""The report's picture of a pipeline is that of a traced run: what it draws keeps the order that barriers enforce."""

from __future__ import annotations

import pytest

from attngen.drawings.timeline import COPY, PRODUCT, Bar, Timeline
from attngen.emit.emitter import emit
from attngen.inspect.call import Call
from attngen.inspect.pipeline import NO_PIPELINE, SHOWN, traced_timeline
from attngen.inspect.report.page import report
from attngen.language.load import load_path
from attngen.plan import ARCHES, Plan
from attngen.schedules import choose
from attngen.spec.gradient import QKV
from tests.conftest import ROOT
from tests.harness import shipped


def traced(name: str, schedule: str, arch: str) -> tuple[Plan, Timeline]:
    plan = choose(shipped(name), ARCHES[arch], schedule)
    found = traced_timeline(shipped(name), plan)
    assert isinstance(found, Timeline)
    return plan, found


def bars(drawn: Timeline, kind: str) -> dict[str, list[Bar]]:
    return {
        lane: [b for b in found if b.kind == kind] for lane, found in drawn.lanes.items() if any(b.kind == kind for b in found)
    }


@pytest.mark.parametrize(
    ("name", "schedule", "arch"),
    [
        ("gpt2", "hopper", "sm_90a"),
        ("gpt2", "wgmma", "sm_90a"),
        ("gpt2", "fused", "sm_80"),
        ("gemma_softcap", "fused", "sm_80"),
    ],
)
def test_what_is_drawn_waits_for_what_it_needs(name: str, schedule: str, arch: str) -> None:
    plan, drawn = traced(name, schedule, arch)
    copies = {b.label: b for found in bars(drawn, COPY).values() for b in found}
    assert {"K0", "V0", "K1", "V1"} <= set(copies)
    assert len(copies) <= 2 * SHOWN
    reads: dict[str, float] = {}  # by tile, when its last product ends
    for lane, products in bars(drawn, PRODUCT).items():
        weights = {b.label.split()[-1]: b.end for b in drawn.lanes[lane.replace("products", "softmax")]}
        for product in products:
            tile = product.label.split()[1]
            assert product.start >= copies[tile].end
            reads[tile] = max(reads.get(tile, 0.0), product.end)
            if product.label.startswith("P"):
                assert product.start >= weights[tile[1:]]
    for tile, copy in copies.items():
        before = f"{tile[0]}{int(tile[1:]) - plan.stages}"
        assert copy.start >= reads.get(before, 0.0), f"{tile} overwrites {before}"


def test_hopper_has_the_roles_of_its_plan() -> None:
    plan, drawn = traced("gpt2", "hopper", "sm_90a")
    assert list(bars(drawn, COPY)) == ["TMA, K", "TMA, V"]
    products = bars(drawn, PRODUCT)
    assert list(products) == [f"products, consumer {c}" for c in range(1, plan.own.consumers + 1)]
    for found in products.values():
        assert [b.label for b in found][:4] == ["Q K0", "Q K1", "P V0", "Q K2"]  # the next scores before these values
    assert "traced run" in drawn.says


def test_the_page_says_what_its_picture_is() -> None:
    (one,) = load_path(ROOT / "specs" / "gpt2.attn")
    plan = choose(one.spec, ARCHES["sm_80"], "fused")
    source = emit(one.spec, plan)
    of_run, none = (
        report(one, source, Call(one.spec, plan, 256, 256), "not here", pipeline).html
        for pipeline in (traced_timeline(one.spec, plan), "it cannot run here")
    )
    assert "From a traced run on the emulated device" in of_run
    assert "Not drawn: it cannot run here" in none


def test_schedules_without_a_pipeline_are_not_traced() -> None:
    for schedule, wanted in (("naive", ()), ("tiled", ()), ("fused", QKV), ("decode", ())):
        plan = choose(shipped("gpt2"), ARCHES["sm_80"], schedule, wanted=wanted)
        assert traced_timeline(shipped("gpt2"), plan) == NO_PIPELINE
