"""Keys and values in pages: every portable schedule reads them where the page table says, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import device as emulated
from attngen.diagnostics import DiagnosticError
from attngen.emit.manifest import from_manifest, to_manifest
from attngen.emit.program import MULTIPROCESSORS
from attngen.keywords import ScheduleName
from attngen.language import load_text
from attngen.plan import ARCHES, Problem
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import dense, stored, unpacked
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, Storage
from attngen.spec.print_attn import to_text
from tests import tiers
from tests.device.test_decode import SYNCHRONIZATION
from tests.harness import cli, compile_text, compiled, emitted, solved
from tests.left_out import first_finding, removable, unnoticed

Case = tuple[ScheduleName, Storage, int | None]
BOTTOM = attngen.define(dtype="bf16", head_dim=16, mask="causal_bottom_right and q + kv_len - q_len - k < 300", lse=True)


def in_pages(
    spec: AttentionSpec, schedule: ScheduleName, storage: Storage = "paged", page_size: int | None = None
) -> AttentionSpec:
    """`spec` by a schedule, with keys in pages."""
    return replace(spec, kernel=replace(spec.kernel, schedule=schedule, storage=storage, page_size=page_size))


def wrong(
    spec: AttentionSpec, problem: Sample, rows: list[int] | None, keys: list[int], arch: str | None = None, **how: Any
) -> list[Any]:
    """The sequences whose results are not those of the same sequence alone."""
    kernel = compiled(spec, spec.kernel.schedule, arch) if arch else compiled(spec, spec.kernel.schedule)
    q_len = problem.q.shape[2]
    rows = rows or [q_len] * len(keys)
    arrays = stored(spec, problem, rows, keys, **how)
    given = [arrays.pop(name) for name in ("q", "k", "v") if name in arrays]
    out, lse = kernel(*given, **arrays)
    packed = spec.kernel.is_packed
    outs = unpacked(out, rows, 0) if packed else list(out)
    lses = unpacked(lse, rows, 1) if packed else list(lse)
    found = []
    for b, (n, m) in enumerate(zip(rows, keys, strict=True)):
        alone = Sample(problem.q[b : b + 1, :, :n], problem.k[b : b + 1, :, :m], problem.v[b : b + 1, :, :m], {})
        o = outs[b].swapaxes(0, 1) if packed else outs[b]
        result = compare(o[None], lses[b][None], truth(spec, alone))
        if n and not result.passed:
            found.append((b, n, m, result))
    return found


SCHEDULES: list[Case] = [
    ("decode", "paged", None), ("decode", "paged", 16), ("fused", "paged", None), ("fused", "packed_paged", 128),
    ("hopper", "paged", 64), ("hopper", "paged", 16), ("hopper", "packed_paged", 256), ("naive", "packed_paged", None),
    ("tiled", "paged", None), ("tiled", "packed_paged", 1), ("decode", "padded", None), ("fused", "padded", None),
    ("hopper", "padded", None), ("naive", "padded", None), ("tiled", "padded", None),
    ("wgmma", "paged", 16), ("wgmma", "packed_paged", 256), ("wgmma", "padded", None),
]  # fmt: skip
KEYS = [0, 1, 16, 17, 300, 64, 5]


QUICK = SCHEDULES[:1]


@pytest.mark.quick
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in SCHEDULES], ids=str)
def test_sequences_in_pages(case: Case) -> None:
    """Lengths from 0 on, pages of several sizes, rubbish in the table, NaN in the rows that no sequence has."""
    schedule, storage, page_size = case
    spec = in_pages(BOTTOM, schedule, storage, page_size)
    problem = sample(spec, Shape(len(KEYS), 4, 2, 3, 300))
    rows = [3, 1, 0, 2, 3, 3, 1] if spec.kernel.is_packed else None
    for number, size in enumerate((1, 16, 64, 256) if page_size is None and spec.kernel.is_paged else (page_size or 1,)):
        assert wrong(spec, problem, rows, KEYS, page_size=size, heads_inside=number % 2 == 0) == []


@pytest.mark.parametrize(("schedule", "size"), [("hopper", 64), ("wgmma", 64), ("decode", 64), ("fused", 16)])
def test_keys_for_which_there_is_no_room(schedule: ScheduleName, size: int) -> None:
    """Padded storage of no keys: any strides, as some libraries give 0 to an array without elements."""
    spec = in_pages(attngen.define(dtype="bf16", head_dim=size), schedule, "padded")
    problem = sample(spec, Shape(2, 2, 1, 3, 0))
    k, v = (np.lib.stride_tricks.as_strided(x, strides=(0, 0, 0, x.itemsize)) for x in (problem.k, problem.v))
    kernel = compiled(spec, schedule, "sm_90a" if schedule == "decode" else None)
    assert not kernel(problem.q, k, v, seqused=np.zeros(2, np.int32)).view(np.int16).any()


BY_TMA: list[tuple[Storage, int | None]] = [("padded", None), ("packed", None), ("paged", 16), ("packed_paged", 48)]


@pytest.mark.parametrize(("storage", "page_size"), tiers.cases(BY_TMA, quick=[("padded", None), ("packed_paged", 48)]))
def test_sequences_that_tma_copies(storage: Storage, page_size: int | None) -> None:
    """Rows after the last key of a sequence are its neighbour's, or NaN. Pages have half a tile, or one and a half."""
    spec = in_pages(replace(BOTTOM, head_dim=64, head_dim_v=64), "decode", storage, page_size)
    plan = choose(spec, ARCHES["sm_90a"])
    assert (plan.own.copies, plan.block_kv) == ("tma", 32 if spec.kernel.is_paged else 64)
    problem = sample(spec, Shape(len(KEYS), 4, 2, 3, 300))
    rows = [3, 1, 0, 2, 3, 3, 1] if spec.kernel.is_packed else None
    for heads_inside in (True, False):
        assert wrong(spec, problem, rows, KEYS, "sm_90a", page_size=page_size or 1, heads_inside=heads_inside) == []
    if storage == "padded":
        assert wrong(spec, sample(spec, Shape(2, 4, 2, 3, 1)), None, [1, 0], "sm_90a") == []  # a cache of one row


