"""Removals from emitted files that leave every result right, each with the reason.

A removal is named by its file and statement, and by its line if the file has the statement more than once. `tests/inspect/
test_removals.py` fails if one is no longer in its file, or if its proof is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.removals import Emitted, Removal

_CONSTANT = re.compile(r"constexpr int (\w+) = ([^;]+);")


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """`what`: statements and how they are changed, as `Removal.describe` says it. If the file has the statement elsewhere too:
    `line` is a part of its line, `within` how the name of a function or namespace around it ends, `behind` a part of the three
    lines before. `proof`: a condition of the file's constants, as text of Python, or "file:" and a text that it contains."""

    files: Sequence[str]
    what: Sequence[str]
    because: str
    line: str = ""
    within: str = ""
    behind: str = ""
    proof: str = ""

    def matches(self, file: str, emitted: Emitted, removal: Removal) -> bool:
        if file not in self.files or removal.describe(emitted.text) not in self.what:
            return False
        before, line = removal.lines(emitted.text)
        return (
            self.line in line
            and any(name.endswith(self.within) for name in emitted.functions_of(removal))
            and re.sub(r"\s+", " ", self.behind) in re.sub(r"\s+", " ", before)
        )

    def is_proved(self, text: str) -> bool:
        """Whether the proof holds in the text of a file."""
        if self.proof.startswith("file:"):
            return self.proof.removeprefix("file:") in text
        return not self.proof or bool(eval(self.proof, constants(text)))


def constants(text: str) -> dict[str, int]:
    """The integer constants of a file."""
    values: dict[str, int] = {}
    for name, value in _CONSTANT.findall(text):
        try:
            values[name] = eval(value.replace("/", "//"), {}, dict(values))
        except (NameError, SyntaxError):  # constants of template parameters, or of a function
            continue
    return values


def reason_of(file: str, emitted: Emitted, removal: Removal) -> WithoutEffect | None:
    """Why a removal has no effect; None if it should have one."""
    return next((one for one in WITHOUT_EFFECT if one.matches(file, emitted, removal)), None)


def stale(file: str, emitted: Emitted) -> Iterator[str]:
    """What is said of a file that is not so: removals that it has not, and proofs that do not hold."""
    for one in WITHOUT_EFFECT:
        if file not in one.files:
            continue
        found = {removal.describe(emitted.text) for removal in emitted.removals if one.matches(file, emitted, removal)}
        yield from (f"{what}: there is no such removal" for what in one.what if what not in found)
        if not one.is_proved(emitted.text):
            yield f"{', '.join(one.what)}: {one.proof} does not hold"


# forwards by mma.sync: with a softmax, of a causal mask; retention, which has none; other masks
SOFTMAX_MMA = (
    "gpt2_fused.cu", "alibi_fused.cu", "gemma_softcap_fused.cu", "head_dim_80_fused.cu", "llama_gqa_fused.cu",
    "llama_rotary_fused.cu",
)  # fmt: skip
UNBOUNDED_MMA = tuple(name for name in SOFTMAX_MMA if name != "gemma_softcap_fused.cu")  # scores may be large
CAUSAL_MMA = (*SOFTMAX_MMA, "retention_fused.cu")
OTHER_MMA = ("gpt_oss_sinks_fused.cu", "mistral_window_fused.cu", "packed_documents_fused.cu", "prefix_lm_fused.cu")
MMA = (*CAUSAL_MMA, *OTHER_MMA)
STREAMED_BY_HALVES = (
    "alibi_fused.cu", "head_dim_80_fused.cu", "llama_gqa_fused.cu", "llama_rotary_fused.cu", "packed_documents_fused.cu",
    "prefix_lm_fused.cu",
)  # fmt: skip
SIMT = ("cross_attention_fused.cu",)
TILED = ("gpt2_tiled.cu", "cross_attention_tiled.cu")
NAIVE = ("gpt2_naive.cu", "cross_attention_naive.cu")
NAIVE_BACKWARD = ("gpt2_naive_backward.cu", "alibi_naive_backward.cu")
TILED_BACKWARD = ("gpt2_tiled_backward.cu",)
SIMT_BACKWARD = ("cross_attention_fused_backward.cu",)
MMA_BACKWARD = ("gpt2_fused_backward.cu",)
ALIBI_BACKWARD, ROTARY_BACKWARD = "alibi_fused_backward.cu", "llama_rotary_fused_backward.cu"
FUSED_BACKWARD = (*MMA_BACKWARD, ALIBI_BACKWARD, ROTARY_BACKWARD)
ROTARY = ("llama_rotary_fused.cu", ROTARY_BACKWARD)

MORE_TILES = "tiles whose pairs the mask forbids, or which lie past the last key, are computed too, and their weights are 0"
ALL_PARTIAL = "the mask of a full tile is computed too, and allows every pair"
HIDES_NO_ROW = "each row has a key, so that the mask hides nothing of Q and dO that could be infinite or NaN"
NO_MORE_ROWS = "calls with more rows than keys are refused, as the first row would have a position before the table"
HAS_A_KEY = "each row that the mask can see has a key in the first tile that is visited"

DECODE = ("llama_gqa_decode.cu", "mistral_window_decode.cu")

OF_LAUNCHES = (
    WithoutEffect(
        DECODE,
        ("let_next_kernel_start();: left out",),
        "the next kernel then starts when this one has ended, as it does without the attribute of its launch",
    ),
)

