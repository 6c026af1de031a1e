from attngen.puzzles import FAR, Case, Puzzle, Random, Target, attention, far_scores, near, normal_numbers, tolerance_of

D, WARPS = 32, 4


def cases(rng: Random) -> list[Case]:
    far = [case(rng, 5, 37, FAR), case(rng, 5, 37, -FAR), case(rng, 5, 37, FAR, (35,))]
    return [case(rng, 8, 64), case(rng, 5, 37), *far]


def case(rng: Random, rows: int, keys: int, level: int = 0, only: tuple[int, ...] = ()) -> Case:
    q, k, v = 3 * normal_numbers(rng, rows, D), normal_numbers(rng, keys, D), normal_numbers(rng, keys, D)
    q, k = far_scores(q, k, level, only)
    given = {"q": q, "k": k, "v": v, "rows": rows, "keys": keys}
    blocks = (-(-rows // WARPS),)
    return Case(
        f"{rows} rows, {keys} keys{near(level, only)}",
        given,
        {"o": attention(q, k, v)},
        blocks,
        (32 * WARPS,),
        tolerance=tolerance_of(level, 1e-5),
        operations=4 * rows * keys * D,
    )


READ = 8 * (1 + 2 * 64) * D * 4

PUZZLE = Puzzle(
    title="A fused row",
    teaches="scores, online softmax and output in one loop over the keys",
    cases=cases,
    large=lambda rng: case(rng, 2048, 2048),
    targets=(
        Target("read", silver=READ, gold=READ),
        Target("sectors", gold=READ // 32 + 8 * D * 4 // 32),
        Target("shared_read", silver=0, gold=0),
    ),
)
