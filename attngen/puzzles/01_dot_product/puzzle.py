from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

D, THREADS = 8, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, n) for n in (256, 300, 1)]


def case(rng: Random, n: int) -> Case:
    q, k = whole_numbers(rng, D), whole_numbers(rng, n, D)
    given = {"q": q, "k": k, "n": n, "scale": 0.25}
    return Case(f"n = {n}", given, {"s": 0.25 * (k @ q)}, (-(-n // THREADS),), (THREADS,))


PUZZLE = Puzzle(
    title="Dot product",
    teaches="one thread for each element, the last block, loads of 16 bytes",
    cases=cases,
    large=lambda rng: case(rng, 1 << 22),
    targets=(
        Target("read", silver=2 * 256 * D * 4, gold=2 * 256 * D * 4),
        Target("sectors", gold=560),
    ),
)