# --- bounds and guards that other sizes of the plan would need
OF_OTHER_SIZES = (
    WithoutEffect(
        (*NAIVE, *NAIVE_BACKWARD),
        ("min(begin + SLICE, HEAD_DIM): the first operand",),
        "the head size is a multiple of a slice",
        proof="HEAD_DIM % SLICE == 0",
    ),
    WithoutEffect(
        NAIVE_BACKWARD,
        ("min(begin + SLICE, HEAD_DIM_V): the first operand",),
        "the head size is a multiple of a slice",
        proof="HEAD_DIM_V % SLICE == 0",
    ),
    WithoutEffect(
        NAIVE_BACKWARD,
        ("d >= HEAD_DIM: never true", "d >= HEAD_DIM_V: never true"),
        "each thread of the block has a column",
        proof="THREADS_D == HEAD_DIM == HEAD_DIM_V",
    ),
    WithoutEffect(
        NAIVE,
        ("d >= HEAD_DIM_V: never true",),
        "each thread of the block has a column",
        proof="THREADS_D == HEAD_DIM_V",
    ),
    WithoutEffect(
        TILED,
        ("min(rows, ROWS): the first operand", "r < ROWS: always true"),
        "the rows of each slice are a multiple of those that the block fetches at once",
        proof="BLOCK_Q % (THREADS * 4 // SLICE) == BLOCK_KV % (THREADS * 4 // SLICE) == SLICE % (THREADS * 4 // BLOCK_DV) == 0",
    ),
    WithoutEffect(
        TILED_BACKWARD,
        ("min(rows, ROWS): the first operand", "r < ROWS: always true"),
        "the rows of each slice are a multiple of those that the block fetches at once",
        proof="all(rows % (THREADS * 4 // width) == 0 for rows, width in ((BLOCK_Q, SLICE), (BLOCK_KV, SLICE), "
        "(SLICE, BLOCK_D), (SLICE, BLOCK_KV)))",
    ),
    WithoutEffect(
        TILED_BACKWARD,
        ("my_column<WIDTH>() < columns: always true", "d < HEAD_DIM: always true", "d < HEAD_DIM_V: always true"),
        "the columns of Q, K, V and dO are a multiple of those of a block",
        proof="HEAD_DIM % BLOCK_D == HEAD_DIM_V % BLOCK_D == 0",
    ),
    WithoutEffect(
        TILED,
        ("my_column<WIDTH>() < columns: always true", "d < HEAD_DIM_V: always true"),
        "the columns of V are a multiple of those of a block",
        proof="HEAD_DIM_V % BLOCK_DV == 0",
    ),
    WithoutEffect(
        MMA,
        ("column < COLUMNS: always true",),
        "rows in shared memory have no columns beside those of the tensor",
        proof="QK_WIDTH == HEAD_DIM",
    ),
    WithoutEffect(
        tuple(name for name in MMA if name != "head_dim_80_fused.cu"),
        ("r + row < TILE_ROWS: never true",),
        "the rows of each tile are a multiple of those that the block copies at once, which is the other operand",
        proof="BLOCK_Q % (THREADS // (QK_WIDTH // 8)) == BLOCK_KV % (THREADS // (HEAD_DIM_V // 8)) == 0",
    ),
    WithoutEffect(
        ("gemma_softcap_fused.cu", "mistral_window_fused.cu"),
        ("row >= STEP: never true",),
        "each thread of the block has a chunk to copy",
        proof="THREADS % (QK_WIDTH // 8) == THREADS % (HEAD_DIM_V // 8) == 0",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        (
            "min(32 * (first + OUTPUT_SLABS), HEAD_DIM_V / 2): the first operand",
            "min(32 * (first + OUTPUT_SLABS), HEAD_DIM_V / 2): the second operand",
        ),
        "the columns of O fill their slabs, of which one is stored at a time",
        proof="HEAD_DIM_V == 64 * OUTPUT_SLABS",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("i + 4 < HEAD_DIM_V / 2: always true", "both: always true"),
        "columns are stored 16 at a time",
        proof="HEAD_DIM_V % 16 == 0",
    ),
)

# --- which tiles are visited, and in which the mask is computed
OF_TILES = (
    WithoutEffect(
        ("gpt2_tiled.cu", *CAUSAL_MMA, "gpt2_wgmma.cu"),
        ("min(kv_len, q_hi + 1): the first operand",),
        MORE_TILES,
    ),
    WithoutEffect((*CAUSAL_MMA, "gpt2_wgmma.cu"), ("min(kv_len, q_hi + 1): the second operand",), MORE_TILES),
    WithoutEffect(
        (*CAUSAL_MMA, "gpt2_wgmma.cu", "gpt2_hopper.cu"),
        ("min(q_lo + BLOCK_Q, q_len): the first operand", "min(q_lo + BLOCK_Q, q_len): the second operand"),
        MORE_TILES,
    ),
    WithoutEffect(
        ("gpt2_tiled.cu",),
        ("min(q_lo + BLOCK_Q, q_len): the first operand",),
        "the last row of a whole block ends in the same tile as its first row",
        proof="BLOCK_KV % BLOCK_Q == 0",
    ),
    WithoutEffect(
        ("gpt2_tiled.cu",),
        ("min(q_lo + BLOCK_Q, q_len): the second operand",),
        within="gpt2_scores",
        because=f"of the kernel that computes scores: {MORE_TILES}; nobody reads them",
    ),
    WithoutEffect(
        ("gpt2_tiled.cu",),
        ("tile < range.begin / BLOCK_KV: never true",),
        "ranges begin at key 0",
        proof="file:        0,  // begin",
    ),
    WithoutEffect(("gpt2_tiled.cu",), ("tile >= tile_end: never true",), f"{MORE_TILES}; nobody reads them"),
    WithoutEffect(
        (*TILED, *SIMT, *CAUSAL_MMA, "gpt2_wgmma.cu"),
        ("tile < full_tile_begin: never true",),
        "full ranges begin at key 0",
        proof="file:        0,  // full_begin",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("tile < tiles.full_begin: never true",),
        "full ranges begin at key 0",
        proof="file:        0,  // full_begin",
    ),
    WithoutEffect((*TILED, *SIMT, *MMA, "gpt2_wgmma.cu", "gpt2_hopper.cu"), ("partial: always true",), ALL_PARTIAL),
    WithoutEffect((*SIMT, *MMA), ("tile < tile_end: one later",), f"one tile more: {MORE_TILES}"),
    WithoutEffect(
        ("gpt2_fused.cu", "retention_fused.cu", "gpt_oss_sinks_fused.cu"),
        ("next < tile_end: always true",),
        "rows of a tile that nobody visits are copied if they lie in K or V, instead of zeros",
        line="next < tile_end ? kv_len : 0",
    ),
    WithoutEffect(
        STREAMED_BY_HALVES,
        ("next < tile_end: always true",),
        "rows of a tile that nobody visits are copied if they lie in K, instead of zeros",
        line="k_head, k_stride_s",
    ),
    WithoutEffect(
        ("retention_fused.cu",),
        ("min(kv_len, q_lo + 1): the second operand", "kv_idx >= kv_len: never true"),
        "keys past the last one are zeros, as are their values: their weights are 0",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("max(tiles.full_end, tiles.begin): the first operand",),
        "ranges begin at key 0",
        proof="file:        0,  // begin",
    ),
    WithoutEffect(("gpt2_hopper.cu",), ("max(tiles.full_end, tiles.begin): the second operand",), ALL_PARTIAL),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("step<true>();: left out",),
        "a block of rows has no other partial tile than the first one that it visits, since tiles are square",
        proof="BLOCK_Q == BLOCK_KV",
    ),
)

