"""Query heads of a group that are divided over several work tiles, whose sums of dK and dV a kernel adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.plan.group_parts import GroupParts, rounds_of
from attngen.plan.mask_bounds import mask_bounds
from attngen.reference.compare_gradients import compare_gradients, gradient_truth
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV
from tests import tiers
from tests.harness import gradients, wrong_gradients


def defined(head_dim: int, mask: str | None = "causal", **more: Any) -> AttentionSpec:
    return attngen.define(**{"dtype": "bf16", "head_dim": head_dim, "mask": mask} | more)


def on(multiprocessors: int, spec: AttentionSpec, seed: int = 0, **more: Any) -> CompiledAttention:
    """A kernel whose device has so many multiprocessors: these, and the sizes of a call, decide the number of parts."""
    device = EmulatedDevice(checked=True, seed=seed, arch="sm_90a", multiprocessors=multiprocessors)
    return attngen.compile(spec, kernel="hopper", device=device, **more)


def parts(rule: GroupParts, q_heads: int, kv_heads: int, kv_len: int, batch: int = 1, multiprocessors: int = 132) -> int:
    return rule(
        {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "kv_len": kv_len, "multiprocessors": multiprocessors}
    )


def test_parts_fill_the_multiprocessors() -> None:
    causal, full = GroupParts(128, 2), GroupParts(128, 1)
    lengths = (512, 1024, 2048, 4096)
    assert [parts(causal, 32, 8, n) for n in lengths] == [4, 4, 2, 1]
    assert [parts(full, 32, 8, n) for n in lengths] == [4, 2, 1, 1]
    assert parts(causal, 32, 8, 512, batch=8) == 1
    assert parts(causal, 8, 8, 512) == 1  # no groups
    assert parts(full, 5, 1, 128, multiprocessors=4) == 3  # parts of 2, 2 and 1 heads: with 4 parts, the largest has no fewer
    assert parts(full, 0, 0, 512) == parts(full, 4, 2, 0) // 2 == 1


ROUNDS = {None: 1, "causal": 2, "causal and window(40)": 1, "k >= q + 3": 2, "(q + k) % 3 == 0 and k <= q": 1}


def test_masks_whose_last_blocks_have_few_rows_get_more_parts() -> None:
    assert {mask: rounds_of(mask_bounds(defined(64, mask), (64, 64), "q")) for mask in ROUNDS} == ROUNDS


def test_heads_that_share_no_keys_have_no_parts() -> None:
    def suffixes(**more: Any) -> list[str]:
        spec = defined(64, **more)
        program = emit(spec, choose(spec, ARCHES["sm_90a"], "hopper", direction="backward"))
        return [e.name.partition("backward_")[2] for e in program.kernels]

    assert suffixes(heads=(8, 8)) == ["delta", "dk_dv", "convert_dq"]
    assert suffixes(heads=(8, 2)) == suffixes() == ["delta", "dk_dv", "add_parts", "convert_dq"]


def test_one_part_has_no_memory_and_no_launch_of_its_own() -> None:
    rule = choose(defined(64), ARCHES["sm_90a"], "hopper", direction="backward").own.parts
    spec = defined(64)
    program = emit(spec, choose(spec, ARCHES["sm_90a"], "hopper", direction="backward"))
    (sums,) = (t for t in program.tensors if t.name == "part_sums")
    (added,) = (e for e in program.kernels if e.name.endswith("add_parts"))
    for heads, found in ((2, 1), (8, 4)):
        sizes = {"batch": 1, "q_heads": heads, "kv_heads": 2, "kv_len": 200, "multiprocessors": 132}
        assert rule(sizes) == found
        assert added.grid[0](sizes) == (2 * 2 * 2 * 2 if found > 1 else 0)
        assert sums.axes[0].size(sizes) == (found > 1)


# Parts of one, two and unequally many heads; dQ by additions and by a kernel of its own; consumers that share their keys; keys
# that no row visits; heads without a tile.
CASES = {
    "additions": (defined(64), Shape(2, 6, 2, 140, 200), False),
    "in order": (defined(16, "k + 70 <= q"), Shape(1, 5, 1, 140, 200), True),
    "split": (defined(136, "causal and h % 2 == 0"), Shape(1, 3, 1, 70, 100), True),
    "halves": (defined(136, "causal and h % 2 == 0", head_dim_v=128), Shape(2, 3, 1, 70, 200), False),
    "dropout": (defined(16, dropout=0.25, head_dim_v=24), Shape(1, 4, 1, 140, 140), False),
}


@pytest.mark.parametrize("name", tiers.cases(CASES, quick=["in order"]))
def test_gradients_of_divided_groups(name: str) -> None:
    spec, shape, deterministic = CASES[name]
    for multiprocessors in (1, 4, 24):
        kernel = on(multiprocessors, spec, seed=multiprocessors)
        assert not wrong_gradients(kernel, shape, deterministic=deterministic), multiprocessors


def test_the_order_of_threads_changes_no_bit_of_the_sum_of_parts() -> None:
    spec = defined(16)
    problem = sample(spec, Shape(1, 6, 2, 70, 140))
    loss = sample_loss(spec, problem)
    for deterministic, same in ((True, "qkv"), (False, "kv")):
        found = [gradients(on(24, spec, seed), problem, loss, deterministic=deterministic) for seed in (0, 8)]
        assert all(len({one[name].tobytes() for one in found}) == 1 for name in same)


LENGTHS = ((3, 5), (0, 40), (150, 140), (130, 0))


PACKED = [(16, None, False), (16, None, True), (136, 128, False)]


@pytest.mark.parametrize(("head_dim", "head_dim_v", "deterministic"), tiers.cases(PACKED, quick=PACKED[:2], one_of=1))
def test_packed_sequences(head_dim: int, head_dim_v: int | None, deterministic: bool) -> None:
    """Blocks of keys that a sequence does not have, keys without rows, rows without keys."""
    spec = defined(head_dim, head_dim_v=head_dim_v)
    kernel = on(32, spec, storage="packed")
    saved = kernel.gradients(QKV, deterministic).plan.saved
    whole = sample(spec, Shape(len(LENGTHS), 4, 2, 150, 140))
    problems = [
        Sample(whole.q[b : b + 1, :, :rows], whole.k[b : b + 1, :, :keys], whole.v[b : b + 1, :, :keys], {})
        for b, (rows, keys) in enumerate(LENGTHS)
    ]
    losses = [sample_loss(spec, one, b) for b, one in enumerate(problems)]

    def packed(arrays: list[Any]) -> Any:
        return np.concatenate([one[0].swapaxes(0, 1) for one in arrays])

    begins = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in zip(*LENGTHS, strict=True)]
    found = kernel.backward(
        packed([one.dout for one in losses]), *(packed([getattr(one, n) for one in problems]) for n in QKV),
        cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], max_q_len=150, max_kv_len=140, deterministic=deterministic,
    )  # fmt: skip
    for b, (problem, loss) in enumerate(zip(problems, losses, strict=True)):
        ends = {n: begins[n != "q"][b : b + 2] for n in QKV}
        own = {n: found[n][ends[n][0] : ends[n][1]].swapaxes(0, 1)[None] for n in QKV}
        exact = gradient_truth(spec, problem, loss, QKV, {}, saved)
        assert all(one.passed for one in compare_gradients(own, exact).values()), b
