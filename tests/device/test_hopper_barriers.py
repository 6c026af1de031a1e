"""mbarriers, named barriers, setmaxnreg and atomic counters on the emulated device."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.device.protocol import Launch, Memory
from attngen.emit.program import Product
from tests import tiers
from tests.device.kernels import Arguments, aligned, primitives, program_of, run_on_hopper


def attempt(body: str, *, threads: int = 256, seed: int = 0, shared: int = 1024) -> np.ndarray | EmulationError:
    y = np.zeros(512, np.uint32)
    try:
        run_on_hopper(body, {"y": y}, threads=threads, shared=shared, seed=seed)
    except EmulationError as error:
        return error
    return y


def kind(body: str, **options: int) -> str:
    found = attempt(body, **options)
    return found.kind if isinstance(found, EmulationError) else ""


# Warpgroup 0 fills `data` three times, warpgroup 1 reads it, by one mbarrier for each direction.
HANDOVER = """
    unsigned long long *const full = (unsigned long long*)smem, *const empty = full + 1;
    unsigned* const data = (unsigned*)(smem + 64);
    const int t = threadIdx.x % 128;
    if (threadIdx.x == 0) { mbarrier_init(full, 128); mbarrier_init(empty, 128); }
    __syncthreads();
    unsigned sum = 0;
    for (int i = 0; i < 3; ++i) {
        if (threadIdx.x < 128) {
            mbarrier_wait(empty, i % 2 ^ 1);
            data[t] = 100 * i + t;
            mbarrier_arrive(full);
        } else {
            mbarrier_wait(full, i % 2);
            sum += data[127 - t];
            mbarrier_arrive(empty);
        }
    }
    y[threadIdx.x] = sum;
"""


@pytest.mark.parametrize("seed", tiers.cases(range(5), quick=range(2)))
def test_mbarriers_order_a_handover(seed: int) -> None:
    found = attempt(HANDOVER, seed=seed)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found[128:256], 300 + 3 * np.arange(127, -1, -1))


MBARRIER_MISTAKES = [
    ("mbarrier_wait(empty, i % 2 ^ 1);", "", ("race", "barrier misuse", "uninitialized shared read", "deadlock")),
    ("mbarrier_wait(full, i % 2);", "", ("race", "uninitialized shared read", "barrier misuse")),
    ("mbarrier_wait(full, i % 2);", "mbarrier_wait(full, 0);", ("race", "barrier misuse", "deadlock")),
    ("mbarrier_arrive(full);", "", ("deadlock",)),
    ("mbarrier_arrive(empty);", "if (t == 0) mbarrier_arrive(empty);", ("deadlock",)),
    (
        "mbarrier_arrive(full);",
        "mbarrier_arrive(full); mbarrier_arrive(full);",
        ("race", "barrier misuse", "deadlock", "uninitialized shared read"),
    ),
    ("mbarrier_init(empty, 128)", "mbarrier_init(empty, 1)", ("race", "barrier misuse", "deadlock")),
    ("    __syncthreads();\n", "", ("race", "barrier misuse")),
    ("mbarrier_init(full, 128);", "mbarrier_init((unsigned long long*)(smem + 4), 128);", ("misaligned access",)),
    ("mbarrier_init(full, 128);", "mbarrier_init(full, 0);", ("barrier misuse",)),
]


@pytest.mark.parametrize("seed", tiers.cases(range(3), quick=[0]))
@pytest.mark.parametrize(("correct", "wrong", "kinds"), tiers.cases(MBARRIER_MISTAKES, quick=MBARRIER_MISTAKES[::3]))
def test_mistakes_with_mbarriers(correct: str, wrong: str, kinds: tuple[str, ...], seed: int) -> None:
    assert correct in HANDOVER
    assert kind(HANDOVER.replace(correct, wrong), seed=seed) in kinds


# Warpgroup 1 reads what warpgroup 0 wrote; then 0 may write again.
NAMED = """
    unsigned* const data = (unsigned*)smem;
    const int t = threadIdx.x % 128;
    if (threadIdx.x < 128) {
        data[t] = 1 + t;
        named_barrier_arrive(1, 256);
        named_barrier_sync(2, 256);
        data[t] = 7;
    } else {
        named_barrier_sync(1, 256);
        y[t] = data[127 - t];
        named_barrier_arrive(2, 256);
    }
