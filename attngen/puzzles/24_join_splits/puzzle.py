import numpy as np

from attngen.puzzles import Case, Puzzle, Random, Target, normal_numbers

D, WARPS = 32, 4


def cases(rng: Random) -> list[Case]:
    return [case(rng, 8, 6), case(rng, 5, 40), case(rng, 1, 1), case(rng, 5, 40, -300)]


def case(rng: Random, rows: int, splits: int, level: int = 100) -> Case:
    o_part, lse = normal_numbers(rng, splits, rows, D), level + 3 * normal_numbers(rng, splits, rows)
    lse[:, 0] += 200  # exp of it overflows
    if rows > 1:  # some parts without a key, and one row without any
        without = rng.random((splits, rows)) < 0.3
        without[:, 0], without[:, 1] = False, True
        lse[without], o_part[without] = -np.inf, np.nan
    most = np.maximum(lse.astype(np.float64).max(0), -1e30)
    shares = np.exp(lse - most)
    total = np.maximum(shares.sum(0), 1e-30)
    o = ((shares / total)[..., None] * np.nan_to_num(o_part.astype(np.float64))).sum(0)
    given = {"o_part": o_part, "lse": lse, "rows": rows, "splits": splits}
    return Case(
        f"{rows} rows of {splits} splits, lse near {level}",
        given,
        {"o": o},
        (-(-rows // WARPS),),
        (32 * WARPS,),
        tolerance=2e-5,
    )


READ = 8 * 6 * (D + 1) * 4

PUZZLE = Puzzle(
    title="The join of splits",
    teaches="shares of partial rows, and rows without a key",
    cases=cases,
    large=lambda rng: case(rng, 32768, 16),
    targets=(
        Target("read", silver=8 * 6 * 2 * D * 4, gold=READ),
        Target("shared_read", gold=0),
    ),
)