# --- forwards by mma.sync of a window
WINDOW, SIZED_WINDOW = ("gpt_oss_sinks_fused.cu",), ("mistral_window_fused.cu",)  # windows of 128 keys, and of a param
OF_WINDOWS = (
    WithoutEffect(WINDOW, ("max(0, q_lo - 127): the first operand",), MORE_TILES),
    WithoutEffect(
        (*WINDOW, *SIZED_WINDOW), tuple(f"min(q_hi + 1, kv_len): the {n} operand" for n in ("first", "second")), MORE_TILES
    ),
    WithoutEffect(WINDOW, ("max(0, q_hi - 127): the second operand",), "no tile begins before key 0"),
    WithoutEffect(
        (*WINDOW, *SIZED_WINDOW),
        tuple(f"min(q_lo + BLOCK_Q, q_len): the {n} operand" for n in ("first", "second")),
        f"{MORE_TILES}, and fewer tiles are full",
    ),
    WithoutEffect(
        SIZED_WINDOW,
        ("min(max(0, q_lo - in.size + 1), kv_len): the first operand",),
        "a block whose tiles begin past the last key visits none: they end there",
    ),
    WithoutEffect(SIZED_WINDOW, ("max(0, q_lo - in.size + 1): the first operand",), MORE_TILES),
    WithoutEffect(
        SIZED_WINDOW,
        tuple(f"min(max(0, q_hi - in.size + 1), kv_len): the {n} operand" for n in ("first", "second")),
        f"fewer tiles are full: {ALL_PARTIAL}",
    ),
    WithoutEffect(SIZED_WINDOW, ("max(0, q_hi - in.size + 1): the second operand",), "no tile begins before key 0"),
)

# --- forwards by mma.sync that find the kind of each tile
PREFIX, DOCUMENTS = "prefix_lm_fused.cu", "packed_documents_fused.cu"
OWN_KEY = "each row sees its own key: there are no fewer keys than rows, since the mask reads an element of each row"
OF_TILE_KINDS = (
    WithoutEffect(
        (PREFIX,),
        tuple(f"min(kv_len, max(prefix_length_at(in, b_idx), q_hi + 1)): the {n} operand" for n in ("first", "second")),
        MORE_TILES,
    ),
    WithoutEffect((PREFIX,), ("kv_hi < t0: never true", "kv_hi <= q_lo: never true"), f"fewer tiles are full: {ALL_PARTIAL}"),
    WithoutEffect((DOCUMENTS,), tuple(f"min(q_hi + 1, kv_len): the {n} operand" for n in ("first", "second")), MORE_TILES),
    WithoutEffect(
        (DOCUMENTS,),
        ("min(t0 + 1, q_hi / 64): the second operand",),
        "the last row of a block lies in the second of its two tiles, or before",
        proof="BLOCK_Q == 2 * BLOCK_KV",
    ),
    WithoutEffect(
        (DOCUMENTS,),
        (
            "kv_lo <= q_hi: always true",
            "(t4 <= t5 && t6 <= t9): always true",
            "t4 <= t5: always true",
            "t6 <= t9: always true",
        ),
        MORE_TILES,
    ),
    WithoutEffect(
        (DOCUMENTS,),
        ("min((tile + 1) * BLOCK_KV, kv_len): the second operand",),
        f"the range of a tile holds the elements of later ones too: {MORE_TILES}, and fewer tiles are full",
        line="i += 32",
    ),
    WithoutEffect(
        (PREFIX, DOCUMENTS),
        tuple(f"min((tile + 1) * BLOCK_KV, kv_len): the {n} operand" for n in ("first", "second")),
        f"fewer tiles are full: {ALL_PARTIAL}",
        line="kv_hi",
    ),
    WithoutEffect((PREFIX, DOCUMENTS), ("must: never true",), f"no tile is full: {ALL_PARTIAL}"),
    WithoutEffect((PREFIX, DOCUMENTS), ("may: always true",), MORE_TILES),
    WithoutEffect(
        (PREFIX, DOCUMENTS),
        tuple(f"min(q_lo + BLOCK_Q, q_len): the {n} operand" for n in ("first", "second")),
        MORE_TILES,
    ),
    WithoutEffect(
        (PREFIX, DOCUMENTS), ("min((work_tile_smem->q_block + 1) * BLOCK_Q, q_len): the second operand",), MORE_TILES
    ),
    WithoutEffect((PREFIX,), ("min((work_tile_smem->q_block + 1) * BLOCK_Q, q_len): the first operand",), MORE_TILES),
    WithoutEffect(
        (PREFIX, DOCUMENTS),
        ("mine >= tile_begin: always true",),
        "ranges begin at key 0",
        proof="file:        0,  // begin",
    ),
    WithoutEffect((PREFIX,), ("mine < tile_end: always true",), "the loop over tiles ends at tile_end itself"),
    WithoutEffect((PREFIX,), ("later != 0: always true",), "no tile before tile_end is empty"),
    WithoutEffect((PREFIX, DOCUMENTS), ("(full[tile % THREADS / 32] >> tile % 32 & 1) == 0: always true",), ALL_PARTIAL),
    WithoutEffect(
        (DOCUMENTS,),
        ("thread_index() < BLOCK_KV: always true",),
        "the other threads read an element that they do not pass on",
        behind="int my_document_of_k = 0;",
    ),
    WithoutEffect((DOCUMENTS,), ("kv_idx >= kv_len: never true",), f"the mask forbids keys after the row's own: {OWN_KEY}"),
    WithoutEffect(
        (DOCUMENTS,),
        ("__syncthreads();: left out",),
        f"each block visits a tile: {OWN_KEY}",
        line="if no tile was visited, Q may not have arrived",
    ),
    WithoutEffect((DOCUMENTS,), ("row_sum == 0.0f: never true",), OWN_KEY),
    WithoutEffect((PREFIX,), ("new_max == -INF: never true",), HAS_A_KEY),
)

