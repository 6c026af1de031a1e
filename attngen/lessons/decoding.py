"""The decoding ladder as data; see `forward.py`."""

from __future__ import annotations

from attngen.emit.program import CeilDiv
from attngen.lessons.step import GROUP, HEAD, KEYS, ROWS, Array, Ladder, Launched, Step

SPLIT = 256  # keys
A_ROW = ("q_len", "q_heads")
JOIN = Launched("_join", A_ROW, HEAD)
VECTORS: tuple[tuple[str, int | str], ...] = (("THREADS", 128), ("LANES", "D / 8"), ("PARTS", "THREADS / LANES"))

STEPS = (
    Step(
        1, "a_warp_a_head", "a warp a head", "",
        "A block of one warp computes a row of a head, key after key, with an online softmax. A lane has the columns l, l + "
        "32, ..., so that a warp reads neighbouring numbers.",
        (Launched("", A_ROW, 32),), (("THREADS", 32),),
        ("sectors", "8 * (2048 * 2 * 4 + 2 * 4)",
         "Each of eight heads touches 4 sectors of K and 4 of V for a key, 4 of Q and 4 of O."),
    ),
    Step(
        2, "warps_across_keys", "warps across keys",
        "One chain: a key waits for the maximum and the sums of the key before, 2048 times. And a warp has few bytes in "
        "flight.",
        "Four warps take every fourth key, each with a softmax of its own. In the end, the parts are joined in shared memory, "
        "under the largest of their maxima.",
        (Launched("", A_ROW, 128),), (("PARTS", 4), ("THREADS", 128)),
        ("shared_read", "8 * 64 * 4 * (4 + 4 + 4 + 4)",
         "Each of 64 columns of a head reads, of four parts, the maximum twice, the sum of weights and its column: 4 bytes "
         "each."),
    ),
    Step(
        3, "vector_loads", "vector loads",
        "Instructions: a lane reads 2 bytes at a time, and a score takes five shuffles of the whole warp.",
        "A lane reads 16 bytes at a time: eight lanes share a key (with heads of 64), so a warp reads four keys at once, and "
        "three shuffles are enough for four scores. Each group of lanes has a softmax of its own: 16 parts, joined as before.",
        (Launched("", A_ROW, 128),), VECTORS,
        ("requests", "8 * (4 * (2048 / 16 * 2 + 1) + 2)",
         "Four warps of a head read K and V of 16 keys by one request each, and Q once; two warps write O. Step 2 has "
         "8 * (2048 * 4 + 4 * 2 + 2) = 65,616: two for a key, two for a value."),
    ),
    Step(
        4, "split_keys", "keys split over blocks",
        "Eight blocks: a GPU has more than a hundred multiprocessors, and most have nothing to do.",
        "A block has 256 keys of a head (split-KV). It writes its part, with maximum and sum, and a second kernel joins the "
        "parts of a row as the block has joined those of its lanes.",
        (Launched("_split", (CeilDiv("kv_len", SPLIT), "q_len", "q_heads"), 128), JOIN), (*VECTORS, ("KEYS", SPLIT)),
        ("global_written", "8 * 8 * (64 + 2) * 4 + 8 * 64 * 2",
         "64 blocks write 64 sums, a maximum and a sum of weights, 4 bytes each; then O is written as before."),
    ),
    Step(
        5, "grouped_heads", "heads that share keys share a load",
        "Memory: K and V are read by each query head, and four share them.",
        "A block computes the rows of four query heads: an element of K or V that is loaded once serves all of them.",
        (Launched("_split", (CeilDiv("kv_len", SPLIT), "q_len", ("kv_heads", CeilDiv(GROUP, 4))), 128), JOIN),
        (*VECTORS, ("KEYS", SPLIT), ("HEADS", 4)),
        ("global_read", "2 * 2048 * 2 * 128 + 2 * 8 * 4 * 16 * 128 + 8 * 64 * 8 * (4 + 4 + 4 + 4)",
         "K and V of two heads are read once. In each of 16 blocks, 16 groups of lanes read four rows of Q; and the join "
         "reads, for each of 64 columns of eight rows, of eight parts the maximum twice, the sum and the column."),
    ),
)  # fmt: skip

AFTER = """
From here the schedule goes on: `attngen show {spec} --kernel decode` has the rows of a group in one mma, copies in the
background, and as many splits as keep all multiprocessors reading. Puzzles 23 and 24 have a split and the join singly."""

DECODING = Ladder(
    "decoding", STEPS,
    (
        Array("Q", (*ROWS, HEAD), "input"), Array("K", (*KEYS, HEAD), "input"), Array("V", (*KEYS, HEAD), "input"),
        Array("max_part", (*ROWS, CeilDiv("kv_len", SPLIT)), "workspace", "float"),
        Array("sum_part", (*ROWS, CeilDiv("kv_len", SPLIT)), "workspace", "float"),
        Array("O_part", (*ROWS, CeilDiv("kv_len", SPLIT), HEAD), "workspace", "float"),
        Array("O", (*ROWS, HEAD), "output"),
    ),
    (32, 64, 128), (8, 2, 1, 2048),
    ("global_read", "global_written", "sectors", "requests", "shared_read", "fma", "barriers"),
    AFTER,
)  # fmt: skip
