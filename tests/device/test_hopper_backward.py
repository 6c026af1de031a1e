"""The Hopper backward on the emulated device: gradients against float64, the same bits in any order, refusals, and its SASS."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import PlanRefusal
from attngen.device.cuda.compiler import compile_text
from attngen.emit.emitter import emit
from attngen.emit.loops import loop_nest
from attngen.plan import ARCHES
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose, schedules_for
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from attngen.spec.gradient import QKV
from tests import tiers
from tests.harness import IN_16_BITS, SMALL_PARAMS, cli, compiled, gradients, small, spills, wrong_gradients

DOCUMENTS = {"ids": ("int32", ("batch", 400))}
SINKS = {"sinks": ("fp32", ("heads",))}
BIAS = {"bias": ("fp16", ("heads", "kv_len")), "gate": ("fp16", ("heads", "q_len"))}
# What a spec may say, each with what is special about it.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal and window(40)"},  # blocks of keys with an end of rows
    "documents": {"mask": "causal and same_document(ids)", "inputs": DOCUMENTS},  # tiles that the producer classifies
    "padding": {"mask": "keep[b, k]", "inputs": {"keep": ("bool", ("batch", "kv_len"))}},  # the same for all rows
    "some heads": {"mask": "causal and h % 2 == 0"},  # heads without a tile, in a group too
    "far": {"mask": "k + 150 <= q"},  # blocks without a tile, rows without keys
    "softcap": {"mask": "causal", "score": "softcap(5.0)"},  # a derivative
    "bias": {"score": "s * gate[h, q] + bias[h, k]", "inputs": BIAS, "mask": "k <= q + 20"},
    "sink and lse": {"mask": "causal", "sink": "sinks[h]", "inputs": SINKS, "lse": True},
    "sigmoid": {"mask": "causal", "normalize": "sigmoid"},
    "none": {"mask": "causal", "normalize": "none", "score": "s * s"},
}
HALVES = {136: 128, 192: 128}  # head sizes of which consumers have half of the pairs each, with those of V
SHAPES = (Shape(2, 2, 2, 1, 1), Shape(1, 4, 2, 140, 200), Shape(1, 2, 1, 300, 70))


def defined(name: str, head_dim: int = 64, dtype: str = "bf16", **more: Any) -> AttentionSpec:
    return attngen.define(dtype=dtype, head_dim=head_dim, **VARIANTS[name] | more)


def test_dq_is_added_up_in_global_memory_unless_gradients_are_deterministic() -> None:
    plans = [choose(defined("causal"), ARCHES["sm_90a"], wanted=QKV, **said) for said in ({}, {"deterministic": True})]
    assert [p.own.dq for p in plans] == ["additions", "own kernel"]


@pytest.mark.parametrize("name", tiers.cases(VARIANTS, one_of=2))
def test_variants(name: str) -> None:
    for seed, shape in enumerate(SHAPES):
        kernel = compiled(defined(name), "hopper", seed=seed % 2 * 7)
        assert kernel.gradients(deterministic=True).plan.schedule.name == "hopper_backward"
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=True), shape


ADDED = [(name, d) for name in VARIANTS for d in (64, 128) if name not in ("sigmoid", "none")]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "head_dim"), tiers.cases(ADDED, quick=[("documents", 64)], one_of=2))
def test_dq_added_up_in_global_memory(name: str, head_dim: int) -> None:
    for seed, shape in enumerate(SHAPES):
        kernel = compiled(defined(name, head_dim), "hopper", seed=seed % 2 * 7)
        assert kernel.gradients(deterministic=False).plan.own.dq == "additions"
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=False), shape


@pytest.mark.parametrize("name", tiers.cases([name for name in VARIANTS if name not in ("sigmoid", "none")], one_of=2))
def test_dq_added_up_by_consumers_of_half_of_the_pairs(name: str) -> None:
    for seed, shape in enumerate(SHAPES):
        kernel = compiled(defined(name, 136, head_dim_v=HALVES[136]), "hopper", seed=seed % 2 * 7)
        assert kernel.gradients(deterministic=False).plan.own.by_halves
        assert not wrong_gradients(kernel, shape, seed=seed, deterministic=False), shape


ADDED_HEAD_DIMS = [(8, 8), (24, 64), (40, 24), (80, 80), (96, 128)]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases(ADDED_HEAD_DIMS, quick=[(24, 64)]))
@pytest.mark.parametrize("dropout", tiers.cases([0.0, 0.25], quick=[0.25]))
def test_head_sizes_of_additions(head_dim: int, head_dim_v: int, dropout: float) -> None:
    """A consumer adds half of a tile's rows, or with dropout half of its columns."""
    kernel = compiled(defined("causal", head_dim, "fp16", head_dim_v=head_dim_v, dropout=dropout), "hopper")
    assert not wrong_gradients(kernel, Shape(1, 2, 1, 140, 170), deterministic=False)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 192])