# --- backwards of mma.sync
OF_MMA_BACKWARD = (
    WithoutEffect(
        (*MMA_BACKWARD, ALIBI_BACKWARD),
        (
            "min(kv_len, q_hi + 1): the first operand",
            "min(kv_len, q_hi + 1): the second operand",
            "min(q_lo + BLOCK_Q, q_len): the first operand",
            "min(q_lo + BLOCK_Q, q_len): the second operand",
        ),
        MORE_TILES,
    ),
    WithoutEffect(
        FUSED_BACKWARD,
        ("column < COLUMNS: always true",),
        "rows in shared memory have no columns beside those of the tensor",
        proof="QK_WIDTH == HEAD_DIM and V_WIDTH == HEAD_DIM_V",
    ),
    WithoutEffect(
        FUSED_BACKWARD,
        ("r + row < TILE_ROWS: never true",),
        "the rows of each tile are a multiple of those that the block copies at once, which is the other operand",
        proof="all(rows % (THREADS // (QK_WIDTH // 8)) == 0 for rows in (BLOCK_Q, BLOCK_KV))",
    ),
    WithoutEffect(
        (ROTARY_BACKWARD,),
        ("column < columns: always true",),
        "the columns of gradients are a multiple of those that a warp stores",
        proof="HEAD_DIM % DQ_COLUMNS == HEAD_DIM % QK_COLUMNS == HEAD_DIM_V % V_COLUMNS == 0",
    ),
    WithoutEffect(
        (ROTARY_BACKWARD,),
        ("min(q_len - first_row, DQ_ROWS): the first operand",),
        "the loop over the rows ends at 32 itself",
        proof="DQ_ROWS == 32",
    ),
    WithoutEffect(
        (*MMA_BACKWARD, ALIBI_BACKWARD),
        ("row < BLOCK_Q: always true", "thread_index() < BLOCK_Q: always true"),
        "each thread of the block has a row of the tile",
        proof="THREADS == BLOCK_Q",
    ),
    WithoutEffect(
        FUSED_BACKWARD,
        ("min(kv_lo + BLOCK_KV, kv_len): the first operand", "min(kv_lo + BLOCK_KV, kv_len): the second operand"),
        f"fewer tiles of rows are full: {ALL_PARTIAL}",
    ),
    WithoutEffect(
        FUSED_BACKWARD,
        ("lse == -INF: never true", "thread_index() < BLOCK_Q: never true"),
        "only if there are no keys does a row have none, and then no tile is visited",
    ),
    WithoutEffect(
        FUSED_BACKWARD,
        ("__any_sync(0xffffffff, left_out != 0): always true",),
        "elements that are not finite are looked for, and there are none",
    ),
    WithoutEffect(FUSED_BACKWARD, ("partial: always true",), ALL_PARTIAL),
    WithoutEffect(
        FUSED_BACKWARD,
        ("partial: never true",),
        HIDES_NO_ROW,
        within="_dk_dv",
        behind="dK +=",
        line="if (partial)",
    ),
    WithoutEffect(
        FUSED_BACKWARD,
        ("tile >= full_tile_end: never true",),
        within="_dk_dv",
        because="rows past the last one, their lse, dO and their delta are zeros: they add nothing to dK and dV",
    ),
    WithoutEffect(
        MMA_BACKWARD,
        ("q_lo + column_of(j) >= q_len: never true",),
        within="_dk_dv",
        because="rows past the last one, their lse, dO and their delta are zeros: they add nothing to dK and dV",
    ),
    WithoutEffect(
        (ROTARY_BACKWARD,),
        ("kv_lo + BLOCK_KV > kv_len: never true", "kv_idx >= kv_len: never true"),
        f"{NO_MORE_ROWS}: no tile of rows is full of keys past the last one, which the mask allows no row",
        within="_dk_dv",
    ),
    WithoutEffect(
        (ALIBI_BACKWARD,),
        ("q_lo + BLOCK_Q > q_len: never true", "q_lo + row_of(r) >= q_len: never true"),
        "each row has a sum of its own, and those of rows past the last one are not stored",
        within="_dq",
    ),
    *(
        WithoutEffect(
            files,
            ("tile < full_tile_begin: never true",),
            "full ranges begin at key 0",
            within=within,
            proof="file:        0,  // full_begin",
        )
        for files, within in (((*MMA_BACKWARD, ALIBI_BACKWARD), "_dq"), ((ALIBI_BACKWARD,), "_delta"))
    ),
    WithoutEffect(
        (*MMA_BACKWARD, ALIBI_BACKWARD),
        ("tile < tile_end: always true",),
        "zeros, or rows that nobody reads, are copied",
        line="load_rows(tile, stage)",
    ),
    WithoutEffect(
        (*MMA_BACKWARD, ALIBI_BACKWARD),
        ("tile < tile_end: always true",),
        "zeros, or keys that nobody reads, are copied",
        line="load_keys(tile, stage)",
    ),
    WithoutEffect(
        (*MMA_BACKWARD, ALIBI_BACKWARD),
        ("following < tile_end: always true",),
        "the same after the last tile",
        line="load_keys(following, stage)",
    ),
    WithoutEffect(
        (ALIBI_BACKWARD,),
        ("of_P != 0.0f: always true", "has_keys: always true"),
        "each row has a key, and its weights add up to about 1",
    ),
    WithoutEffect(
        (ALIBI_BACKWARD,),
        ("has_keys: never true",),
        "scores of this kernel and of the forward differ by rounding errors alone, which here are small beside those of fp16",
        line="own_lse_rest",
    ),
    WithoutEffect((ALIBI_BACKWARD,), ("dS != 0.0f: always true",), "0 is added: the factor of a slope, k - q, is finite"),
    WithoutEffect(
        (ALIBI_BACKWARD,),
        ("element >= d_slopes_size_0: never true",),
        "the grid has a block for each element",
        within="_d_slopes",
    ),
    WithoutEffect(
        (ALIBI_BACKWARD,),
        ("d_slopes_size_0 == 1: never true",),
        "the index of an only element is 0",
        line="h_begin",
    ),
    WithoutEffect(
        (ALIBI_BACKWARD,),
        ("min(i0 + 1, q_heads): the first operand",),
        "slopes have an element for each head, or one, and no other",
    ),
)

# --- rotated rows
OF_ROTATIONS = (
    WithoutEffect(
        ROTARY,
        ("x != x: never true",),
        "on the emulated device, where arithmetic gives a NaN whose upper 16 bits are a NaN. On a GPU it is 0x7fffffff, which "
        "would become -0",
    ),
    WithoutEffect(
        ROTARY, ("part >= ROTATED: never true",), "all of a row is rotated", proof="PARTS == ROTATED and HEAD_DIM == 2 * HALF"
    ),
    WithoutEffect(
        ROTARY,
        ("position < 0: never true", "position < length: always true"),
        "a dense call is refused if one of its positions lies outside of the tables",
        within="nearest",
    ),
    WithoutEffect(ROTARY, ("row < kv_len: always true",), "the grid has a block for each row of Q and each of K"),
    WithoutEffect(
        (ROTARY[0],),
        ("min(kv_len, q_lo + 1): the second operand", "kv_idx >= kv_len: never true"),
        f"{NO_MORE_ROWS}, and the mask allows no row keys past the last one",
    ),
)

