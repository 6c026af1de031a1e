"""`attngen trace`: counts equal to closed formulas, planted mistakes found and named, steps with elements."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from attngen import define
from attngen.device.emulated import EmulationError
from attngen.device.emulated.tracing import Watch
from attngen.inspect.coordinates import Layout
from attngen.inspect.trace_text import totals_line
from attngen.inspect.tracing import ScheduleTrace, trace_spec
from attngen.inspect.work import requested, tile_kinds, work
from attngen.keywords import PORTABLE_SCHEDULES, SCHEDULE_NAMES
from attngen.plan import ARCHES
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose, default_arch
from attngen.spec.attention import AttentionSpec
from tests import tiers
from tests.conftest import ROOT
from tests.harness import call, cli, compiled, emitted, shipped
from tests.hopper import HOPPER_SCHEDULES

ONE = Shape(1, 1, 1, 256, 256)


def traced(spec: AttentionSpec, schedule: str, shape: Shape = ONE, **options) -> ScheduleTrace:
    (found,) = trace_spec(spec, (schedule,), default_arch(schedule), shape, options.pop("params", {}), **options)
    return found


def open_heads(name: str, dtype: str | None = None) -> AttentionSpec:
    return replace(shipped(name, dtype), q_heads=None, kv_heads=None)


# --- counts


def test_gpt2_at_256_by_hand() -> None:
    """Counts derived by hand: n = 256 rows and keys of 64 elements of 2 bytes, scores of 4 bytes."""
    n, row = 256, 64 * 2
    names = ("naive", "tiled", "fused", "wgmma", "hopper")
    naive, tiled, fused, wgmma, hopper = (traced(shipped("gpt2"), schedule) for schedule in names)
    scores, passes, dims = 4 * n * n, 3, 64
    assert naive.totals.global_read == 2 * n * n * row + passes * scores + dims * (scores + n * n * 2)
    tiles = 1 + 2 + 3 + 4  # 64 rows x 64 keys: of each block of rows, those left of the diagonal's end
    of_scores = tiles * 64 * 64 * 4
    assert tiled.totals.global_read == tiles * (64 + 64 + 64) * row + (2 + 1) * of_scores
    tiles = 2 + 4  # 128 rows x 64 keys
    assert fused.totals.global_read == n * row + tiles * 2 * 64 * row
    assert wgmma.totals.global_read == n * row + (1 + 2) * 2 * 128 * row  # tiles of 128 x 128
    assert hopper.totals.global_read == wgmma.totals.global_read + 2 * 4  # and a counter
    assert fused.totals.global_read < tiled.totals.global_read < naive.totals.global_read
    assert (naive.totals.global_written, tiled.totals.global_written) == (2 * scores + n * row, 2 * of_scores + n * row)
    assert fused.totals.global_written == wgmma.totals.global_written == n * row
    assert fused.totals.mma_operations == tiles * 128 * 64 * 2 * (64 + 64)
    assert wgmma.totals.mma_operations == fused.totals.mma_operations
    assert hopper.totals.mma_operations == tiles * 128 * 64 * 2 * (64 + 64 + 8)  # and 8 columns of ones
    assert (naive.totals.mma, naive.totals.shared_read, naive.totals.barriers) == (0, 0, 0)
    # ordinary multiply-adds: every pair once for each dimension of K and V; of tiled those of the visited tiles
    assert (naive.totals.fma, naive.totals.operations) == (n * n * (64 + 64), 2 * n * n * (64 + 64))
    assert tiled.totals.fma == of_scores // 4 * (64 + 64)
    assert (fused.totals.fma, fused.totals.operations) == (0, fused.totals.mma_operations)


CASES = [
    ("gpt2", None, ONE, {}),
    ("gpt2", None, Shape(2, 2, 1, 200, 130), {}),
    ("gpt2", None, Shape(1, 1, 1, 70, 300), {}),
    ("gpt2", "fp32", Shape(1, 2, 2, 129, 65), {}),
    ("cross_attention", None, Shape(1, 1, 1, 100, 40), {}),
    ("mistral_window", None, Shape(1, 1, 1, 300, 300), {"size": 70}),
    ("head_dim_80", None, Shape(1, 1, 1, 65, 90), {}),
    ("sigmoid_attention", None, Shape(1, 1, 1, 100, 100), {}),
    ("retention", None, Shape(1, 1, 1, 130, 130), {}),
    ("packed_documents", None, Shape(2, 1, 1, 200, 200), {}),
    ("dilated", None, Shape(1, 1, 1, 150, 150), {"step": 3}),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "params"), tiers.cases(CASES, quick=[CASES[1]]))
def test_bytes_are_those_of_the_closed_formula(name: str, dtype: str | None, shape: Shape, params: dict[str, int]) -> None:
    spec = open_heads(name, dtype)
    problem = sample(spec, shape)
    for schedule in (*PORTABLE_SCHEDULES, *(HOPPER_SCHEDULES if spec.dtype.bytes == 2 else ())):
        found = traced(spec, schedule, shape, params=params)
        names = {**shape.sizes(spec), **{p.name: p.default for p in spec.params if p.default is not None}, **params}
        read, written = dict.fromkeys("QKVS", 0), dict.fromkeys("SO", 0)
        for b in range(shape.batch):
            for h in range(shape.q_heads):
                kinds = tile_kinds(found.plan, problem, names, b, h)
                traffic = requested(spec, found.plan, shape.q_len, shape.kv_len, kinds)
                read = {t: n + traffic.read.get(t, 0) for t, n in read.items()}
                written = {t: n + traffic.written.get(t, 0) for t, n in written.items()}
        assert {t: found.read.get(t, 0) for t in "QKVS"} == read, schedule
        assert {t: found.written.get(t, 0) for t in "SO"} == written, schedule


@pytest.mark.parametrize("name", ["mistral_window", "packed_documents"])
def test_products_are_those_of_the_tiles_that_are_visited(name: str) -> None:
    spec, shape = open_heads(name), Shape(1, 1, 1, 256, 256)
    (found,) = trace_spec(spec, ("fused",), "sm_90a", shape, {})
    names = {**shape.sizes(spec), **{p.name: p.default for p in spec.params}}
    assert found.totals.mma_operations == work(spec, found.plan, sample(spec, shape), names).computed


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("name", tiers.cases(["gpt2", "packed_documents"], quick=["gpt2"]))
def test_sites_add_up_to_the_totals(name: str, schedule: str) -> None:
    found = traced(shipped(name), schedule, Shape(1, 2, 2, 150, 150))
    sums = {(shared, writes): 0 for shared in (False, True) for writes in (False, True)}
    for s in found.sites:
        if s.buffer is not None:
            sums[s.buffer.is_shared, s.writes] += s.bytes
    t = found.totals
    assert sums[False, False] == t.global_read == sum(found.read.values())
    assert sums[False, True] == t.global_written == sum(found.written.values())
    assert (sums[True, False], sums[True, True]) == (t.shared_read, t.shared_written)
    for s in found.sites:
        assert s.place.line, s
        assert s.buffer is None or s.buffer.name != "shared memory"  # every buffer has a name
    met = ("block barrier", "warp barrier")
    if schedule not in HOPPER_SCHEDULES:
        assert sum(s.executions for s in found.sites if s.what in met) == t.barriers


def test_lines_are_found_although_another_process_has_made_the_library_anew(tmp_path: Path) -> None:
    naive = compiled(shipped("gpt2"), "naive")
    call(naive, sample(naive.spec, Shape(1, 1, 1, 8, 8)))  # loads it
    library = naive.kernel.library
    before = naive.kernel._loaded.emulator_library()
    shutil.copy(library, tmp_path / "same.so")
    os.replace(tmp_path / "same.so", library)
    assert naive.kernel._loaded.emulator_library() == before > 0


def test_every_line_of_a_site_has_what_it_is_said_to_do() -> None:
    words = {"ldmatrix": "ldmatrix", "mma": "mma_", "cp.async": "cp_async", "block barrier": "__syncthreads"}
    for s in traced(shipped("gpt2"), "fused").sites:
        assert words.get(s.what, "") in s.place.text, s.place


@pytest.mark.parametrize("schedule", ["fused", *HOPPER_SCHEDULES])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", tiers.cases(["gpt2", "llama_gqa"], quick=["gpt2"]))
def test_kernels_on_tensor_cores_have_no_bank_conflict(name: str, dtype: str, schedule: str) -> None:
    found = traced(open_heads(name, dtype), schedule, Shape(1, 1, 1, 130, 130))
    assert [(s.place, s.degree) for s in found.sites if s.conflicts] == []


@pytest.mark.parametrize(
    ("head_dim", "q", "kv", "warps"),
    tiers.cases([(64, 128, 64, 4), (72, 64, 64, 2), (80, 64, 64, 4), (32, 128, 128, 8)], quick=[(72, 64, 64, 2)]),
)
def test_tiled_kernels_have_no_bank_conflict(head_dim: int, q: int, kv: int, warps: int) -> None:
    """Stores of a transposed slice and reads of four floats a lane, whether a slice has 8 terms or 16."""
    spec = define(dtype="fp32", head_dim=head_dim, mask="causal", kernel="tiled", tile=(q, kv), warps=warps)
    found = traced(spec, "tiled", Shape(1, 1, 1, 130, 130))
    assert [(s.place, s.degree) for s in found.sites if s.conflicts] == []
    plan = choose(spec, ARCHES["sm_80"], "tiled")
    assert (plan.block_q, plan.block_kv, plan.warps) == (q, kv, warps)


# --- planted mistakes


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, (old, text.count(old))
    return text.replace(old, new)


def test_a_planted_bank_conflict_is_named() -> None:
    """Without their padding, the eight rows that an ldmatrix reads lie in the same banks."""
    text = emitted(shipped("gpt2"), "fused").text
    planted = re.sub(r"constexpr int PAD = 8;", "constexpr int PAD = 0;", text)
    assert planted != text
    found = [s for s in traced(shipped("gpt2"), "fused", text=planted).sites if s.conflicts]
    by_buffer = {(s.what, s.buffer.label): s for s in found if s.buffer is not None}
    lines = planted.splitlines()
    fragments = {"Q_smem": "ldmatrix_x4(Q_frag", "K_smem": "ldmatrix_x4(k_frag", "V_smem": "ldmatrix_x4_trans(v_frag"}
    for buffer, primitive in fragments.items():
        site = by_buffer["ldmatrix", buffer]
        assert primitive in lines[site.place.line - 1]
        assert site.degree == 8
        assert site.conflicts == 7 * site.phases


def test_a_planted_bank_conflict_without_the_swizzle_is_named() -> None:
    text = emitted(shipped("gpt2"), "hopper", "sm_90a").text
    planted = text.replace("(chunk ^ row % 8) * 16", "chunk * 16")
    assert planted != text
    found = [s for s in traced(shipped("gpt2"), "hopper", text=planted).sites if s.conflicts]
    (read,) = (s for s in found if not s.writes and s.what == "ldmatrix")
    assert read.buffer is not None
    assert (read.what, read.buffer.label, read.degree) == ("ldmatrix", "Q_smem", 8)
    assert "ldmatrix_x4(frag.Q[step]" in read.place.text


@pytest.mark.parametrize(
    ("schedule", "barrier", "buffers"),
    [
        ("fused", "__syncthreads();  // all threads are done with the previous tile", {"K_smem", "V_smem"}),
        (
            "tiled",
            "__syncthreads();  // everyone is done: the next may take its place",
            {"Q_smem", "K_smem", "P_smem", "V_smem"},
        ),
    ],
)
def test_a_planted_missing_barrier_is_named(schedule: str, barrier: str, buffers: set[str]) -> None:
    """A race names the lines of both accesses, and the buffer."""
    text = emitted(shipped("gpt2"), schedule).text
    place = text.index(barrier)
    planted = text[:place] + " " * len("__syncthreads();") + text[place + len("__syncthreads();") :]
    with pytest.raises(EmulationError) as caught:
        traced(shipped("gpt2"), schedule, text=planted)
    error = caught.value
    assert error.where is not None
    assert error.where.buffer in buffers
    assert f"of {error.where.buffer})" in str(error)
    assert error.at.line > 0
    assert error.kind in ("race", "copy in flight")
    assert error.other is not None
    assert error.other.line > 0
    if schedule == "fused":  # two primitives: where they are called is named too
        assert any("ldmatrix_x4" in text for _, text in error.at.callers)
        assert any("load_k" in text for _, text in error.other.callers)


def test_a_changed_file_is_traced_and_checked_on_the_command_line(tmp_path: Path) -> None:
    source = emitted(shipped("gpt2"), "tiled")
    path = tmp_path / "gpt2_tiled.cu"
    path.write_text(source.text)
    small = ("gpt2", "--q-len", "64", "--source", str(path))
    assert invoke("trace", *small, exit_code=0).startswith("gpt2: ")
    assert "tiled" in invoke("check", *small, "--device", "emulated", exit_code=0)
    path.write_text(changed(source.text, "const float s = S_frag[r][j] * softmax_scale;", "const float s = S_frag[r][j];"))
    assert "FAILED" in invoke("check", *small, "--device", "emulated", exit_code=1)
    place = source.text.index("__syncthreads();  // both slices are complete")
    path.write_text(source.text[:place] + source.text[place + len("__syncthreads();") :])
    for command in ("trace", "check"):
        output = invoke(command, *small, *(("--device", "emulated") if command == "check" else ()), exit_code=1)
        assert re.search(r"in gpt2_scores, block \(0, 0, 0\), thread \d+: .* of [QK]_smem\)\n  line \d+: ", output), output
    path.write_text(source.text + "nonsense\n")
    assert f"{path} does not compile:\n{path}:" in invoke("trace", *small, exit_code=2)


# --- steps and coordinates


def test_layouts_name_elements() -> None:
    assert Layout("fp16", (2, 3, 10, 64)).at(2 * (((1 * 3 + 2) * 10 + 7) * 64 + 8), 16) == "[1, 2, 7, 8:16]"
    assert Layout("fp32", (5, 6)).at(4 * 13, 4) == "[2, 1]"
    assert Layout("float", (1,)).at(4 * 132, 16) == "[132:136]"
    swizzled = Layout("bf16", (1, 192, 64), swizzled=True)
    assert swizzled.at(128 * 9 + 16 * (3 ^ 1), 16) == "[0, 9, 24:32]"  # row 9: chunks are permuted by 9 % 8


def test_steps_of_the_fused_kernel_tell_its_story() -> None:
    """Thread 0 copies its elements of Q, K and V, and what it copies is what is read at these places of shared memory."""
    found = traced(shipped("gpt2"), "fused", watch=Watch(threads=(0, 31), limit=400))
    layouts = found.layouts
    copies = [s for s in found.steps if s.site.what == "cp.async" and s.thread == 0]
    reads, writes = copies[0::2], copies[1::2]
    for read, write in zip(reads, writes, strict=True):
        assert read.site.buffer is not None
        assert write.site.buffer is not None
        assert (read.site.writes, write.site.writes) == (False, True)
        assert write.site.buffer.label == f"{read.site.buffer.label}_smem"
        row = layouts[read.site.buffer.label].at(read.offset, 16).rsplit(",", 1)[1]
        assert layouts[write.site.buffer.label].at(write.offset, 16).rsplit(",", 1)[1] == row  # the same columns
    assert layouts["Q"].at(reads[0].offset, 16) == "[0, 0, 128, 0:8]"  # the last rows come first
    phases = [s.phase for s in found.steps if s.thread == 0]
    assert phases == sorted(phases)
    fragments = [s for s in found.steps if s.site.what == "ldmatrix" and s.thread == 31]
    assert layouts["Q_smem"].at(fragments[0].offset, 16) == "[15, 8:16]"  # row lane % 16, columns 8 (lane / 16)
    assert all(s.value is not None for s in fragments)


def invoke(*arguments: str, exit_code: int) -> str:
    result = cli(*arguments)
    assert result.exit_code == exit_code, result.output
    return result.output


def test_trace_prints_schedules_sites_and_steps() -> None:
    text = invoke("trace", "gpt2", "--q-len", "64", exit_code=0)
    assert [line.split()[0] for line in text.splitlines()[4:7]] == ["naive", "tiled", "fused"]
    assert "fused: no bank conflict" in text
    text = invoke("trace", "gpt2", "--kernel", "fused", "--q-len", "64", exit_code=0)
    assert re.search(r"\d+ ldmatrix +<- K_smem", text)
    text = invoke("trace", "gpt2", "--q-len", "64", "--steps", "--thread", "0,2-3", "--limit", "5", exit_code=0)
    assert len(re.findall(r"^ +\d+ +[023] +\d +\d+  \w", text, re.MULTILINE)) == 15
    assert re.search(r"cp.async +reads Q\[0, 0, 0, 0:8\] = -?\d", text)


def test_trace_as_json() -> None:
    arguments = ("trace", "gpt2", "--kernel", "fused", "--q-len", "64", "--json", "--steps", "--limit", "3")
    (found,) = json.loads(invoke(*arguments, exit_code=0))
    assert (found["attention"], found["schedule"], found["template"]) == ("gpt2", "fused", "fused_mma")
    assert found["global_read"] == sum(found["read"].values()) == 3 * 64 * 128
    assert {"kernel", "line", "buffer", "conflicts", "idle_lanes"} <= set(found["sites"][0])
    assert [s["element"] for s in found["steps"]] == ["[0:3]", "[0, 0, 0, 0:8]", "[0, 0:8]"]


def test_threads_that_are_not_there_have_no_steps() -> None:
    assert "no kernel has a block 99" in invoke("trace", "gpt2", "--q-len", "64", "--steps", "--block", "99", exit_code=0)


def test_the_documents_show_what_is_counted() -> None:
    page = (ROOT / "docs" / "trace.md").read_text()
    for schedule in PORTABLE_SCHEDULES:
        counted = totals_line(traced(shipped("gpt2"), schedule))
        assert counted[: counted.rindex("%") + 1] in page


@pytest.mark.long  # compiles the emulated device's own code for a debugger
@pytest.mark.parametrize("schedule", PORTABLE_SCHEDULES)
def test_check_of_a_kernel_compiled_for_gdb(schedule: str) -> None:
    small = ("gpt2", "--device", "emulated", "--kernel", schedule, "--q-len", "40", "--debug")
    assert "ok" in invoke("check", *small, exit_code=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--thread", "x"), "'x' is not a thread number or a range"),
        (("--thread", "2000"), "thread numbers are 0 to 1023"),
        (("--arch", "sm_1"), "unknown architecture sm_1"),
        (("--param", "window=3"), "has no input or param `window`"),
    ],
)
def test_bad_arguments_are_refused_with_words(arguments: tuple[str, ...], words: str) -> None:
    assert words in invoke("trace", "gpt2", "--steps", *arguments, exit_code=2)


def test_a_backward_is_traced() -> None:
    (found,) = trace_spec(shipped("alibi"), ("naive",), "sm_80", Shape(1, 1, 1, 20, 20), {}, wanted=("q", "slopes"))
    assert set(found.written) == {"S", "dP", "delta", "dQ", "d_slopes"}
    assert found.written["d_slopes"] == 4
