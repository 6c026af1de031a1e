"""The table of kernels that have registers enough: complete, current, and what is chosen by it spills nothing."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, nvrtc_version
from attngen.emit.emitter import emit
from attngen.inspect.registers import SPACES, fits
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.facts import facts_of
from attngen.plan.plan import PlanRefusal
from attngen.plan.register_table import HEAD_SIZES, TABLE, made_by, parse, table, to_text
from attngen.plan.tile import Tile
from attngen.schedules import candidates, choose
from attngen.schedules.choose import request_of
from attngen.schedules.fused_mma.registers import VARIANTS, variant
from attngen.spec.attention import AttentionSpec
from tests import tiers

FAMILIES = [family for _, measured in SPACES.values() for family in measured.families]
CELLS = sorted((str(family), keys) for family, found in table().items() for keys in found)
COUNTS = {"fused_mma": 12, "wgmma": 3}  # of the cells that are drawn
DRAWN = [c for name, n in COUNTS.items() for c in Random(0).sample([c for c in CELLS if c[0].startswith(f"{name} ")], n)]


def test_the_table_has_every_family_and_reads_as_it_is_written() -> None:
    assert [*table()] == FAMILIES
    assert all(tuple(found) == SPACES[family.schedule][1].keys(family) for family, found in table().items())
    assert to_text(table(), made_by()) == TABLE.read_text()
    assert parse(to_text(table(), made_by())) == table()


def test_fewer_keys_and_more_warps_never_need_more_registers() -> None:
    """What the table is read by: a tile of fewer keys than a row has, or of more warps, spills nothing either."""
    for found in table().values():
        sizes = [*found.values()]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("arch", tiers.cases(["sm_80", "sm_90a", "sm_120a"], quick=["sm_80"]))
@pytest.mark.parametrize(("row", "keys"), tiers.cases(DRAWN, quick=DRAWN[:2]))
def test_the_table_is_current(row: str, keys: int, arch: str) -> None:
    """The head size in the table spills nothing, on any architecture; the next does, by the compiler that made the table."""
    family = next(f for f in FAMILIES if str(f) == row)
    if arch not in SPACES[family.schedule][1].arches:
        arch = SPACES[family.schedule][1].arches[0]
    widest = table()[family][keys]
    if widest:
        assert fits(family, keys, arch, widest)
    more = [size for size in HEAD_SIZES if size > widest]
    if more and arch == "sm_80" and made_by() == f"NVRTC {nvrtc_version()}":
        assert not fits(family, keys, arch, more[0])


def spilled(spec: AttentionSpec, arch: str) -> list[int]:
    made = compile_text(emit(spec, choose(spec, ARCHES[arch], "fused")))
    return [r.spill_store_bytes + r.stack_bytes for r in made.resources()]


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
    assert set(spilled(spec, "sm_80")) == {0}


def test_wide_queries_with_narrow_values_keep_the_tile_of_the_values() -> None:
    """A thread holds columns of O; Q is in shared memory."""
    wide, narrow = (attngen.define(dtype="bf16", head_dim=d, head_dim_v=128, mask="causal") for d in (192, 128))
    tiles = [choose(spec, ARCHES["sm_90a"], "fused").tile for spec in (wide, narrow)]
    assert tiles[0] == tiles[1]
    assert set(spilled(wide, "sm_90a")) == {0}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_spec_has_the_row_of_what_it_reads(kind: str) -> None:
    assert kind in VARIANTS
    facts = facts_of(attngen.define(dtype="bf16", head_dim=64, **ALL_KINDS[kind]))
    assert variant(facts, Tile(64, 32, 2, 2)) == kind


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