# --- the backward of documents
DOCUMENTS_BACKWARD = ("packed_documents_fused_backward.cu",)
LATER_TILES = (
    "only beyond THREADS tiles, 8192 rows or keys: the last line of a check says that no block visits tiles after those that "
    "are classified at once"
)
OF_DOCUMENTS_BACKWARD = (
    WithoutEffect(DOCUMENTS_BACKWARD, ("lse == -INF: never true", "thread_index() < BLOCK_Q: never true"), OWN_KEY),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        (
            "min(q_hi + 1, kv_len): the first operand",
            "min(q_hi + 1, kv_len): the second operand",
            "max(kv_lo, 0): the second operand",
            "kv_lo <= q_hi: always true",
            "(t0 <= t1 && t2 <= t3): always true",
            "t0 <= t1: always true",
            "t2 <= t3: always true",
            "may: always true",
            "min(q_lo + BLOCK_Q, q_len): the first operand",
            "min(q_lo + BLOCK_Q, q_len): the second operand",
        ),
        MORE_TILES,
    ),
    WithoutEffect(DOCUMENTS_BACKWARD, ("max(kv_lo, 0): the first operand",), "no key is before key 0"),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("min((tile + 1) * BLOCK_KV, kv_len): the second operand",),
        f"the range of a tile holds the elements of later ones too: {MORE_TILES}, and fewer tiles are full",
        line="i += 32",
    ),
    *(
        WithoutEffect(
            DOCUMENTS_BACKWARD,
            (*(f"min({what}: the {n} operand" for n in ("first", "second")),),
            f"fewer tiles are full: {ALL_PARTIAL}",
            line=line,
        )
        for what, line in (
            ("kv_lo + BLOCK_KV, kv_len)", "kv_hi"),
            ("(tile + 1) * BLOCK_Q, q_len)", "q_hi"),
            ("(tile + 1) * BLOCK_KV, kv_len)", "kv_hi"),
        )
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        (
            "must: never true",
            "(full[tile % THREADS / 32] >> tile % 32 & 1) == 0: always true",
            "partial: always true",
        ),
        f"no tile is full: {ALL_PARTIAL}",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("row >= STEP: never true",),
        "each thread of the block has a chunk to copy",
        proof="THREADS % (QK_WIDTH // 8) == THREADS % (V_WIDTH // 8) == 0",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("column < COLUMNS: always true",),
        "rows in shared memory have no columns beside those of the tensor",
        proof="QK_WIDTH == HEAD_DIM and V_WIDTH == HEAD_DIM_V",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("r + row < TILE_ROWS: never true",),
        "the rows of each tile are a multiple of those that the block copies at once, which is the other operand",
        proof="all(rows % (THREADS // (QK_WIDTH // 8)) == 0 for rows in (BLOCK_Q, BLOCK_KV))",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("__any_sync(0xffffffff, left_out != 0): always true",),
        "elements that are not finite are looked for, and there are none",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("tile < tile_end: one later",),
        "a tile more is looked at, and is marked as empty",
        line="while (tile < tile_end) {",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("__syncthreads();: left out",),
        LATER_TILES,
        line="all threads have read the words of the previous tiles",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("mine >= tile_begin: always true",),
        "tiles of rows before the first key are empty by the mask: more are visited",
        within="_dk_dv",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("mine >= tile_begin: always true",),
        "ranges begin at key 0",
        within="_dq",
        proof="file:        0,  // begin",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("mine < whole_tiles: always true", "q_lo + column_of(j) >= q_len: never true"),
        "rows past the last one, their lse, dO and their delta are zeros: they add nothing to dK and dV",
        within="_dk_dv",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("tile < tile_end: always true",),
        "zeros, or rows that nobody reads, are copied",
        line="load_rows(tile, stage)",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("later != 0: always true",),
        "the last tile before tile_end has the keys of the rows themselves",
        within="_dq",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("tile < tile_end: always true",),
        f"each block visits a tile: {OWN_KEY}",
        line="load_keys(tile, stage)",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("following < tile_end: always true",),
        "the same after the last tile",
        line="load_keys(following",
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD, ("partial: never true",), HIDES_NO_ROW, within="_dk_dv", behind="dK +=", line="if (partial)"
    ),
    WithoutEffect(
        DOCUMENTS_BACKWARD,
        ("cp_async_wait<0>();: left out",),
        f"each block visits a tile, and waits for its copies: {OWN_KEY}",
        within="_dq",
        behind="dQ goes through",
    ),
)

