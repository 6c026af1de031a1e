"""Elements that each pair has for itself, such as a bias of all pairs: several are read at once if their layout allows it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import stored, unpacked
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, Storage
from tests.harness import call, compiled, emitted, run

PAIRS = {"bias": ("bf16", ("batch", "heads", "q_len", "kv_len"))}
BIAS = attngen.define(dtype="bf16", head_dim=32, score="s + bias[b, h, q, k]", inputs=PAIRS)


def laid_out(bias: Any, offset: int = 0, gap: int = 0) -> Any:
    """`bias` in memory from element `offset` on, with `gap` elements between its rows."""
    *outer, keys = bias.shape
    memory = np.zeros(np.prod(outer, dtype=int) * (keys + gap) + offset, bias.dtype)
    rows = memory[offset:].reshape(*outer, keys + gap)[..., :keys]
    rows[...] = bias
    return rows


def elements_read(problem: Sample) -> int:
    """The elements of the bias that the hopper schedule reads, whose result must be right, and that of fused too."""
    expected = truth(BIAS, problem)
    for schedule in ("fused", "hopper"):
        kernel = compiled(BIAS, schedule)
        assert compare(*call(kernel, problem), expected).passed, schedule
    return kernel.kernel.counters.bytes_read["bias"] // 2


@pytest.mark.long
def test_layouts() -> None:
    """16 bytes are copied at once if rows begin at multiples of 16 bytes; then no element is read for a pair past the end."""
    problem = sample(BIAS, Shape(2, 2, 1, 70, 136))
    bias = problem.inputs["bias"]
    copied, read = 2 * 2 * 128 * 136, 2 * 2 * 128 * 256  # elements of a tile of rows: for keys that are there, for whole tiles
    turned = np.ascontiguousarray(bias.swapaxes(2, 3)).swapaxes(2, 3)
    broadcast = np.broadcast_to(bias[:, :, :1], bias.shape)
    at_once = (bias, bias[:1], bias[:, :1], broadcast, laid_out(bias, 8, 16))
    one_by_one = (turned, laid_out(bias, offset=1), laid_out(bias, gap=1), laid_out(bias, offset=2, gap=2), bias[:, :, :, :1])
    for number, (layouts, expected) in enumerate(((at_once, copied), (one_by_one, read))):
        for layout in layouts:
            assert elements_read(replace(problem, inputs={"bias": layout})) == expected, (number, layout.strides)
    odd = sample(BIAS, Shape(1, 2, 2, 70, 141))  # the last 8 keys of a row are not all there
    for gap in (0, 3):
        assert elements_read(replace(odd, inputs={"bias": laid_out(odd.inputs["bias"], gap=gap)})) == read // 2, gap


LINES = {
    "three consumers": "head_dim 64 kernel hopper { tile 192 x 64 }",
    "tiles of their own": "head_dim 64 mask k + 200 <= q and q < k + 300 kernel hopper { tile 192 x 64 }",
    "lanes without a chunk": "head_dim 72, v 40 kernel hopper { tile 128 x 80 }",
    "three slabs": "head_dim 64 kernel hopper { tile 128 x 176 stages 2 }",
    "classified tiles": "head_dim 32 mask (k - q) % 200 < 30",
    "documents": "head_dim 64 input ids: int32[batch, kv_len] mask causal and same_document(ids)",
    "no softmax": "head_dim 32 normalize sigmoid",
    "dropout": "head_dim 32 dropout 0.2",
    "lse": "head_dim 64 output lse",
    "affine": "head_dim 64 mask causal input slopes: fp32[heads] score s + bias[b, h, q, k] + slopes[h] * (k - q)",
    "key vectors": "head_dim 64 input x: fp32[heads, kv_len] score s + bias[b, h, q, k] + x[h, k]",
    "two": "head_dim 32 input other: bf16[heads, q_len, kv_len] score s * other[h, q, k] + bias[b, h, q, k]",
    "from the last row": "head_dim 32 score s + bias[b, h, q_len - 1 - q, k]",
}


def of_lines(name: str) -> AttentionSpec:
    lines = LINES[name] if "score" in LINES[name] else LINES[name] + " score s + bias[b, h, q, k]"
    (spec,) = load_text(f"attention x {{ dtype bf16 input bias: bf16[batch, heads, q_len, kv_len] {lines} }}")
    return spec


@pytest.mark.long
@pytest.mark.parametrize("name", LINES)
def test_with_what_else_a_spec_may_have(name: str) -> None:
    spec = of_lines(name)
    plan = choose(spec, ARCHES["sm_90a"], "hopper")
    assert plan.own.pair_slots
    assert [e.name for e in plan.staged.pairs] in (["bias_of_pair"], ["other_of_pair"])
    for seed, shape in ((0, Shape(1, 4, 2, 330, 336)), (7, Shape(2, 2, 1, 270, 301)), (0, Shape(1, 1, 1, 1, 8))):
        assert run(spec, "hopper", shape, seed=seed).passed, shape


@pytest.mark.long
@pytest.mark.parametrize(("storage", "page_size"), [("packed", None), ("padded", None), ("paged", 64)])
def test_sequences(storage: Storage, page_size: int | None) -> None:
    """Elements of one sequence are copied, and those of the next are not."""
    kernel = replace(BIAS.kernel, schedule="hopper", storage=storage, page_size=page_size)
    spec = replace(BIAS, kernel=kernel)
    keys, rows = [5, 200, 0, 72, 131, 16], [3, 70, 9, 130, 0, 20]
    whole = sample(spec, Shape(len(keys), 2, 1, 130, 200))
    if not spec.kernel.is_packed:
        rows = [130] * len(keys)
    arrays = stored(spec, whole, rows, keys)
    out = compiled(spec, "hopper")(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"), **arrays)
    outs = [o.swapaxes(0, 1) for o in unpacked(out, rows, 0)] if spec.kernel.is_packed else list(out)
    for b, (q_len, kv_len) in enumerate(zip(rows, keys, strict=True)):
        inputs = {"bias": whole.inputs["bias"][b : b + 1, :, :q_len, :kv_len]}
        alone = Sample(whole.q[b : b + 1, :, :q_len], whole.k[b : b + 1, :, :kv_len], whole.v[b : b + 1, :, :kv_len], inputs)
        assert not q_len or compare(outs[b][None], None, truth(spec, alone)).passed, (q_len, kv_len)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [32, 64, 72])
def test_consumers_read_no_pair_from_global_memory(head_dim: int) -> None:
    """Unless the layout is another: then a thread has as many loads for a tile as pairs, else an eighth of them, from shared
    memory. Nothing is spilled, and no product waits for another."""
    spec = replace(BIAS, head_dim=head_dim, head_dim_v=head_dim)
    program = compile_text(emitted(spec, "hopper", "sm_90a"))
    assert not re.findall(r"C75\d\d", program.log)
    (resources,) = program.resources()
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)
    code, pairs = disassemble(program.code), choose(spec, ARCHES["sm_90a"], "hopper").block_kv // 2
    one_by_one, at_once = (len(re.findall(rf"\b{load}\b", code)) for load in ("LDG", "LDSM"))
    assert one_by_one % pairs == 0
    assert at_once >= one_by_one // 8 > 0


@pytest.mark.long
@pytest.mark.parametrize("mask", [None, "causal"])
def test_two_neighbouring_keys_are_one_load_in_fused(mask: str | None) -> None:
    """In full tiles, of which there is one text beside that of the others; without more registers."""
    program = compile_text(emitted(replace(BIAS, mask=attngen.define(mask=mask).mask), "fused", "sm_80"))
    (resources,) = program.resources()
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)
    one, two = (len(re.findall(rf"\bLDG\.E{size} ", disassemble(program.code))) for size in (r"\.U16", ""))
    assert one == 2 * two > 0
