"""Deleting any one wait, arrival, fence or barrier from an emitted kernel of Hopper's rungs must be noticed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.emit.kernel_source import KernelSource
from attngen.plan import ARCHES, choose
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec
from tests.problems import call, emitted

STEPS = re.compile(
    r"(?:__syncthreads|__syncwarp|mbarrier_init_fence|async_proxy_fence|wgmma_fence|wgmma_commit|release_q)\(\);"
    r"|(?:wgmma_wait|tma_store_wait(?:_read)?)<[^>]*>\(\);|tma_store_commit\(\);|mbarrier_(?:wait|arrive|expect_bytes)\([^;]*\);|multiplied\([^;]*\);"
)
# Q in registers; Q in shared memory; tiles that the producer classifies, and key vectors; key vectors without that
SPECS: dict[str, AttentionSpec] = {
    "causal": attngen.define(dtype="bf16", head_dim=64, mask="causal and h % 2 == 0"),  # heads without a tile between others
    "wide": attngen.define(dtype="bf16", head_dim=256, mask="k + 200 <= q"),  # rows of no tile, of one, of more
    "documents": attngen.define(
        dtype="bf16",
        head_dim=128,
        mask="causal and same_document(ids) and h % 2 == 0",
        inputs={"ids": ("int32", ("batch", "kv_len"))},
    ),
    "bias": attngen.define(
        dtype="bf16", head_dim=256, mask="k + 200 <= q", score="s + bias[h, k]", inputs={"bias": ("fp16", ("heads", "kv_len"))}
    ),
    # Q in shared memory, and blocks of no tile, of two, of three: one more than the wgmma rung has stages
    "far": attngen.define(dtype="bf16", head_dim=256, mask="k + 150 <= q"),
}
BY_RUNG = {"hopper": ("causal", "wide", "documents", "bias"), "wgmma": ("causal", "far")}
ORDERS = (0, 3, 4, 8)  # of threads and copies; in the last three, lanes that nothing holds together drift apart
SHAPES = {"causal": Shape(1, 4, 4, 300, 300), "documents": Shape(1, 4, 4, 300, 300), "far": Shape(1, 1, 1, 300, 300)}
OTHERWISE = Shape(1, 2, 1, 300, 300)


def steps(source: KernelSource) -> list[re.Match[str]]:
    """Every step between warps, in the kernel and what it calls of this file."""
    start = source.text.index("load_tile_async(")
    return [m for m in STEPS.finditer(source.text) if m.start() > start]


def outcome(name: str, rung: str, source: KernelSource) -> str:
    """The kind of finding, "wrong result", or "" where all is well, over all of ORDERS."""
    spec = SPECS[name]
    problem = sample(spec, SHAPES.get(name, OTHERWISE))
    for seed in ORDERS:
        device = EmulatedDevice(arch="sm_90a", seed=seed)
        compiled = CompiledAttention(spec, choose(spec, ARCHES["sm_90a"], rung), device.compile(source), device)
        try:
            found = compare(*call(compiled, problem), truth(spec, problem))
        except EmulationError as error:
            return error.kind
        if not found.passed:
            return "wrong result"
    return ""


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
