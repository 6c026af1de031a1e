"""What follows from lengths, batches and heads alone."""

from __future__ import annotations

from attngen.inspect.block_work import Case
from attngen.inspect.blocks import visits_keys
from attngen.inspect.circumstances.row import FEW_ROWS, Circumstance, persistent, tiled
from attngen.plan import Plan

ALIGNED = 8  # elements: rows of captured tensors then begin at multiples of 16 bytes


def _reads_pairs(plan: Plan) -> bool:
    return bool(plan.staged.pairs or plan.written_pairs)


def _has_works(case: Case) -> bool:
    """Whether blocks have work; those that take rows from a queue have some without keys too."""
    return case.works >= (case.processors + 2 if persistent(case.plan) and visits_keys(case.plan) else 1)


UNEQUAL = Circumstance(
    "unequal_lengths", "q_len other than kv_len", (), lambda case: case.q_len != case.kv_len, without_pairs=True
)
SIZES = (
    UNEQUAL,
    Circumstance("batches", "several batches", (), lambda case: case.batch > 1, without_pairs=True),
    Circumstance("heads", "several heads", (), lambda case: case.sizes["q_heads"] > 1, without_pairs=True),
    Circumstance("groups", "several key/value heads, each of several query heads",
        (lambda plan: plan.facts.spec.q_heads is None,), lambda case: case.sizes["kv_heads"] > 1 and case.group_size > 1,
        without_pairs=True),
    Circumstance("ragged_rows", "rows that do not fill the last block", (), lambda case: case.q_len % case.tile[0] != 0),
    Circumstance("ragged_keys", "keys that do not fill the last tile", (), lambda case: case.kv_len % case.tile[1] != 0),
    Circumstance("few_last_rows", "a last block of rows with fewer rows than a warp has", (tiled,),
        lambda case: 0 < case.q_len % case.tile[0] < FEW_ROWS),
    Circumstance("more_rows", "more rows than keys, by a block or more", (),
        lambda case: case.q_len >= case.kv_len + case.tile[0]),
    Circumstance("rows_past_keys", "a block of rows after the last key, and a last tile that keys do not fill", (tiled,),
        lambda case: case.q_len >= case.kv_len + case.tile[0] and case.kv_len % case.tile[1] > 0),
    Circumstance("more_keys", "more keys than rows, by a tile or more", (),
        lambda case: case.kv_len >= case.q_len + case.tile[1]),
    Circumstance("no_batch", "a batch of 0", (), lambda case: case.batch == 0, without_pairs=True),
    Circumstance("no_rows", "a q_len of 0", (), lambda case: case.batch > 0 and case.q_len == 0, without_pairs=True),
    Circumstance("no_keys", "a kv_len of 0", (), lambda case: case.kv_len == 0 and _has_works(case), without_pairs=True),
    Circumstance("aligned_pairs", "captured rows that begin at multiples of 16 bytes", (_reads_pairs,),
        lambda case: case.kv_len % ALIGNED == 0),
    Circumstance("unaligned_pairs", "captured rows that do not begin at multiples of 4 bytes", (_reads_pairs,),
        lambda case: case.kv_len % 2 == 1 and case.q_len > 1),
)  # fmt: skip