def test_keys_past_the_end_add_nothing_to_dq_of_rows_of_low_scores(head_dim: int) -> None:
    """Every score of the rows is far below 0, the score of the zeros past the end: the weight of such a key overflows."""
    spec = defined("full", head_dim, head_dim_v=HALVES.get(head_dim))
    problem = sample(spec, Shape(1, 1, 1, 70, 70))
    q, k = np.abs(from_storage(problem.q)) + 8.0, -np.abs(from_storage(problem.k)) - 2.0
    problem = replace(problem, q=round_to_storage(q, spec.dtype), k=round_to_storage(k, spec.dtype))
    assert not wrong_gradients(compiled(spec, "hopper"), problem, deterministic=False)


# Tiles of 128 and of 64 rows; one kernel and two; consumers that share the keys; scores that hide an infinite query from lse;
# no lse.
BEHIND_THE_MASK: list[tuple[int, str, str | None, str, bool]] = [
    (64, "fp16", None, "softmax", False),
    (64, "bf16", None, "softmax", True),
    (64, "fp16", "softcap(5.0)", "softmax", False),
    (128, "bf16", None, "softmax", False),
    (256, "fp16", None, "softmax", True),
    (64, "bf16", None, "none", True),
    (64, "fp16", None, "sigmoid", True),
    (256, "bf16", None, "none", True),
    (192, "bf16", None, "softmax", False),
]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "score", "normalize", "deterministic"), tiers.cases(BEHIND_THE_MASK, quick=BEHIND_THE_MASK[:1])
)
def test_what_the_mask_excludes_leaves_no_trace(
    head_dim: int, dtype: str, score: str | None, normalize: str, deterministic: bool
) -> None:
    """NaN and infinity in K, Q and dO at excluded pairs, also of rows and keys that have others. These have it."""
    mask, lse = "causal and k < 120 and q < 190", normalize == "softmax"
    sizes = {"head_dim": head_dim, "head_dim_v": HALVES.get(head_dim)}
    spec = attngen.define(dtype=dtype, **sizes, mask=mask, score=score, normalize=normalize, lse=lse)
    kernel = compiled(spec, "hopper")

    def found(**changes: Any) -> dict[str, Any]:
        """The gradients of a problem, and with each tensor one change: rows, columns, their number."""
        problem = sample(spec, Shape(1, 2, 1, 200, 200))
        loss = sample_loss(spec, problem)
        for name, (rows, columns, number) in changes.items():
            tensor = loss.dout if name == "dout" else getattr(problem, name)
            tensor[:, :, rows, columns] = round_to_storage(np.float32(number), spec.dtype)
        gradient = gradients(kernel, problem, loss, deterministic=deterministic)
        return {name: from_storage(gradient[name]) for name in "qkv"}

    def is_as_before(rows: slice, one: Any, other: Any) -> bool:
        return np.array_equal(one[:, :, rows], other[:, :, rows])

    clean, every = found(), slice(None)
    rows, keys = slice(190, None), slice(120, None)  # rows that see nothing, and keys that nothing sees
    for hidden in (
        {"q": (rows, every, np.nan), "k": (keys, 5, np.nan), "dout": (rows, 3, np.inf)},
        {"q": (rows, 3, -np.inf), "k": (keys, every, np.inf), "dout": (rows, every, np.nan)},
    ):
        assert all(is_as_before(every, found(**hidden)[name], clean[name]) for name in "qkv"), hidden
    # Row 79 is the last of its warp: in the forward, the warp's other rows are rescaled with it, and round differently
    row, key = 79, 80
    for name, columns, number in (("q", 9, np.inf), ("q", every, np.nan), ("dout", 9, -np.inf), ("dout", every, np.nan)):
        one = found(**{name: (row, columns, number)})
        assert is_as_before(slice(64), one["q"], clean["q"]), (name, number)
        assert is_as_before(slice(row + 1, None), one["q"], clean["q"]), (name, number)
        assert np.isfinite(one["q"][:, :, 64:row]).all(), (name, number)
        for of_keys in "kv":
            assert is_as_before(slice(row + 1, None), one[of_keys], clean[of_keys]), (name, number)
            assert not np.isfinite(one[of_keys][:, :, : row + 1]).all(axis=-1).any(), (name, number)
    for number in (np.nan, np.inf):
        one = found(k=(key, 9, number))
        assert is_as_before(slice(key), one["q"], clean["q"]), number
        if normalize == "softmax":
            assert not np.isfinite(one["k"][:, :, key]).all(), number
        elif np.isnan(number):  # the derivative of other weights by an infinite score is 0
            assert not np.isfinite(one["q"][:, :, key:190]).all(axis=-1).any()