# --- the backward for Hopper
HOPPER_BACKWARD = ("gpt2_hopper_backward.cu",)
NOT_STORED = "rows past the last one: in the tiles of rows the mask leaves them out, and their dQ is not stored"
NO_FINITE_SCORE = (
    "lse is -inf only if there are no keys, and then no tile is visited; or if all scores of a row are -inf, as Q or each of "
    "its keys has an infinity, and then gradients may be NaN"
)
MANY_KEYS = (
    "only if a block visits more than {tiles} tiles of keys, which a causal mask has beyond {rows} rows and keys: a check says "
    "that it has no such problem, which would take too long. In the kernel of keys, whose lines are the same, it is noticed"
)
OF_HOPPER_BACKWARD = (
    # --- delta
    WithoutEffect(
        HOPPER_BACKWARD,
        ("min(column, HEAD_DIM_V - 8): the first operand", "column < HEAD_DIM_V: always true"),
        "the lanes of a row have no columns beside those of O",
        proof="8 * ROW_LANES == HEAD_DIM_V",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("exists: always true",),
        f"delta is that of the last row for {NOT_STORED}",
        line="lane_reduce<ROW_LANES>(exists",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("exists: always true",),
        f"if the last row has NaN or infinity, the same is said of {NOT_STORED}",
        line="bool special = exists",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("exists: always true",),
        f"lse is that of the last row for {NOT_STORED}",
        line="bool has_keys = exists",
    ),
    WithoutEffect(HOPPER_BACKWARD, ("row_lse[r] != -INF: always true",), NO_FINITE_SCORE),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("has_keys: always true",),
        f"{NO_FINITE_SCORE}. Others without keys are {NOT_STORED}",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("row_lse[r] == -INF: always true",),
        "Q of each row is looked at: where it is not finite, no score is, so that lse is not either",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("fabsf(row_lse[r]) * LOG2_E > LARGE: always true",),
        f"lse is subtracted from the scores of each row, as from large ones, and each tile counts as partial: {ALL_PARTIAL}",
    ),
    # --- what both kernels share
    WithoutEffect(
        HOPPER_BACKWARD,
        ("lane == 0: always true",),
        "the other lanes have no copies to wait for",
        line="tma_store_wait",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("threadIdx.x % 32 == 0: always true",),
        "the other lanes have no copies to wait for",
        line="tma_store_wait",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("i + 4 < COLUMNS / 2: always true", "both: always true", "i + 4 < HEAD_DIM / 2: always true"),
        "the columns are a multiple of 16",
        proof="HEAD_DIM % 16 == HEAD_DIM_V % 16 == 0",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("count < 2: always true",),
        "if two tiles wait, no more are looked at: heads are left as before, and the next work tile is not taken",
        line="const bool looks",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("take_registers<232>();: left out",),
        "the compiler gives consumers as many registers as they have: they spill",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("is_partial(visit, consumer): always true", "large: always true"),
        ALL_PARTIAL,
    ),
    # --- the kernel of keys
    WithoutEffect(
        HOPPER_BACKWARD,
        ("kv_lo < kv_len: always true",),
        "a consumer that has no keys: the other one visits the same tiles of rows without it, and its sums are not stored",
        within="of_keys",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("min(kv_lo + BLOCK_KV, kv_len): the first operand", "min(kv_lo + BLOCK_KV, kv_len): the second operand"),
        f"fewer tiles of rows are full: {ALL_PARTIAL}",
        within="of_keys",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("range.begin < range.end: always true",),
        "if keys begin at or past the last row, so do the tiles of their range: it has none",
        within="of_keys",
        proof="BLOCK_KV % BLOCK_Q == 0",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("max(next_tile, begin): the first operand",),
        f"tiles from the first row on are visited: {MORE_TILES}",
        within="of_keys",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("q_tile >= to: never true",),
        "the last tile of rows counts as full: rows past the last one are zeros, and have an lse of inf: their weights are 0",
        within="of_keys",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("wgmma_fence();: left out",),
        "on the emulated device, which takes the operand P at the issue of a product, and has seen the fence before the "
        "products for dP. P is written after that fence: on a GPU the products may read its registers before",
        within="issue_dv",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("__any_sync(0xffffffff, mine): always true",),
        f"each tile is looked through for rows to clear, and counts as partial: {ALL_PARTIAL}",
        within="read_visit",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("!__any_sync(0xffffffff, mine): never true",),
        "both consumers meet, and each row of the tile is left as it is",
        within="clear_rows",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("visit & SPECIAL: always true",),
        "the tile is looked through for rows to clear, and has none",
    ),
    # --- the kernel of rows
    WithoutEffect(
        HOPPER_BACKWARD,
        (
            "min(kv_len, q_hi + 1): the first operand",
            "min(q_lo + BLOCK_Q, q_len): the first operand",
            "min(q_lo + BLOCK_Q, q_len): the second operand",
        ),
        MORE_TILES,
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("q_lo < q_len: always true",),
        "a consumer that has no rows: the other one has the last row and visits the same tiles, and its own dQ is not stored",
        within="of_rows",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("range.begin < range.end: always true", "max(next_tile, begin): the first operand"),
        "ranges begin at key 0; one without keys has no tile",
        within="of_rows",
        proof="file:        0,  // begin",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("kv_tile < from: never true",),
        "full ranges begin at key 0",
        within="of_rows",
        proof="file:        0,  // full_begin",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("count < 2: always true",),
        MANY_KEYS.format(tiles=64, rows=4096),
        within="of_rows",
        line="while (count < 2",
        proof="FOUND == 64",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        (
            "h_idx >= work().h_end: always true",
            "max(next_tile, begin): the second operand",
            "next_tile >= end: always true",
        ),
        MANY_KEYS.format(tiles=32, rows=2048),
        within="of_rows",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("wgmma_fence();: left out",),
        "that of the scores, which are issued just before, comes after the last access to dP",
        within="issue_weight_gradients",
        behind="v_operand + tile_at.index",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("!is_partial(visit, consumer): never true",),
        "a key with NaN or infinity in a full tile is seen by each row. If a row's lse is finite, its weight of the key is 0; "
        "if not, the row has NaN in dQ, however its keys are multiplied",
        within="multiplies_all_keys",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("row_in_pair(i) == 0: always true",),
        "lower rows of a warp are looked at too. A key with NaN or infinity has no finite score in any row. A row of Q with "
        "one has none either: its keys are then multiplied by products of warps, which add up the same",
    ),
    WithoutEffect(
        HOPPER_BACKWARD,
        ("!multiplies_all_keys(): always true",),
        "all keys are multiplied by products of warps, which leave out NaN and infinity. Of a row that sees such a key, either "
        "its weight is 0, or lse is not finite, and dQ is NaN",
    ),
)

# --- rows without keys
OF_TILED_BACKWARD = (
    WithoutEffect(TILED_BACKWARD, ("min(kv_len, q_hi + 1): the first operand",), MORE_TILES),
    *(
        WithoutEffect(
            TILED_BACKWARD,
            (
                "min(q_lo + BLOCK_Q, q_len): the first operand",
                "min(q_lo + BLOCK_Q, q_len): the second operand",
                "tile >= tile_end: never true",
            ),
            f"{MORE_TILES}; nobody reads them",
            within=within,
        )
        for within in ("_backward_scores", "_backward_weight_gradients")
    ),
    *(
        WithoutEffect(
            TILED_BACKWARD,
            ("min(q_lo + BLOCK_Q, q_len): the first operand",),
            "the last row of a whole block ends in the same tile as its first row",
            within=within,
            proof="BLOCK_KV % BLOCK_Q == 0",
        )
        for within in ("_softmax", "_delta", "_score_gradients", "_dq", "_dk", "_dv")
    ),
    WithoutEffect(
        TILED_BACKWARD,
        ("tile < range.begin / BLOCK_KV: never true",),
        "ranges begin at key 0",
        proof="file:        0,  // begin",
    ),
    WithoutEffect(
        TILED_BACKWARD,
        ("tile < full_tile_begin: never true",),
        "full ranges begin at key 0",
        proof="file:        0,  // full_begin",
    ),
    WithoutEffect(TILED_BACKWARD, ("partial: always true",), ALL_PARTIAL),
    WithoutEffect(
        TILED_BACKWARD,
        (
            "tile >= full_tile_end: never true",
            "partial: never true",
            "mask(q_idx, kv_idx): always true",
            "kv_idx >= kv_len: never true",
            "!allowed: never true",
        ),
        "whoever reads dP skips pairs without weight",
        within="_backward_weight_gradients",
    ),
    WithoutEffect(
        TILED_BACKWARD,
        ("p.at[e] != 0.0f: always true", "P[pair] != 0.0f: always true"),
        f"dP of a pair that the mask excludes is 0 already; {HIDES_NO_ROW}",
    ),
    *(WithoutEffect(TILED_BACKWARD, ("w[r] != 0.0f: always true",), HIDES_NO_ROW, within=within) for within in ("_dk", "_dv")),
    WithoutEffect(
        TILED_BACKWARD,
        ("s.at[e] == -INF: never true",),
        "the exponential of -inf is 0 too: no row with keys has an infinite maximum",
    ),
    WithoutEffect(
        TILED_BACKWARD,
        ("row_max == -INF: never true", "row_sum == 0.0f: never true"),
        "only if there are no keys does a row have none, and then nothing is divided",
    ),
    WithoutEffect(
        TILED_BACKWARD, ("q_block < q_blocks: one later",), "a block more, of no rows: zeros arrive for rows past the last one"
    ),
    WithoutEffect(
        TILED_BACKWARD, ("begin + SLICE < BLOCK_Q: always true",), "a slice more is fetched, and replaced before it is stored"
    ),
    WithoutEffect(
        TILED_BACKWARD,
        (
            "vectors: never true",
            *(
                f"has_vectors({name}, {of}_stride_b, {of}_stride_h, {of}_stride_s, {of}_stride_d): never true"
                for name, of in (("Q", "q"), ("K", "k"), ("V", "v"), ("dO", "do"))
            ),
        ),
        "elements are read one by one",
    ),
)

