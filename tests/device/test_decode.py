"""The schedule for few rows and many keys: heads packed into a tile, keys split over blocks and warps, and their join."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

import attngen
from attngen.diagnostics import DiagnosticError
from attngen.emit.manifest import from_manifest, to_manifest
from attngen.emit.program import MULTIPROCESSORS, PackedTiles, Splits
from attngen.language import load_text
from attngen.plan import ARCHES, Problem
from attngen.plan.arch import Feature
from attngen.plan.split_keys import INVARIANT_KEYS, MOST_SPLITS
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose, plans_for
from attngen.schedules.decode.plan import LEAST_KEYS, MOST_ROWS
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from attngen.spec.print_attn import to_text
from tests import tiers
from tests.harness import call, compared, compile_text, compiled, emitted, is_right, run, solved
from tests.left_out import first_finding, removable, unnoticed

SYNCHRONIZATION = re.compile(
    r"__syncthreads\(\);|__syncwarp\(\);|cp_async_wait<[^>]+>\(\);|(?<!void )(?:cp_async_commit|mbarrier_init_fence)\(\);"
    r"|mbarrier_(?:init|wait|expect_bytes)\(full[^;]*\);"
)
PLAIN = attngen.define(dtype="bf16", head_dim=64, lse=True)
BOTTOM = attngen.define(dtype="fp16", head_dim=40, head_dim_v=24, mask="causal_bottom_right", sink="0.5", lse=True)
# A mask of the head in closed form, and one that each tile is asked for
BY_HEAD = attngen.define(dtype="bf16", head_dim=16, mask="k <= kv_len - 1 - 40 * h", score="s - 0.01 * h * k")
DOCUMENTS = attngen.define(
    dtype="bf16", head_dim=16, mask="ids[b, k] == ids[b, kv_len - q_len + q] or k < 3 * h",
    inputs={"ids": ("int32", ("batch", "kv_len"))},
)  # fmt: skip
# batch, query heads, key/value heads, rows, keys: a block has rows of one head, of several, of more than one tile has room for
SHAPES = (
    Shape(2, 2, 2, 1, 300), Shape(1, 6, 2, 5, 700), Shape(1, 40, 1, 1, 257), Shape(1, 3, 3, 17, 64), Shape(5, 8, 2, 1, 130),
    Shape(1, 2, 1, 1, 1), Shape(1, 2, 1, 1, 1500),
)  # fmt: skip


@pytest.mark.parametrize(
    "spec", tiers.cases([PLAIN, BOTTOM, BY_HEAD, DOCUMENTS], quick=[DOCUMENTS]), ids=["plain", "bottom", "heads", "ids"]
)
def test_rows_of_all_heads_in_a_tile(spec: AttentionSpec) -> None:
    for number, shape in enumerate(SHAPES):
        if spec is not DOCUMENTS or shape.q_len <= shape.kv_len:
            found = run(spec, "decode", shape, seed=number % 2 * 7)
            assert found.passed, (shape, found)


@pytest.mark.parametrize("spec", [PLAIN, BOTTOM, attngen.define(dtype="fp32", head_dim=16)], ids=["plain", "sink", "fp32"])
def test_a_row_with_nan_is_nan_in_any_number_of_splits(spec: AttentionSpec) -> None:
    """All its scores are NaN, and none is the maximum of a split: so had a split without keys."""
    for kv_len in (30, 300, 900):
        problem = sample(spec, Shape(1, 1, 1, 7, kv_len))
        q = from_storage(problem.q)
        q[0, 0, 3, 5], q[0, 0, 5, 0] = np.nan, np.inf
        found = compared(compiled(spec, "decode"), replace(problem, q=round_to_storage(q, spec.dtype)))
        assert found.passed, (kv_len, found)


def wide(spec: AttentionSpec, head_dim: int = 64, head_dim_v: int = 64) -> AttentionSpec:
    """`spec` with head sizes whose tiles TMA copies."""
    return replace(spec, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize(
    "spec",
    tiers.cases([PLAIN, wide(BOTTOM, 128), wide(BY_HEAD), wide(DOCUMENTS), wide(PLAIN, 192, 256)], quick=[wide(BOTTOM, 128)]),
    ids=["plain", "bottom", "heads", "ids", "wide"],
)
def test_tiles_that_tma_copies(spec: AttentionSpec) -> None:
    assert choose(spec, ARCHES["sm_90a"], "decode").own.copies == "tma"
    for number, shape in enumerate(SHAPES):
        if shape.q_len <= shape.kv_len:
            found = run(spec, "decode", shape, arch="sm_90a", seed=number % 2 * 7)
            assert found.passed, (shape, found)


@pytest.mark.parametrize(
    ("keys", "stages", "warps"), tiers.cases([(16, 3, 4), (32, 2, 2), (64, 4, 1), (16, 4, 8)], quick=[(64, 4, 1)])
)
def test_tiles_that_are_stated_and_arrays_with_strides(keys: int, stages: int, warps: int) -> None:
    """K and V are views, [batch, keys, heads, size] and part of a larger array; or have one batch that stands for several."""
    request = replace(PLAIN.kernel, schedule="decode", block_q=16, block_kv=keys, stages=stages, warps=warps)
    spec = replace(PLAIN, kernel=request, mask=attngen.define(head_dim=64, mask="causal_bottom_right").mask)
    kernel, problem = compiled(spec, "decode", "sm_90a"), sample(spec, Shape(2, 4, 2, 3, 333))
    both = np.zeros((2, 340, 4, 64), problem.k.dtype)  # heads of K, then of V
    both.view(np.uint16)[...] = 0x7FFF  # NaN
    both[:, :333, :2], both[:, :333, 2:] = problem.k.swapaxes(1, 2), problem.v.swapaxes(1, 2)
    views = replace(problem, k=both[:, :333, :2].swapaxes(1, 2), v=both[:, :333, 2:].swapaxes(1, 2))
    assert compare(*call(kernel, views), truth(spec, problem)).passed
    one = replace(problem, k=np.broadcast_to(problem.k[:1], problem.k.shape), v=np.broadcast_to(problem.v[:1], problem.v.shape))
    assert compare(*call(kernel, one), truth(spec, one)).passed


def test_which_tiles_tma_copies() -> None:
    """Those of 16-bit numbers whose head sizes are whole slabs; of keys in pages, where a box lies in one."""

    def copies(arch: str = "sm_90a", spec: AttentionSpec = PLAIN, **kernel: object) -> str:
        one = replace(spec, kernel=replace(spec.kernel, **kernel))  # type: ignore[arg-type]
        plan = choose(one, ARCHES[arch], "decode")
        said = [d for d in plan.decisions if d.field == "K and V"]
        assert len(said) == ARCHES[arch].has(Feature.TMA)
        assert all(d.because and ("by TMA" in d.value) == (plan.own.copies == "tma") for d in said)
        return str(plan.own.copies)

    pages = copies(storage="paged", page_size=16), copies(storage="packed_paged", page_size=48)
    assert {copies(), copies("sm_100a"), copies(storage="packed"), copies(storage="padded"), *pages} == {"tma"}
    others = copies("sm_80"), copies(spec=BOTTOM), copies(spec=attngen.define(dtype="fp32", head_dim=64))
    assert {*others, copies(storage="paged"), copies(storage="paged", page_size=8)} == {"cp_async"}


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_window_reads_its_own_keys_alone(arch: str) -> None:
    """Of 4000 keys a window of 100 lies in 8 tiles of 16; splits without a key read nothing."""
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal_bottom_right and q + kv_len - q_len - k < 100")
    spec = replace(spec, kernel=replace(spec.kernel, schedule="decode", block_q=16, block_kv=16))
    kernel, problem = compiled(spec, "decode", arch), sample(spec, Shape(1, 4, 1, 1, 4000))
    sizes = {"batch": 1, "q_heads": 4, "kv_heads": 1, "q_len": 1, "kv_len": 4000, MULTIPROCESSORS: 2}
    assert kernel.plan.own.splits(sizes) > 1
    assert compare(*call(kernel, problem), truth(spec, problem)).passed
    assert kernel.kernel.counters.bytes_read["K"] == kernel.kernel.counters.bytes_read["V"] == 7 * 16 * 128


@pytest.mark.long
def test_rows_without_keys_and_splits_without_keys() -> None:
    """Row 0 of each head has no key; of 600 keys, the others allow the last one: most splits have none for them."""
    spec = attngen.define(dtype="fp16", head_dim=16, mask="q > 0 and k >= kv_len - 1", lse=True)
    problem = sample(spec, Shape(2, 4, 2, 3, 600))
    out, lse = call(compiled(spec, "decode"), problem)
    assert compare(out, lse, truth(spec, problem)).passed
    assert not out[:, :, 0].any()
    assert np.isneginf(lse[:, :, 0]).all()


@pytest.mark.long
def test_a_sink_is_no_part_of_a_split() -> None:
    inputs = {"by_row": ("fp32", ("heads", "q_len"))}
    spec = attngen.define(dtype="bf16", head_dim=16, sink="by_row[h, q]", lse=True, inputs=inputs)
    for shape in (Shape(2, 4, 2, 3, 300), Shape(9, 4, 2, 3, 20)):  # several splits, one
        problem = sample(spec, shape)
        for size in (-np.inf, -1e30, 0.5, 90.0, 1e30):
            sinks = np.full((shape.q_heads, shape.q_len), size, np.float32)
            sinks[1] = 0.1
            with_sinks = replace(problem, inputs={"by_row": sinks})
            found = compare(*call(compiled(spec, "decode"), with_sinks), truth(spec, with_sinks))
            assert found.passed, (shape, size, found)


INVARIANT = replace(PLAIN, kernel=replace(PLAIN.kernel, schedule="decode", batch_invariant=True))


@pytest.mark.long
def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    shape = Shape(3, 8, 2, 2, 1300)
    problem, expected = solved(INVARIANT, shape)
    kernel = compiled(INVARIANT, "decode")
    together = call(kernel, problem)
    assert compare(*together, expected).passed
    for b in range(shape.batch):
        one = replace(problem, q=problem.q[b : b + 1], k=problem.k[b : b + 1], v=problem.v[b : b + 1])
        alone = call(kernel, one)
        assert all(x[b : b + 1].tobytes() == y.tobytes() for x, y in zip(together, alone, strict=True))


def sizes(batch: int, kv_len: int, q_len: int = 1, q_heads: int = 32, kv_heads: int = 8) -> dict[str, int]:
    return {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len, MULTIPROCESSORS: 132}


@pytest.mark.parametrize("blocks", [1, 2])
def test_splits_keep_all_multiprocessors_busy(blocks: int) -> None:
    rule = Splits(16, 64, blocks)
    for batch in (1, 2, 3, 5, 8, 16, 17, 40, 64, 100, 1000):
        for kv_len in (4096, 8192, 65536):
            splits = rule(sizes(batch, kv_len))
            waves = batch * 8 * splits / (132 * blocks)
            assert 1 <= splits <= MOST_SPLITS
            assert waves / np.ceil(waves) >= 0.8 or batch * 8 > 132 * blocks * 8, (batch, kv_len, splits)
    assert rule(sizes(1, 1)) == rule(sizes(1, 0)) == rule(sizes(1, 64)) == rule(sizes(0, 64)) == 1
    assert rule(sizes(1, 128)) <= 2  # never more than there are rounds of the warps of a block
    assert PackedTiles(16)(sizes(1, 1, q_len=9)) == 3
    assert PackedTiles(16)(sizes(1, 1, q_heads=0, kv_heads=0)) == 0


def test_invariant_splits_depend_on_the_number_of_keys_alone() -> None:
    rule = choose(INVARIANT, ARCHES["sm_90a"]).own.splits
    for kv_len in (0, 1, INVARIANT_KEYS, 10 * INVARIANT_KEYS + 1, 10**7):
        others = product((1, 7), (1, 9), (1, 3), (2, 132))
        found = {rule(sizes(b, kv_len, q, 4 * h, h) | {MULTIPROCESSORS: n}) for b, q, h, n in others}
        assert found == {min(max(-(-kv_len // INVARIANT_KEYS), 1), MOST_SPLITS)}


def test_batch_invariance_is_part_of_the_text() -> None:
    assert load_text(to_text(INVARIANT)) == (INVARIANT,)
    spec = attngen.define(kernel="auto", batch_invariant=True, head_dim=128, mask="causal")
    assert "batch_invariant" in to_text(spec)
    plans = {choose(spec, ARCHES["sm_90a"], None, Problem(heads, 2048, 2048, 132)) for heads in (1, 8, 32, 100)}
    assert len(plans) == 1  # and so is the tile of other schedules
    with pytest.raises(DiagnosticError, match="batch_invariant"):
        load_text("attention x { head_dim 64 kernel decode { batch_invariant batch_invariant } }")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_auto_takes_it_for_few_rows_and_many_keys(arch: str) -> None:
    usual = choose(PLAIN, ARCHES[arch])

    def keyword(rows: int, keys: int, **more: object) -> str:
        return choose(PLAIN, ARCHES[arch], None, Problem(32, rows, keys, 132), **more).keyword  # type: ignore[arg-type]

    assert keyword(1, 8192) == keyword(MOST_ROWS, LEAST_KEYS) == "decode"
    assert keyword(MOST_ROWS + 1, 8192) == keyword(1, LEAST_KEYS - 1) == usual.keyword != "decode"
    assert keyword(1, 8192, saves_lse=True) == usual.keyword  # a backward reads the lse of its own forward
    assert any("decode" in d.value for d in usual.decisions)
    assert [p.keyword for p in plans_for(PLAIN, ARCHES[arch])].count("decode") == 1
    assert {p.keyword for p in plans_for(PLAIN, ARCHES[arch], "fused")} == {"fused"}


@pytest.mark.long
def test_compiled_specs_select_it_by_the_lengths_of_a_call() -> None:
    kernel = attngen.compile(PLAIN, device="emulated:fast")
    problem, expected = solved(PLAIN, Shape(1, 4, 2, 1, 300))
    assert kernel.at(Shape(1, 4, 2, 1, 300).sizes(PLAIN)).plan.keyword == "decode"
    assert kernel.at(Shape(1, 4, 2, 20, 300).sizes(PLAIN)) is kernel
    assert compare(*call(kernel, problem), expected).passed


def test_it_needs_asynchronous_copies_and_has_no_backward() -> None:
    with pytest.raises(DiagnosticError, match="sm_75"):
        choose(PLAIN, ARCHES["sm_75"], "decode")
    assert choose(PLAIN, ARCHES["sm_75"], None, Problem(32, 1, 8192, 40)).keyword == "fused"
    with pytest.raises(DiagnosticError, match="no backward"):
        choose(PLAIN, ARCHES["sm_80"], "decode", direction="backward")


def test_the_manifest_has_the_formulas() -> None:
    program = emitted(PLAIN, "decode")
    again = from_manifest(to_manifest(program), program.text)
    assert again == program
    at = sizes(2, 1000)
    assert [k.grid[0](at) for k in again.kernels] == [k.grid[0](at) for k in program.kernels]


@pytest.mark.long
@pytest.mark.parametrize(("arch", "name", "statements"), [
    ("sm_80", "plain", 9), ("sm_80", "ids", 9), ("sm_90a", "plain", 11), ("sm_90a", "ids", 11),
])  # fmt: skip
def test_every_barrier_is_needed(arch: str, name: str, statements: int) -> None:
    """With one split and with several; a warp has more tiles than stages."""
    spec = {"plain": PLAIN, "ids": replace(DOCUMENTS, head_dim=64, head_dim_v=64)}[name]
    spec = replace(spec, kernel=replace(spec.kernel, schedule="decode", block_q=16, block_kv=16, stages=3, warps=2))
    source = emitted(spec, "decode", arch)
    places = list(SYNCHRONIZATION.finditer(source.text))
    assert len(places) == statements
    kernels = [compile_text(spec, "decode", removable(source, places), seed, arch) for seed in (0, 5)]

    problems = [solved(spec, shape) for shape in (Shape(1, 2, 1, 2, 500), Shape(4, 2, 1, 2, 190))]

    def finding() -> str:
        return first_finding(partial(is_right, kernel, *problem) for problem in problems for kernel in kernels)

    assert unnoticed(source, places, kernels[0].kernel.library, finding) == []
