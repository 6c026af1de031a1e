"""Deleting any one wait, arrival, fence or barrier from an emitted kernel of Hopper's rungs must be noticed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import attngen
from attngen.device.emulated import EmulationError
from attngen.emit.kernel_source import KernelSource
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec, Schedule
from tests import tiers
from tests.harness import call, compile_text, emitted

STEPS = re.compile(
    r"(?:__syncthreads|__syncwarp|mbarrier_init_fence|async_proxy_fence|wgmma_fence|wgmma_commit)\(\);"
    r"|(?:wgmma_wait|tma_store_wait(?:_read)?)<[^>]*>\(\);|tma_store_commit\(\);|mbarrier_(?:wait|arrive|expect_bytes)\([^;]*\);|multiplied\([^;]*\);"
    r"|pass_over(?:_keys|_values|_above|_last_values)?\([^;]*\);"
)
# Q in registers; Q in shared memory; tiles that the producer classifies, and key vectors; key vectors without that.
# In "wide" consumers pass over tiles above their own
SPECS: dict[str, AttentionSpec] = {
    "causal": attngen.define(dtype="bf16", head_dim=64, mask="causal and h % 2 == 0"),  # heads without a tile between others
    "wide": attngen.define(dtype="bf16", head_dim=256, mask="k + 610 <= 3 * q"),  # blocks of no tile, consumers of none
    "documents": attngen.define(
        dtype="bf16",
        head_dim=128,
        mask="causal and same_document(ids) and h % 2 == 0",
        inputs={"ids": ("int32", ("batch", "kv_len"))},
    ),
    "bias": attngen.define(
        dtype="bf16",
        head_dim=128,
        mask="k + 200 <= q",
        score="s * gate[h, q] + bias[h, k] + shift[h, q]",  # of a row two elements: Q's fragments find no room beside them
        inputs={
            "bias": ("fp16", ("heads", "kv_len")),
            "gate": ("fp16", ("heads", "q_len")),
            "shift": ("fp16", ("heads", "q_len")),
        },
    ),
    # consumers that pass over tiles above their own, below, and all; and above with Q in registers
    "band": attngen.define(dtype="bf16", head_dim=256, mask="k + 120 <= 3 * q and 3 * q < k + 160"),
    # four consumers, of which each passes over tiles of the others
    "four": replace(attngen.define(dtype="bf16", head_dim=64, mask="k + 200 <= q"), schedule=Schedule("hopper", 256, 64, 2)),
    "narrow": replace(attngen.define(dtype="bf16", head_dim=64, mask="k <= 2 * q"), schedule=Schedule("hopper", 128, 64, 2)),
    # Q in shared memory, and blocks of no tile, of two, of three: one more than the wgmma rung has stages
    "far": attngen.define(dtype="bf16", head_dim=256, mask="k + 150 <= q"),
}
BY_RUNG = {"hopper": ("causal", "wide", "documents", "bias", "band", "four", "narrow"), "wgmma": ("causal", "far")}
# Of threads and copies; in all but the first, lanes that nothing holds together drift apart
ORDERS = (0, 3, 4, 8, 7, 9, 10, 12)
SHAPES = {
    "causal": Shape(1, 4, 4, 300, 300),
    "wide": Shape(1, 4, 1, 380, 600),
    "documents": Shape(1, 4, 4, 300, 300),
    "bias": Shape(1, 4, 1, 400, 400),
    "band": Shape(1, 4, 4, 300, 600),
    "four": Shape(1, 4, 1, 500, 500),
    "narrow": Shape(1, 3, 3, 400, 400),
    "far": Shape(1, 1, 1, 300, 300),
}


def steps(source: KernelSource) -> list[re.Match[str]]:
    """Every step between warps, in the kernel and what it calls of this file."""
    start = source.text.index("load_tile_async(")
    return [m for m in STEPS.finditer(source.text) if m.start() > start]


def outcome(name: str, rung: str, source: KernelSource) -> str:
    """The kind of finding, "wrong result", or "" where all is well, over all of ORDERS."""
    spec = SPECS[name]
    problem = sample(spec, SHAPES[name])
    for seed in ORDERS:
        try:
            found = compare(*call(compile_text(spec, rung, source, seed), problem), truth(spec, problem))
        except EmulationError as error:
            return error.kind
        if not found.passed:
            return "wrong result"
    return ""


@pytest.mark.long
@pytest.mark.parametrize(("name", "rung"), [(name, rung) for rung in BY_RUNG for name in BY_RUNG[rung]])
def test_every_step_between_warps_is_needed(name: str, rung: str) -> None:
    source = emitted(SPECS[name], rung, "sm_90a")
    assert outcome(name, rung, source) == ""
    unnoticed = []
    for step in steps(source):
        text = source.text[: step.start()] + ";" + source.text[step.end() :]
        if not outcome(name, rung, replace(source, text=text)):
            line = source.text.count("\n", 0, step.start())
            unnoticed.append(f"{line + 1}: {source.text.splitlines()[line].strip()}")
    assert unnoticed == []


@pytest.mark.parametrize("statement", tiers.cases(["begun = false;", "begun = true;"], quick=["begun = true;"]))
def test_the_first_product_of_rows_replaces_what_the_ones_before_have_left(statement: str) -> None:
    source = emitted(SPECS["narrow"], "hopper", "sm_90a")
    assert source.text.count(statement) == 1
    assert outcome("narrow", "hopper", replace(source, text=source.text.replace(statement, ";"))) == "wrong result"