"""


@pytest.mark.parametrize("seed", tiers.cases(range(4), quick=range(2)))
def test_named_barriers_order_a_handover(seed: int) -> None:
    found = attempt(NAMED, seed=seed)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found[:128], np.arange(128, 0, -1))


@pytest.mark.parametrize("seed", tiers.cases(range(4), quick=range(2)))
def test_threads_of_a_named_barrier_know_whether_one_of_them_says_so(seed: int) -> None:
    """A warpgroup of which one thread does in the second round, and one of which none does."""
    found = attempt(
        """
    unsigned said = 0;
    for (int round = 0; round < 3; ++round)
        said |= named_barrier_any(1 + threadIdx.x / 128, 128, threadIdx.x == 77 && round == 1) << round;
    y[threadIdx.x] = said;
""",
        seed=seed,
    )
    assert isinstance(found, np.ndarray)
    assert found[:128].tolist() == [2] * 128
    assert not found[128:256].any()


NAMED_MISTAKES = [
    ("named_barrier_arrive(1, 256);", "", ("deadlock",)),
    ("named_barrier_sync(1, 256);", "", ("race", "uninitialized shared read")),
    ("named_barrier_sync(2, 256);", "", ("race",)),
    ("named_barrier_arrive(1, 256);", "named_barrier_arrive(1, 128);", ("divergent barrier", "race", "deadlock")),
    ("named_barrier_arrive(1, 256);", "named_barrier_arrive(1, 250);", ("invalid operand",)),
    ("named_barrier_arrive(1, 256);", "named_barrier_arrive(16, 256);", ("invalid operand",)),
    ("named_barrier_arrive(1, 256);", "named_barrier_arrive(1, 256); named_barrier_arrive(1, 256);", ("divergent barrier",)),
    ("data[t] = 7;", "data[t] = 7; __syncthreads();", ("divergent barrier", "deadlock")),
]


@pytest.mark.parametrize("seed", tiers.cases(range(3), quick=[0]))
@pytest.mark.parametrize(("correct", "wrong", "kinds"), tiers.cases(NAMED_MISTAKES, quick=NAMED_MISTAKES[::3]))
def test_mistakes_with_named_barriers(correct: str, wrong: str, kinds: tuple[str, ...], seed: int) -> None:
    assert correct in NAMED
    assert kind(NAMED.replace(correct, wrong), seed=seed) in kinds


REGISTER_MOVES = [
    ("if (threadIdx.x < 128) give_registers<40>(); else take_registers<232>();", ""),
    ("if (threadIdx.x < 128) give_registers<24>(); else take_registers<240>();", ""),
    ("if (threadIdx.x < 128) give_registers<40>(); else take_registers<240>();", "too many registers"),
    ("if (threadIdx.x >= 128) take_registers<232>();", "too many registers"),
    ("if (threadIdx.x < 96) give_registers<40>();", "divergent warpgroup"),
    ("if (threadIdx.x < 16) give_registers<40>(); else if (threadIdx.x < 128) give_registers<48>();", "divergent warpgroup"),
    ("give_registers<36>();", "invalid operand"),
    ("give_registers<200>();", "invalid operand"),
]


@pytest.mark.parametrize(("body", "expected"), tiers.cases(REGISTER_MOVES, quick=REGISTER_MOVES[::3]))
@pytest.mark.parametrize("seed", tiers.cases(range(3), quick=[0]))
def test_registers_move_within_the_pool(body: str, expected: str, seed: int) -> None:
    assert kind(f"{body} y[threadIdx.x] = 1;", threads=384, seed=seed) == expected


def test_too_many_registers_say_who_wants_them() -> None:
    found = attempt("if (threadIdx.x >= 128) take_registers<232>();", threads=384)
    assert "waits for registers that other warpgroups have not given" in str(found)
    assert "take_registers<232>();" in str(found)


COUNTER = """
    unsigned* const tile_smem = (unsigned*)smem;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) *tile_smem = atomicAdd(next, 1u);
        __syncthreads();
        const unsigned tile = *tile_smem;
        if (tile >= 10) break;
        if (threadIdx.x == 0) y[tile] = 1 + blockIdx.x;
    }
