"""`attngen check`: its problems exercise spec and plan, wrong kernels are reported, wrong files are answered in words."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import CompilationError
from attngen.diagnostics import ArgumentError
from attngen.emit.emitter import emit
from attngen.inspect import trials
from attngen.inspect.checking import Kernel, check_exercised
from attngen.inspect.trials import Chosen, Fixed, Trial, choose_trials
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.reference.alternatives import alternatives
from attngen.reference.compare import Truth, compare
from attngen.reference.coverage import Exercise
from attngen.reference.numpy_oracle import Reference
from attngen.reference.stored import apart
from attngen.schedules import choose, schedules_for
from attngen.spec.attention import HOPPER_SCHEDULES, AttentionSpec
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import QKV
from tests.harness import SPECS, emitted, shipped
from tests.harness import cli as invoke
from tests.tiers import cases

WINDOW = "attention mine { dtype fp16 head_dim 16 param size: int = 4096 mask causal and window(size) }"


FREE = Fixed()


def chosen(spec: AttentionSpec, schedule: str = "fused", fixed: Fixed = FREE) -> Chosen:
    arch = ARCHES["sm_90a" if schedule in HOPPER_SCHEDULES else "sm_80"]
    return choose_trials(spec, choose(spec, arch, schedule), fixed)


def described(mask: str = "true", score: str = "s", declared: str = "") -> AttentionSpec:
    (spec,) = load_text(f"attention mine {{ dtype fp16 head_dim 16 {declared} mask {mask} score {score} }}")
    return spec


# --- what is exercised

EVERY = [(name, schedule) for name in SPECS for schedule in schedules_for(shipped(name), ARCHES["sm_90a"])]


@pytest.mark.parametrize(("name", "schedule"), cases(EVERY, quick=lambda name, schedule: schedule == "fused"))
def test_problems_exercise_all_of_a_shipped_spec(name: str, schedule: str) -> None:
    assert chosen(shipped(name), schedule).missed == ()


def test_a_window_longer_than_the_lengths_gets_a_smaller_param() -> None:
    """A check at length 200 alone would pass a kernel without the window."""
    spec = shipped("mistral_window")
    parts = {str(one) for one in alternatives(spec)}
    without = "mask: `q - k < size` always true"
    assert without in parts
    assert without not in chosen(spec).missed
    assert without in chosen(spec, fixed=Fixed(q_len=200, params={"size": 4096})).missed
    assert without not in chosen(spec, fixed=Fixed(q_len=200)).missed


@pytest.mark.parametrize(
    "spec",
    [
        described(score="where(q - k > 10, s, s * 0.5)"),
        described(score="s + 0.1 * max(min(k - q, 40), -40)"),
        described(score="min(s, 20.0)"),
        described(score="30.0 * tanh(s / 30.0)"),
        described("abs(q - k) < 150 or k < 3"),
        described("ids[b, q] == ids[b, k] or k == near[b, q]", declared="input ids: int32[batch, kv_len] "
                  "input near: int32[batch, q_len]"),
        described("q >= k and k < reach[h]", declared="input reach: int32[heads]"),
        described("(q // width - k // width) % 3 == 0", declared="param width: int = 5000"),
    ],
)  # fmt: skip
def test_every_clause_and_branch_makes_a_difference(spec: AttentionSpec) -> None:
    assert chosen(spec).missed == ()


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (described("q - k < 100000"), "mask: `q - k < 100000` always true"),
        (described(score="min(s, 100000.0)"), "score: `min(s, 100000.0)` as `s`"),
        (described("q >= k or q == k"), "mask: `q == k` always false"),
    ],
)
def test_what_no_problem_exercises_is_said(spec: AttentionSpec, part: str) -> None:
    assert part in chosen(spec).missed


def test_what_a_softmax_divides_away_is_not_asked_for() -> None:
    """ALiBi as slopes * k has the same results: the rows' own terms are the same for all keys."""
    assert chosen(described("q >= k", "s + 0.25 * (k - q)")).missed == ()


@pytest.mark.parametrize(
    ("fixed", "missed"), [(Fixed(batch=1), "several batches"), (Fixed(q_len=70, kv_len=70), "q_len other")]
)
def test_what_is_asked_for_wins_and_what_it_misses_is_said(fixed: Fixed, missed: str) -> None:
    found = chosen(shipped("gpt2"), fixed=fixed)
    assert any(what.startswith(missed) for what in found.missed)
    assert {t.shape.batch for t in found.trials} == {1}


