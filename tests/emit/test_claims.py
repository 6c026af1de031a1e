"""Claims of comments and decisions are true of every spec and plan whose text contains them.

Each row of CLAIMS is a pattern of text and what must be true where it stands. Texts are emitted, not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from attngen.emit.emitter import emit
from attngen.keywords import PORTABLE_SCHEDULES
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.axes import KEYS
from attngen.plan.plan import Plan, PlanRefusal
from attngen.schedules import choose
from attngen.schedules.fused_mma.needs import blocks_of_an_sm, shared_bytes
from attngen.spec.attention import AttentionSpec
from attngen.spec.operator import ZERO
from tests.harness import SHIPPED, shipped
from tests.hopper import HOPPER_SCHEDULES

ODD = """
attention all_pairs        { dtype fp16  head_dim 64 }
attention narrow           { dtype fp16  head_dim 8   mask causal }
attention wide             { dtype bf16  head_dim 256 mask causal }
attention odd_head         { dtype fp16  head_dim 72, v 40  mask causal }
attention widest_split     { dtype fp32  head_dim 256  input bias: fp32[batch, heads, q_len, kv_len]
                             score s + bias[b, h, q, k] }
attention rough_split      { dtype fp32  head_dim 64  precision high  mask causal }
attention window           { dtype fp16  head_dim 64  mask causal and window(100) }
attention both_documents   { dtype bf16  head_dim 64  input ids: int32[batch, kv_len]  mask same_document(ids) }
attention by_rows_alone    { dtype bf16  head_dim 64  mask q >= 5 }
attention by_batch         { dtype bf16  head_dim 64  input on: bool[batch]  mask on[b] }
attention two_windows      { dtype fp16  head_dim 64  mask causal and (q - k < 64 or q - k > 128) }
attention strided          { dtype fp16  head_dim 64  param step: int = 4  mask dilated(step) }
attention plain_sigmoid    { dtype bf16  head_dim 64  normalize sigmoid }
attention plain_weights    { dtype bf16  head_dim 64  normalize none }
attention weights_of_part  { dtype fp16  head_dim 64  input ids: int32[batch, kv_len]  mask causal and same_document(ids)
                             normalize none }
