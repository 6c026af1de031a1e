from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

COLUMNS, ROWS, THREADS = 64, 16, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, rows, stride) for rows, stride in ((32, 96), (21, 64))]


def case(rng: Random, rows: int, stride: int) -> Case:
    x = whole_numbers(rng, rows, stride)
    given = {"x": x, "rows": rows, "stride": stride}
    expected = {"y": x[:, :COLUMNS].copy()}
    return Case(f"{rows} rows with a stride of {stride}", given, expected, (-(-rows // ROWS),), (THREADS,))


SECTORS = 2 * 32 * COLUMNS // 8

PUZZLE = Puzzle(
    title="Coalesced copy",
    teaches="sectors: which lanes read which elements, and 16 bytes a lane",
    cases=cases,
    large=lambda rng: case(rng, 1 << 18, 96),
    targets=(
        Target("sectors", silver=SECTORS, gold=SECTORS),
        Target("requests", gold=2 * 32 * COLUMNS // 128),
    ),
)
