import numpy as np

from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers


def cases(rng: Random) -> list[Case]:
    return [case(rng, 32, 32, 32), case(rng, 16, 24, 64)]


def case(rng: Random, rows: int, keys: int, d: int) -> Case:
    q, k = whole_numbers(rng, rows, d, dtype=np.float16), whole_numbers(rng, keys, d, dtype=np.float16)
    s = q.astype(np.float32) @ k.astype(np.float32).T
    given = {"q": q, "k": k, "keys": keys, "d": d}
    return Case(
        f"{rows} rows, {keys} keys, d = {d}", given, {"s": s}, (keys // 8, rows // 16), (32,), operations=2 * rows * keys * d
    )


WARPS, STEPS = 8, 2

PUZZLE = Puzzle(
    title="Fragments of mma",
    teaches="which lane has which element of A, B and D",
    cases=cases,
    large=lambda rng: case(rng, 2048, 2048, 64),
    targets=(
        Target("mma", silver=WARPS * STEPS, gold=WARPS * STEPS, at_least=True),
        Target("requests", silver=WARPS * (6 * STEPS + 4), gold=WARPS * (6 * STEPS + 2)),
    ),
)
