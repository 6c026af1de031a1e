"""The table of kernels that have registers enough: complete, current, and what is chosen by it spills nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from random import Random
from typing import Any

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, nvrtc_version
from attngen.device.protocol import CompilationError
from attngen.emit.emitter import emit
from attngen.inspect import registers
from attngen.inspect.registers import SPACES, fits
from attngen.language import load_text
from attngen.plan import ARCHES, register_table
from attngen.plan.facts import facts_of
from attngen.plan.plan import Plan, PlanRefusal
from attngen.plan.register_table import HEAD_SIZES, compilers, file_of, measured_by, parse, table, to_text
from attngen.plan.tile import Tile
from attngen.plan.variants import SPECS
from attngen.schedules import candidates, choose, request_of
from attngen.schedules.decode.registers import SMALLEST_KEYS
from attngen.schedules.fused_mma.registers import VARIANTS, variant
from attngen.schedules.tiled.plan import POSSIBLE as TILED_TILES
from attngen.spec.attention import AttentionSpec
from tests import tiers
from tests.harness import spills

COMPLETE = "NVRTC-13.5"  # its table has every family
COUNTS = {"fused_mma": 12, "decode": 3, "wgmma": 3}


def drawn(schedule: str) -> list[tuple[str, str, int]]:
    """Cells of a schedule: the number that COUNTS has, and a number that is the schedule's own."""
    cells = sorted((str(family), keys) for family, found in measured_by(schedule, COMPLETE).items() for keys in found)
    return [(schedule, *cell) for cell in Random(0).sample(cells, min(COUNTS[schedule], len(cells)))]


DRAWN = [cell for schedule in SPACES for cell in drawn(schedule)]
QUICK = [cell for cell in DRAWN if cell[0] == "fused_mma"][:2]


def test_every_schedule_that_is_measured_is_drawn() -> None:
    assert set(COUNTS) == set(SPACES)
    assert COMPLETE in compilers()


@pytest.mark.parametrize("schedule", SPACES)
@pytest.mark.parametrize("compiler", compilers())
def test_the_table_has_every_family_and_reads_as_it_is_written(compiler: str, schedule: str) -> None:
    found, measured = measured_by(schedule, compiler), SPACES[schedule][1]
    families = [f for f in measured.families if f in found] if compiler != COMPLETE else list(measured.families)
    assert [*found] == families
    assert all(tuple(sizes) == tuple(sorted(measured.keys(family))) for family, sizes in found.items())
    assert all({*sizes.values()} <= {0, *HEAD_SIZES} for family, sizes in found.items())
    if found:
        assert to_text(found) == file_of(schedule, compiler).read_text()
        assert parse(schedule, to_text(found)) == found


@pytest.mark.parametrize("schedule", SPACES)
def test_fewer_keys_never_need_more_registers(schedule: str) -> None:
    """What the table is read by: a tile of fewer keys than a row has spills nothing either; and each compiler has its say."""
    for family, found in table(schedule).items():
        sizes = [*found.values()]
        assert sizes == sorted(sizes, reverse=True)
        for compiler in compilers():
            own = measured_by(schedule, compiler).get(family, {})
            assert all(found[keys] <= size for keys, size in own.items())


@pytest.mark.parametrize(("schedule", "row", "keys"), tiers.cases(DRAWN, quick=QUICK, one_of=4))
def test_the_table_is_current(schedule: str, row: str, keys: int) -> None:
    """The head size that planning reads in the table spills nothing, on an architecture for which it is read."""
    family = next(f for f in SPACES[schedule][1].families if str(f) == row)
    widest = table(schedule)[family][keys]
    if widest:
        arches = [a for a in SPACES[schedule][1].arches if any(registers.plans_of(family, keys, widest, a))]
        assert fits(family, keys, arches[DRAWN.index((schedule, row, keys)) % len(arches)], widest)