PAIRS = {
    "bias": ("s + bias[b, h, q, k]", ("batch", "heads", "q_len", "kv_len")),
    "turned": ("bias[k, b, q, h] + s", ("kv_len", "batch", "q_len", "heads")),
}


def of_pairs(name: str, head_dim: int, **more: Any) -> AttentionSpec:
    """A spec that adds a tensor with one element for each pair."""
    score, dims = PAIRS[name]
    return attngen.define(**{"dtype": "bf16", "head_dim": head_dim, "score": score, "inputs": {"bias": ("bf16", dims)}} | more)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "head_dim", "wanted"), [("bias", 64, (*QKV, "bias")), ("turned", 128, (*QKV, "bias")), ("bias", 128, QKV)]
)
def test_the_gradient_of_a_bias_of_all_pairs_is_ds(name: str, head_dim: int, wanted: tuple[str, ...]) -> None:
    """Blocks of keys read the bias and write its gradient: 16 bytes of a row at once, or elements one by one."""
    spec = of_pairs(name, head_dim)
    for seed, shape in enumerate((Shape(2, 4, 2, 33, 47), Shape(1, 2, 1, 140, 200))):
        kernel = compiled(spec, "auto", "sm_90a", seed=seed * 7)
        assert kernel.gradient_parts(wanted) == (wanted,)
        assert not wrong_gradients(kernel, shape, wanted, seed=seed, deterministic=False), shape


def test_other_gradients_of_a_bias_have_a_program_of_their_own() -> None:
    """Of a tensor that is broadcast, in a fixed order, of a masked or another score."""
    kernel, wanted, apart = compiled(of_pairs("bias", 16), "auto", "sm_90a"), (*QKV, "bias"), (QKV, ("bias",))
    shapes = {"q": (2, 4, 33, 16), "k": (2, 2, 47, 16)}
    parts = {n: kernel.gradient_parts(wanted, False, {**shapes, "bias": (n, 4, 33, 47)}) for n in (1, 2)}
    assert parts == {1: apart, 2: (wanted,)}
    assert kernel.gradient_parts(wanted, deterministic=True) == apart
    scores = ("0.5 * bias[b, h, q, k] + s", "s / 2.0 + bias[b, h, q, k]")
    for more in ({"mask": "causal"}, {"inputs": {"bias": ("fp32", PAIRS["bias"][1])}}, *({"score": s} for s in scores)):
        assert compiled(of_pairs("bias", 16, **more), "auto", "sm_90a").gradient_parts(wanted) == apart, more
    problem = sample(kernel.spec, Shape(2, 4, 2, 33, 47))
    problem.inputs["bias"] = problem.inputs["bias"][:1]
    with pytest.raises(attngen.ArgumentError, match=r"`bias` is \[1, 4, 33, 47\]; .* \[2, 4, 33, 47\]. Use kernel fused"):
        gradients(compiled(kernel.spec, "hopper"), problem, sample_loss(kernel.spec, problem), wanted, False)


