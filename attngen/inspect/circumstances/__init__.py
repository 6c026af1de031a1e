"""What can happen to the blocks of a kernel, as tables of rows: each circumstance in words, the plans that it applies to, how
a problem is seen to have it, and why none may. A kernel that is wrong in one of them alone is right in all problems without it.
"""

from collections.abc import Iterator, Mapping

from attngen.inspect.circumstances.row import Circumstance
from attngen.inspect.circumstances.schedules import CLASSIFIED, IN_A_TILE, JOINED, SPLITS, WORDS, WORK_TILES
from attngen.inspect.circumstances.sizes import SIZES
from attngen.inspect.circumstances.storage import LAYOUTS, SEQUENCES
from attngen.inspect.circumstances.tiles import CLASSES, OF_BLOCKS, ROWS_AND_KEYS
from attngen.inspect.circumstances.values import CAPTURED, LOW, SCORES, SINKS, SPOILED
from attngen.plan import Plan

TABLE: tuple[Circumstance, ...] = (
    *(*SIZES, *SEQUENCES, *ROWS_AND_KEYS, *CLASSES, *OF_BLOCKS),
    *(*IN_A_TILE, *CLASSIFIED, *WORDS, *WORK_TILES, *SPLITS, *LAYOUTS),
    *(*SCORES, *JOINED, *SINKS, *CAPTURED, *LOW, *SPOILED),
)
BY_NAME: Mapping[str, Circumstance] = {one.name: one for one in TABLE}


def wanted_circumstances(plan: Plan) -> Iterator[Circumstance]:
    """Those that a check of `plan` should have."""
    return (one for one in TABLE if one.applies(plan))
