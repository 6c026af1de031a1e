"""No default plan spills registers: kernels that would are noted beside the table of registers, and planning avoids them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from attngen import define
from attngen.device.cuda.compiler import nvrtc_version
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect import spilled as command
from attngen.inspect.registers import SPACES
from attngen.inspect.spilled import default_plan, default_plans, planned_specs, spilled_bytes
from attngen.plan import ARCHES, register_table
from attngen.plan.facts import facts_of
from attngen.plan.plan import PlanRefusal
from attngen.plan.register_table import compilers, file_of_spilled, parse_spilled, spilled, spilled_by, spilled_to_text
from attngen.plan.tile import Tile
from attngen.schedules import choose
from attngen.schedules.fused_mma.registers import may_hold_q
from tests import tiers
from tests.harness import SHIPPED

PLACES = [(schedule, arch) for schedule, (_, measured) in SPACES.items() for arch in measured.arches]
pytestmark = pytest.mark.skipif(f"NVRTC-{nvrtc_version()}" not in compilers(), reason="this NVRTC has made no table")


@pytest.mark.parametrize(("schedule", "arch"), tiers.cases(PLACES, one_of=6))
def test_default_plans_of_shipped_specs_spill_nothing(schedule: str, arch: str) -> None:
    plans = [plan for plan in default_plans(schedule, arch) if plan.facts.spec.name in SHIPPED]
    found = {plan.facts.spec.name: spilled_bytes(emit(plan.facts.spec, plan)) for plan in plans}
    assert found == dict.fromkeys(found, 0)
    assert len(found) >= len(SHIPPED) - 2  # wgmma has no fp32


@pytest.mark.long
@pytest.mark.parametrize("count", tiers.cases([3, 16], quick=[3]))
def test_default_plans_drawn_anew_for_each_version_spill_nothing(count: int) -> None:
    """What notices that kernels have changed since the table was made: each version of the package compiles other kernels of
    the whole space, all of which `python -m attngen.inspect.spilled` has found without spills. One version draws the same ones
    in each run: what ptxas makes of them does not change, and a version that has passed once passes everywhere."""
    seed = tiers.version()
    draw = Random(seed)
    for schedule, arch in draw.choices(PLACES, k=count):
        plan = default_plan(schedule, arch, draw.choice(planned_specs(schedule, arch)))
        what = f"seed {seed}: {plan.facts.spec} on {arch}; `python -m attngen.inspect.spilled --write` repairs the table"
        noted = SPACES[schedule][1].as_spilled(plan) in spilled(schedule)
        assert noted or spilled_bytes(emit(plan.facts.spec, plan)) == 0, what


@pytest.mark.parametrize("schedule", SPACES)
def test_what_is_noted_is_planned_only_if_no_tile_has_fewer_keys_and_reads_as_it_is_written(schedule: str) -> None:
    measured = SPACES[schedule][1]
    for arch in measured.arches:
        plans = [*default_plans(schedule, arch)]
        fewest = min(plan.block_kv for plan in plans)
        assert not {measured.as_spilled(plan) for plan in plans if plan.block_kv > fewest} & spilled(schedule)
    for compiler in compilers():
        found = spilled_by(schedule, compiler)
        path = file_of_spilled(schedule, compiler)
        assert not found or path.read_text() == spilled_to_text(found)
        assert parse_spilled(spilled_to_text(found)) == found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the tables in which nothing is noted."""
    compiler = f"NVRTC-{nvrtc_version()}"
    files = {name: register_table.file_of(name, compiler).read_text() for name in SPACES}
    monkeypatch.setattr(register_table, "FOLDER", tmp_path)
    (tmp_path / compiler).mkdir()
    for name, text in files.items():
        register_table.file_of(name, compiler).write_text(text)
    spilled.cache_clear()
    yield tmp_path
    spilled.cache_clear()


def test_the_command_notes_kernels_until_no_default_plan_spills(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "specs_of_the_table", lambda: ())
    gpt2 = define(dtype="bf16", head_dim=64, mask="causal")
    assert choose(gpt2, ARCHES["sm_80"], "fused").q_place == "registers"
    plans = {emit(p.facts.spec, p).text: p for p in default_plans("fused_mma", "sm_80")}

    def spills(program: Program) -> int:
        """Kernels of heads of 64 with Q in registers do."""
        plan = plans.get(program.text)
        return 8 if plan is not None and (plan.q_place, plan.facts.spec.head_dim) == ("registers", 64) else 0

    class Here:
        """A pool without processes."""

        def __init__(self, jobs: int) -> None: ...
        def __enter__(self) -> Here:
            return self

        def __exit__(self, *error: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr(command, "spilled_bytes", spills)
    monkeypatch.setattr(command, "ProcessPoolExecutor", Here)
    asked = ["spilled", "--only", "fused_mma", "--arch", "sm_80"]
    monkeypatch.setattr("sys.argv", asked)
    assert command.main() == 1
    assert "gpt2: closed 16-bit 128 64 2 4 registers 64 sm_80" in capsys.readouterr().out
    assert not spilled("fused_mma")
    monkeypatch.setattr("sys.argv", [*asked, "--write"])
    assert command.main() == 0
    again, wider = (define(dtype="bf16", head_dim=d, mask="causal", name="again") for d in (64, 80))
    assert choose(again, ARCHES["sm_80"], "fused").q_place == "shared"
    tile = Tile(128, 64, 2, 4)
    assert not may_hold_q(facts_of(again), ARCHES["sm_89"], tile)  # sm_89 has the code of sm_80
    assert may_hold_q(facts_of(again), ARCHES["sm_90a"], tile)
    assert choose(again, ARCHES["sm_90a"], "fused").q_place == "registers"
    assert choose(wider, ARCHES["sm_80"], "fused").q_place == "registers"
    stated = define(dtype="bf16", head_dim=64, mask="causal", kernel="fused", tile=(128, 64), stages=2, warps=4, q="registers")
    with pytest.raises(PlanRefusal, match="registers for head sizes up to 32"):
        choose(stated, ARCHES["sm_80"])
