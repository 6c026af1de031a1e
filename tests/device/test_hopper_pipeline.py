"""A producer and two consumer warpgroups, O = bf16(Q K^T) V: clean in any order of events, and every mistake is noticed."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from attngen.device.emulated import EmulationError
from attngen.device.tensor_map import TensorMap
from attngen.emit.program import Program
from attngen.emit.wgmma import Wgmma
from attngen.spec.dtypes import DTYPES, from_storage, round_to_storage
from tests import tiers
from tests.device.kernels import PRIMITIVES, Arguments, aligned, launch, primitives, products, program_of

TILES = 5
BODY = f"""
    constexpr int tiles = {TILES}, STAGES = 2, TILE_BYTES = 64 * 128, Q_BYTES = 128 * 128, STAGE = TILE_BYTES / 16;
    unsigned char *const Q = smem, *const K = Q + Q_BYTES, *const V = K + STAGES * TILE_BYTES;
    unsigned long long* const q_full = (unsigned long long*)(V + STAGES * TILE_BYTES);
    unsigned long long *const k_full = q_full + 1, *const k_empty = k_full + STAGES;
    unsigned long long *const v_full = k_empty + STAGES, *const v_empty = v_full + STAGES;
    if (threadIdx.x == 0) {{
        mbarrier_init(q_full, 1);
        for (int stage = 0; stage < STAGES; ++stage) {{
            mbarrier_init(k_full + stage, 1);
            mbarrier_init(v_full + stage, 1);
            mbarrier_init(k_empty + stage, 2);
            mbarrier_init(v_empty + stage, 2);
        }}
        mbarrier_init_fence();
    }}
    __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {{
        give_registers<40>();
        if (threadIdx.x == 0) {{
            mbarrier_expect_bytes(q_full, Q_BYTES);
            tma_load(Q, &q_map, q_full, 0, 0, 0, 0, L2_EVICT_FIRST);
            for (int tile = 0; tile < tiles; ++tile) {{
                const int stage = tile % STAGES, phase = tile / STAGES % 2;
                mbarrier_wait(k_empty + stage, phase ^ 1);
                mbarrier_expect_bytes(k_full + stage, TILE_BYTES);
                tma_load(K + stage * TILE_BYTES, &k_map, k_full + stage, 0, 64 * tile, 0, 0, L2_EVICT_LAST);
                mbarrier_wait(v_empty + stage, phase ^ 1);
                mbarrier_expect_bytes(v_full + stage, TILE_BYTES);
                tma_load(V + stage * TILE_BYTES, &v_map, v_full + stage, 0, 64 * tile, 0, 0, L2_EVICT_LAST);
            }}
        }}
        return;
    }}

    take_registers<232>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const unsigned long long q_at = smem_descriptor(smem_operand(Q + 64 * 128 * consumer, 0));
    const unsigned long long k_at = smem_descriptor(smem_operand(K, 0)), v_at = smem_descriptor(smem_operand(V, 64 * 128));
    float O[32];
    mbarrier_wait(q_full, 0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {{
        const int stage = tile % STAGES, phase = tile / STAGES % 2;
        float S[32];
        mbarrier_wait(k_full + stage, phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_qk(S, q_at + 2 * step, k_at + stage * STAGE + 2 * step, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_received(S);
        if (thread == 0) mbarrier_arrive(k_empty + stage);
        unsigned P[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) P[i / 4][i % 4] = pack(S[2 * i], S[2 * i + 1]);
        mbarrier_wait(v_full + stage, phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_pv(O, P[step], v_at + stage * STAGE + 128 * step, tile + step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_received(O);
        if (thread == 0) mbarrier_arrive(v_empty + stage);
    }}
    // O goes through Q's rows of this warp, which no other warp's products read
    unsigned char* const rows = Q + (64 * consumer + 16 * warp) * 128;
    const int row = lane % 16;
#pragma unroll
    for (int g = 0; g < 4; ++g)
        stmatrix_x4(rows + 128 * row + 16 * ((2 * g + lane / 16) ^ (row % 8)), pack(O[8 * g], O[8 * g + 1]),
                    pack(O[8 * g + 2], O[8 * g + 3]), pack(O[8 * g + 4], O[8 * g + 5]), pack(O[8 * g + 6], O[8 * g + 7]));
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {{
        tma_store(&o_map, rows, 0, 64 * consumer + 16 * warp, 0, 0);
        tma_store_commit();
        tma_store_wait_read<0>();
    }}
"""
WRAPPERS = products(Wgmma("wgmma_qk", 64, "bf16"), Wgmma("wgmma_pv", 64, "bf16", a_in_registers=True, b_transposed=True))
SHARED = 128 * 128 + 4 * 64 * 128 + 9 * 8


def problem() -> tuple[Arguments, np.ndarray]:
    """Small whole numbers: sums are exact. The last tile's keys are half outside."""
    rng = np.random.default_rng(0)
    rows = 64 * TILES - 32
    q, k, v = (rng.integers(-2, 3, (n, 64)).astype(np.float32) for n in (120, rows, rows))
    bf16 = DTYPES["bf16"]
    arrays = {n: aligned(round_to_storage(a, bf16).view(np.uint16)) for n, a in (("q", q), ("k", k), ("v", v))}
    arrays["o"] = aligned(np.zeros((120, 64), np.uint16))
    boxes = {"q": (64, 128, 1, 1), "k": (64, 64, 1, 1), "v": (64, 64, 1, 1), "o": (64, 16, 1, 1)}
    maps = {f"{n}_map": TensorMap(n, "bf16", (64, len(arrays[n]), 1, 1), (128, 128, 128), box) for n, box in boxes.items()}
    p = from_storage(round_to_storage(q @ k.T, bf16))
    return Arguments(arrays, maps, frozenset("o")), round_to_storage(p @ v, bf16).view(np.uint16)


def pipeline() -> Program:
    before = primitives(*PRIMITIVES) + WRAPPERS
    return program_of(BODY, problem()[0], before=before, threads=384, shared=SHARED)


def outcome(source: Program, seed: int) -> str:
    """The kind of finding, or "wrong result"; "" if there is none."""
    given, expected = problem()
    try:
        launch(source, given, seed=seed)
    except EmulationError as error:
        return error.kind
    return "" if np.array_equal(given.arrays["o"], expected) else "wrong result"


def mutated(correct: str, wrong: str) -> Program:
    source = pipeline()
    start = source.text.index('extern "C"')
    kernel = source.text[start:]
    assert kernel.count(correct) == 1, correct
    return replace(source, text=source.text[:start] + kernel.replace(correct, wrong))


@pytest.mark.parametrize("seed", tiers.cases(range(12), quick=range(3)))
def test_the_pipeline_is_clean_in_any_order(seed: int) -> None:
    assert outcome(pipeline(), seed) == ""


def test_the_pipeline_is_right_without_checks() -> None:
    given, expected = problem()
    launch(pipeline(), given, checked=False, seed=7)
    assert np.array_equal(given.arrays["o"], expected)


MUTATIONS = {
    # deleted waits
    "mbarrier_wait(q_full, 0);": ("", "copy in flight"),
    "mbarrier_wait(k_full + stage, phase);": ("", "copy in flight"),
    "mbarrier_wait(v_full + stage, phase);": ("", "copy in flight"),
    "mbarrier_wait(k_empty + stage, phase ^ 1);": ("", "copy in flight|barrier misuse"),
    "mbarrier_wait(v_empty + stage, phase ^ 1);": ("", "copy in flight|barrier misuse"),
    # arrivals
    "if (thread == 0) mbarrier_arrive(k_empty + stage);": ("", "deadlock"),
    "if (thread == 0) mbarrier_arrive(v_empty + stage);": ("", "deadlock"),
    "mbarrier_expect_bytes(q_full, Q_BYTES);": ("", "deadlock"),
    "mbarrier_expect_bytes(k_full + stage, TILE_BYTES);": (
        "mbarrier_expect_bytes(k_full + stage, 2 * TILE_BYTES);",
        "deadlock",
    ),
    "mbarrier_expect_bytes(v_full + stage, TILE_BYTES);": (
        "mbarrier_expect_bytes(v_full + stage, TILE_BYTES / 2);",
        "barrier misuse",
    ),
    "mbarrier_init(k_empty + stage, 2);": ("mbarrier_init(k_empty + stage, 1);", "copy in flight|barrier misuse|deadlock"),
    "mbarrier_init(v_empty + stage, 2);": ("mbarrier_init(v_empty + stage, 3);", "deadlock"),
    # loads
    "tma_load(Q, &q_map, q_full,": ("tma_load(Q, &q_map, k_full,", "barrier misuse|deadlock"),
    # fences and barriers
    "mbarrier_init_fence();": ("", "missing proxy fence"),
    "__syncthreads();": ("", "race|barrier misuse"),
    "async_proxy_fence();": ("", "missing proxy fence"),
    "__syncwarp();": ("", "race|uninitialized shared read|copy in flight"),
    # stores
    "tma_store_commit();": ("", "copy in flight"),
    "tma_store_wait_read<0>();": ("", "copy in flight"),
    # registers
    "give_registers<40>();": ("", "too many registers|divergent warpgroup"),
    "take_registers<232>();": ("take_registers<240>();", "too many registers"),
}


@pytest.mark.parametrize("seed", tiers.cases([0, 5], quick=[0]))
@pytest.mark.parametrize("correct", tiers.cases(MUTATIONS, quick=["__syncthreads();", "mbarrier_wait(q_full, 0);"]))
def test_a_mistake_is_found(correct: str, seed: int) -> None:
    wrong, kinds = MUTATIONS[correct]
    assert outcome(mutated(correct, wrong), seed) in kinds.split("|")


PRODUCT = re.compile(r"wgmma_(fence|commit|wait<0>)\(\);")
KINDS = {
    "fence": {"missing wgmma fence"},
    "commit": {"copy in flight", "accumulator in use", "deadlock", "missing wgmma fence"},
    "wait<0>": {"copy in flight", "accumulator in use", "race", "wrong result", "deadlock"},
}


@pytest.mark.parametrize("seed", tiers.cases([0, 5], quick=[0]))
@pytest.mark.parametrize("which", tiers.cases(range(6), quick=[0]))
def test_no_step_of_a_product_can_be_left_out(which: int, seed: int) -> None:
    source = pipeline()
    start = source.text.index('extern "C"')
    place = list(PRODUCT.finditer(source.text, start))[which]
    without = replace(source, text=source.text[: place.start()] + source.text[place.end() :])
    assert outcome(without, seed) in KINDS[place[1]]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(("name", "wait"), [("k", 0), ("v", 1)])
def test_a_buffer_released_before_its_products_are_done(name: str, wait: int, seed: int) -> None:
    source = pipeline()
    release = f"if (thread == 0) mbarrier_arrive({name}_empty + stage);"
    start = source.text.index('extern "C"')
    place = list(re.finditer(r"wgmma_wait<0>\(\);", source.text[start:]))[wait].start() + start
    text = source.text.replace(release, "")
    early = replace(source, text=text[:place] + release + text[place:])
    # or the refill is so early that threads still wait for the phase before it, whose parity is the next one's too
    assert outcome(early, seed) in ("copy in flight", "deadlock")


def test_a_deadlock_names_the_barrier_its_phase_and_the_wait() -> None:
    given, _ = problem()
    with pytest.raises(EmulationError) as caught:
        launch(mutated("if (thread == 0) mbarrier_arrive(v_empty + stage);", ""), given)
    text = str(caught.value)
    offset = SHARED - 9 * 8 + 8 * 7
    assert f"thread 0 waits for the phase of parity 0 of the mbarrier at byte {offset} of shared memory" in text
    assert "in phase 0 and lacks 2 of 2 arrivals and 0 bytes" in text
    assert "(mbarrier_wait(v_empty + stage, phase ^ 1);)" in text
    assert "thread 128 waits for the phase of parity" in text
    assert "(mbarrier_wait(k_full + stage, phase);)" in text or "(mbarrier_wait(v_full + stage, phase);)" in text
