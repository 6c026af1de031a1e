import numpy as np

from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

D, TILE, THREADS = 64, 64, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, 64, 128), case(rng, 128, 64)]


def case(rng: Random, rows: int, keys: int) -> Case:
    q, k = whole_numbers(rng, rows, D, dtype=np.float16), whole_numbers(rng, keys, D, dtype=np.float16)
    s = q.astype(np.float32) @ k.astype(np.float32).T
    return Case(
        f"{rows} rows, {keys} keys",
        {"q": q, "k": k, "keys": keys},
        {"s": s},
        (keys // TILE, rows // TILE),
        (THREADS,),
        operations=2 * rows * keys * D,
    )


BLOCKS, WARPS, STEPS = 2, 4, D // 16

PUZZLE = Puzzle(
    title="ldmatrix",
    teaches="fragments from shared memory, and rows that avoid bank conflicts",
    cases=cases,
    large=lambda rng: case(rng, 4096, 4096),
    targets=(
        Target("mma", silver=BLOCKS * WARPS * STEPS * TILE // 8, gold=BLOCKS * WARPS * STEPS * TILE // 8, at_least=True),
        Target("ldmatrix", gold=BLOCKS * WARPS * STEPS * (1 + TILE // 16), at_least=True),
        Target("conflicts", gold=0),
    ),
)
