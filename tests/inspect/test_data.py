"""`--json` of each command: the keys are those of docs/json.md, the values those of the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from attngen.api import CompiledAttention
from attngen.cache.disk_cache import KINDS
from attngen.device.emulated import EmulatedDevice
from attngen.device.lazy_kernel import DeferredKernel
from attngen.emit.emitter import emit
from attngen.inspect.conditions import conditions
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.schedules import choose
from attngen.spec.attention import KernelRequest
from attngen.spec.print_attn import expression_to_text
from tests.conftest import ROOT
from tests.harness import cli, shipped

PAGE = (ROOT / "docs" / "json.md").read_text()
STAGES = ("tree", "spec", "plan", "loops", "cuda", "ptx")
# objects whose keys are names of dimensions, tensors, params and arguments
FREE = {"params", "sizes", "gradients", "read", "written", "arguments"}
GRID = (
    "attention grid { dtype fp16  head_dim 64  param w: int = 32  mask abs(q % w - k % w) <= 3 and abs(q // w - k // w) <= 3 }"
)


@cache
def printed(*arguments: str) -> Any:
    result = cli(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def documented(command: str) -> set[str]:
    """The keys that the page has for `attngen command`, and those that its first section defines for several."""
    section = PAGE.split(f"## `attngen {command} ", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"`(\w+)`", section.split("\n", 1)[1]))


def keys(value: Any, inside: str = "") -> Iterator[str]:
    """Every key of nested data; of a manifest, whose keys are another page's, none."""
    if isinstance(value, dict) and inside not in FREE | {"manifest"}:
        for key, inner in value.items():
            yield key
            yield from keys(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_data_with_documented_keys(stage: str) -> None:
    data = printed("show", "alibi", "--stage", stage)
    assert data["stage"] == stage
    assert set(keys(data)) <= documented("show")
    assert stage == "tree" or data["attentions"][0]["attention"] == "alibi"


def test_a_stage_has_what_its_text_shows() -> None:
    spec = shipped("alibi")
    plan = choose(spec, ARCHES["sm_80"])
    (shown,) = printed("show", "alibi")["attentions"]
    assert shown["text"] == emit(spec, plan).text
    assert shown["manifest"]["source"] == "alibi_fused.cu"
    (shown,) = printed("show", "alibi", "--stage", "plan")["attentions"]
    assert [d["because"] for d in shown["plan"]["decisions"]] == [d.because for d in plan.decisions]
    (shown,) = printed("show", "alibi", "--stage", "ptx")["attentions"]
    instructions = [line for line in shown["lines"] if line["is_instruction"]]
    assert any(line["cuda"] and line["spec"] for line in instructions)


def test_explain_is_data_with_documented_keys() -> None:
    (found,) = printed("explain", "mistral_window", "--q-len", "512", "--param", "size=100")["attentions"]
    assert set(keys(found)) <= documented("explain") | documented("show")
    tiles = found["tiles"]
    assert sum(tiles["counts"].values()) == sum(map(len, tiles["map"]))
    assert tiles["kv_end"] == "min(q_hi + 1, kv_len)"
    assert found["call"] == {"batch": 1, "q_len": 512, "kv_len": 512, "params": {"size": 100}}
    assert found["work"]["intensity"] == pytest.approx(found["work"]["operations"] / found["work"]["least_bytes"])
    (naive,) = printed("explain", "gpt2", "--kernel", "naive")["attentions"]
    assert naive["tiles"] is None


@pytest.mark.parametrize("command", ["check", "trace"])
def test_a_run_is_data_with_documented_keys(command: str) -> None:
    steps = ("--steps", "--limit", "3") if command == "trace" else ("--device", "emulated")
    found = set(keys(printed(command, "gpt2", "--kernel", "fused", "--q-len", "64", *steps)))
    assert found <= documented(command)
    assert documented(command) - {"fmaf"} <= found


def test_a_comparison_is_data_with_documented_keys() -> None:
    found = printed("diff", "gpt2", "naive", "tiled")
    assert found[0]["attention"] == "gpt2"
    assert set(keys(found)) == documented("diff")


@pytest.mark.parametrize("command", ["build gpt2 --kernel naive", "list", "cache", "doctor"])
def test_other_commands_are_data_with_documented_keys(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = {name for entries in printed("list").values() for name in entries}
    found = set(keys(printed.__wrapped__(*command.split())))  # not remembered: it is of this folder
    assert found - listed - set(KINDS) <= documented("build`, `package`, `list`, `cache` and")


def test_tune_is_data_with_documented_keys() -> None:
    pytest.importorskip("torch")
    from attngen.bench.report import Timing
    from attngen.bench.tune import Outcome, Tried
    from attngen.device.tuning_cache import Winner

    plan = choose(shipped("gpt2"), ARCHES["sm_80"])
    schedules = (KernelRequest("fused", 64, 64, 2, 4), KernelRequest("fused", 128, 64, 2, 4))
    tried = tuple(Tried(plan, s, Timing(ms, ms, ms), s == schedules[1]) for s, ms in zip(schedules, (1.0, 2.0), strict=True))
    found = Outcome(tried, 12, (9, 14), Winner(schedules[0], 1.0, 2.0, "a GPU"), True).to_json()
    assert set(keys(found)) <= documented("tune") | documented("show")
    assert [(t["speedup"], t["is_planned"], t["is_winner"]) for t in found["finalists"]] == [
        (2.0, False, True),
        (1.0, True, False),
    ]


def test_every_documented_key_occurs() -> None:
    stages = [printed("show", "alibi", "--stage", s) for s in STAGES]
    explained = [
        printed("explain", "mistral_window", "--q-len", "512", "--param", "size=100"),
        printed("explain", "gpt2", "--kernel", "naive", "--backward"),
        printed("show", "mistral_window", "--stage", "spec"),
    ]
    found = set(keys([*stages, *explained]))
    words = {"tree", "spec", "plan", "loops", "cuda", "ptx", "sass", "attentions", "nodes", "trace", "naive", "show", "build"}
    assert (documented("show") | documented("explain")) - words <= found


def test_a_long_condition_is_named_part_by_part() -> None:
    """Lines of explain are short, and each introduced name stands for the expression that is shown."""
    (spec,) = load_text(GRID)
    bounds = choose(spec, ARCHES["sm_80"]).bounds
    lines = list(conditions({"may": bounds.may, "must": bounds.must}, 100))
    assert max(map(len, lines)) <= 100
    assert len(expression_to_text(bounds.may)) > 300
    text = " ".join(" ".join(lines).split())
    assert text.startswith("may t1 <= t2 + 3 and t3 <= t4 + 3 and")
    assert "where t1 = where(q_lo // w == q_hi // w, q_lo % w, min(0, w + 1)) t2 = " in text


def test_names_of_parts_are_not_the_users(tmp_path: Any) -> None:
    (spec,) = load_text(GRID.replace("w", "t1"))
    bounds = choose(spec, ARCHES["sm_80"]).bounds
    text = " ".join(conditions({"may": bounds.may, "must": bounds.must}, 100))
    assert "t1 =" not in text.replace("t1 ==", "")
    assert "t2 = where(q_lo // t1" in text


def test_kernels_plans_and_sources_are_shown_in_a_line() -> None:
    spec = shipped("mistral_window")
    plan = choose(spec, ARCHES["sm_80"], "fused")
    kernel = CompiledAttention(spec, plan, DeferredKernel(EmulatedDevice(), emit(spec, plan)), EmulatedDevice())
    for value in (kernel, kernel.plan, kernel.source):
        assert len(repr(value)) < 200, repr(value)[:300]
        assert "\n" not in repr(value)
    assert "mistral_window" in repr(kernel)
    assert all(word in repr(kernel) for word in ("fused", "sm_80", "128 x 64", "bf16", "head_dim 128", "emulated"))
