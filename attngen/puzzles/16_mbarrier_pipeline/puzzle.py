from attngen.puzzles import Case, Puzzle, Random, Target, whole_numbers

TILE, THREADS = 512, 128


def cases(rng: Random) -> list[Case]:
    return [case(rng, 6), case(rng, 1), case(rng, 5)]


def case(rng: Random, tiles: int) -> Case:
    x = whole_numbers(rng, tiles, TILE)
    return Case(f"tiles = {tiles}", {"x": x, "tiles": tiles}, {"y": x.sum(0)}, (1,), (THREADS,))


PUZZLE = Puzzle(
    title="A pipeline with mbarriers",
    teaches="phases and their parity, and who waits for whom",
    arch="sm_90a",
    cases=cases,
    large=lambda rng: case(rng, 4096),
    targets=(
        Target("tma", silver=6, gold=6, at_least=True),
        Target("barriers", gold=1),
        Target("conflicts", silver=0, gold=0),
    ),
)
