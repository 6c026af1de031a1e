import numpy as np

from attngen.puzzles import Array, Case, Puzzle, Random, Target

THREADS = 128


def cases(rng: Random) -> list[Case]:
    small, large = rng.normal(size=(2, 512)), 100 * rng.normal(size=(3, 200))
    return [
        case(small, "2 rows of 512"),
        case(large, "3 rows of 200, with scores up to 300"),
        case(small[:, :3], "2 rows of 3"),
        case(small[:, :200] - 30000, "2 rows of 200, with scores near -30000"),
    ]


def case(scores: Array, what: str) -> Case:
    s = scores.astype(np.float32)
    p = np.exp(s.astype(np.float64) - s.max(1, keepdims=True))
    return Case(
        what, {"s": s, "columns": s.shape[1]}, {"p": p / p.sum(1, keepdims=True)}, (len(s),), (THREADS,), tolerance=1e-5
    )


PUZZLE = Puzzle(
    title="Softmax",
    teaches="three passes over a row, and why its maximum is subtracted",
    cases=cases,
    large=lambda rng: case(rng.normal(size=(16384, 1024)), "16384 rows of 1024"),
    targets=(
        Target("read", silver=3 * 2 * 512 * 4, gold=2 * 512 * 4),
        Target("sectors", silver=4 * 2 * 512 // 8, gold=2 * 2 * 512 // 8),
        Target("wavefronts", gold=2 * 192),  # 128 a row with two trees; half as many again for other ways to keep a row
    ),
)