def test_a_window_ends_at_the_edge_of_a_tile() -> None:
    """At these lengths a loop bound that is off by one skips an allowed key or visits a forbidden one."""
    (spec,) = load_text(WINDOW)
    plan = choose(spec, ARCHES["sm_80"], "fused")
    sizes = [int(trial.params["size"]) for trial in chosen(spec).trials]
    rows = range(0, 129, plan.block_q)
    assert any((row - size + 1) % plan.block_kv == plan.block_kv - 1 for size in sizes for row in rows)  # kv_begin
    assert any((128 - size + 1) % plan.block_kv == 1 for size in sizes)  # full_begin, of the last row


def test_tiles_of_every_class_and_all_circumstances_occur() -> None:
    """Counted by hand here: two row blocks, three tiles of keys, one row and one key in the last ones."""
    spec = shipped("gpt2")
    plan = choose(spec, ARCHES["sm_80"], "fused")
    first, second, _ = (trial.shape for trial in chosen(spec).trials)
    assert first.q_len > plan.block_q
    assert first.q_len % plan.block_q
    assert first.kv_len > 2 * plan.block_kv
    assert first.kv_len % plan.block_kv
    assert first.q_len < first.kv_len
    assert second.q_len > second.kv_len
    assert second.batch > 1
    assert second.q_heads > second.kv_heads > 1


@pytest.mark.parametrize(("schedule", "count"), [("fused", 1), ("tiled", 0)])
def test_a_problem_of_a_kernel_that_rescales_has_maxima_that_rise(schedule: str, count: int) -> None:
    """A row whose largest score of the second tile is more than 8 powers of 2 above that of the first one."""
    spec, trials = shipped("gpt2"), chosen(shipped("gpt2"), schedule).trials
    plan = choose(spec, ARCHES["sm_80"], schedule)
    steep = [trial for trial in trials if trial.draw.magnitude > 1]
    assert len(steep) == count
    for trial in steep:
        problem, rows, keys = trial.problem(spec), np.arange(trial.shape.q_len), np.arange(trial.shape.kv_len)
        q, k = (from_storage(one[0, 0]).astype(np.float64) for one in (problem.q, problem.k))
        scores = np.where(rows[:, None] >= keys, q @ k.T / np.sqrt(spec.head_dim), -np.inf)
        first, second = (scores[:, i : i + plan.block_kv].max(1) for i in (0, plan.block_kv))
        assert ((second - first) / np.log(2.0)).max() > 8.0


def test_the_problem_with_rising_maxima_is_held_to_sizes_of_the_command_line() -> None:
    for fixed in (Fixed(batch=0), Fixed(heads=4, kv_heads=2), Fixed(kv_heads=2)):
        shapes = [trial.shape for trial in chosen(shipped("gpt2"), fixed=fixed).trials]
        assert {shape.kv_heads for shape in shapes} == {fixed.kv_heads} or fixed.kv_heads is None
        assert all(shape.q_heads % shape.kv_heads == 0 for shape in shapes)
        assert {shape.batch for shape in shapes} == {0} or fixed.batch is None


def test_arrays_of_later_problems_have_strides_of_their_own() -> None:
    first, *others = chosen(shipped("gpt2")).trials
    assert not first.apart
    assert all(trial.apart for trial in others)
    array = np.arange(24, dtype=np.float16).reshape(1, 2, 3, 4)
    found = apart([array, array])
    assert [one.strides for one in found] == [(144, 72, 24, 2), (240, 120, 40, 2)]
    assert all((one == array).all() for one in found)


def test_a_part_is_exercised_only_if_results_differ_beyond_the_bound() -> None:
    spec = described(score="s + 0.00001 * abs(q - k)")
    problem = chosen(spec).trials[0].problem(spec)
    noticed = {str(one) for one in Exercise(spec, problem, {}).noticed(alternatives(spec))}
    assert "scale doubled" in noticed
    assert not any("as `s`" in what for what in noticed)


