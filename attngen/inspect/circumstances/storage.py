"""How the arrays of a call are stored: sequences of several lengths, pages, and layouts that no word is aligned in."""

from __future__ import annotations

from attngen.inspect.circumstances.row import Circumstance, backward, has_sequences, tiled
from attngen.inspect.trial import LAYOUTS as LAYOUT_WORDS
from attngen.plan import Plan


def _has_empty_sequences(plan: Plan) -> bool:
    return plan.facts.spec.kernel.is_packed


def _is_paged(plan: Plan) -> bool:
    kernel = plan.facts.spec.kernel
    return kernel.is_paged and kernel.page_size is None


SEQUENCES = (
    Circumstance("sequence_without_rows", "a sequence without rows, between others", (has_sequences, _has_empty_sequences),
        lambda case: any(rows == 0 for rows, _ in case.setting.lengths)),
    Circumstance("sequence_without_keys", "a sequence of rows without keys, beside one of several tiles of keys",
        (has_sequences,),
        lambda case: (
            any(rows > 0 and keys == 0 for rows, keys in case.setting.lengths)
            and any(rows > 0 and keys > case.tile[1] for rows, keys in case.setting.lengths)
        )),
    Circumstance("first_sequence_without_keys", "a first sequence without keys", (has_sequences,),
        lambda case: bool(case.setting.lengths) and case.setting.lengths[0][1] == 0),
    Circumstance("wrong_lengths", "numbers of rows or keys outside of the tensors", (has_sequences,),
        lambda case: case.setting.wrong_lengths and (case.page_size == 1 or not _is_paged(case.plan))),
    Circumstance("page_of_one_row", "pages of one row, and a sequence with several", (_is_paged,),
        lambda case: case.page_size == 1),
    Circumstance("page_of_a_tile", "pages of as many rows as a tile has keys, the last one filled in part", (_is_paged, tiled),
        lambda case: case.page_size == case.tile[1] and any(keys % case.page_size for _, keys in case.setting.lengths)),
    Circumstance("page_across_tiles", "pages that begin and end within a tile", (_is_paged, tiled),
        lambda case: case.page_size % 2 == 1 and 1 < case.page_size < case.tile[1]),
)  # fmt: skip


def _reads_words(plan: Plan) -> bool:
    """Whether kernels accept any layout, and copy by wider words if the layout allows it."""
    return plan.schedule.is_tiled and not plan.schedule.on_tensor_cores


LAYOUTS = tuple(
    Circumstance(
        f"{layout}_of_{name}",
        f"{words} of {name}",
        (_reads_words, backward) if name == "dout" else (_reads_words,),
        lambda case, at=(name, layout): case.setting.laid_out == at,  # type: ignore[misc]
    )
    for layout, words in LAYOUT_WORDS.items()
    for name in ("q", "k", "v", "dout")
)
