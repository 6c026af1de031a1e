"""`explain`: occupancy, work, roofline, and what a param changes."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

import attngen
from attngen import define
from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import DeviceError
from attngen.emit.emitter import emit
from attngen.emit.loops import loop_nest
from attngen.inspect import occupancy as of_kernels
from attngen.inspect.call import Call
from attngen.inspect.explain import explain_tiles
from attngen.inspect.explain_work import explain_work
from attngen.inspect.occupancy import occupancy
from attngen.inspect.work import allowed_pairs, roofline, tile_kinds
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.block_map import EMPTY
from attngen.reference.definition import Problem, allowed_rows, count_allowed
from attngen.reference.gradients import sample_loss
from attngen.reference.numpy_oracle import numbers_of
from attngen.reference.problems import Draw, Shape, sample, without_values
from attngen.schedules import choose
from attngen.spec.dtypes import from_storage
from attngen.spec.gradient import QKV
from tests import tiers
from tests.harness import SHIPPED, cli, gradients, shipped


def explained(*arguments: str) -> str:
    result = cli("explain", *arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limit"),
    [
        ("sm_80", 256, 64, 0, 4, "registers"),  # 64 registers a thread: half of the warps
        ("sm_80", 256, 32, 0, 8, "threads"),
        ("sm_80", 32, 32, 0, 32, "blocks"),
        ("sm_80", 128, 168, 55296, 2, "shared memory"),  # 2 (54 + 1) KiB of 164
        ("sm_75", 64, 32, 32 * 1024, 2, "shared memory"),  # nothing is reserved there
        ("sm_90a", 384, 168, 133120, 1, "registers"),  # 168 * 384 of 65536 registers
        ("sm_86", 1024, 33, 0, 1, "threads"),
        ("sm_80", 128, 33, 0, 12, "registers"),  # a warp's 1056 registers are given as 1280
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    assert occupancy(ARCHES[arch], threads, registers, shared) == (blocks, limit)


def test_work_of_causal_attention() -> None:
    """n (n + 1) / 2 pairs of 4 * 64 operations; Q, K, V and O once; the tiles on the diagonal count whole."""
    spec, n = shipped("gpt2"), 512
    plan = choose(spec, ARCHES["sm_80"], "fused")
    work = Call(spec, plan, n, n).work()
    assert work.operations == n * (n + 1) // 2 * 4 * 64
    assert work.least_bytes == 4 * n * 64 * 2
    blocks = n // plan.block_q
    tiles = sum((i + 1) * plan.block_q // plan.block_kv for i in range(blocks))
    assert work.visited_pairs == tiles * plan.block_q * plan.block_kv
    assert work.read == n * 64 * 2 + 2 * tiles * plan.block_kv * 64 * 2


def test_work_of_values_that_are_a_part_of_keys() -> None:
    """Keys of 8 bits or 16, and no bytes for V."""
    for types, size in (("bf16", 2), ({"q": "bf16", "k": "fp8_e4m3", "v": "fp8_e4m3"}, 1)):
        spec = define(dtype=types, head_dim=64, values=(0, 32), heads=(1, 1))
        work = Call(spec, choose(spec, ARCHES["sm_80"], "tiled"), 1, 512).work()
        scores = 4 * 512 * 4  # in global memory: written and read by three launches
        assert work.least_bytes - scores == (64 + 32) * 2 + 512 * 64 * size


def test_work_of_a_window_over_a_long_cache() -> None:
    """The tiles of keys in the window are read, and no others: the bound of the time is theirs."""
    spec = define(dtype="bf16", head_dim=64, mask="causal_bottom_right and q + kv_len - q_len - k < 100")
    plan = choose(spec, ARCHES["sm_90a"], "decode")
    work = Call(spec, plan, 1, 8192).work()
    tiles = -(-8192 // plan.block_kv) - (8192 - 100) // plan.block_kv
    assert work.least_bytes == (2 * 1 + 2 * tiles * plan.block_kv) * 64 * 2
    assert work.read == (1 + 2 * tiles * plan.block_kv) * 64 * 2


def test_work_of_consumers_that_pass_over_tiles() -> None:
    """Blocks of 128 rows load 2, 4, 6 and 8 tiles of 64 keys; of 64 rows those with 1, 2, ... 8 are multiplied."""
    spec, n = define(dtype="bf16", head_dim=256, mask="causal"), 512
    plan = choose(spec, ARCHES["sm_90a"], "hopper")
    work = Call(spec, plan, n, n).work()
    assert work.visited_pairs == sum(range(1, 9)) * 64 * 64
    assert work.read == n * 256 * 2 + 2 * (2 + 4 + 6 + 8) * 64 * 256 * 2
    assert "those of the tiles that are not empty for 64 rows" in explain_work(Call(spec, plan, n, n))
    tiles = " ".join(explain_tiles(Call(spec, plan, n, n)).split())
    assert "12 full (#), 8 partial (/), 12 empty" in tiles
    assert "its own 64 rows: of 40 tiles of 64 x 64 that are loaded 28 are full, 8 partial" in tiles
    (keys,) = [p.loop for p in loop_nest(spec, plan, emit(spec, plan)) if "own 64 rows" in p.loop.range]
    assert keys.name == "keys"


def test_naive_is_bound_by_memory_and_fused_by_arithmetic() -> None:
    spec, arch = shipped("gpt2"), ARCHES["sm_80"]
    bounds = {}
    for schedule in ("naive", "fused"):
        plan = choose(spec, arch, schedule)
        bounds[schedule] = roofline(spec, plan, Call(spec, plan, 2048, 2048).work())
    assert bounds["naive"].by_memory
    assert not bounds["fused"].by_memory
    assert bounds["fused"].reachable == arch.tensor_tflops * 1e12
    assert bounds["naive"].reachable < arch.fp32_tflops * 1e12
    assert bounds["naive"].ridge == pytest.approx(arch.fp32_tflops / arch.bandwidth_tb_s)


def test_work_of_a_backward() -> None:
    """Five products of each pair count; two kernels compute seven, over whole tiles. Launches move Q, K, V, O, dO, their
    gradients, and fp32 numbers of the rows."""
    spec, n = define(dtype="bf16", head_dim=64, mask="causal"), 512
    plan = choose(spec, ARCHES["sm_80"], "fused", direction="backward", deterministic=True)
    work = Call(spec, plan, n, n).work()
    assert work.operations == n * (n + 1) // 2 * 5 * 2 * 64
    blocks = n // plan.block_q
    assert work.visited_pairs == blocks * (blocks + 1) // 2 * plan.block_q * plan.block_kv
    assert work.computed == work.visited_pairs * 7 * 2 * 64
    assert [one.kernel for one in work.launches] == ["delta", "dk_dv", "dq"]
    matrix, numbers = n * 64 * 2, n * 4
    saved = len([name for name in plan.saved if name != "out"])
    assert [one.bytes for one in work.launches] == [
        2 * matrix + numbers,
        6 * matrix + (saved + 1) * numbers,
        5 * matrix + (saved + 1) * numbers,
    ]
    assert work.least_bytes == sum(one.bytes for one in work.launches)
    text = explain_work(Call(spec, plan, n, n))
    assert "2 (64 + 64 + 64 + 64 + 64) for each of the 131328 pairs" in text
    assert "one after another" in text


@pytest.mark.parametrize(("head_dim", "tiles_of_keys"), [(128, 20 * 2), (256, 36)])
def test_work_of_a_backward_with_a_producer(head_dim: int, tiles_of_keys: int) -> None:
    """A block has 128 rows, and 128 keys or 64: what it visits is known for all of them together."""
    spec, n = define(dtype="bf16", head_dim=head_dim, mask="causal"), 512
    plan = choose(spec, ARCHES["sm_90a"], "hopper", direction="backward", deterministic=True)
    work = Call(spec, plan, n, n).work()
    pairs = {one.kernel: one.visited_pairs for one in work.launches}
    assert pairs == {"delta": 0, "dk_dv": tiles_of_keys * 64 * 64, "dq": 20 * 128 * 64}


def test_work_of_a_backward_that_keeps_scores() -> None:
    """What a launch changes in place, it reads and writes; tiles that are empty are neither."""
    spec, n = define(dtype="fp32", head_dim=64, mask="causal"), 256
    by_name = {}
    for schedule in ("naive", "tiled"):
        plan = choose(spec, ARCHES["sm_80"], schedule, direction="backward")
        work = Call(spec, plan, n, n).work()
        assert sum(len(one.products) for one in work.launches) == 5
        by_name[schedule] = {one.kernel: one for one in work.launches}
    assert by_name["naive"]["softmax"].bytes == 2 * 4 * n * n
    assert by_name["tiled"]["softmax"].bytes == 2 * 4 * (1 + 2 + 3 + 4) * 64 * 64
    assert by_name["naive"]["dq"].computed == 2 * 64 * n * n


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "schedule", "mask"),
    tiers.cases(
        [
            ("sm_80", "fused", "causal and q - k < 100"),
            ("sm_90a", "hopper", "causal"),
            ("sm_90a", "hopper", "causal and q - k < 100"),
        ],
        quick=[("sm_80", "fused", "causal and q - k < 100")],
    ),
)
def test_products_of_a_backward_are_those_that_run(arch: str, schedule: str, mask: str) -> None:
    spec, n = define(dtype="fp16", head_dim=64, mask=mask), 384
    kernel = attngen.compile(spec, kernel=schedule, device=EmulatedDevice(checked=False, arch=arch))
    problem = sample(spec, Shape(1, 1, 1, n, n))
    gradients(kernel, problem, sample_loss(spec, problem), QKV)
    backward = kernel.gradients(QKV)
    threads = 32 if schedule == "fused" else 128  # threads that share an instruction
    shapes = [(re.search(r"\.m(\d+)n(\d+)k(\d+)\.", op), ran) for op, ran in backward.kernel.counters.instructions.items()]
    operations = sum(2 * prod(map(int, shape.groups())) * ran // threads for shape, ran in shapes if shape)
    assert Call(spec, backward.plan, n, n).work().computed == operations


@pytest.mark.parametrize("wanted", tiers.cases(["q,k,v", "q,v", "v", "v,bias", "bias", "k"], quick=["q,v"]))
def test_products_that_no_wanted_gradient_needs_are_not_counted(wanted: str) -> None:
    """Delta is no product: a multiplication and an addition for each element of O."""
    spec, n = define(dtype="fp32", head_dim=16, score="s + bias[k]", inputs={"bias": ("fp32", ("kv_len",))}), 64
    kernel = attngen.compile(spec, kernel="fused", device=EmulatedDevice(arch="sm_75"))
    problem, names = sample(spec, Shape(1, 1, 1, n, n)), tuple(wanted.split(","))
    gradients(kernel, problem, sample_loss(spec, problem), names)
    backward = kernel.gradients(names)
    of_delta = 2 * n * 16 if "delta" in backward.plan.own.kernels else 0
    operations = 2 * backward.kernel.counters.instructions["fma.rn.f32"] - of_delta
    assert Call(spec, backward.plan, n, n).work().computed == operations


def test_split_operands_have_a_third_of_the_rate() -> None:
    spec, arch = shipped("gpt2", "fp32"), ARCHES["sm_80"]
    plan = choose(spec, arch, "fused")
    roof = roofline(spec, plan, Call(spec, plan, 256, 256).work())
    assert roof.peak == pytest.approx(arch.tensor_tflops * 1e12 / 2 / 3)  # tf32 has half the rate of fp16


def test_explain_says_registers_and_occupancy_of_every_kernel() -> None:
    text = explained("gpt2", "--kernel", "tiled")
    for kernel in ("scores", "softmax", "weighted_sum"):
        assert f"gpt2_{kernel}: 128 threads, " in text
    assert "8448 bytes of shared memory" in text  # static, as the compiler counts it
    assert "on a multiprocessor at once" in text


def test_explain_without_nvrtc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise DeviceError("NVRTC cannot be loaded; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(of_kernels, "nvrtc_version", absent)
    text = explained("gpt2")
    assert "registers and occupancy: unknown, because the compiler is missing: NVRTC cannot be loaded" in text
    assert "roofline" in text


@pytest.mark.long
def test_explain_of_few_rows_is_of_the_schedule_that_runs(tmp_path: Path) -> None:
    """Which splits keys, of pages too; a backward and a named schedule are left alone."""
    tables = "input cosines: fp32[positions, 32]  input sines: fp32[positions, 32]  rotary 64 halves by cosines, sines"
    for name, more in (("rotary", tables), ("paged", "kernel auto { storage paged  page_size 16 }")):
        spec = str(tmp_path / f"{name}.attn")
        Path(spec).write_text(f"attention {name} {{ dtype bf16  head_dim 64  mask causal_bottom_right  {more} }}")
        text = explained(spec, "--q-len", "1", "--kv-len", "4096")
        assert re.search(rf"^{name} on sm_80 .*: decode$", text, re.M)
        assert "\n  splits = " in text
        assert f"  {name}_split: " in text
        assert f"  {name}_join: " in text
        assert (f"  {name}_rotate: " in text) == (name == "rotary")
        assert ": fused" in explained(spec, "--q-len", "17", "--kv-len", "4096")
    assert ": fused" in explained("gpt2", "--q-len", "1", "--kv-len", "4096", "--kernel", "fused")
    assert "_split" not in explained("gpt2", "--backward", "--q-len", "1", "--kv-len", "4096")


@pytest.mark.parametrize(("schedule", "arch"), [("tiled", "sm_80"), ("fused", "sm_80"), ("hopper", "sm_90a")])
def test_work_of_a_packed_backward(schedule: str, arch: str) -> None:
    """That of the dense one; besides, its launches read where the sequence lies."""
    dense = define(dtype="bf16", head_dim=128, mask="causal", lse=True)
    packed = replace(dense, kernel=replace(dense.kernel, storage="packed"))
    works = [
        Call(spec, choose(spec, ARCHES[arch], schedule, direction="backward", wanted=QKV), 512, 512).work()
        for spec in (dense, packed)
    ]
    for one, other in zip(*(work.launches for work in works), strict=True):
        assert (one.kernel, one.computed) == (other.kernel, other.computed)
        assert one.bytes <= other.bytes < 1.2 * one.bytes


def test_explain_says_what_a_param_changes() -> None:
    text = explained("mistral_window", "--q-len", "512", "--kv-len", "512", "--param", "size=128")
    lines = text[text.index("what size = 128 (4096 by default) changes") :].splitlines()
    found = {line[2:16].strip(): line[17:] for line in lines[1:]}
    before, after = 512 * 513 // 2, 128 * 129 // 2 + (512 - 128) * 128  # per head; there are 32
    assert found["allowed pairs"].startswith(f"{32 * before} -> {32 * after} ")
    assert found["empty tiles"].startswith("12 -> ")
    assert found["full tiles"].endswith("%)")
    assert "what size" not in explained("mistral_window", "--q-len", "512", "--param", "size=4096")


def test_a_param_without_default_is_compared_with_what_stands_in_for_it(tmp_path: Path) -> None:
    spec = tmp_path / "windowed.attn"
    spec.write_text("attention windowed { dtype fp16 head_dim 64 param n: int mask causal and window(n) }")
    text = explained(str(spec), "--q-len", "512", "--param", "n=128")
    assert "what n = 128 (no default; compared with 1) changes" in text
    assert "by default" not in text


@pytest.mark.parametrize(("given", "words"), [("sise=3", "did you mean `size`?"), ("size=1.5", "expected an int")])
def test_explain_refuses_params_that_are_none(given: str, words: str) -> None:
    result = cli("explain", "mistral_window", "--param", given)
    assert result.exit_code == 2
    assert words in result.output


def test_decode_reads_keys_once_for_the_heads_that_share_them() -> None:
    """16 rows of two heads are two tiles of 8 positions, and each reads the keys up to its last one."""
    spec, arch = shipped("gemma_softcap"), ARCHES["sm_80"]
    fused, decode = (Call(spec, choose(spec, arch, schedule), 16, 512).work() for schedule in ("fused", "decode"))
    assert fused.allowed_pairs == decode.allowed_pairs
    assert fused.read is not None
    assert decode.read is not None
    assert decode.read < fused.read


@pytest.mark.parametrize("name", SHIPPED)
def test_pairs_are_counted_by_tiles_as_one_by_one(name: str) -> None:
    spec = shipped(name)
    problem = without_values(spec, Shape(batch=1, q_len=200, kv_len=333))
    params, inputs = {p.name: 70 for p in spec.params}, {n: from_storage(a) for n, a in problem.inputs.items()}
    counted = count_allowed(Problem(spec, problem.q, problem.k, problem.v, inputs, params, np), 1, 1)
    assert allowed_pairs(spec, problem, params) == counted


def test_long_sequences_take_little_memory() -> None:
    """Lengths beyond memory: K alone would have 8 GiB."""
    spec, arch, keys = shipped("gpt2"), ARCHES["sm_90a"], 1 << 26
    problem = without_values(spec, Shape(batch=1, q_len=2, kv_len=keys))
    assert problem.k.strides == (0, 0, 0, 0)
    found = Call(spec, choose(spec, arch, "decode"), 2, keys).work()
    assert found.allowed_pairs == 3  # one in the first row, two in the second


def test_tiles_of_a_block_of_several_heads_by_ranges_of_integers() -> None:
    """A block has fewer positions than rows; the ranges that tell documents apart are of as many positions as it has rows."""
    (spec,) = load_text(
        "attention grouped { dtype bf16 head_dim 128 heads 8 over 2 input document: int32[batch, kv_len] "
        "mask causal and same_document(document) }"
    )
    plan, shape = choose(spec, ARCHES["sm_80"], "decode"), Shape(2, 8, 2, 70, 70)
    problem = sample(spec, shape, draw=Draw(integers="two documents"))
    kinds = tile_kinds(plan, problem, shape.sizes(spec), b=1)
    assert kinds is not None
    rows, keys = plan.block_q // 4, plan.block_kv
    pairs = allowed_rows(numbers_of(spec, problem, {}, np.float32), 1, 0, slice(0, 70))
    padded = np.pad(pairs, ((0, -70 % rows), (0, -70 % keys)))
    allowed = padded.reshape(-1, rows, len(padded[0]) // keys, keys).any((1, 3))
    assert kinds.shape == allowed.shape
    assert (kinds[allowed] != EMPTY).all()
    assert (kinds == EMPTY).any()