def test_short_rows_are_faster_in_order() -> None:
    of_two_slabs = (((None, 256), ("causal", 512)), ((None, 512), ("causal", 1024)))
    short = {64: ((None, 64), ("causal", 128)), 128: of_two_slabs[0], 192: of_two_slabs[0]}
    long = {64: ((None, 128), ("causal", 256)), 128: of_two_slabs[1], 192: of_two_slabs[1]}
    cases = [(d, mask, n, says) for says, found in ((True, short), (False, long)) for d in found for mask, n in found[d]]
    for head_dim, mask, length, expected in cases:
        spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=HALVES.get(head_dim), mask=mask)
        kernel = compiled(spec, "hopper")
        assert kernel.gradients(None, False).is_faster_in_order(length, length) is expected, (head_dim, mask, length)
        assert not kernel.gradients(None, True).is_faster_in_order(length, length)  # it is in order
    sigmoid = compiled(attngen.define(dtype="bf16", head_dim=64, normalize="sigmoid"), "hopper")
    assert not sigmoid.gradients(None, False).is_faster_in_order(64, 64)  # additions are for a softmax


@pytest.mark.long
def test_deterministic_gradients_are_those_of_two_kernels() -> None:
    spec = defined("causal")
    problem, kernel = sample(spec, Shape(1, 2, 2, 140, 140)), compiled(spec, "hopper")
    loss = sample_loss(spec, problem)
    two = gradients(kernel, problem, loss, deterministic=True)
    alone = {n: gradients(kernel, problem, loss, wanted)[n] for wanted in (("q",), ("k", "v")) for n in wanted}
    assert all(np.array_equal(two[n], alone[n]) for n in "qkv")
    two_kernels, added = (kernel.gradients(None, said).source.kernels for said in (True, False))
    assert [e.name.partition("backward_")[2] for e in two_kernels] == ["delta", "dk_dv", "add_parts", "dq"]
    assert [e.name.partition("backward_")[2] for e in added] == ["delta", "dk_dv", "add_parts", "convert_dq"]


NOT_ADDED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"normalize": "sigmoid"}, ("q", "k", "v")),
    ({"head_dim_v": 128}, ("q", "k", "v")),
    ({}, ("q",)),
    ({}, ("k", "v")),
]


@pytest.mark.parametrize(("spec", "wanted"), NOT_ADDED)
def test_what_is_not_added_up_is_computed_as_ever(spec: dict[str, Any], wanted: tuple[str, ...]) -> None:
    kernel = compiled(attngen.define(**{"dtype": "bf16", "head_dim": 64} | spec), "hopper")
    texts = {kernel.gradients(wanted, said).source.text.partition("// Sections")[2] for said in (True, False)}
    assert len(texts) == 1


@pytest.mark.parametrize("dtype", tiers.cases(["fp16", "bf16"], quick=[]))
def test_additive_masks_of_the_lowest_number(dtype: str) -> None:
    """Rows of which every key is at finfo.min have equal weights, rows at -inf none; those of other rows are as ever."""
    spec = attngen.define(dtype=dtype, head_dim=64, score="s + extra[q, k]", inputs={"extra": (dtype, ("q_len", "kv_len"))})
    problem = sample(spec, Shape(1, 2, 2, 133, 140))
    lowest = {"fp16": -65504.0, "bf16": -3.3895e38}[dtype]
    extra = np.where(np.arange(140) > np.arange(133)[:, None] - 5, lowest, 0.0)
    extra[20:22] = -np.inf
    problem.inputs["extra"] = round_to_storage(extra, spec.dtype)
    for deterministic in (True, False):
        assert not wrong_gradients(compiled(spec, "hopper"), problem, deterministic=deterministic), deterministic


@pytest.mark.parametrize("head_dim", tiers.cases([64, 80, 192], quick=[]))
def test_large_scores(head_dim: int) -> None:
    """Scores so large that their product with log2(e) is too coarse for a weight, beside rows of usual ones."""
    spec = attngen.define(dtype="bf16", head_dim=head_dim, head_dim_v=HALVES.get(head_dim), mask="causal")
    problem = sample(spec, Shape(1, 1, 1, 140, 140))
    q = from_storage(problem.q)
    q[:, :, 40:50] *= 2.0**30
    problem = replace(problem, q=round_to_storage(q, spec.dtype))
    for deterministic in (True, False):
        assert not wrong_gradients(compiled(spec, "hopper"), problem, deterministic=deterministic), deterministic


@pytest.mark.parametrize("name", tiers.cases(VARIANTS, one_of=2))
def test_variants_of_wide_heads(name: str) -> None:
    """Heads so wide that the consumers share the keys of a block: weights pass through shared memory."""
    for seed, shape in enumerate(SHAPES):
        kernel = compiled(defined(name, 136), "hopper", seed=seed % 2 * 7)
        assert kernel.gradients().plan.own.split_products
        assert not wrong_gradients(kernel, shape, seed=seed), shape