@pytest.mark.long
def test_classified_tiles_that_tma_copies() -> None:
    """A warp finds its next tile while the others are under way, so that no lane has its page ahead."""
    mask = "(q + kv_len - q_len - k) % 3 < 2 or k < 40 and h > 1"
    spec = in_pages(attngen.define(dtype="bf16", head_dim=64, mask=mask, lse=True), "decode", "paged", 48)
    plan = choose(spec, ARCHES["sm_90a"])
    assert (plan.own.copies, plan.bounds.full_begin) == ("tma", None)
    assert wrong(spec, sample(spec, Shape(len(KEYS), 4, 2, 3, 300)), None, KEYS, "sm_90a", page_size=48) == []


@pytest.mark.parametrize("size", tiers.cases([16, 64], quick=[16]))
def test_more_tiles_than_a_read_of_the_table_brings(size: int) -> None:
    """The lanes of a warp have the pages of 32 boxes; then they read those of the next ones."""
    spec = in_pages(attngen.define(dtype="bf16", head_dim=64, lse=True), "decode", "paged", size)
    keys = [(2 * 32 * 4 + 1) * min(size, 32) + 5, 40]  # more than 64 boxes of each of the 4 warps
    shape = Shape(2, 1, 1, 1, keys[0])
    splits = compiled(spec, "decode", "sm_90a").plan.own.splits
    assert splits({**shape.sizes(spec), MULTIPROCESSORS: emulated.MULTIPROCESSORS}) == 1
    assert wrong(spec, sample(spec, shape), None, keys, "sm_90a", page_size=size) == []


SPLIT = attngen.define(
    dtype="fp16", head_dim=24, head_dim_v=16, mask="causal_bottom_right", sink="0.5 * h - q", batch_invariant=True, lse=True
)


@pytest.mark.parametrize(
    ("storage", "page_size"), tiers.cases([("packed_paged", 16), ("packed", None)], quick=[("packed_paged", 16)])
)
def test_packed_queries_and_split_keys(storage: Storage, page_size: int | None) -> None:
    """Splits of a long sequence beside short ones, which have no key in most splits; rows that fill one tile, two, and none."""
    spec = in_pages(SPLIT, "decode", storage, page_size)
    keys, rows = [1100, 0, 1, 5, 513, 40], [3, 2, 1, 0, 9, 4]
    problem = sample(spec, Shape(len(keys), 4, 2, 9, 1100))
    sizes = {"batch": len(keys), "q_heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 1100}
    assert compiled(spec, "decode").plan.own.splits(sizes) > 1
    assert wrong(spec, problem, rows, keys) == []


DOCUMENTS = attngen.define(
    dtype="bf16", head_dim=16, mask="ids[b, k] == ids[b, clamp(kv_len - q_len + q, 0, 699)] or k < 3 * h", lse=True,
    inputs={"ids": ("int32", ("batch", "kv_len"))},
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [("decode", "paged"), ("decode", "packed_paged"), ("fused", "paged"), ("fused", "packed")], ids=str
)
def test_tiles_that_data_decide(case: tuple[ScheduleName, Storage]) -> None:
    """The mask reads captured keys, so that tiles are classified one by one: of one long sequence beside many short ones."""
    spec = in_pages(DOCUMENTS, *case)
    keys = [700, 3, 9, 0, 40, 17]
    problem = sample(spec, Shape(len(keys), 2, 1, 2, 700))
    out, lse = dense(spec, problem, *compiled(spec, case[0])(**stored(spec, problem, None, keys, page_size=24)))
    for b, m in enumerate(keys):
        ids = problem.inputs["ids"][b : b + 1, :m]
        alone = Sample(problem.q[b : b + 1], problem.k[b : b + 1, :, :m], problem.v[b : b + 1, :, :m], {"ids": ids})
        assert compare(out[b][None], lse[b][None], truth(spec, alone)).passed if m else not out[b].any(), (b, m)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["decode", "naive"])
