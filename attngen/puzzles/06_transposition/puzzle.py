from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

TILE, ROWS = 32, 8


def cases(rng: Random) -> list[Case]:
    return [case(rng, rows, columns) for rows, columns in ((64, 96), (32, 64))]


def case(rng: Random, rows: int, columns: int) -> Case:
    x = whole_numbers(rng, rows, columns)
    given = {"x": x, "rows": rows, "columns": columns}
    return Case(f"{rows} rows, {columns} columns", given, {"y": x.T.copy()}, (columns // TILE, rows // TILE), (TILE, ROWS))


SECTORS = 2 * 64 * 96 // 8

PUZZLE = Puzzle(
    title="Transposition",
    teaches="bank conflicts, and how a padded row avoids them",
    cases=cases,
    large=lambda rng: case(rng, 4096, 8192),
    targets=(Target("sectors", silver=SECTORS, gold=SECTORS), Target("conflicts", gold=0)),
)