HEAD_DIMS = [(8, 8), (40, 24), (64, 128), (80, 80), (96, 64), (128, 128), (192, 64), (248, 8)]
WIDE_HEAD_DIMS = [(192, 128), (64, 256), (256, 8), (136, 200), (160, 160), (256, 256)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), tiers.cases([*HEAD_DIMS, *WIDE_HEAD_DIMS], quick=[(80, 24)]))
def test_head_sizes(head_dim: int, head_dim_v: int) -> None:
    kernel = compiled(defined("causal", head_dim, "fp16", head_dim_v=head_dim_v), "hopper")
    assert not wrong_gradients(kernel, Shape(1, 2, 1, 140, 170), deterministic=True)


SUITABLE = [(n, dtype) for n, dtype in IN_16_BITS if "hopper" in schedules_for(small(n, dtype), ARCHES["sm_90a"], "backward")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), SUITABLE)
def test_every_spec(name: str, dtype: str) -> None:
    spec = small(name, dtype)
    for seed, (q_len, kv_len) in enumerate(((7, 7), (130, 130), (65, 190))):
        kernel = compiled(spec, "hopper", seed=seed % 2 * 7)
        params: dict[str, Any] = SMALL_PARAMS.get(name, {})
        shape = Shape(8 if q_len < 10 else 1, 2, 1, q_len, kv_len)
        for deterministic in (True, False):
            assert not wrong_gradients(kernel, shape, seed=seed, deterministic=deterministic, **params), (q_len, kv_len)


ORDERED = [("causal", 64), ("documents", 64), ("some heads", 64), ("causal", 200), ("documents", 136)]


@pytest.mark.parametrize(("name", "head_dim"), tiers.cases(ORDERED, quick=[("some heads", 64)]))
def test_the_order_of_threads_and_copies_does_not_matter(name: str, head_dim: int) -> None:
    spec = defined(name, head_dim)
    problem = sample(spec, Shape(1, 4, 2, 200, 330))
    loss = sample_loss(spec, problem)
    found = [gradients(compiled(spec, "hopper", seed=seed), problem, loss, deterministic=True) for seed in (0, 3, 8)]
    for one in "qkv":
        assert len({each[one].tobytes() for each in found}) == 1, one


@pytest.mark.long
@pytest.mark.parametrize("head_dim", tiers.cases([64, 144], quick=[64]))
def test_only_what_is_wanted_is_computed(head_dim: int) -> None:
    spec = defined("causal", head_dim)
    problem, kernel = sample(spec, Shape(1, 2, 1, 70, 70)), compiled(spec, "hopper")
    every = gradients(kernel, problem, sample_loss(spec, problem), deterministic=True)
    for wanted in (("q",), ("k", "v")):
        found = gradients(kernel, problem, sample_loss(spec, problem), wanted, deterministic=True)
        assert set(found) == set(wanted)
        assert all(np.array_equal(found[n], every[n]) for n in wanted)
    kernels = {e.name for e in kernel.gradients(("q",)).source.kernels}
    assert kernels == {"attention_backward_delta", "attention_backward_dq"}


@pytest.mark.parametrize(
    ("head_dim", "deterministic"), [(64, True), (64, False), (192, True), (192, False), (256, True), (256, False)]
)
def test_pages_have_its_loops_and_its_pipeline(head_dim: int, deterministic: bool) -> None:
    spec = defined("documents", head_dim, head_dim_v=HALVES.get(head_dim))
    plan = choose(spec, ARCHES["sm_90a"], "hopper", direction="backward", deterministic=deterministic)
    nest = loop_nest(spec, plan, emit(spec, plan))
    assert any("dQ = dS K of the tile before" in p.loop.name for p in nest) == (plan.own.dq == "additions")
    products = {p.loop.anchor for p in nest if "pairs" in p.loop.range}
    split = {"void issue_dv() {", "void issue_dk() {"} if head_dim > 128 else set()
    assert products == ({"void step("} if plan.own.kernels[-1] == "dq" or not split else set()) | split


