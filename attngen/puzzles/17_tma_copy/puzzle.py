import numpy as np

from attngen.puzzles import Case, Puzzle, Random, Target, rows_map, whole_numbers

TILE, THREADS = 64, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, 128, 64), case(rng, 70, 128)]


def case(rng: Random, rows: int, columns: int) -> Case:
    x = whole_numbers(rng, rows, columns, dtype=np.float16)
    given = {"x": rows_map("x_memory", x, TILE), "x_memory": x, "rows": rows, "columns": columns}
    grid = (columns // TILE, -(-rows // TILE))
    return Case(f"{rows} rows, {columns} columns", given, {"y": x.T.copy()}, grid, (THREADS,))


SECTORS = 128 * 64 * 2 // 32  # written; TMA reads count as none

PUZZLE = Puzzle(
    title="A TMA copy",
    teaches="tensor maps, bytes that an mbarrier expects, and the swizzle",
    arch="sm_90a",
    cases=cases,
    large=lambda rng: case(rng, 8192, 4096),
    targets=(
        Target("tma", silver=2, gold=2, at_least=True),
        Target("sectors", silver=SECTORS, gold=SECTORS),
        Target("conflicts", gold=0),
    ),
)
