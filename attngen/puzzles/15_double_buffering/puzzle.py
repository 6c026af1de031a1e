from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

D, TILE, THREADS = 32, 128, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, 512), case(rng, 300), case(rng, 1)]


def case(rng: Random, n: int) -> Case:
    q, k = whole_numbers(rng, D), whole_numbers(rng, n, D)
    return Case(f"n = {n}", {"q": q, "k": k, "n": n}, {"s": k @ q}, (1,), (THREADS,))


PUZZLE = Puzzle(
    title="Double buffering",
    teaches="cp.async, its groups, and two buffers that take turns",
    cases=cases,
    large=lambda rng: case(rng, 1 << 16),
    targets=(
        Target("cp_async", silver=512 * D // 4, gold=512 * D // 4, at_least=True),
        Target("barriers", silver=2 * 512 // TILE, gold=512 // TILE + 1),
        Target("conflicts", gold=0),
    ),
)
