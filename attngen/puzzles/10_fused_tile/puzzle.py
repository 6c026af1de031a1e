from attngen.puzzles import FAR, Case, Puzzle, Random, Target, attention, far_scores, near, normal_numbers, tolerance_of

D, ROWS, WARPS = 32, 16, 4


def cases(rng: Random) -> list[Case]:
    far = [case(rng, 21, 45, FAR), case(rng, 21, 45, -FAR), case(rng, 21, 45, FAR, (40,))]
    return [case(rng, 32, 64), case(rng, 21, 45), case(rng, 1, 1), *far]


def case(rng: Random, rows: int, keys: int, level: int = 0, only: tuple[int, ...] = ()) -> Case:
    q, k, v = 3 * normal_numbers(rng, rows, D), normal_numbers(rng, keys, D), normal_numbers(rng, keys, D)
    q, k = far_scores(q, k, level, only)
    given = {"q": q, "k": k, "v": v, "rows": rows, "keys": keys}
    blocks = (-(-rows // ROWS),)
    return Case(
        f"{rows} rows, {keys} keys{near(level, only)}",
        given,
        {"o": attention(q, k, v)},
        blocks,
        (32 * WARPS,),
        tolerance=tolerance_of(level, 1e-5),
        operations=4 * rows * keys * D,
    )


READ = (32 + 2 * 2 * 64) * D * 4

PUZZLE = Puzzle(
    title="A fused tile",
    teaches="keys and values that the rows of a block share",
    cases=cases,
    large=lambda rng: case(rng, 2048, 2048),
    targets=(Target("read", silver=2 * READ, gold=READ), Target("conflicts", gold=0)),
)
