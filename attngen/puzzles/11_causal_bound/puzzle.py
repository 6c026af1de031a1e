from attngen.puzzles import (
    FAR,
    Case,
    Puzzle,
    Random,
    Target,
    attention,
    far_scores,
    near,
    normal_numbers,
    positions,
    tolerance_of,
)

D, ROWS, KEYS, WARPS = 32, 16, 32, 4


def cases(rng: Random) -> list[Case]:
    return [case(rng, 64), *(case(rng, 45, level) for level in (0, FAR, -FAR)), case(rng, 45, FAR, (40,))]


def case(rng: Random, n: int, level: int = 0, only: tuple[int, ...] = ()) -> Case:
    q, k, v = 3 * normal_numbers(rng, n, D), normal_numbers(rng, n, D), normal_numbers(rng, n, D)
    q, k = far_scores(q, k, level, only)
    row, key = positions(n, n)
    expected = {"o": attention(q, k, v, key <= row)}
    given = {"q": q, "k": k, "v": v, "n": n}
    return Case(
        f"n = {n}{near(level, only)}",
        given,
        expected,
        (-(-n // ROWS),),
        (32 * WARPS,),
        tolerance=tolerance_of(level, 1e-5),
        operations=2 * n * (n + 1) * D,
    )


TILES = (1, 1, 2, 2)  # tiles that blocks of 16 rows see

PUZZLE = Puzzle(
    title="A causal bound",
    teaches="a loop that ends at the last tile that a row of the block sees",
    cases=cases,
    large=lambda rng: case(rng, 2048),
    targets=(
        Target("read", silver=(64 + 2 * KEYS * 2 * 4) * D * 4, gold=(64 + 2 * KEYS * sum(TILES)) * D * 4),
        Target("conflicts", gold=0),
    ),
)
