from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

TILE, ROWS = 32, 8


def cases(rng: Random) -> list[Case]:
    return [case(rng, n) for n in (64, 32)]


def case(rng: Random, n: int) -> Case:
    a, b = whole_numbers(rng, n, n), whole_numbers(rng, n, n)
    return Case(f"n = {n}", {"a": a, "b": b, "n": n}, {"c": a @ b}, (n // TILE, n // TILE), (TILE, ROWS), operations=2 * n**3)


PUZZLE = Puzzle(
    title="Tiled product",
    teaches="tiles in shared memory, and several sums in the registers of a thread",
    cases=cases,
    large=lambda rng: case(rng, 2048),
    targets=(
        Target("read", silver=2 * 64 * 64 * 2 * 4, gold=2 * 64 * 64 * 2 * 4),
        Target("shared_read", gold=64**3 * 5),
        Target("conflicts", gold=0),
    ),
)
