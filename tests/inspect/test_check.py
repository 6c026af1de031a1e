"""`attngen check`: its problems exercise spec and plan, and wrong kernels are reported."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import CompilationError
from attngen.inspect import trials
from attngen.inspect.block_work import Case, seconds
from attngen.inspect.checking import Kernel, check_exercised
from attngen.inspect.few_heads import few_heads_of
from attngen.inspect.trial import Fixed, Trial
from attngen.inspect.trials import Chosen, choose_trials
from attngen.language import load_text
from attngen.plan import ARCHES, Plan
from attngen.reference.alternatives import alternatives
from attngen.reference.compare import Truth, compare, truth
from attngen.reference.coverage import Exercise
from attngen.reference.numpy_oracle import Reference
from attngen.reference.problems import Shape, sample
from attngen.reference.stored import apart
from attngen.schedules import choose, default_arch, schedules_for
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage
from tests.harness import SHIPPED, shipped
from tests.harness import cli as invoke
from tests.tiers import cases

WINDOW = "attention mine { dtype fp16 head_dim 16 param size: int = 4096 mask causal and window(size) }"


FREE = Fixed()


def sentence(spec: AttentionSpec, part: str) -> str:
    """What is said if no problem exercises a part."""
    (one,) = [one for one in alternatives(spec) if str(one) == part]
    return one.sentence


def chosen(spec: AttentionSpec, schedule: str = "fused", fixed: Fixed = FREE) -> Chosen:
    def plan_for(spec: AttentionSpec) -> Plan:
        arch = ARCHES[default_arch(schedule)]
        return choose(spec, arch if schedule in schedules_for(spec, arch) else ARCHES["sm_90a"], schedule)

    plan = plan_for(spec)
    return choose_trials(*(few_heads_of(spec, plan, plan_for) or (spec, plan)), fixed)


def described(mask: str = "true", score: str = "s", declared: str = "") -> AttentionSpec:
    (spec,) = load_text(f"attention mine {{ dtype fp16 head_dim 16 {declared} mask {mask} score {score} }}")
    return spec


# --- what is exercised

EVERY = [(name, schedule) for name in SHIPPED for schedule in schedules_for(shipped(name), ARCHES["sm_90a"])]


@pytest.mark.parametrize(("name", "schedule"), cases(EVERY, quick=lambda name, schedule: schedule == "fused"))
def test_problems_exercise_all_of_a_shipped_spec(name: str, schedule: str) -> None:
    assert chosen(shipped(name), schedule).missed == ()


@pytest.mark.parametrize(("arch", "heads"), [("sm_80", 2), ("sm_90a", 64)])
def test_many_heads_of_a_key_head_are_checked_as_few(arch: str, heads: int) -> None:
    """The tile follows from the heads that share keys: of fewer, it is stated, where the schedule takes fewer at all."""
    spec = shipped("latent_decode")
    plan = choose(spec, ARCHES[arch], "decode")
    found = few_heads_of(spec, plan, lambda few: choose(few, ARCHES[arch], "decode"))
    assert found is not None
    few, of_few = found
    assert (few.q_heads, few.kv_heads) == (heads, 1)
    assert (of_few.schedule, of_few.tile) == (plan.schedule, plan.tile)


def test_packed_heads_take_the_time_of_their_blocks() -> None:
    """A row of 64 heads that share keys is a block, as 64 rows of one head are; one more row of each is another block."""
    plan = choose(replace(shipped("latent_decode"), q_heads=None, kv_heads=None), ARCHES["sm_80"], "decode")
    spec, rows = plan.facts.spec, plan.block_q

    def estimated(heads: int, q_len: int) -> float:
        trial = Trial(Shape(1, heads, 1, q_len, 40), {})
        return seconds(Case(spec, plan, trial, trial.problem(spec)))

    assert estimated(1, rows) == estimated(rows, 1) == estimated(2 * rows, 2) / 4


def test_a_window_longer_than_the_lengths_gets_a_smaller_param() -> None:
    """A check at length 200 alone would pass a kernel without the window."""
    spec = shipped("mistral_window")
    parts = {str(one) for one in alternatives(spec)}
    assert "mask: `q - k < size` always true" in parts
    without = "a kernel that takes `q - k < size` in the mask to be always true would pass"
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
    assert sentence(spec, part) in chosen(spec).missed


def test_what_a_softmax_divides_away_is_not_asked_for() -> None:
    """ALiBi as slopes * k has the same results: the rows' own terms are the same for all keys."""
    assert chosen(described("q >= k", "s + 0.25 * (k - q)")).missed == ()


