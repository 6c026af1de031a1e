from attngen.puzzles import Backward, Case, Puzzle, Random, Target

D, ROWS, KEYS, WARPS = 32, 16, 32, 4


def cases(rng: Random) -> list[Case]:
    return [case(rng, 64), case(rng, 45)]


def case(rng: Random, n: int) -> Case:
    of = Backward.random(rng, n, D, causal=True)
    given = {"q": of.q, "k": of.k, "v": of.v, "d_o": of.d_o, "lse": of.lse, "delta": of.delta, "n": n}
    return Case(
        f"n = {n}", given, {"dq": of.dq}, (-(-n // ROWS),), (32 * WARPS,), tolerance=1e-5, operations=3 * n * (n + 1) * D
    )


ROW, TILES = D * 4, (1, 1, 2, 2)  # tiles that blocks of 16 rows see
OWN = 64 * (2 * ROW + 8)  # q, d_o, lse, delta

PUZZLE = Puzzle(
    title="dQ",
    teaches="the same gradient of a score by rows, with a causal bound",
    cases=cases,
    large=lambda rng: case(rng, 2048),
    targets=(
        Target("read", silver=OWN + 4 * 2 * KEYS * 2 * ROW, gold=OWN + sum(TILES) * KEYS * 2 * ROW),
        Target("conflicts", gold=0),
    ),
)
