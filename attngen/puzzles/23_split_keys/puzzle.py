import numpy as np

from attngen.puzzles import FAR, Case, Puzzle, Random, Target, far_scores, near, normal_numbers, tolerance_of, weights

D, WARPS = 32, 4


def cases(rng: Random) -> list[Case]:
    plain = [case(rng, 256, 64, 3), case(rng, 100, 32, 60), case(rng, 1, 32, 1)]
    far = [case(rng, 100, 32, 3, FAR), case(rng, 100, 32, 3, -FAR), case(rng, 100, 32, 3, FAR, (31, 32))]
    return [*plain, *far]


def case(rng: Random, keys: int, split: int, size: int, level: int = 0, only: tuple[int, ...] = ()) -> Case:
    q, k, v = size * normal_numbers(rng, 1, D), normal_numbers(rng, keys, D), normal_numbers(rng, keys, D)
    q, k = far_scores(q, k, level, only)
    begins = range(0, keys, split)
    parts = [weights(q, k[b : b + split]) for b in begins]
    o_part = np.concatenate([p @ v[b : b + split] for b, (p, _) in zip(begins, parts, strict=True)])
    lse = np.concatenate([lse for _, lse in parts])
    given = {"q": q[0], "k": k, "v": v, "keys": keys, "split": split}
    expected = {"o_part": o_part, "lse": lse}
    return Case(
        f"{keys} keys in parts of {split}{near(level, only)}",
        given,
        expected,
        (len(parts),),
        (32 * WARPS,),
        tolerance=tolerance_of(level, 2e-5),
        operations=4 * keys * D,
    )


READ = 4 * D * 4 * WARPS + 2 * 256 * D * 4  # q by each warp, k and v once

PUZZLE = Puzzle(
    title="Split keys",
    teaches="partial rows with their lse, by blocks that do not know each other",
    cases=cases,
    large=lambda rng: case(rng, 1 << 18, 256, 3),
    targets=(
        Target("read", silver=READ, gold=READ),
        Target("sectors", gold=READ // 32 + 4 * (D * 4 // 32 + 1)),
        Target("conflicts", gold=0),
    ),
)
