"""What can happen to a block happens in some problem of a check, or is said to occur in none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.emit.emitter import emit
from attngen.inspect.block_work import Case
from attngen.inspect.checking import Kernel, check_exercised
from attngen.inspect.circumstances import TABLE, wanted_circumstances
from attngen.inspect.known import Problems
from attngen.inspect.trial import Fixed
from attngen.inspect.trials import choose_trials
from attngen.language import load_text
from attngen.plan import ARCHES, Plan
from attngen.plan.plan import PlanRefusal
from attngen.schedules import choose, default_arch
from attngen.spec.attention import AttentionSpec, KernelRequest, Storage
from attngen.spec.gradient import QKV
from tests import tiers
from tests.harness import cli, shipped


def described(mask: str, declared: str = "", score: str = "s") -> AttentionSpec:
    (spec,) = load_text(f"attention mine {{ dtype fp16 head_dim 64 {declared} mask {mask} score {score} }}")
    return spec


def plan_of(spec: AttentionSpec, schedule: str, wanted: tuple[str, ...] = ()) -> Plan:
    return choose(spec, ARCHES[default_arch(schedule)], schedule, wanted=wanted)


def occurring(spec: AttentionSpec, plan: Plan) -> tuple[set[str], str]:
    """The names of the circumstances that occur in the problems of a check, and what is said to occur in none."""
    chosen = choose_trials(spec, plan, Fixed(), Problems(spec))
    cases = [Case(spec, plan, trial, trial.problem(spec)) for trial in chosen.trials]
    names = {one.name for one in wanted_circumstances(plan) if any(one.occurs(case) for case in cases)}
    return names, "\n".join((*chosen.missed, *chosen.absent))


STORED = {
    storage: replace(described("causal"), kernel=KernelRequest(storage=storage)) for storage in ("packed", "padded", "paged")
}
MASKS = (
    *STORED.values(),
    described("causal"),
    described("k > q and k < q + 200"),
    described("k <= q - 70 or k > q + 300"),
    described("padding(lengths)", "input lengths: int32[batch]"),
    described("same_document(document)", "input document: int32[batch, kv_len]"),
    described("q >= k", "input bias: fp16[batch, heads, q_len, kv_len]", "s + bias[b, h, q, k]"),
    replace(
        described("q >= k or k < prefix[b]", "input prefix: int32[batch]"), head_dim=16, head_dim_v=16
    ),  # long rows are cheap
)
PLANS = [
    *((schedule, ()) for schedule in ("naive", "tiled", "fused", "wgmma", "hopper", "decode")),
    *((schedule, QKV) for schedule in ("naive", "tiled", "fused", "hopper")),
]


@pytest.mark.parametrize(("schedule", "wanted"), PLANS)
def test_each_circumstance_of_a_schedule_occurs_with_some_mask(schedule: str, wanted: tuple[str, ...]) -> None:
    possible, found = set(), set()
    for spec in MASKS:
        try:
            plan = plan_of(spec, schedule, wanted)
        except PlanRefusal:  # for keys in pages
            continue
        names, said = occurring(spec, plan)
        for one in wanted_circumstances(plan):
            possible.add(one.name)
            assert one.name in names or one.what in said, (spec.mask, one.name)
        found |= names
    assert possible - found == set()


def test_names_and_words_are_unique() -> None:
    assert len({one.name for one in TABLE}) == len(TABLE)
    assert len({one.what for one in TABLE}) == len(TABLE)


BUGS = [
    ("gpt2", "decode", "sm_90a", r"\n +__syncwarp\(\);  // all lanes are done with the previous stage", ""),
    ("gpt2", "decode", "sm_80", r"copy_next\(stage == 0 \? STAGES - 1 : stage - 1\);", "copy_next(stage);"),
    ("padding", "fused", "sm_80", r"row_sum == 0.0f \? 0.0f : fast_reciprocal", "fast_reciprocal"),
    ("alibi", "fused", "sm_80", r"\n +__syncthreads\(\);  // if no tile was visited[^\n]*", ""),
    ("cross_attention", "naive", "sm_80", "float row_max = -INF;", "float row_max = 0.0f;"),
    ("mistral_window", "decode", "sm_90a", r"q_lo - in.size \+ 1\), kv_len\),  // begin", "q_lo - in.size + 2), kv_len),"),
    ("gpt2", "decode", "sm_80", r"row_sum == row_sum \? row_max : row_sum", "row_max"),
    ("prefix_lm", "fused", "sm_80", r"visited\[begin % THREADS / 32\] >>", "visited[begin / 32] >>"),
]
BUGS_OF_BACKWARDS = [
    ("gpt2", "fused", "sm_80", r" - of_rows.lse_rest\[row\] \* LOG2_E\)", ")"),
    ("packed_documents", "fused", "sm_90a", r"int lanes = 16; lanes > 0", "int lanes = 8; lanes > 0"),
]


def is_reported(spec: AttentionSpec, kernel: Kernel, old: str, new: str) -> bool:
    """Whether a check reports the kernel with `new` in the place of what the expression `old` finds."""
    plan = choose(spec, ARCHES[kernel.device.arch], kernel.schedule, wanted=kernel.wanted, deterministic=kernel.deterministic)
    text, count = re.subn(old, new, emit(spec, plan).text)
    assert count == 1
    try:
        (found,) = check_exercised(spec, [kernel], Fixed(), text)
    except EmulationError:
        return True
    return not found.comparison.passed


@pytest.mark.parametrize(("name", "schedule", "arch", "old", "new"), tiers.cases(BUGS, quick=lambda name, *_: name == "alibi"))
def test_a_kernel_that_is_wrong_in_one_circumstance_is_reported(
    name: str, schedule: str, arch: str, old: str, new: str
) -> None:
    """A stage that is used again before a warp has read it, or another stage; rows without keys; a block without tiles; scores
    far below 0; a window that begins at a tile's last key; more tiles than threads."""
    assert is_reported(shipped(name), Kernel(schedule, EmulatedDevice(arch=arch)), old, new)


