from attngen.puzzles import Backward, Case, Puzzle, Random, Target

D, KEYS, WARPS = 32, 16, 4


def cases(rng: Random) -> list[Case]:
    return [case(rng, 64), case(rng, 45)]


def case(rng: Random, n: int) -> Case:
    of = Backward.random(rng, n, D)
    given = {"q": of.q, "k": of.k, "v": of.v, "d_o": of.d_o, "lse": of.lse, "delta": of.delta, "n": n}
    return Case(f"n = {n}", given, {"dk": of.dk}, (-(-n // KEYS),), (32 * WARPS,), tolerance=1e-5, operations=6 * n * n * D)


BLOCKS, ROW = 64 // KEYS, D * 4
READ = BLOCKS * 64 * (2 * ROW + 8) + 2 * 64 * ROW  # q, d_o, lse and delta by each block, k and v once

PUZZLE = Puzzle(
    title="dK",
    teaches="the gradient of a score, and why delta is subtracted",
    cases=cases,
    large=lambda rng: case(rng, 2048),
    targets=(Target("read", silver=2 * READ, gold=READ), Target("conflicts", gold=0)),
)
