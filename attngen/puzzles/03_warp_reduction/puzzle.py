from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

WARPS = 4


def cases(rng: Random) -> list[Case]:
    return [case(rng, rows, columns) for rows, columns in ((8, 256), (7, 100), (1, 1))]


def case(rng: Random, rows: int, columns: int) -> Case:
    x = whole_numbers(rng, rows, columns)
    given = {"x": x, "rows": rows, "columns": columns}
    return Case(f"{rows} rows of {columns}", given, {"y": x.sum(1)}, (-(-rows // WARPS),), (32 * WARPS,))


PUZZLE = Puzzle(
    title="Warp reduction",
    teaches="lanes and shuffles: a sum without shared memory and without barriers",
    cases=cases,
    large=lambda rng: case(rng, 16384, 2048),
    targets=(
        Target("sectors", silver=8 * 256 // 8 + 8, gold=8 * 256 // 8 + 8),
        Target("shared_read", silver=0, gold=0),
        Target("barriers", gold=0),
    ),
)