@pytest.mark.parametrize(
    ("fixed", "missed"), [(Fixed(batch=1), "several batches"), (Fixed(q_len=70, kv_len=70), "q_len other")]
)
def test_what_is_asked_for_wins_and_what_it_misses_is_said(fixed: Fixed, missed: str) -> None:
    found = chosen(shipped("gpt2"), fixed=fixed)
    assert any(what.startswith(f"no problem has {missed}") for what in found.missed)
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
    first, second, *_ = (trial.shape for trial in chosen(spec).trials)
    assert first.q_len > plan.block_q
    assert first.q_len % plan.block_q
    assert first.kv_len > 2 * plan.block_kv
    assert first.kv_len % plan.block_kv
    assert first.q_len < first.kv_len
    assert second.q_len > second.kv_len
    assert second.batch > 1
    assert second.q_heads > second.kv_heads > 1


@pytest.mark.parametrize("schedule", ["fused", "tiled"])
def test_a_problem_has_maxima_that_rise(schedule: str) -> None:
    """A row whose largest score of the second tile is more than 8 powers of 2 above that of the first one."""
    spec, trials = shipped("gpt2"), chosen(shipped("gpt2"), schedule).trials
    plan = choose(spec, ARCHES["sm_80"], schedule)
    steep = [trial for trial in trials if trial.setting.draw.magnitude > 1]
    assert steep
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
    assert not first.setting.apart
    assert all(trial.setting.apart for trial in others)
    array = np.arange(24, dtype=np.float16).reshape(1, 2, 3, 4)
    found = apart({"q": array, "k": array, "slopes": array[0, 0, 0]})
    assert [one.strides for one in found.values()] == [(240, 120, 40, 2), (432, 216, 72, 2), (4,)]
    assert (found["q"] == array).all()
    assert (found["k"] == array).all()


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


def test_a_row_of_nan_hides_no_error_of_other_rows() -> None:
    """log of a negative score is NaN: in rows of it, as such, and as an operand of max the other one is the result."""
    spec = described(score="where(q == 0, log(-abs(s)), max(log(s), -3.0))")
    problem = sample(spec, Shape(1, 1, 1, 4, 5))
    expected = truth(spec, problem)
    output = from_storage(expected.reference.output.astype(spec.dtype.numpy))
    assert np.isnan(output[0, 0, 0]).all()
    assert np.isfinite(output[0, 0, 1:]).all()
    assert compare(output, None, expected).passed
    for row, wrong in ((1, 9.0), (1, np.nan), (0, 0.0)):
        other = output.copy()
        other[0, 0, row, 0] = wrong
        assert not compare(other, None, expected).passed, (row, wrong)


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
    assert lines[4] == "mine: not exercised, so that a mistake there is not seen:"
    assert "    a kernel that takes `q - k < size` in the mask to be always true would pass" in lines[5:]
    assert lines[-1] == "    the lengths are fixed: with others, more can happen to a block, which is not checked"


# --- what is checked by default, and dimensions of one's own


def test_every_schedule_that_auto_may_take_is_checked() -> None:
    from attngen.cli.check import _Devices

    def schedules(spec: AttentionSpec, arch: str | None) -> list[str]:
        return [kernel.schedule for kernel in _Devices(None, arch, 1, True, False).kernels(spec, None)]

    spec = shipped("gpt2")
    assert schedules(spec, None) == schedules(spec, "sm_90a") == ["naive", "tiled", "fused", "wgmma", "hopper", "decode"]
    assert schedules(spec, "sm_80") == ["naive", "tiled", "fused", "decode"]
    assert schedules(shipped("cross_attention"), None) == ["naive", "tiled", "fused", "hopper", "decode"]
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
    assert chosen(spec, "naive").missed == ("parts of the mask and score after the first 3 are not tried",)


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
