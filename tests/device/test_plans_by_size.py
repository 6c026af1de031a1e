"""Plans that depend on the sizes of a call: the choice, and the results of each plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.device.emulated import EmulatedDevice
from attngen.plan import ARCHES, Problem
from attngen.plan.mask_bounds import mask_bounds
from attngen.reference.problems import Shape, sample
from attngen.schedules import choice_of, choose, plans_for
from attngen.spec.attention import KernelRequest
from tests.harness import compared

SMS = 132
PLAIN = attngen.define(dtype="bf16", head_dim=64, lse=True)


def rows_of_a_block(spec, length: int, heads: int) -> int:
    return choose(spec, ARCHES["sm_90a"], "hopper", Problem(heads, length, length, SMS)).block_q


@pytest.mark.parametrize(
    ("head_dim", "mask", "rows"),
    [
        (32, None, 256),
        (64, None, 192),
        (64, "causal", 192),
        (80, "causal", 192),
        (128, None, 192),
        (128, "causal", 192),
        (160, "causal", 192),
    ],
)
def test_long_rows_take_more_consumers(head_dim: int, mask: str | None, rows: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask)
    assert rows_of_a_block(spec, 16384, 32) == rows


@pytest.mark.parametrize(
    ("head_dim", "mask", "problem", "tile"),
    [
        (64, None, Problem(512, 577, 577, SMS), (128, 128)),  # 256 rows would leave a quarter of the blocks empty
        (128, "causal", Problem(32, 512, 512, SMS), (128, 64)),  # one sequence: the first product waits for fewer keys
        (40, None, Problem(64, 4096, 77, SMS), (256, 80)),  # the words of an image: one tile, with few keys past the end
        (72, None, Problem(1024, 256, 256, SMS), (256, 48)),  # one block a head
        (64, None, Problem(2720, 192, 192, SMS), (192, 96)),
    ],
)
def test_short_rows_and_few_keys(head_dim: int, mask: str | None, problem: Problem, tile: tuple[int, int]) -> None:
    plan = choose(attngen.define(dtype="bf16", head_dim=head_dim, mask=mask), ARCHES["sm_90a"], "hopper", problem)
    assert (plan.block_q, plan.block_kv) == tile


@pytest.mark.parametrize(
    ("mask", "params", "tile"),
    [
        ("causal and dilated(step)", {"step": 4}, (192, 64)),  # each tile has pairs
        ("causal and (q // side - k // side) % every == 0", {"side": 128, "every": 4}, (128, 64)),  # blocks of these sides
    ],
)
def test_masks_that_divide(mask: str, params: dict, tile: tuple[int, int]) -> None:
    plan = choose(attngen.define(dtype="bf16", head_dim=128, mask=mask, params=params), ARCHES["sm_90a"], "hopper")
    assert (plan.block_q, plan.block_kv) == tile


def test_a_few_blocks_are_not_made_fewer() -> None:
    spec = attngen.define(dtype="bf16", head_dim=128)
    assert rows_of_a_block(spec, 4096, 4) == 128  # 128 blocks run at once; 88 would leave a third of the SMs idle
    gpt2 = attngen.define(dtype="bf16", head_dim=64, mask="causal")
    assert (rows_of_a_block(gpt2, 1024, 12), rows_of_a_block(gpt2, 1024, 12 * 16)) == (128, 256)


@pytest.mark.parametrize(("mask", "rows"), [("causal_bottom_right", 128), ("causal", 192)])
def test_what_all_rows_visit_takes_whole_rounds(mask: str, rows: int) -> None:
    """1024 rows of 64 heads are 512 blocks of 128 rows, four rounds of 132, or 384 of 192, three rounds: 512 rows or 576."""
    spec = attngen.define(dtype="bf16", head_dim=128, mask=mask)
    assert choose(spec, ARCHES["sm_90a"], "hopper", Problem(64, 1024, 8192, SMS)).block_q == rows


@pytest.mark.parametrize(
    ("mask", "keys", "rows"),
    [
        ("causal", (1, 500, 1000), (1000, 501, 1)),
        ("causal_bottom_right", (2001, 2500, 3000), (1000, 1000, 1000)),
        ("causal and window(100)", (1, 100, 100), (100, 100, 1)),
        ("k >= q", (3000, 2501, 2001), (1, 500, 1000)),
    ],
)
def test_visited_keys_and_rows(mask: str, keys: tuple[int, ...], rows: tuple[int, ...]) -> None:
    spec, places = attngen.define(dtype="bf16", head_dim=128, mask=mask), np.array([0, 499, 999])
    of_keys, of_rows = mask_bounds(spec), mask_bounds(spec, None, "q")
    assert tuple(of_keys.visited(places, places, 1000, 3000)) == keys
    assert tuple(of_rows.visited(places, places, 1000, 3000)) == rows


def test_visited_keys_of_blocks_in_whole_tiles() -> None:
    bounds = mask_bounds(attngen.define(dtype="bf16", head_dim=128, mask="causal and window(100)"))
    first = np.array([0, 128, 256])
    assert bounds.visited(first, first + 127, 384, 384, 48).tolist() == [144, 288, 240]  # 0:144, 0:288 and 144:384


def test_what_params_bound_is_not_known() -> None:
    spec = attngen.define(dtype="bf16", head_dim=128, mask="causal and window(n)", params={"n": ("int", 100)})
    assert mask_bounds(spec).visited(np.zeros(1), np.zeros(1), 1000, 3000) is None


@pytest.mark.parametrize(
    "described",
    [
        {"head_dim": 256},
        {"head_dim": 128, "score": "s + bias[q, k]", "inputs": {"bias": ("bf16", ("q_len", "kv_len"))}},
        {"head_dim": 80, "mask": "prefix(10) or causal"},
        {"head_dim": 64, "mask": "prefix(10) or causal"},
    ],
)
def test_others_have_one_plan(described) -> None:
    spec = attngen.define(dtype="bf16", **described)
    assert len(plans_for(spec, ARCHES["sm_90a"], "hopper")) == 1


def test_windows_have_tiles_of_their_own() -> None:
    for head_dim, rows in ((64, 256), (80, 192), (96, 192), (160, 192), (128, 192)):
        spec = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal and window(100)")
        assert (rows_of_a_block(spec, 8192, 32), rows_of_a_block(spec, 1024, 12)) == (rows, 128)
    assert choose(spec, ARCHES["sm_90a"], "hopper", Problem(32, 8192, 8192, SMS)).block_kv == 64  # 80 without a mask


def test_a_stated_tile_is_kept() -> None:
    spec = replace(attngen.define(dtype="bf16", head_dim=64), kernel=KernelRequest("hopper", 128, 128))
    assert choice_of(spec, ARCHES["sm_90a"]).rules == ()
    assert choose(spec, ARCHES["sm_90a"], problem=Problem(512, 16384, 16384, SMS)).block_q == 128


def test_auto_is_the_best_that_the_architecture_has() -> None:
    for dtype, arch, schedule in (("bf16", "sm_90a", "hopper"), ("fp16", "sm_80", "fused"), ("fp32", "sm_90a", "hopper")):
        spec = attngen.define(dtype=dtype, head_dim=64)
        assert choose(spec, ARCHES[arch]).keyword == choose(spec, ARCHES[arch], "auto").keyword == schedule


class Counting:
    """A device that counts its compilations."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device, self.compiled = device, 0
        self.name, self.arch, self.multiprocessors = device.name, device.arch, device.multiprocessors

    def compile(self, source):
        self.compiled += 1
        return self.device.compile(source)


