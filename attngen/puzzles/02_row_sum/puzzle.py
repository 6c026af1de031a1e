from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

THREADS = 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, rows, columns) for rows, columns in ((4, 512), (3, 200), (2, 5))]


def case(rng: Random, rows: int, columns: int) -> Case:
    x = whole_numbers(rng, rows, columns)
    return Case(f"{rows} rows of {columns}", {"x": x, "columns": columns}, {"y": x.sum(1)}, (rows,), (THREADS,))


PUZZLE = Puzzle(
    title="Row sum",
    teaches="shared memory, barriers, a sum in a tree",
    cases=cases,
    large=lambda rng: case(rng, 16384, 2048),
    targets=(
        Target("sectors", silver=4 * 512 // 8 + 4, gold=4 * 512 // 8 + 4),
        Target("barriers", gold=4 * 8),
        Target("conflicts", gold=0),
        Target("wavefronts", gold=4 * 32),  # a tree has 29 a row; thread 0 alone 131
    ),
)