@pytest.mark.long
def test_pages_show_what_additions_change() -> None:
    shown = cli("diff", "gpt2", "hopper", "hopper", "--backward", "--deterministic", "--width", "80")
    assert shown.exit_code == 0
    assert re.search(r"^< .*of_rows::Consumer consumer", shown.output, re.MULTILINE)
    assert re.search(r"^> .*global_add\(", shown.output, re.MULTILINE)
    explained = cli("explain", "gpt2", "--kernel", "hopper", "--backward").output
    assert "dQ = additions" in explained
    assert re.search(r"dk_dv .* Q K\^T, dO V\^T, P\^T dO, dS\^T Q, dS K", explained)
    assert "dQ = additions" not in cli("explain", "gpt2", "--kernel", "hopper", "--backward", "--deterministic").output
    assert "add --backward" in cli("explain", "gpt2", "--deterministic").output


REFUSED = [
    ({"head_dim": 64}, ("k",), "the gradients of k and v together"),
    ({"head_dim": 64, "score": "s * gate[h, q] + bias[h, k]", "inputs": BIAS}, ("q", "bias"), "captured values"),
    ({"head_dim": 64, "dtype": "fp32"}, None, "fp16 or bf16"),
]


@pytest.mark.parametrize(("spec", "wanted", "reason"), REFUSED)
def test_what_it_cannot_compute_is_refused_and_left_to_another_schedule(
    spec: dict[str, Any], wanted: tuple[str, ...] | None, reason: str
) -> None:
    defined = attngen.define(**{"dtype": "bf16"} | spec)
    with pytest.raises(PlanRefusal, match=reason):
        choose(defined, ARCHES["sm_90a"], "hopper", direction="backward", wanted=wanted)
    assert choose(defined, ARCHES["sm_90a"], direction="backward", wanted=wanted).keyword != "hopper"


def test_shared_memory_of_wide_heads_is_what_a_block_may_have() -> None:
    """What fits decides how many tiles are on their way; each kernel has a memory of its own."""
    stages = {}
    for sizes in ((136, 136), (192, 192), (200, 200), (256, 256), (256, 64)):
        spec = defined("causal", sizes[0], head_dim_v=sizes[1])
        plan = choose(spec, ARCHES["sm_90a"], direction="backward")
        assert plan.schedule.name == "hopper_backward"
        assert plan.shared_bytes <= plan.arch.shared_per_block
        assert {b.kernel for b in plan.buffers} == {"dk_dv", "dq"}
        assert all(min(b.offset for b in plan.buffers if b.kernel == kernel) == 0 for kernel in ("dk_dv", "dq"))
        stages[sizes] = (plan.stages, plan.own.value_stages)
    assert stages == {
        (136, 136): (2, 2),
        (192, 192): (2, 2),
        (200, 200): (2, 1),
        (256, 256): (2, 1),
        (256, 64): (2, 2),
    }


MASKS = (None, "causal", "causal and window(40)")
MACHINE_CODE = [(d, mask) for d in (64, 128, 256) for mask in MASKS] + [(d, MASKS[-1]) for d in (80, 96, 136, 160, 192)]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "mask"), tiers.cases(MACHINE_CODE, quick=[(64, "causal")]))
def test_products_are_not_serialized_and_nothing_is_spilled(head_dim: int, mask: str | None) -> None:
    storage = "packed" if head_dim == 128 else "dense"  # the producer of packed sequences has more to keep
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, storage=storage)
    compiled = compile_text(emit(spec, choose(spec, ARCHES["sm_90a"], "hopper", direction="backward", deterministic=True)))
    assert not re.findall(r"C75\d\d", compiled.log)
    assert not any(map(spills, compiled.resources()))


# The bytes that are spilled: before and behind the loops over tiles.
SPILLED = {(64, None): 8, (64, "causal"): 0, (128, None): 8, (128, "causal"): 8}


@pytest.mark.long
@pytest.mark.parametrize("storage", tiers.cases(["dense", "packed"], quick=["dense"]))
@pytest.mark.parametrize(("head_dim", "mask"), tiers.cases(list(SPILLED), quick=[(64, "causal")]))
def test_products_beside_additions_are_not_serialized(head_dim: int, mask: str | None, storage: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, storage=storage)
    compiled = compile_text(emit(spec, choose(spec, ARCHES["sm_90a"], "hopper", direction="backward")))
    assert not re.findall(r"C75\d\d", compiled.log)
    assert not any(spills(r, SPILLED[head_dim, mask]) for r in compiled.resources())
