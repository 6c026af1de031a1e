import numpy as np

from attngen.puzzles import Array, Case, Puzzle, Random, Target


def cases(rng: Random) -> list[Case]:
    rising = np.sort(100 * rng.normal(size=(1, 1500)))
    few = rng.normal(size=(2, 5))
    return [
        case(rng.normal(size=(3, 320)), "3 rows of 320"),
        case(rising, "1500 rising scores"),
        case(few, "2 rows of 5"),
        case(rng.normal(size=(2, 100)) - 30000, "2 rows of 100, with scores near -30000"),
    ]


def case(scores: Array, what: str) -> Case:
    s = scores.astype(np.float32)
    p = np.exp(s.astype(np.float64) - s.max(1, keepdims=True))
    return Case(what, {"s": s, "columns": s.shape[1]}, {"p": p / p.sum(1, keepdims=True)}, (len(s),), (32,), tolerance=1e-5)


PUZZLE = Puzzle(
    title="Online softmax",
    teaches="maximum and sum in one pass, and how two parts of a row join",
    cases=cases,
    large=lambda rng: case(rng.normal(size=(4096, 4096)), "4096 rows of 4096"),
    targets=(
        Target("sectors", silver=4 * 3 * 320 // 8, gold=3 * 3 * 320 // 8),
        Target("barriers", silver=0, gold=0),
        Target("read", gold=2 * 3 * 320 * 4),
    ),
)