@pytest.mark.long
def test_a_plan_that_no_call_takes_is_not_compiled() -> None:
    device = Counting(EmulatedDevice(arch="sm_90a"))
    compiled = attngen.compile(PLAIN, kernel="hopper", device=device)
    assert (compiled.plan.block_q, device.compiled) == (128, 0)
    assert "BLOCK_Q = 128" in compiled.source.text  # it is there to be read
    for length, kernels in ((256, 1), (256, 1), (128, 2), (128, 2)):
        problem = sample(PLAIN, Shape(1, 2, 2, length, 1280))
        assert compared(compiled, problem).passed
        assert device.compiled == kernels
    stated = replace(PLAIN, kernel=KernelRequest("hopper", 128, 128))
    attngen.compile(stated, device=device)
    assert device.compiled == 3


def test_what_only_kernels_of_one_device_have_is_asked_of_the_compiled_one() -> None:
    device = Counting(EmulatedDevice(arch="sm_90a"))
    kernel = attngen.compile(PLAIN, kernel="hopper", device=device).kernel
    assert device.compiled == 0
    assert kernel.counters is kernel.compiled.counters
    assert device.compiled == 1
    with pytest.raises(AttributeError, match="repeat"):  # only kernels of a GPU have it
        _ = kernel.repeat


def test_a_call_runs_the_plan_of_its_sizes() -> None:
    """On two SMs: 256 rows of two heads are four blocks of 128, in two rounds, or two of 256 in one; 128 rows fill half."""
    compiled = attngen.compile(PLAIN, kernel="hopper", device=EmulatedDevice(arch="sm_90a"))
    for length, rows in ((256, 256), (128, 128), (256, 256)):
        problem = sample(PLAIN, Shape(1, 2, 2, length, 1280))
        sizes = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": length, "kv_len": 1280, "multiprocessors": 2}
        assert compiled.at(sizes).plan.block_q == rows
        assert compared(compiled, problem).passed


def test_the_plan_of_unknown_lengths_names_the_others() -> None:
    spec = attngen.define(dtype="bf16", head_dim=64)
    (said,) = [d for d in choose(spec, ARCHES["sm_90a"], "hopper").decisions if d.field == "other tiles"]
    assert said.value.startswith("256 x 64, ")
    assert "128 x 64" in said.value
    called = choose(spec, ARCHES["sm_90a"], "hopper", Problem(512, 1024, 1024, SMS))
    assert not [d for d in called.decisions if d.field == "other tiles"]


def test_a_process_that_serves_can_have_all_compiled_ahead() -> None:
    plans = plans_for(PLAIN, ARCHES["sm_90a"])
    assert plans[0].block_q == 128
    assert sorted(p.block_q for p in plans) == [16, 64, 128, 128, 192, 192, 192, 256, 256]
    assert len({(p.keyword, p.tile) for p in plans}) == len(plans)