attention sigmoid_fp32     { dtype fp32  head_dim 40  mask causal  normalize sigmoid }
attention with_sink        { dtype bf16  head_dim 64  input sinks: fp32[heads]  mask causal  sink sinks[h] }
attention coarse_bias      { dtype bf16  head_dim 64  input table: fp32[heads, 64]  score s + table[h, min(q // 512, 63)] }
attention one_stage        { dtype fp16  head_dim 64  mask causal  kernel auto { stages 1 } }
attention stated           { dtype fp16  head_dim 64  mask causal  kernel auto { tile 64 x 64 } }
"""
PLACES = [(schedule, arch) for schedule in PORTABLE_SCHEDULES for arch in ("sm_75", "sm_80", "sm_86")] + [
    (schedule, "sm_90a") for schedule in HOPPER_SCHEDULES
]


@dataclass(frozen=True, slots=True)
class Claim:
    """`text` (a pattern) stands in files of specs and plans only if `holds` is true of them."""

    text: str
    holds: Callable[[AttentionSpec, Plan], bool]


def solved(plan: Plan) -> bool:
    """Whether the mask bounds the keys of a block of rows in closed form."""
    return plan.bounds.begin is not ZERO or plan.bounds.end is not KEYS.length


def of_a_softmax(spec: AttentionSpec, plan: Plan) -> bool:
    return spec.normalize == "softmax"


def blocks_with(spec: AttentionSpec, plan: Plan, stages: int) -> int:
    return blocks_of_an_sm(plan.facts, plan.arch, replace(plan.tile, stages=stages))


CLAIMS = (
    Claim(r"There is no mask", lambda spec, plan: spec.mask is None),
    Claim(r"every tile is visited", lambda spec, plan: spec.mask is None),
    Claim(r"Pairs that the mask forbids|Tiles that the mask leaves empty", lambda spec, plan: spec.mask is not None),
    Claim(r"No part of this mask can be solved", lambda spec, plan: plan.bounds.per_tile and not solved(plan)),
    Claim(r"Only a part of this mask can be solved", lambda spec, plan: plan.bounds.per_tile and solved(plan)),
    Claim(r"Every condition of this mask was solved", lambda spec, plan: spec.mask is not None and not plan.bounds.per_tile),
    Claim(r"q_hi, solved from", lambda spec, plan: spec.mask is not None and solved(plan)),
    Claim(r"(?<!_)softmax(?!_scale)", of_a_softmax),
    Claim(r"rows' maxima|row maximum", of_a_softmax),
    Claim(r"2\^RESCALE_THRESHOLD", of_a_softmax),
    Claim(r"weights of at most 1\b", lambda spec, plan: spec.normalize != "none"),
    Claim(r"\b16 bytes (that tiled moves )?for each pair", lambda spec, plan: spec.normalize == "sigmoid"),
    Claim(r"\b20 bytes (that tiled moves )?for each pair", of_a_softmax),
    Claim(r"\b8 bytes (that tiled moves )?for each pair", lambda spec, plan: spec.normalize == "none"),
    Claim(r"kernels = 3", lambda spec, plan: spec.normalize != "none"),
    Claim(r"kernels = 2", lambda spec, plan: spec.normalize == "none"),
    Claim(r"That is 32 sectors", lambda spec, plan: spec.head_dim * spec.dtype.bytes >= 32),
    Claim(r"two warps, one for Q and K", lambda spec, plan: plan.own.q_in_registers),
    Claim(r"four warps, one for K", lambda spec, plan: not plan.own.q_in_registers),
    Claim(r"would take the room of another block",
          lambda spec, plan: plan.stages == 1 and blocks_with(spec, plan, 2) < blocks_with(spec, plan, 1)),
    Claim(r"Two of each do not fit shared memory",
          lambda spec, plan: shared_bytes(plan.facts, replace(plan.tile, stages=2)) > plan.arch.shared_per_block),
    Claim(r"The sink counts as one more key", lambda spec, plan: spec.sink is not None),
    Claim(r"has no cp\.async", lambda spec, plan: plan.arch.name == "sm_75"),
    Claim(r"stated in the spec", lambda spec, plan: bool(spec.kernel.block_q or spec.kernel.stages)),
)  # fmt: skip


@cache
def texts() -> tuple[tuple[AttentionSpec, Plan, str], ...]:
    return tuple(_texts())


def _texts() -> Iterator[tuple[AttentionSpec, Plan, str]]:
    specs = [*(shipped(name) for name in SHIPPED), *(shipped(name, "fp32") for name in ("gpt2", "packed_documents", "alibi"))]
    for spec in (*specs, *load_text(ODD)):
        for schedule, arch in PLACES:
            asked = spec if schedule not in ("naive", "tiled") else replace(spec, kernel=type(spec.kernel)())
            try:
                plan = choose(asked, ARCHES[arch], schedule)
            except PlanRefusal:
                continue
            yield asked, plan, said(emit(asked, plan, "teach").text)


def said(text: str) -> str:
    """The comments of a file, each paragraph a line."""
    comments = (re.search(r"//\s*(.*)", line) for line in text.splitlines())
    return " ".join(found[1] if found else "\n" for found in comments)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_what_comments_claim_is_true(claim: Claim) -> None:
    made = [(spec, plan) for spec, plan, text in texts() if re.search(claim.text, text)]
    assert made, "no file says this: the pattern is out of date"
    wrong = [f"{spec.name}, {plan.schedule.name} for {plan.arch.name}" for spec, plan in made if not claim.holds(spec, plan)]
    assert not wrong


def test_a_reason_names_what_fused_mma_lacks() -> None:
    """fused_simt is chosen where tensor cores cannot take the spec: each plan says why."""
    reasons = {
        (spec.name, plan.arch.name): next(d.because for d in plan.decisions if d.field == "schedule")
        for spec, plan, _ in texts()
        if plan.schedule.name == "fused_simt"
    }
    assert reasons["gpt2", "sm_75"].startswith("sm_75 has no cp.async")
    assert "widest_split" in {name for name, _ in reasons}
    for (_, arch), because in reasons.items():
        assert ("registers" in because) == (arch != "sm_75"), because