@pytest.mark.long
@pytest.mark.parametrize(("name", "schedule", "arch", "old", "new"), BUGS_OF_BACKWARDS)
def test_a_backward_that_is_wrong_in_one_circumstance_is_reported(
    name: str, schedule: str, arch: str, old: str, new: str
) -> None:
    """An lse as large as only two numbers of fp32 can hold; numbers that change in the second half of a tile."""
    assert is_reported(shipped(name), Kernel(schedule, EmulatedDevice(arch=arch), QKV, True), old, new)


@pytest.mark.parametrize(
    ("storage", "schedule", "old", "new"),
    [
        ("paged", "decode", r"min\(max\(seqused\[b_idx\], 0\), max_kv_len\)", "max_kv_len"),
        ("paged", "naive", r"% page_size\)", "% 16)"),
        ("packed", "fused", r"max\(cu_seqlens\[b\], 0\)", "max(cu_seqlens[b], 3 * b)"),
        ("packed", "fused", r"max\(cu_seqlens\[b\], 0\)", "cu_seqlens[b]"),
        ("padded", "fused", r"min\(max\(seqused\[b_idx\], 0\), max_kv_len\)", "max(seqused[b_idx], 0)"),
    ],
)
def test_sequences_have_several_lengths_and_pages_several_sizes(storage: Storage, schedule: str, old: str, new: str) -> None:
    assert is_reported(STORED[storage], Kernel(schedule, EmulatedDevice()), old, new)


@pytest.mark.parametrize(
    ("schedule", "arch"), tiers.cases([("fused", "sm_80"), ("hopper", "sm_90a")], quick=[("fused", "sm_80")])
)
def test_sequences_of_a_backward_have_several_lengths(schedule: str, arch: str) -> None:
    kernel = Kernel(schedule, EmulatedDevice(arch=arch), QKV)
    assert is_reported(STORED["packed"], kernel, r"max\(cu_seqlens\[b\], 0\)", "max(cu_seqlens[b], 3 * b)")
    assert is_reported(STORED["packed"], kernel, r"max\(cu_seqlens\[b\], 0\)", "cu_seqlens[b]")


def test_packed_sequences_are_checked_with_no_sequence_too() -> None:
    for wanted in ((), QKV):
        (found,) = check_exercised(STORED["packed"], [Kernel("naive", EmulatedDevice(), wanted)], Fixed())
        assert found.comparison.passed
        assert 0 in {problem.sizes["batch"] for problem in found.problems}


@pytest.mark.parametrize("wanted", [(), ("near", "far")])
def test_captured_tensors_have_strides_of_their_own(wanted: tuple[str, ...]) -> None:
    read = "input near: fp32[q_len, kv_len] input far: fp32[q_len, kv_len] score s + near[q, k] + far[q, k]"
    (spec,) = load_text(f"attention two {{ dtype fp16 head_dim 16 {read} }}")
    assert is_reported(spec, Kernel("naive", EmulatedDevice(), wanted), r"i0 \* in.far_step_0", "i0 * in.near_step_0")


def test_what_does_not_occur_is_said_in_words(tmp_path: object) -> None:
    said = cli("check", "gpt2", "--device", "emulated", "--kernel", "naive", "--forward").output.splitlines()
    start = said.index("gpt2: occurs in none of the problems tried, which are short:")
    assert said[start + 1] == "    a row without keys (each row has a key)"
    assert all(line.startswith("    ") for line in said[start + 1 :])
    chosen = choose_trials(described("q >= k"), plan_of(described("q >= k"), "decode"), Fixed(heads=32))
    (missed,) = [what for what in chosen.missed if "filled again" in what]
    assert re.fullmatch(
        r"no problem has each buffer of a tile of keys filled again, by the same block or warp; "
        r"one would take about \d+ s here: check it with --q-len \d+ --kv-len \d+",
        missed,
    )


def test_many_heads_are_checked_as_few_and_a_file_that_depends_on_them_as_many() -> None:
    spec, kernel = shipped("llama_gqa"), Kernel("naive", EmulatedDevice())
    text = emit(spec, plan_of(spec, "naive")).text
    (few,) = check_exercised(spec, [kernel], Fixed(), text)
    assert {problem.sizes["q_heads"] for problem in few.problems} == {4}
    of_32 = text.replace("h_idx / (q_heads / kv_heads)", "h_idx / (32 / kv_heads)")
    assert of_32 != text
    (many,) = check_exercised(spec, [kernel], Fixed(), of_32)
    assert many.comparison.passed
    assert {problem.sizes["q_heads"] for problem in many.problems} == {32}
