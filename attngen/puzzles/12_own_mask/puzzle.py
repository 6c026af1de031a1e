from attngen.puzzles import (
    FAR,
    Array,
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

D, ROWS, KEYS, WARPS, SINKS = 32, 16, 32, 4, 4
N, WINDOW = 160, 16


def cases(rng: Random) -> list[Case]:
    plain = [case(rng, N, WINDOW), case(rng, 77, 1), case(rng, 50, 100), case(rng, 90, 20)]
    return [*plain, case(rng, 77, 9, FAR), case(rng, 77, 9, -FAR), case(rng, 77, 9, FAR, (70,))]


def sees(n: int, window: int) -> Array:
    row, key = positions(n, n)
    seen: Array = (key <= row) & ((row - key < window) | (key < SINKS))
    return seen


def case(rng: Random, n: int, window: int, level: int = 0, only: tuple[int, ...] = ()) -> Case:
    q, k, v = 3 * normal_numbers(rng, n, D), normal_numbers(rng, n, D), normal_numbers(rng, n, D)
    q, k = far_scores(q, k, level, only)
    expected = {"o": attention(q, k, v, sees(n, window))}
    given = {"q": q, "k": k, "v": v, "n": n, "window": window}
    return Case(
        f"n = {n}, window = {window}{near(level, only)}",
        given,
        expected,
        (-(-n // ROWS),),
        (32 * WARPS,),
        tolerance=tolerance_of(level, 1e-5),
        operations=4 * int(sees(n, window).sum()) * D,
    )


def read(tiles: int) -> int:
    return (N + 2 * KEYS * tiles) * D * 4


CAUSAL = sum(-(-ROWS * (block + 1) // KEYS) for block in range(N // ROWS))
SEEN = int(sees(N, WINDOW).reshape(N // ROWS, ROWS, N // KEYS, KEYS).any((1, 3)).sum())  # pairs of a block and a tile

PUZZLE = Puzzle(
    title="A mask of one's own",
    teaches="a mask in code, and tiles skipped between others, by all warps together",
    cases=cases,
    large=lambda rng: case(rng, 2048, 64),
    targets=(Target("read", silver=read(CAUSAL), gold=read(SEEN)), Target("conflicts", gold=0)),
)
