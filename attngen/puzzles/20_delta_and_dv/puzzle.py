from attngen.puzzles import Backward, Case, Puzzle, Random, Target

D, KEYS, WARPS = 32, 16, 4


def cases(rng: Random) -> list[Case]:
    return [case(rng, 64), case(rng, 45)]


def case(rng: Random, n: int) -> Case:
    of = Backward.random(rng, n, D)
    given = {"q": of.q, "k": of.k, "o": of.o, "d_o": of.d_o, "lse": of.lse, "n": n}
    return Case(
        f"n = {n}",
        given,
        {"delta": of.delta, "dv": of.dv},
        (-(-n // KEYS),),
        (32 * WARPS,),
        tolerance=1e-5,
        operations=4 * n * n * D,
    )


BLOCKS, ROW = 64 // KEYS, D * 4
READ = BLOCKS * 64 * (2 * ROW + 4) + 64 * ROW  # q, d_o and lse by each block, k once
DELTA = 2 * 64 * ROW

PUZZLE = Puzzle(
    title="Delta and dV",
    teaches="a backward by blocks of keys, with weights computed again from lse",
    cases=cases,
    large=lambda rng: case(rng, 2048),
    targets=(Target("read", silver=2 * (READ + DELTA), gold=READ + DELTA), Target("conflicts", gold=0)),
)