def test_the_command_saves_as_it_goes_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that cannot be compiled costs its own number alone; --missing then makes what is missing."""
    broken = [True]

    def spills(plan: Plan) -> bool:
        if broken[0] and plan.block_kv == 32:
            raise CompilationError("cannot be compiled", "log")
        return plan.facts.spec.head_dim > 64

    monkeypatch.setattr(register_table, "FOLDER", tmp_path)
    monkeypatch.setattr(registers, "spills", spills)
    asked = ["registers", "--write", "--missing", "--only", "wgmma", "--rows", "divided 16-bit 64 4", "--jobs", "1"]
    monkeypatch.setattr("sys.argv", asked)
    compiler = f"NVRTC-{nvrtc_version()}"
    assert registers.main() == 1
    assert "32 keys failed: CompilationError: cannot be compiled" in capsys.readouterr().out
    assert [*measured_by("wgmma", compiler).values()] == [{16: 64, 48: 64, 64: 64, 80: 64, 96: 64, 128: 64}]
    broken[0] = False
    assert registers.main() == 0
    assert "1 cells of wgmma" in capsys.readouterr().out
    assert [*measured_by("wgmma", compiler).values()] == [dict.fromkeys((16, 32, 48, 64, 80, 96, 128), 64)]


def test_an_error_of_a_compiler_reaches_another_process() -> None:
    found = pickle.loads(pickle.dumps(CompilationError("cannot be compiled", "line 1\nline 2")))
    assert (str(found), found.log) == (str(CompilationError("cannot be compiled", "line 1\nline 2")), "line 1\nline 2")


def is_spilled(spec: AttentionSpec, arch: str, schedule: str = "fused") -> bool:
    return any(map(spills, compile_text(emit(spec, choose(spec, ARCHES[arch], schedule))).resources()))


ALL_KINDS: dict[str, dict[str, Any]] = {
    "closed": {"mask": "causal"},
    "closed,more": {"mask": "causal", "score": "alibi(z)", "sink": "z[h]", "inputs": {"z": ("fp32", ("heads",))}},
    "keys": {
        "mask": "keep[b, k] and k <= last[b, q]",
        "inputs": {"keep": ("bool", ("batch", "kv_len")), "last": ("int32", ("batch", "q_len"))},
    },
    "distances": {"mask": "causal", "score": "relative_bias(table, 1024)", "inputs": {"table": ("fp32", ("heads", 2049))}},
    "pairs": {"score": "s + bias[h, q, k]", "inputs": {"bias": ("fp32", ("heads", "q_len", "kv_len"))}},
    "divided": {"mask": "causal and (q // side - k // side) % every == 0", "params": {"side": 128, "every": 4}},
}


@pytest.mark.parametrize("head_dim", tiers.cases([40, 80, 96, 136, 192, 256], quick=[80]))
@pytest.mark.parametrize("kind", tiers.cases([*ALL_KINDS], quick=["closed,more", "pairs"]))
def test_what_is_chosen_spills_nothing(kind: str, head_dim: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, **ALL_KINDS[kind])
    assert not is_spilled(spec, "sm_80")


def test_wide_queries_with_narrow_values_keep_the_tile_of_the_values() -> None:
    """A thread holds columns of O; Q is in shared memory."""
    wide, narrow = (attngen.define(dtype="bf16", head_dim=d, head_dim_v=128, mask="causal") for d in (192, 128))
    tiles = [choose(spec, ARCHES["sm_90a"], "fused").tile for spec in (wide, narrow)]
    assert tiles[0] == tiles[1]
    assert not is_spilled(wide, "sm_90a")


def test_ordinary_units_keep_o_in_registers() -> None:
    """With many operations in a score, the compiler left the loop over the rows of O as a loop."""
    (spec,) = load_text(f"attention a {{ dtype fp16 head_dim 192 {SPECS['keys,more'][0]} }}")
    plan = choose(spec, ARCHES["sm_75"], "fused")
    o_bytes = 4 * plan.block_q * spec.head_dim_v // plan.threads
    assert max(r.stack_bytes for r in compile_text(emit(spec, plan)).resources()) < o_bytes


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_spec_has_the_row_of_what_it_reads(kind: str) -> None:
    assert kind in VARIANTS
    facts = facts_of(attngen.define(dtype="bf16", head_dim=64, **ALL_KINDS[kind]))
    assert variant(facts, Tile(64, 32, 2, 2)) == kind


def test_decode_takes_the_tiles_that_its_table_has_room_for() -> None:
    """Tiles copied by TMA need fewer registers; those of 16 keys are taken whatever the spec reads."""
    stated = attngen.define(dtype="bf16", head_dim=128, mask="causal", kernel="decode", tile=(16, 64), stages=2, warps=2)
    assert not is_spilled(stated, "sm_90a", "decode")
    with pytest.raises(PlanRefusal, match="registers for head sizes up to 80"):
        choose(stated, ARCHES["sm_80"])
    keys = attngen.define(dtype="fp32", head_dim=256, mask="same_document(ids)", inputs={"ids": ("int32", ("batch", "kv_len"))})
    assert choose(keys, ARCHES["sm_80"], "decode").block_kv == SMALLEST_KEYS


def test_tuning_tries_each_place_of_q_that_fits() -> None:
    spec, arch = attngen.define(dtype="bf16", head_dim=64, mask="causal"), ARCHES["sm_80"]
    found = candidates(spec, arch, "fused")
    planned = choose(spec, arch, "fused")
    assert request_of(planned) in found
    assert planned.q_place == "registers"
    assert {r.q for r in found if (r.block_q, r.block_kv, r.warps) == (128, 64, 4)} == {"registers", "shared"}
    for request in found:
        plan = choose(spec, arch, request)
        assert request_of(plan) == request


@pytest.mark.parametrize(("schedule", "arch"), [("fused", "sm_80"), ("hopper", "sm_90a")])
def test_a_kernel_statement_says_where_q_stays(schedule: str, arch: str) -> None:
    (spec,) = load_text(f"attention a {{ dtype bf16 head_dim 64 mask causal kernel {schedule} {{ q shared }} }}")
    plan = choose(spec, ARCHES[arch])
    assert plan.q_place == "shared"


def test_q_that_does_not_fit_is_refused() -> None:
    spec = attngen.define(dtype="bf16", head_dim=256, mask="causal", kernel="fused", tile=(128, 32), warps=4, q="registers")
    with pytest.raises(PlanRefusal, match="registers for head sizes up to"):
        choose(spec, ARCHES["sm_80"])
    naive = attngen.define(dtype="bf16", head_dim=64, kernel="naive", q="shared")
    with pytest.raises(PlanRefusal, match="no choice"):
        choose(naive, ARCHES["sm_80"])


@pytest.mark.parametrize("head_dim", tiers.cases([64, 72], quick=[72]))
@pytest.mark.parametrize("tile", tiers.cases(TILED_TILES, quick=TILED_TILES[-1:]))
def test_every_tile_of_the_tiled_schedule_has_registers_enough(tile: Tile, head_dim: int) -> None:
    size = (tile.block_q, tile.block_kv)
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal", kernel="tiled", tile=size, warps=tile.warps)
    assert request_of(choose(spec, ARCHES["sm_80"])) in candidates(spec, ARCHES["sm_80"], "tiled")
    found = compile_text(emit(spec, choose(spec, ARCHES["sm_80"]))).resources()
    assert not any(map(spills, found))
