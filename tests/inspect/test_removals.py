"""A default `attngen check --source` notices that a barrier, guard or bound of an emitted file is missing, or the removal is
known to have no effect. `python -m tests.inspect.all_removals` runs all of them."""

from __future__ import annotations

import random
import re
from functools import cache

import pytest

from attngen.cache.disk_cache import digest
from attngen.device.emulated.build import runtime_digest
from tests.conftest import ROOT
from tests.inspect.all_removals import Harness, files
from tests.inspect.removals_without_effect import WITHOUT_EFFECT, reason_of, stale
from tests.removals import BOUND, GUARD, LOOP, ORDERS, Emitted

GENERATED = sorted(path.name for path in (ROOT / "generated").glob("*.cu"))
NO_SPEC = {"append_to_pages_bf16_128_rotary_128.cu"}  # no kernel of a spec: tests/torch/test_append_removals.py
# Of which every removal has been run, and is noticed or known to have no effect
EXPLORED = (
    "gpt2_naive.cu", "cross_attention_naive.cu", "gpt2_tiled.cu", "cross_attention_tiled.cu", "gpt2_fused.cu",
    "cross_attention_fused.cu", "alibi_fused.cu", "head_dim_80_fused.cu", "retention_fused.cu", "gpt2_wgmma.cu",
    "gpt2_naive_backward.cu", "gpt2_hopper.cu", "gpt2_fused_backward.cu", "cross_attention_fused_backward.cu",
    "prefix_lm_fused.cu", "packed_documents_fused.cu", "gpt2_tiled_backward.cu", "alibi_naive_backward.cu",
    "gemma_softcap_fused.cu", "gpt_oss_sinks_fused.cu", "llama_gqa_fused.cu", "mistral_window_fused.cu",
    "llama_gqa_decode.cu", "mistral_window_decode.cu", "gpt2_hopper_backward.cu", "llama_rotary_fused.cu",
    "llama_rotary_fused_backward.cu", "alibi_fused_backward.cu", "packed_documents_fused_backward.cu",
)  # fmt: skip
IN_QUICK = "cross_attention_fused.cu"
OF_CONSTANTS = re.compile(r"constexpr|static_assert|\bif \([A-Z][A-Z_0-9]+\)|\([A-Z][A-Z_0-9]+ \?")
AT_ONCE, OF_EACH = 6, 8  # files of one run of the long tier, and removals of each
# What orders something, in any file: a name that is called. Written down here, and not found as the removals are
ORDERING = (
    r"__sync\w+|cp_async_(?:wait|commit)|wgmma_(?:wait|commit|fence)|tma_store_(?:wait|commit)\w*|\w*proxy_fence|mbarrier_\w+"
)
ORDERING += r"|named_barrier_\w+|__threadfence\w*|wait_for_kernels_before|let_next_kernel_start|(?:take|give)_registers"


@cache
def emitted(name: str) -> Emitted:
    return Emitted((ROOT / "generated" / name).read_text())


def code_of(text: str) -> str:
    """`text` with comments and strings blanked, of the same length."""
    return re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', lambda m: " " * len(m[0]), text)


@pytest.mark.parametrize("name", GENERATED)
def test_every_call_that_orders_something_is_found(name: str) -> None:
    text = (ROOT / "generated" / name).read_text()
    calls = [*re.finditer(rf"\b(?:{ORDERING})\s*(?:<[^<>;]*>)?\s*\(", code_of(text))]
    called = [m for m in calls if not re.search(r"\b(?:void|bool)\s+$", text[: m.start()])]  # a definition
    found = {removal.start for removal in emitted(name).removals if removal.kind == ORDERS}
    assert [text[m.start() : m.end()] for m in called if m.start() not in found] == []
    kinds = {removal.kind for removal in emitted(name).removals}
    assert kinds >= {GUARD, BOUND, LOOP} - ({BOUND} if name == "cross_attention_fused.cu" else set())
    assert (ORDERS in kinds) == bool(called) == ("_naive" not in name and "append" not in name)


@pytest.mark.parametrize("name", GENERATED)
def test_every_line_with_a_condition_or_a_bound_has_a_removal(name: str) -> None:
    """Unless it is of constants alone."""
    text, one = (ROOT / "generated" / name).read_text(), emitted(name)
    changed = {text.count("\n", 0, place) for removal in one.removals for place in (removal.start, removal.end)}
    lines = [line for number, line in enumerate(code_of(text).splitlines()) if number not in changed]
    conditions = [line.strip() for line in lines if re.search(r"\bif \(|\?|\w &&|\|\||\b(?:min|max)\(", line)]
    assert [line for line in conditions if not OF_CONSTANTS.search(line)] == []


@pytest.mark.parametrize("name", GENERATED)
def test_what_is_said_to_have_no_effect_is_in_the_file(name: str) -> None:
    assert [*stale(name, emitted(name))] == []
    assert {file for one in WITHOUT_EFFECT for file in one.files} <= {*GENERATED}


def test_every_file_has_a_spec_that_a_check_runs() -> None:
    assert {*files()} == {*GENERATED} - NO_SPEC
    for name, file in files().items():
        assert (ROOT / "generated" / name).read_text() == file.program.text


def missed(name: str, count: int | None = None) -> list[str]:
    """Removals from a file, of all or of so many, that are not noticed and should be."""
    harness = Harness(files()[name])
    numbers = [*range(len(harness.removals))]
    if count is not None:
        numbers = random.Random(digest(harness.text, runtime_digest())).sample(numbers, min(count, len(numbers)))
    found = []
    for number in numbers:
        removal = harness.removals[number]
        if not reason_of(name, harness.emitted, removal) and not harness.finding(number):
            found.append(f"{removal.line(harness.emitted.text)}: {removal.describe(harness.emitted.text)}")
    return found


def of_this_run() -> list[str]:
    """Other files with each change of a kernel or of what checks them: in a few changes each has had its turn."""
    sources = [*sorted((ROOT / "generated").glob("*.cu")), *sorted((ROOT / "attngen" / "inspect").glob("*.py"))]
    seed = digest(*(path.read_text() for path in sources))
    return sorted(random.Random(seed).sample(EXPLORED, AT_ONCE))


def test_a_check_notices_what_is_missing() -> None:
    assert missed(IN_QUICK, OF_EACH) == []


@pytest.mark.long
@pytest.mark.parametrize("name", of_this_run())
def test_a_check_notices_what_is_missing_from_files_in_turn(name: str) -> None:
    assert missed(name, OF_EACH) == []