def test_a_tile_with_one_key_of_a_row_makes_a_difference() -> None:
    """A loop that ends one key early skips the tile in which the last row has its own key alone. That error is within the limit
    if the row has many other keys."""
    spec = replace(shipped("packed_documents"), head_dim=16, head_dim_v=16)
    plan = choose(spec, ARCHES["sm_80"], "fused")

    def is_noticed(trial: Trial) -> bool:
        problem, rows = trial.problem(spec), np.arange(trial.shape.q_len)
        keys, documents = np.arange(trial.shape.kv_len), problem.inputs["document"][0]
        allowed = (rows[:, None] >= keys) & (documents[rows][:, None] == documents)
        computed = allowed & ((rows[:, None] < rows[-1]) | (keys < rows[-1] // plan.block_kv * plan.block_kv))
        return Exercise(spec, problem, {}).notices_pairs(0, 0, allowed, computed)

    of_one_key = [t for t in chosen(spec).trials if t.shape.q_len % plan.block_kv == 1 and t.shape.kv_len > plan.block_kv]
    assert any(map(is_noticed, of_one_key))


# --- what a failure says


def test_a_failure_names_the_first_element_and_where_all_are() -> None:
    exact = np.zeros((2, 4, 80, 16))
    found = exact.astype(np.float16)
    found[1, 3, 64:, :] = 2.0
    found[1, 3, 64, 0] = np.nan
    (wrong,) = compare(found, None, Truth(Reference(exact, None), 0.5, 0.0)).wrong
    assert str(wrong) == (
        "first at O[b=1, h=3, q=64, d=0]: nan, expected 0; 256 of 10,240 elements of O are wrong, "
        "all in batch 1, head 3 and rows >= 64"
    )


def test_errors_of_lse_are_named_by_row() -> None:
    exact = np.zeros((1, 2, 10))
    lse = exact.astype(np.float32)
    lse[0, :, [2, 7]] = 1.0
    output = np.zeros((1, 2, 10, 4))
    (wrong,) = compare(output.astype(np.float16), lse, Truth(Reference(output, exact), 0.0, 0.1)).wrong
    assert str(wrong) == "first at lse[b=0, h=0, q=2]: 1, expected 0; 4 of 20 elements of lse are wrong, all in rows 2, 7"


def edited(tmp_path: Path, text: str, old: str, new: str) -> tuple[str, str]:
    """A spec, and the file that `build` writes for it with one change."""
    spec = tmp_path / "mine.attn"
    spec.write_text(text)
    assert invoke("build", str(spec), "--kernel", "fused", "-o", str(tmp_path)).exit_code == 0
    path = tmp_path / "mine_fused.cu"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return str(spec), str(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return q_idx >= kv_idx && q_idx - kv_idx < in.size;", "return q_idx >= kv_idx;"),
        ("q_idx - kv_idx < in.size;", "q_idx - kv_idx <= in.size;"),
        ("q_hi - in.size + 1", "0"),
    ],
)
def test_a_window_that_is_left_out_or_off_by_one_is_reported(old: str, new: str, tmp_path: Path) -> None:
    """The changed line is in the mask, at its boundary, or in the range of full tiles."""
    spec, path = edited(tmp_path, WINDOW, old, new)
    result = invoke("check", spec, "--source", path, "--device", "emulated", "--json")
    assert result.exit_code == 1, result.output
    (found,) = json.loads(result.output)
    assert not found["passed"]
    assert found["comparison"]["wrong"][0]["tensor"] == "O"
    assert any(0 < problem["params"]["size"] < 129 for problem in found["problems"])


def test_the_text_says_what_failed_and_what_was_not_exercised(tmp_path: Path) -> None:
    spec, path = edited(tmp_path, WINDOW, "return q_idx >= kv_idx", "return q_idx > kv_idx")
    result = invoke("check", spec, "--source", path, "--device", "emulated", "--q-len", "60", "--param", "size=4096")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[1].endswith("FAILED")
    assert lines[2].startswith("    first at O[b=0, h=0, q=0, d=0]: 0, expected ")
    assert lines[3].startswith("    with 1 x 2 heads over 1, 60 rows, 60 keys, size 4096")
    assert "not exercised: " in lines[4]
    assert "mask: `q - k < size` always true" in lines[4]


# --- which file --source is


@pytest.mark.parametrize(
    ("spec", "schedule", "arguments", "words"),
    [
        (
            "gpt2",
            "fused",
            ["alibi"],
            "contains gpt2_fused; alibi has alibi_scores, alibi_softmax, alibi_weighted_sum; or alibi_fused",
        ),
        ("gpt2", "fused", ["gpt2", "--kernel", "tiled"], "contains the fused kernel of gpt2; add --kernel fused"),
        ("gpt2", "fused", ["gpt2", "--arch", "sm_75"], "was built for sm_80, and this run is for sm_75"),
        ("gpt2", "fused", ["packed_documents"], "contains gpt2_fused; packed_documents has"),
        ("gpt2", "fused", ["gpt2", "--backward"], "kernel.cu contains a forward"),
    ],
)
@pytest.mark.parametrize("command", ["check", "trace"])
def test_a_file_of_something_else_is_answered_in_words(
    command: str, spec: str, schedule: str, arguments: list[str], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(emitted(shipped(spec), schedule).text)
    device = ["--device", "emulated"] if command == "check" else []
    result = invoke(command, *arguments, "--source", str(path), *device)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("int heads_in_l2)", "int heads_in_l2, int more)", "the parameters of gpt2_fused are not those"),
        ("BLOCK_Q = 128;", "BLOCK_Q = 64;", "BLOCK_Q is 64, and the plan for sm_80 launches the kernel for 128"),
        ("__global__", "", "has no __global__ function"),
        ("const fp16* __restrict__ Q,", "const bf16* __restrict__ Q,", "parameter Q of gpt2_fused has the type const bf16*"),
        ("__launch_bounds__(THREADS)", "__launch_bounds__(64)", "gpt2_fused has the launch bound 64, and the plan for"),
        ("long long q_stride_b,", "int q_stride_b,", "parameter q_stride_b of gpt2_fused has the type int"),
        ('extern "C" __global__', "__global__", 'gpt2_fused is not declared extern "C"'),
        ("LOG2_E;", "LOG3_E;", "kernel.cu:{line}:"),
        ("asm(", "asm((", "the asm statement at line "),
    ],
)
def test_what_cannot_be_launched_or_compiled_is_said_of_the_user_s_file(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    text = emitted(shipped("gpt2"), "fused").text
    line = text[: text.index(old)].count("\n") + 1
    path.write_text(text.replace(old, new))
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated")
    assert result.exit_code in (2, 3)
    assert words.format(line=line) in result.stderr
    assert "internal error" not in result.stderr
    assert "/tmp/" not in result.stderr.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("encode", "words"),
    [
        (lambda text: text.encode("utf-16"), "is not UTF-8 text"),
        (
            lambda text: text.replace("// 1. Numbers", "// 1. \xdcbersicht").encode("latin-1"),
            "kernel.cu:{line}: this is not UTF-8",
        ),
        (lambda text: text.replace("// 1. Numbers", "// 1.\0").encode(), "kernel.cu:{line}: a character with the code 0"),
        (lambda text: text.encode() + b"//" * 2**22, "a file of `attngen build` has at most"),
        (
            lambda text: text.replace("gpt2_softmax(", "my_softmax(").encode(),
            "lacks the kernel gpt2_softmax that gpt2 launches",
        ),
    ],
)
def test_a_file_that_is_not_text_or_lacks_a_kernel_is_refused_with_its_line(
    encode: Callable[[str], bytes], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.cu"
    text = emitted(shipped("gpt2"), "naive").text
    path.write_bytes(encode(text))
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated")
    assert result.exit_code == 2
    line = text[: text.index("// 1. Numbers")].count("\n") + 1
    assert words.format(line=line) in result.stderr


@pytest.mark.parametrize("change", [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n")])
def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(change: Callable[[str], str], tmp_path: Path) -> None:
    from attngen.inspect.changed_file import changed_file

    spec = shipped("gpt2")
    text = emitted(spec, "naive").text
    path = tmp_path / "kernel.cu"
    path.write_bytes(change(text).encode())
    assert changed_file(path, [spec], None, None).text == text


def test_a_file_of_another_element_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(emitted(shipped("gpt2"), "naive").text)
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated", "--dtype", "bf16")
    assert result.exit_code == 2
    assert "parameter Q of gpt2_scores has the type const fp16*, and the plan for sm_80 passes const bf16*" in result.stderr


@pytest.mark.parametrize("schedule", ["naive", "fused", "hopper"])
def test_backwards_are_detected_and_deterministic_ones_on_request(schedule: str, tmp_path: Path) -> None:
    from attngen.inspect.changed_file import changed_file

    spec, arch = shipped("gpt2"), ARCHES["sm_90a" if schedule == "hopper" else "sm_80"]
    path = tmp_path / "kernel.cu"
    for deterministic in (False, True):
        path.write_text(emit(spec, choose(spec, arch, schedule, wanted=QKV, deterministic=deterministic)).text)
        assert changed_file(path, [spec], None, None).wanted == QKV
        if deterministic or schedule == "naive":
            assert changed_file(path, [spec], None, None, deterministic=True).deterministic
        else:
            with pytest.raises(ArgumentError, match="a backward whose gradients differ from run to run; leave out --det"):
                changed_file(path, [spec], None, None, deterministic=True)
    path.write_text(emitted(spec, "naive").text)
    for command in (["check", "--device", "emulated"], ["trace"]):
        refused = invoke(command[0], "gpt2", "--source", str(path), *command[1:], "--deterministic")
        assert refused.exit_code == 2
        assert "contains a forward; leave out --deterministic" in refused.stderr


@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused", "wgmma", "hopper", "decode"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_schedule_and_architecture_are_detected_in_the_file(schedule: str, arch: str, tmp_path: Path) -> None:
    """A file is recognized under any name, and without comments."""
    from attngen.emit.comments import strip_comments
    from attngen.inspect.changed_file import changed_file

    spec = shipped("gpt2")
    if schedule not in schedules_for(spec, ARCHES[arch]):
        return
    path = tmp_path / "mine.cu"
    text = emitted(spec, schedule, arch).text
    path.write_text(text)
    held = changed_file(path, [shipped("alibi"), spec], None, None)
    assert (held.spec, held.schedule, held.arch.name) == (spec, schedule, arch)
    path.write_text(strip_comments(text))
    assert changed_file(path, [spec], schedule, None).schedule == schedule


@pytest.mark.parametrize("wanted", [("q", "k", "v"), ("q",), ("k", "v")])
@pytest.mark.parametrize(("schedule", "arch"), [("naive", "sm_75"), ("fused", "sm_80"), ("hopper", "sm_90a")])
def test_the_backward_of_a_file_is_recognized(schedule: str, arch: str, wanted: tuple[str, ...], tmp_path: Path) -> None:
    """Also if it writes gradients by tensor maps; another schedule is refused with the one that the file has."""
    from attngen.inspect.changed_file import changed_file

    spec = shipped("gpt2")
    path = tmp_path / "mine.cu"
    path.write_text(emit(spec, choose(spec, ARCHES[arch], schedule, wanted=wanted)).text)
    held = changed_file(path, [spec], None, None)
    assert (held.schedule, held.arch.name, held.wanted) == (schedule, arch, wanted)
    with pytest.raises(ArgumentError, match=f"contains the {schedule} kernel of gpt2; add --kernel {schedule}"):
        changed_file(path, [spec], "tiled", None)


# --- what is checked by default, and dimensions of one's own


def test_every_schedule_that_auto_may_take_is_checked() -> None:
    from attngen.cli.check import _Devices

    def schedules(spec: AttentionSpec, arch: str | None) -> list[str]:
        return [schedule for schedule, _ in _Devices(None, arch, 1, True, False).kernels(spec, None)]

    spec = shipped("gpt2")
    assert schedules(spec, None) == schedules(spec, "sm_90a") == ["naive", "tiled", "fused", "wgmma", "hopper", "decode"]
    assert schedules(spec, "sm_80") == ["naive", "tiled", "fused", "decode"]
    assert schedules(shipped("cross_attention"), None) == ["naive", "tiled", "fused", "decode"]
    tiled = replace(spec, kernel=replace(spec.kernel, block_q=32, block_kv=32))
    assert "fused" in schedules(tiled, None)
    assert "hopper" not in schedules(tiled, None)


TABLE = "attention mine {{ dtype fp16 head_dim 16 input table: fp32[n] score s + table[{index}] }}"


@pytest.mark.parametrize("index", ["k", "min(q, 300) + 7", "abs(k - q)", "clamp(k - q + 100, 0, 200)"])
def test_a_dimension_of_one_s_own_has_the_size_that_its_index_needs(index: str) -> None:
    (spec,) = load_text(TABLE.format(index=index))
    for trial in chosen(spec).trials:
        assert trial.shape.free["n"] > 0


def test_a_dimension_s_size_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.attn"
    path.write_text(TABLE.format(index="k"))
    command = ["check", str(path), "--kernel", "naive", "--device", "emulated", "--kv-len", "20"]
    result = invoke(*command, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)[0]["problems"][0]["sizes"]["n"] == 20
    assert json.loads(invoke(*command, "--dim", "n=33", "--json").output)[0]["problems"][0]["sizes"]["n"] == 33
    for wrong, words in (
        ("n=10", "index 0 of `table`"),
        ("m=3", "has no dimension m of its own; it has n"),
        ("n", "NAME=SIZE"),
    ):
        refused = invoke(*command, "--dim", wrong)
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_parts_that_are_not_tried_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = described("causal", "softcap(20.0)")
    assert chosen(spec, "naive").missed == ()
    monkeypatch.setattr(trials, "MAX_ALTERNATIVES", 3)
    assert chosen(spec, "naive").missed == ("parts of the mask and score after the first 3: they are not tried",)


def test_check_has_both_directions_or_one(tmp_path: Path) -> None:
    def checked(*options: str) -> list[dict[str, Any]]:
        result = invoke("check", "alibi", "--device", "emulated", "--kernel", "naive", "--q-len", "20", "--json", *options)
        found: list[dict[str, Any]] = json.loads(result.output)
        return found

    both = checked()
    assert [one["direction"] for one in both] == ["forward", "backward"]
    assert set(both[1]["problems"][0]["gradients"]) == {"q", "k", "v", "slopes"}
    assert [one["direction"] for one in checked("--forward")] == ["forward"]
    (only,) = checked("--backward", "--wanted", "slopes")
    assert set(only["problems"][0]["gradients"]) == {"slopes"}
    assert only["passed"]


def test_a_changed_backward_is_detected_and_its_wrong_gradients_named(tmp_path: Path) -> None:
    invoke("build", "alibi", "--backward", "--kernel", "naive", "--wanted", "q,slopes", "-o", str(tmp_path))
    path = tmp_path / "alibi_naive_backward.cu"
    path.write_text(path.read_text().replace("p * (dp - delta[row])", "p * dp"))
    result = invoke("check", "alibi", "--device", "emulated", "--source", str(path), "--q-len", "20")
    assert result.exit_code == 1
    assert "naive backward" in result.output
    assert "elements of dq are wrong" in result.output
    assert "first at d_slopes[q_heads=0]" in result.output


def test_a_file_of_a_backward_computes_the_gradients_that_are_named_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    spec = shipped("gpt2")
    path.write_text(emit(spec, choose(spec, ARCHES["sm_80"], "naive", wanted=("q", "k", "v"))).text)
    arguments = ("check", "gpt2", "--source", str(path), "--device", "emulated", "--heads", "1", "--q-len", "9")
    assert invoke(*arguments, "--backward", "--wanted", "v,k,q").exit_code == 0
    for more, words in (
        (["--wanted", "q"], "contains a backward that computes q, k, v"),
        (["--forward"], "contains a backward"),
    ):
        refused = invoke(*arguments, *more)
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_rows_without_keys_give_no_warnings(tmp_path: Path) -> None:
    """The lse of such a row is -inf; what its rounding leaves is 0."""
    (tmp_path / "later.attn").write_text("attention later { dtype fp16 head_dim 16 mask k > q }")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = invoke("check", str(tmp_path / "later.attn"), "--device", "emulated", "--kernel", "naive", "--q-len", "20")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""


def test_a_command_that_fails_does_not_wait_for_references(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_done = Event(), Event()

    def compute(*_: Any) -> None:
        goes_on.wait(20)
        is_done.set()

    monkeypatch.setattr(trials.Known, "compute", compute)
    results = check_exercised(described(), [Kernel("naive", EmulatedDevice())], FREE, text="no CUDA")
    with pytest.raises(CompilationError):
        next(results)
    assert not is_done.is_set()
    goes_on.set()


def test_a_function_that_the_emulated_device_does_not_know_is_answered_in_the_user_s_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(emitted(shipped("gpt2"), "naive").text.replace("float dot = 0.0f;", "float dot = __activemask();"))
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated")
    assert result.exit_code == 2
    assert "__activemask" in result.stderr
    assert "functions of CUDA that docs/trace.md lists" in result.stderr
    assert "/tmp/tmp" not in result.stderr.replace(str(tmp_path), "")
    assert ".hpp" not in result.stderr