"""


def test_an_atomic_counter_deals_out_tiles() -> None:
    y, counter = np.zeros(10, np.uint32), np.zeros(1, np.uint32)
    kernel = run_on_hopper(COUNTER, {"y": y, "next": counter}, written=("y", "next"), shared=16, blocks=3)
    assert (y > 0).all()
    assert counter[0] == 13
    assert (kernel.counters.bytes_read["next"], kernel.counters.bytes_written["next"]) == (52, 52)


def test_mistakes_with_a_counter() -> None:
    def counted(body: str, *written: str) -> str:
        with pytest.raises(EmulationError) as caught:
            run_on_hopper(body, {"y": np.zeros(10, np.uint32), "next": np.zeros(1, np.uint32)}, written=written, shared=16)
        return caught.value.kind

    assert counted(COUNTER.replace("(next,", "((unsigned*)next,"), "y") == "write to a read-only tensor"
    assert counted(COUNTER.replace("atomicAdd(next,", "atomicAdd(next + 1,"), "y", "next") == "out of bounds"
    assert counted("atomicAdd(next, 1u); *next = 0;", "y", "next") == "race"


ADDITIONS = [
    ("global_add(y + 4 * threadIdx.x, 1.0f, 2.0f, 3.0f, 4.0f);", "uninitialized global read"),
    (
        "for (int i = 0; i < 4; ++i) y[4 * threadIdx.x + i] = 0.0f; global_add(y + 4 * threadIdx.x, 1.0f, 2.0f, 3.0f, 4.0f);",
        "race",
    ),
    ("global_add(y + 4 * threadIdx.x + 1, 1.0f, 2.0f, 3.0f, 4.0f);", "misaligned access"),
    ("global_add(y + 4 * threadIdx.x + 128, 1.0f, 2.0f, 3.0f, 4.0f);", "out of bounds"),
    ("global_add((float*)x + 4 * threadIdx.x, 1.0f, 2.0f, 3.0f, 4.0f);", "write to a read-only tensor"),
]


@pytest.mark.parametrize(("body", "expected"), ADDITIONS)
def test_mistakes_with_additions(body: str, expected: str) -> None:
    x, y = aligned(np.zeros(128, np.float32)), aligned(np.zeros(128, np.float32))
    with pytest.raises(EmulationError) as caught:
        run_on_hopper(body, {"x": x, "y": y})
    assert caught.value.kind == expected


def test_additions_of_many_threads_and_blocks_after_a_kernel_that_writes_zeros() -> None:
    y = aligned(np.zeros(8, np.float32))
    given = Arguments({"y": y}, {}, frozenset({"y"}))
    body = "global_add(y + 4 * (threadIdx.x % 2), 1.0f, 2.0f, 3.0f, float(blockIdx.x));"
    adds = program_of(body, given, before=primitives("global_add"), threads=32, shared=0, blocks=3)
    zeros = 'extern "C" __global__ void zeros(float* y) { if (threadIdx.x < 8) y[threadIdx.x] = 0.0f; }\n'
    first = replace(adds.kernels[0], name="zeros", grid=(Product((1,)), Product(()), Product(())))
    kernel = EmulatedDevice(checked=True).compile(replace(adds, text=zeros + adds.text, kernels=(first, *adds.kernels)))
    memory = (Memory("y", y.ctypes.data, y.nbytes, True),)
    pointer = (ctypes.c_void_p(y.ctypes.data),)
    kernel.launch(tuple(Launch(k, (n, 1, 1), pointer) for k, n in zip(kernel.source.kernels, (1, 3), strict=True)), memory)
    assert y.tolist() == [48.0, 96.0, 144.0, 48.0] * 2