OF_ROWS = (
    WithoutEffect(
        (*NAIVE, *NAIVE_BACKWARD, "gpt2_tiled.cu"),
        ("row_max == -INF: never true", "row_sum == 0.0f: never true"),
        "only if there are no keys does a row have none, and then nothing is divided",
    ),
    WithoutEffect(
        ("cross_attention_tiled.cu",),
        ("row_sum == 0.0f: never true",),
        "only if there are no keys does a row have none, and then nothing is divided",
        within="cross_attention_softmax",
    ),
    WithoutEffect((*SIMT, *SOFTMAX_MMA, "gpt2_wgmma.cu"), ("new_max == -INF: never true",), HAS_A_KEY),
    WithoutEffect(("gpt2_hopper.cu",), ("new_max == -INF: never true",), HAS_A_KEY, proof="BLOCK_Q == BLOCK_KV"),
)

OF_NAIVE_BACKWARD = (
    WithoutEffect(
        ("alibi_naive_backward.cu",),
        ("d_slopes_size_0 == 1: never true",),
        "the index of an only element is 0",
        line="h_begin",
    ),
    WithoutEffect(
        ("alibi_naive_backward.cu",),
        ("min(i0 + 1, q_heads): the first operand",),
        "slopes have an element for each head, or one, and no other",
    ),
    WithoutEffect(
        ("alibi_naive_backward.cu",), ("gradient == 0.0f: never true",), "0 is added: the factor of a slope, k - q, is finite"
    ),
    WithoutEffect(
        NAIVE_BACKWARD,
        ("p_row[k] != 0.0f: always true", "p == 0.0f: never true"),
        f"dP of a pair that the mask excludes is 0 already; {HIDES_NO_ROW}",
    ),
    WithoutEffect(NAIVE_BACKWARD, ("factor != 0.0f: always true", "weight != 0.0f: always true"), HIDES_NO_ROW),
)

OF_SIMT_BACKWARD = (
    WithoutEffect(
        SIMT_BACKWARD,
        ("lse == -INF: never true",),
        "only if there are no keys does a row have none, and then no tile is visited",
    ),
    WithoutEffect(
        SIMT_BACKWARD,
        ("tile < full_tile_begin: never true",),
        "full ranges begin at key or row 0",
        proof="file:        0,  // full_begin",
    ),
    WithoutEffect(
        SIMT_BACKWARD, ("partial: always true",), "no pair of a full tile is past the end, or has a weight of 0 by the mask"
    ),
    WithoutEffect(
        SIMT_BACKWARD,
        ("P == 0.0f: never true", "partial: never true"),
        "without a mask no pair is excluded but those past the end, whose rows of the tile are zeros",
        proof="file:with S = s\n",
    ),
    WithoutEffect(
        SIMT_BACKWARD,
        ("kv_lo + BLOCK_KV > kv_len: never true", "kv_idx >= kv_len: never true"),
        "each key has sums of its own, and those of keys past the last one are not stored",
        within="cross_attention_backward_dk_dv",
    ),
    WithoutEffect(
        SIMT_BACKWARD,
        ("q_lo + BLOCK_Q > q_len: never true", "q_idx >= q_len: never true"),
        "each row has a sum of its own, and those of rows past the last one are not stored",
        within="cross_attention_backward_dq",
    ),
    WithoutEffect(
        SIMT_BACKWARD, ("tile < tile_end: one later",), f"one tile more: {MORE_TILES}", within="cross_attention_backward_dq"
    ),
)

OF_BOUNDED_SCORES = (
    WithoutEffect(("gemma_softcap_fused.cu",), ("max[r] == -INF: never true",), HAS_A_KEY),
    WithoutEffect(
        ("gemma_softcap_fused.cu",),
        ("__any_sync(0xffffffff, exceeds): never true",),
        "scores are at most 50, and exponentials of 50 fit bf16 and fp32 without the subtraction of a maximum",
        proof="file:50.0 * tanh(s / 50.0)",
    ),
)

# --- decode
LLAMA_DECODE, MISTRAL_DECODE = (DECODE[0],), (DECODE[1],)
OF_DECODE = (
    WithoutEffect(LLAMA_DECODE, tuple(f"min(kv_len, q_hi + 1): the {n} operand" for n in ("first", "second")), MORE_TILES),
    WithoutEffect(
        LLAMA_DECODE,
        ("column < COLUMNS: always true",),
        "rows in shared memory have no columns beside those of the tensor",
        proof="QK_WIDTH == HEAD_DIM",
    ),
    WithoutEffect(
        LLAMA_DECODE,
        ("row < BLOCK_KV: never true",),
        "the other operand is true: each lane copies as many chunks",
        proof="BLOCK_KV * (QK_WIDTH // 8) % 32 == 0",
    ),
    WithoutEffect(
        LLAMA_DECODE,
        ("new_max == -INF: never true",),
        f"{HAS_A_KEY}: the positions of a block lie in one tile of keys",
        proof="BLOCK_Q % (q_heads // kv_heads) == 0 and BLOCK_KV % (BLOCK_Q // (q_heads // kv_heads)) == 0",
    ),
    WithoutEffect(
        DECODE,
        ("is_large(max[r]): always true",),
        "each tile subtracts the maximum of its rows, as after a large maximum",
        line="return -INF",
    ),
    WithoutEffect(DECODE, ("__any_sync(0xffffffff, exceeds): always true",), "rows whose maximum stays are multiplied by 1"),
    WithoutEffect(DECODE, ("__any_sync(0xffffffff, any): always true",), "0 is subtracted"),
    WithoutEffect(
        LLAMA_DECODE, ("max(seqused[b_idx], 0): the first operand",), "with fewer than 0 keys as with 0, no tile is visited"
    ),
    WithoutEffect(
        DECODE,
        ("column < HEAD_DIM: always true",),
        "rows in shared memory have no columns beside those of the tensor",
        proof="QK_WIDTH == HEAD_DIM",
    ),
    WithoutEffect(
        DECODE,
        ("min(lane / 4 + 8 * r, block_rows - 1): the first operand",),
        "the mask, which reads no tensor, is computed of rows past the last one, whose results nobody writes",
    ),
    WithoutEffect(
        LLAMA_DECODE,
        ("tile < full_tile_begin: never true",),
        "full ranges begin at key 0",
        proof="file:        0,  // full_begin",
    ),
    WithoutEffect(DECODE, ("partial: always true",), ALL_PARTIAL),
    WithoutEffect(
        DECODE,
        ("row_sum == 0.0f: never true",),
        "sums of a split without keys are written; the join does not read them",
        line="continue",
    ),
    WithoutEffect(
        DECODE,
        ("group < GROUPS: always true",),
        "each thread of the join has a group",
        proof="JOINING % (HEAD_DIM_V // 4) == 0",
    ),
    WithoutEffect(
        MISTRAL_DECODE,
        ("min(max(0, q_lo - in.size + 1), kv_len): the first operand",),
        "a block whose tiles begin past the last key visits none: they end there",
    ),
    WithoutEffect(
        MISTRAL_DECODE,
        ("max(0, q_lo - in.size + 1): the first operand", "min(q_hi + 1, kv_len): the second operand"),
        MORE_TILES,
    ),
    WithoutEffect(
        MISTRAL_DECODE,
        tuple(f"min(max(0, q_hi - in.size + 1), kv_len): the {n} operand" for n in ("first", "second")),
        f"fewer tiles are full: {ALL_PARTIAL}",
    ),
    WithoutEffect(MISTRAL_DECODE, ("max(0, q_hi - in.size + 1): the second operand",), "no tile begins before key 0"),
)

