"""Consumers of the hopper schedule that skip tiles of their block: which plans do, results, counts, and whose turn it is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text
from attngen.device.emulated.tracing import Watch
from attngen.emit.emitter import emit
from attngen.inspect.tracing import ScheduleTrace, trace_spec
from attngen.inspect.work import tile_kinds, work
from attngen.plan import ARCHES, Problem
from attngen.plan.block_map import EMPTY
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.schedules.hopper import plan as hopper
from attngen.spec.attention import AttentionSpec, KernelRequest
from tests import tiers
from tests.harness import compiled, run


def spec_of(mask: str | None, head_dim: int = 256, tile: tuple[int, ...] = (), **described) -> AttentionSpec:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, **described)
    return replace(spec, kernel=KernelRequest("hopper", *tile)) if tile else spec


IDS = {"ids": ("int32", ("batch", "kv_len"))}
BIAS = {"bias": ("fp16", ("heads", "kv_len"))}
FIRST = {"first": ("int32", ("q_len",))}


@pytest.mark.parametrize(
    ("spec", "own"),
    [
        (spec_of("causal"), True),
        (spec_of("causal", 128), False),  # 128 x 128: a tile has the keys of a block's rows
        (spec_of("causal", 128, (128, 64)), True),
        (spec_of("causal", 64, (192, 128)), True),
        (spec_of("causal", 64, (256, 64)), True),
        (spec_of("q - k < 100 and k < 50"), True),
        (spec_of(None), False),
        (spec_of("k < 100"), False),  # the same keys for every row
        (spec_of("causal and same_document(ids)", inputs=IDS), False),  # tile by tile
        (spec_of("causal and k >= first[q]", inputs=FIRST), False),  # blocks know the range of a captured vector
    ],
)
def test_which_plans_have_consumers_with_tiles_of_their_own(spec: AttentionSpec, own: bool) -> None:
    plan = choose(spec, ARCHES["sm_90a"], "hopper")
    assert plan.own.per_consumer_range == own
    assert any(d.field == "consumers' tiles" for d in plan.decisions) == own


ALIBI = {"score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}}


LONG_ROWS = [(64, 4096, 4, {}), (64, 16384, 3, {}), (128, 16384, 3, {}), (64, 16384, 3, ALIBI), (128, 16384, 3, ALIBI)]


@pytest.mark.parametrize(("head_dim", "length", "consumers", "described"), tiers.cases(LONG_ROWS, quick=LONG_ROWS[:1]))
def test_long_causal_rows_do_and_spill_nothing(head_dim: int, length: int, consumers: int, described: dict) -> None:
    spec = spec_of("causal", head_dim, **described)
    plan = choose(spec, ARCHES["sm_90a"], "hopper", Problem(2**19 // length, length, length, 132))
    assert (plan.own.consumers, plan.own.per_consumer_range) == (consumers, True)
    made = compile_text(emit(spec, plan))
    assert not re.findall(r"C75\d\d", made.log)
    (resources,) = made.resources()
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)


FALLING = {"score": "s + 0.01 * (q - k)"}  # tiles are visited from the first to the last
# Q in shared memory and in registers; two consumers and three; tiles above a consumer's own, below, none at all; more of
# them than stages; rows before the first for a whole consumer
CASES = {
    "causal": (spec_of("causal", lse=True), Shape(1, 4, 2, 300, 300)),
    "a score": (spec_of("causal", 64, (192, 64), **ALIBI), Shape(1, 4, 2, 300, 300)),
    "fewer rows than keys": (spec_of("causal_bottom_right", lse=True), Shape(1, 2, 1, 200, 333)),
    "rows without keys": (spec_of("causal_bottom_right", lse=True), Shape(1, 2, 1, 333, 200)),
    "fewer rows than a consumer's": (spec_of("causal", lse=True), Shape(3, 2, 1, 40, 300)),
    "window": (spec_of("causal and window(100)"), Shape(1, 2, 2, 400, 400)),
    "window on both sides": (spec_of("q - k < 70 and k - q < 50"), Shape(1, 2, 2, 400, 300)),
    "heads without tiles": (spec_of("causal and window(100) and h % 2 == 0"), Shape(1, 4, 4, 300, 300)),
    "steep": (spec_of("k <= 6 * q and k >= 5 * q"), Shape(1, 2, 2, 200, 1000)),
    "far": (spec_of("k + 150 <= q"), Shape(1, 2, 2, 400, 400)),
    "key vectors": (spec_of("causal and window(70)", score="s + bias[h, k]", inputs=BIAS), Shape(1, 2, 2, 400, 400)),
    "table": (
        spec_of("causal", score="relative_bias(table, 50)", inputs={"table": ("fp32", ("heads", 101))}),
        Shape(1, 2, 2, 300, 300),
    ),
    "sink": (spec_of("causal", sink="sinks[h]", inputs={"sinks": ("fp32", ("heads",))}), Shape(1, 2, 1, 300, 300)),
    "sigmoid": (spec_of("causal", normalize="sigmoid"), Shape(1, 2, 1, 300, 300)),
    "three": (spec_of("causal", 128, (192, 80)), Shape(1, 4, 2, 500, 500)),
    "three, heads without tiles": (spec_of("causal and h % 2 == 0", 64, (192, 128)), Shape(1, 4, 2, 500, 500)),
    "three, window": (spec_of("causal and window(40)", 128, (192, 48, 2)), Shape(1, 4, 2, 500, 500)),
    "three, steep": (spec_of("k <= 6 * q and k >= 5 * q", 128, (192, 48, 2)), Shape(1, 2, 2, 300, 1500)),
    "four": (spec_of("causal", 64, (256, 64)), Shape(1, 4, 2, 600, 600)),
    "four, steep": (spec_of("k <= 6 * q and k >= 5 * q", 32, (256, 64)), Shape(1, 2, 2, 300, 1500)),
    "registers": (spec_of("causal", 64, (128, 64, 2)), Shape(1, 4, 2, 500, 500)),
    "registers, window": (spec_of("causal and window(70)", 160), Shape(1, 4, 2, 500, 500)),
    "falling": (spec_of("causal", lse=True, **FALLING), Shape(1, 4, 2, 300, 300)),
    "falling, far": (spec_of("k + 150 <= q", **FALLING), Shape(1, 2, 2, 400, 400)),
    "falling, three, steep": (spec_of("k <= 6 * q and k >= 5 * q", 128, (192, 48, 2), **FALLING), Shape(1, 2, 2, 300, 1500)),
    "falling, registers": (spec_of("causal", 64, (128, 64, 2), **FALLING), Shape(1, 4, 2, 500, 500)),
    "registers, steep": (spec_of("k <= 6 * q and k >= 5 * q", 64, (128, 48, 2)), Shape(1, 2, 2, 200, 1000)),
}


@pytest.mark.parametrize("seed", tiers.cases([0, 3], quick=[0]))
@pytest.mark.parametrize("name", tiers.cases(CASES, quick=["three, window"], one_of=3))
def test_against_the_oracle(name: str, seed: int) -> None:
    spec, shape = CASES[name]
    plan = compiled(spec, "hopper", seed=seed).plan
    assert plan.own.per_consumer_range
    assert run(spec, "hopper", sample(spec, shape, seed), seed=seed).passed


def traced(spec: AttentionSpec, shape: Shape, **options) -> ScheduleTrace:
    (found,) = trace_spec(spec, ("hopper",), "sm_90a", shape, {}, **options)
    return found


def test_products_of_a_causal_mask_by_hand() -> None:
    """256 rows, 64 x 64 pairs a product: of four times 64 rows those with 1, 2, 3 and 4 tiles of keys. Blocks copy 2 and 4."""
    n, row = 256, 256 * 2
    found = traced(spec_of("causal"), Shape(1, 1, 1, n, n))
    assert found.totals.mma_operations == (1 + 2 + 3 + 4) * 64 * 64 * 2 * (256 + 256)
    assert found.totals.global_read == n * row + (2 + 4) * 2 * 64 * row + 2 * 4  # and a counter


def test_the_first_block_is_the_one_that_lacks_rows() -> None:
    """400 rows in blocks of 192: 64, 192 and 144, whose keys are 1, 4 and 7 tiles of 64. From row 0 on: 3, 6 and 7."""
    found = traced(spec_of("causal", 128, (192, 64)), Shape(1, 1, 1, 400, 400))
    keys = 1 * 64 + 4 * 64 + 400
    assert found.totals.global_read == (400 + 2 * keys) * 128 * 2 + 3 * 4  # and a counter


WINDOWS = ["window", "window on both sides", "far", "three, window"]


@pytest.mark.parametrize("name", tiers.cases(["causal", *WINDOWS, "three", "four"], quick=["three, window"]))
def test_what_is_read_is_said_beforehand(name: str) -> None:
    """Blocks that rows do not fill: the bytes that `explain` says, and a counter's."""
    spec, shape = CASES[name]
    found = traced(spec, shape)
    problem = sample(spec, shape)
    said = work(spec, found.plan, problem, shape.sizes(spec)).read * shape.batch
    pieces = -(-shape.q_len // found.plan.block_q) * shape.q_heads * shape.batch
    assert found.totals.global_read == said + 4 * pieces


@pytest.mark.parametrize("name", tiers.cases([*WINDOWS, "steep", "three", "registers"], quick=["three, window"]))
def test_products_are_those_of_the_tiles_with_keys_for_a_consumers_rows(name: str) -> None:
    spec, shape = CASES[name]
    found = traced(spec, shape)
    plan, roles = found.plan, found.plan.own
    assert roles is not None
    problem, names = sample(spec, shape), shape.sizes(spec)
    of_blocks, of_consumers = (tile_kinds(plan, problem, names, rows=rows) for rows in (plan.block_q, plan.tile_rows))
    assert of_blocks is not None
    assert of_consumers is not None
    visited = int((of_consumers != EMPTY).sum())
    assert visited < roles.consumers * int((of_blocks != EMPTY).sum())
    columns = spec.head_dim + spec.head_dim_v + (hopper.ONES if roles.row_sums == "products" else 0)
    assert found.totals.mma_operations == shape.batch * shape.q_heads * visited * 64 * plan.block_kv * 2 * columns


@pytest.mark.parametrize(("tile", "consumers"), tiers.cases([((128, 64), 2), ((192, 80), 3)], quick=[((192, 80), 3)]))
def test_consumers_take_turns_with_the_rows_of_a_block(tile: tuple[int, int], consumers: int) -> None:
    """The rows whose lse the first thread of each consumer writes, of one piece of work after the other."""
    first = tuple(128 * (1 + c) for c in range(consumers))
    spec = spec_of("causal", 128, tile, lse=True)
    found = traced(spec, Shape(1, 1, 1, 6 * tile[0], 6 * tile[0]), watch=Watch(threads=first, limit=100000))
    written: dict[int, list[int]] = {thread: [] for thread in first}
    for s in found.steps:
        if s.site.buffer is not None and s.site.buffer.label == "lse" and s.site.writes:
            written[s.thread].append(s.offset // 4)
    groups = {thread: [row % tile[0] // 64 for row in rows if row % 16 == 0] for thread, rows in written.items()}
    pieces = len(groups[first[0]])
    assert pieces > consumers
    for c, thread in enumerate(first):
        assert groups[thread] == [(c + piece + 1) % consumers for piece in range(pieces)]