def test_pools_of_more_than_2_to_the_31_elements(schedule: ScheduleName) -> None:
    """Most of the pool is memory that nobody touches."""
    spec = in_pages(attngen.define(dtype="bf16", head_dim=16), schedule)
    problem = sample(spec, Shape(1, 2, 1, 1, 40))
    arrays = stored(spec, problem, page_size=16)
    pages = 2**31 // (16 * 16) + 8
    table, found = arrays["page_table"], {}
    for name in ("k", "v"):
        found[name] = np.empty((pages, 1, 16, 16), spec.dtype.numpy)
        found[name][pages - 8 + table[0]] = arrays[name][table[0]]
    arrays |= found | {"page_table": table + np.int32(pages - 8)}
    assert compare(compiled(spec, schedule)(**arrays), None, truth(spec, problem)).passed


def test_no_key_is_read_that_a_sequence_lacks() -> None:
    """Bytes of K and V are those of the rows of its keys, each once, whatever the table has room for."""
    spec = in_pages(attngen.define(dtype="bf16", head_dim=16, lse=True), "decode")
    problem = sample(spec, Shape(3, 4, 2, 1, 300))
    keys = [33, 0, 7]
    assert wrong(spec, problem, None, keys, page_size=16) == []
    counters = compiled(spec, "decode").kernel.counters
    assert counters.bytes_read["K"] == counters.bytes_read["V"] == sum(keys) * 2 * 32


@pytest.mark.parametrize("storage", ["paged", "packed_paged"])
def test_the_text_and_the_manifest_know_pages(storage: Storage) -> None:
    spec = in_pages(BOTTOM, "fused", storage, 64)
    assert load_text(to_text(spec)) == (spec,)
    program = emitted(spec, "fused")
    again = from_manifest(to_manifest(program), program.text)
    assert again == program
    arguments = [t.argument for t in again.of_role("input")]
    assert arguments == ["q", "k", "v", *(["cu_seqlens_q"] if spec.kernel.is_packed else []), "page_table", "seqused"]


def test_hopper_leaves_pages_of_unknown_size_to_fused_and_says_so() -> None:
    spec = in_pages(attngen.define(dtype="bf16", head_dim=128), "auto")
    plan = choose(spec, ARCHES["sm_90a"])
    assert plan.keyword == "fused"
    assert any("not hopper" in d.value for d in plan.decisions)
    stated = in_pages(spec, "auto", "paged", 64)
    assert choose(stated, ARCHES["sm_90a"]).keyword == "hopper"
    for storage in ("paged", "packed_paged"):
        assert choose(in_pages(spec, "auto", storage), ARCHES["sm_90a"], None, Problem(32, 1, 8192, 132)).keyword == "decode"
    for schedule in ("hopper", "wgmma"):
        with pytest.raises(DiagnosticError, match="by pages of a stated size, a multiple of 8 rows"):
            choose(spec, ARCHES["sm_90a"], schedule)
    with pytest.raises(DiagnosticError, match="no gradients"):
        choose(spec, ARCHES["sm_90a"], direction="backward")
    for wrong_size in ({"page_size": 0, "storage": "paged"}, {"page_size": 64}):
        with pytest.raises(DiagnosticError, match="page_size"):
            attngen.define(head_dim=64, **wrong_size)  # type: ignore[arg-type]


@pytest.mark.long
def test_every_barrier_is_needed() -> None:
    """Of the split kernel with pages; a warp has more tiles than stages."""
    spec = in_pages(replace(BOTTOM, mask=None), "decode")
    spec = replace(spec, kernel=replace(spec.kernel, block_q=16, block_kv=16, stages=3, warps=2))
    source = emitted(spec, "decode")
    places = list(SYNCHRONIZATION.finditer(source.text))
    kernels = [compile_text(spec, "decode", removable(source, places), seed) for seed in (0, 5)]

    problems = [solved(spec, shape) for shape in (Shape(1, 2, 1, 2, 500), Shape(4, 2, 1, 2, 190))]

    def is_right(kernel: CompiledAttention, number: int) -> bool:
        problem, expected = problems[number]
        return compare(*kernel(**stored(spec, problem)), expected).passed

    def finding() -> str:
        return first_finding(partial(is_right, kernel, n) for n in range(len(problems)) for kernel in kernels)

    assert unnoticed(source, places, kernels[0].kernel.library, finding) == []


def test_check_knows_where_keys_are(tmp_path: Path) -> None:
    """`check` pages a problem, and finds a table that is read past its end."""
    path = tmp_path / "paged.attn"
    path.write_text(to_text(replace(in_pages(BOTTOM, "naive"), name="paged")))
    assert cli("check", str(path), "--kernel", "naive").exit_code == 0
    assert cli("trace", str(path), "--kernel", "naive", "--kv-len", "40").exit_code == 0