# --- work that is skipped if it changes nothing, and waits of those who have nothing to wait for
OF_WORK = (
    WithoutEffect(TILED, ("vectors: never true",), "elements are read one by one"),
    WithoutEffect(
        TILED,
        tuple(f"has_vectors({x.upper()}, {x}_stride_b, {x}_stride_h, {x}_stride_s, {x}_stride_d): never true" for x in "qkv"),
        "elements are read one by one",
    ),
    WithoutEffect(
        NAIVE_BACKWARD,
        ("row[k] == -INF: never true",),
        "the exponential of -inf is 0 too: no row with keys has an infinite maximum",
        within="_backward_softmax",
    ),
    WithoutEffect(
        NAIVE_BACKWARD,
        ("mask(q_idx, kv_idx): always true",),
        "whoever reads dP skips pairs without weight",
        within="_backward_weight_gradients",
    ),
    WithoutEffect(NAIVE_BACKWARD, ("begin < q_len: one later",), "a slice more, of no rows: its own loop ends at the last row"),
    WithoutEffect(
        (*NAIVE, *NAIVE_BACKWARD), ("begin < kv_len: one later",), "a slice more, of no keys: its own loop ends at the last key"
    ),
    WithoutEffect(
        (*UNBOUNDED_MMA, *OTHER_MMA, "gpt2_wgmma.cu"),
        ("is_large(max[r]): always true",),
        "each tile subtracts the maximum of its rows, as after a large maximum",
        line="return -INF",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("is_large(subtracted): always true", "large: always true"),
        "each tile subtracts the maximum of its rows from the scores, as if it were large",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("is_large(subtracted): never true",),
        "on the emulated device, which rounds S * EXPONENT_SCALE before it subtracts: the exponent of the largest score is "
        "then exactly 0. A GPU fuses both, and 2 to the power of the rounding error overflows in the problem of huge scores",
        proof="file:fast_exp2(S[i] * EXPONENT_SCALE - shift",
    ),
    WithoutEffect(
        (*SOFTMAX_MMA, *OTHER_MMA, "gpt2_wgmma.cu"),
        ("__any_sync(0xffffffff, exceeds): always true",),
        "rows whose maximum stays are multiplied by 1",
    ),
    WithoutEffect(
        (*UNBOUNDED_MMA, *OTHER_MMA, "gpt2_wgmma.cu", "gpt2_hopper.cu"),
        ("__any_sync(0xffffffff, any): always true",),
        "0 is subtracted",
    ),
    WithoutEffect(
        (*MMA, "gpt2_wgmma.cu"),
        ("min(16 * ROW_BLOCKS, q_len - first_row): the second operand",),
        "the loop over the rows ends at 16 * ROW_BLOCKS itself",
        proof="file:for (int row = 0; row < 16 * ROW_BLOCKS;",
    ),
    WithoutEffect(
        tuple(name for name in MMA if name not in ("gemma_softcap_fused.cu", "mistral_window_fused.cu")),
        ("step == 2: always true",),
        "groups without copies are closed too, and the wait is for all groups",
        line="cp_async_commit",
        proof="file:cp_async_wait<0>();  // this thread's copies of the tile have arrived",
    ),
    WithoutEffect(
        STREAMED_BY_HALVES,
        ("step == 1: always true",),
        "groups without copies are closed too, and the wait is for all groups",
        line="cp_async_commit",
        proof="file:cp_async_wait<0>();  // this thread's copies of the tile have arrived",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("++index == stages: always true",),
        "producer and consumers use one stage of the ring in turn, and not the others",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",), ("lane == 0: always true",), "the other lanes have no copies to wait for", line="tma_store_wait"
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",), ("slab < first + OUTPUT_SLABS: one later",), "the copy of columns past the last one writes nothing"
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("q_block == END: never true",),
        "a block of rows before the first one has no tiles; nobody copies to Q any more, and its registers are not used",
        line="return",
    ),
    WithoutEffect(("gpt2_hopper.cu",), ("!scored: always true",), "the scores of the first tile are computed a second time"),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("release_stage(v, v_at);: left out",),
        "behind a work tile after which there is no other one with keys: nobody waits for the stage",
        within="compute",
        behind="issue_pv(); wgmma_wait<0>();",
    ),
    WithoutEffect(
        ("gpt2_hopper.cu",),
        ("take_registers<CONSUMER_REGISTERS>();: left out",),
        "the compiler gives consumers as many registers as they have: they spill",
    ),
)

WITHOUT_EFFECT = (
    *OF_LAUNCHES,
    *OF_OTHER_SIZES,
    *OF_TILES,
    *OF_WINDOWS,
    *OF_TILE_KINDS,
    *OF_MMA_BACKWARD,
    *OF_DOCUMENTS_BACKWARD,
    *OF_HOPPER_BACKWARD,
    *OF_ROTATIONS,
    *OF_TILED_BACKWARD,
    *OF_ROWS,
    *OF_NAIVE_BACKWARD,
    *OF_SIMT_BACKWARD,
    *OF_BOUNDED_SCORES,
    *OF_DECODE,
    *OF_WORK,
)
