import numpy as np

from attngen.emit.wgmma import Wgmma
from attngen.puzzles import Case, Puzzle, Random, Target, rows_map, whole_numbers

D, TILE, THREADS = 64, 64, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, 64, 128), case(rng, 128, 64)]


def case(rng: Random, rows: int, keys: int) -> Case:
    q, k = whole_numbers(rng, rows, D, dtype=np.float16), whole_numbers(rng, keys, D, dtype=np.float16)
    maps = {"q": rows_map("q_memory", q, TILE), "k": rows_map("k_memory", k, TILE)}
    given = {**maps, "q_memory": q, "k_memory": k, "keys": keys}
    s = q.astype(np.float32) @ k.astype(np.float32).T
    return Case(
        f"{rows} rows, {keys} keys", given, {"s": s}, (keys // TILE, rows // TILE), (THREADS,), operations=2 * rows * keys * D
    )


BLOCKS, STEPS = 2, D // 16
STORES = BLOCKS * 4 * 16  # four warps store two float2 each for eight columns

PUZZLE = Puzzle(
    title="A wgmma tile",
    teaches="descriptors of operands, groups of products, and who may touch the sums when",
    arch="sm_90a",
    cases=cases,
    large=lambda rng: case(rng, 4096, 4096),
    targets=(
        Target("wgmma_async", silver=BLOCKS * STEPS, gold=BLOCKS * STEPS, at_least=True),
        Target("tma", silver=2 * BLOCKS, gold=2 * BLOCKS, at_least=True),
        Target("requests", gold=STORES + 2 * BLOCKS),
    ),
    products=(Wgmma("wgmma_64x64x16", 64, "fp16"),),
)
