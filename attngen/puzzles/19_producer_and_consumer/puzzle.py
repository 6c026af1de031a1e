import numpy as np

from attngen.emit.wgmma import Wgmma
from attngen.puzzles import Case, Puzzle, Random, Target, rows_map, whole_numbers

D, TILE, THREADS = 64, 64, 160


def cases(rng: Random) -> list[Case]:
    return [case(rng, 320), case(rng, 64)]


def case(rng: Random, keys: int) -> Case:
    q, k = whole_numbers(rng, TILE, D, dtype=np.float16), whole_numbers(rng, keys, D, dtype=np.float16)
    maps = {"q": rows_map("q_memory", q, TILE), "k": rows_map("k_memory", k, TILE)}
    given = {**maps, "q_memory": q, "k_memory": k, "keys": keys}
    return Case(
        f"{keys} keys",
        given,
        {"s": q.astype(np.float32) @ k.astype(np.float32).T},
        (1,),
        (THREADS,),
        operations=2 * TILE * keys * D,
    )


TILES, STEPS = 5, D // 16

PUZZLE = Puzzle(
    title="Producer and consumer",
    teaches="warp specialization: a ring of tiles between two roles",
    arch="sm_90a",
    cases=cases,
    large=lambda rng: case(rng, 1 << 16),
    targets=(
        Target("wgmma_async", silver=TILES * STEPS, gold=TILES * STEPS, at_least=True),
        Target("tma", silver=1 + TILES, gold=1 + TILES, at_least=True),
        Target("barriers", gold=1),
    ),
    products=(Wgmma("wgmma_64x64x16", 64, "fp16"),),
)
