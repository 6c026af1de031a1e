"""Elements that a key has for itself, staged beside the keys on the hopper schedule: masks and scores of every kind."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.device.emulated import EmulationError
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.plan.captured_staging import KEY_BYTES
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, KernelRequest
from tests import tiers
from tests.harness import SPECS, call, emitted, run, shipped
from tests.harness import compile_text as compile_emulated

IDS = {"ids": ("int32", ("batch", "kv_len"))}
BIAS = {"bias": ("fp16", ("heads", "kv_len"))}
DESCRIBED: dict[str, dict[str, Any]] = {
    "documents": {"mask": "causal and same_document(ids)", "inputs": IDS},
    "documents both ways": {"mask": "same_document(ids)", "inputs": {"ids": ("int64", ("batch", "kv_len"))}},
    "documents, Q in shared memory": {"mask": "causal and same_document(ids)", "inputs": IDS, "head_dim": 200},
    "padding": {"mask": "valid[b, k]", "inputs": {"valid": ("bool", ("batch", "kv_len"))}},
    "bias": {"score": "s + bias[h, k]", "inputs": BIAS},
    "bias, causal": {"mask": "causal", "score": "s + bias[h, k]", "inputs": BIAS, "lse": True},
    "bias, Q in shared memory": {"mask": "causal", "score": "s + bias[h, k]", "inputs": BIAS, "head_dim": 256},
    "bias of a head's keys, transposed": {"score": "s + bias[k, h]", "inputs": {"bias": ("bf16", ("kv_len", "heads"))}},
    "scale of key/value heads": {
        "score": "s * exp2(x[b, h // 2, k])",
        "inputs": {"x": ("fp32", ("batch", "kv_heads", "kv_len"))},
    },
    "positions": {
        "mask": "causal",
        "score": "s - slopes[h] * abs(at[b, q] - at[b, k])",
        "inputs": {"slopes": ("fp32", ("heads",)), "at": ("int32", ("batch", "kv_len"))},
    },
    "documents and a bias": {
        "mask": "same_document(ids)",
        "score": "s + bias[h, k] + row[h, q]",
        "inputs": IDS | BIAS | {"row": ("fp32", ("heads", "q_len"))},
    },
    "rows that are chosen": {
        "mask": "causal and of[b, q] < 3",
        "score": "s + bias[h, k]",
        "inputs": BIAS | {"of": ("int32", ("batch", "q_len"))},
    },
    "two elements of one tensor": {"mask": "ids[b, k] == ids[b, q] or ids[0, k] > 2", "inputs": IDS},
    "a branch that is never taken": {"mask": "where(k >= k, ids[b, q] != 1, ids[b, k] == 2)", "inputs": IDS},
    "an index from a key": {"score": "s + table[clamp(ids[b, k], 0, 3)]", "inputs": IDS | {"table": ("fp32", (4,))}},
    "decay": {"mask": "causal", "score": "s * exp2(-0.01 * x[k])", "inputs": {"x": ("fp32", ("kv_len",))}, "normalize": "none"},
    "more than are staged": {
        "score": " + ".join(["s", *(f"x{i}[h, k]" for i in range(6))]),
        "inputs": {f"x{i}": ("fp32", ("heads", "kv_len")) for i in range(6)},
    },
}
SHAPES = ((1, 1), (7, 7), (130, 290), (300, 300))


def described(name: str, **more: Any) -> AttentionSpec:
    return attngen.define(**({"dtype": "bf16", "head_dim": 64} | DESCRIBED[name] | more))


@pytest.mark.parametrize("name", tiers.cases(DESCRIBED, quick=["documents and a bias"]))
def test_against_the_oracle(name: str) -> None:
    spec = described(name)
    for seed, (q_len, kv_len) in enumerate(SHAPES):
        problem = sample(spec, Shape(8 if q_len < 10 else 2, 4, 2, q_len, kv_len), seed)
        assert run(spec, "hopper", problem, seed=seed % 2 * 7).passed, (q_len, kv_len)


@pytest.mark.long
@pytest.mark.parametrize(("block_q", "block_kv", "stages"), [(128, 80, 4), (128, 48, 2), (192, 112, 2), (128, 176, 2)])
@pytest.mark.parametrize("name", ["documents", "bias, causal"])
def test_every_shape_of_tiles(name: str, block_q: int, block_kv: int, stages: int) -> None:
    request = KernelRequest("hopper", block_q=block_q, block_kv=block_kv, stages=stages)
    spec = replace(described(name), kernel=request)
    assert run(spec, "hopper", Shape(1, 2, 1, 400, 400), seed=5).passed


@pytest.mark.parametrize("name", tiers.cases(["documents", "bias, causal"], quick=["documents"]))
def test_tensors_of_any_stride(name: str) -> None:
    """Key vectors are views: every second element, backwards, of a transposed tensor, and one element for all keys."""
    spec = described(name)
    problem = sample(spec, Shape(2, 2, 2, 150, 150))
    ((captured, values),) = problem.inputs.items()
    apart = np.zeros((300, values.shape[0]), values.dtype)
    apart[::-2] = values.T
    same = np.broadcast_to(values[:, :1], values.shape)
    for view in (apart[::-2].T, same):
        assert run(spec, "hopper", replace(problem, inputs={captured: view})).passed


@pytest.mark.parametrize("name", tiers.cases(["documents", "bias"], quick=["documents"]))
def test_the_ring_of_key_vectors_needs_one_slot_more_than_there_are_stages(name: str) -> None:
    spec = described(name)
    source = emitted(spec, "hopper", "sm_90a")
    smaller = replace(source, text=source.text.replace("SLOTS = STAGES + 1", "SLOTS = STAGES"))
    problem = sample(spec, Shape(1, 2, 2, 300, 600))
    with pytest.raises(EmulationError, match="race"):
        call(compile_emulated(spec, "hopper", smaller, seed=1), problem)


def test_what_is_staged() -> None:
    staged = {name: choose(described(name), ARCHES["sm_90a"], "hopper").staged for name in DESCRIBED}
    assert [e.name for e in staged["documents"].keys] == ["ids_of_k"]
    assert [e.name for e in staged["documents"].rows] == ["ids_of_q"]
    assert [e.name for e in staged["two elements of one tensor"].keys] == ["ids_of_k", "ids_of_k2"]
    assert staged["more than are staged"].key_bytes == KEY_BYTES
    assert all(s.keys for s in staged.values())
    with_keys = [name for name in SPECS if choose(shipped(name, "bf16"), ARCHES["sm_90a"], "hopper").staged.keys]
    assert with_keys == ["packed_documents"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", tiers.cases(["documents", "padding", "bias, causal", "documents and a bias"], quick=["documents and a bias"])
)
@pytest.mark.parametrize("head_dim", tiers.cases([64, 128], quick=[128]))
def test_consumers_read_no_key_from_global_memory(name: str, head_dim: int) -> None:
    """Two neighbouring keys are one load from shared memory; nothing is spilled, and no product waits for another."""
    spec = described(name, head_dim=head_dim)
    compiled = compile_text(emitted(spec, "hopper", "sm_90a"))
    assert not re.findall(r"C75\d\d", compiled.log)
    resources = next(r for r in compiled.resources() if r.entry == "attention_hopper")
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)
    _, *consumers, _ = disassemble(compiled.code).split("WARPGROUP.DEPBAR")  # the code of the producer comes last
    loads, pairs = (len(re.findall(rf"\b{load}\b", "".join(consumers))) for load in (r"LDG", r"LDS\.64"))
    staged = choose(spec, ARCHES["sm_90a"], "hopper").staged
    assert loads <= 4 * len(staged.rows)  # two rows, in two places
    assert pairs >= 30 * len(staged.keys)  # 64 keys in a lane's two tiles: a pair may be two loads


@pytest.mark.long
def test_the_backward_reads_the_element_of_a_key_once_for_all_rows_of_a_tile() -> None:
    spec = attngen.define(dtype="bf16", head_dim=64, **DESCRIBED["padding"])
    plan = choose(spec, ARCHES["sm_90a"], "hopper", direction="backward")
    kernel = compile_text(emit(spec, plan), "ptx").code.decode().partition("_dk_dv(")[2].partition(".entry")[0]
    # in each of four forms of a step by the two keys of a thread, whose 64 pairs would read one each; some by the producer
    assert 8 <= kernel.count("ld.global.nc.u8") < 64
