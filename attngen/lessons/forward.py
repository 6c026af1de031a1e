"""The forward ladder as data: what each step changes, what bounded the step before, and its launch."""

from __future__ import annotations

from attngen.emit.program import MULTIPROCESSORS, CeilDiv
from attngen.emit.wgmma import Wgmma
from attngen.lessons.step import HEAD, KEYS, ROWS, Array, Ladder, Launched, Step

COPIES = ("mbarrier", "mbarrier_wait", "mbarrier_init_fence", "tma_load")
PRODUCTS = (
    Wgmma("wgmma_scores", 64, "fp16"),
    Wgmma("wgmma_output", 64, "fp16", a_in_registers=True, b_transposed=True),
)
OF_WARPGROUP = ("lane_reduce", "pack_TYPE", *COPIES)
ALL_MAPPED = (("Q", 64), ("K", 64), ("V", 64))
TENSOR = ("lane_reduce", "ldmatrix", "ldmatrix_trans", "pack_TYPE", "mma_TYPE")


def _rows(rows: int, threads: int) -> tuple[Launched, ...]:
    return (Launched("", (CeilDiv("q_len", rows), "q_heads"), threads),)


def _of_warps(warps: int, *others: tuple[str, int | str]) -> tuple[tuple[str, int | str], ...]:
    return (("WARPS", warps), ("THREADS", 32 * warps), *others)


STEPS = (
    Step(
        1, "one_thread_a_row", "one thread a row", "",
        "A thread computes a row of O, as the equations say: the maximum of its scores, then the sum of exponentials, then "
        "the weighted sum of values.",
        _rows(128, 128), (("THREADS", 128),),
        ("sectors", "3 * 8 * 256 * 64 * 33 + 8 * 256 * 64 + 8 * 64 * 32",
         "Eight warps have 32 rows each. For each element that it adds to its scores, a warp touches 32 sectors of Q and one "
         "of K; and it computes each score three times. Then it touches one sector for each element of V, and 32 for each "
         "column of O."),
        (),
    ),
    Step(
        2, "coalesced", "a warp a row, coalesced",
        "Each lane reads another row of Q and writes another row of O, so a warp touches 32 sectors to use 2 bytes of each. "
        "And with one row a thread, most of a GPU is idle if there are few rows.",
        "A warp computes a row. Lane l has the columns l, l + 32, ..., so that a warp reads neighbouring numbers; a "
        "score is a sum over lanes.",
        _rows(8, 256), _of_warps(8),
        ("sectors", "(3 * (4 + 4) + 4) * 256 * 256 + 4 * 256",
         "A warp reads 4 sectors of K and 4 of Q for a score, and computes each score three times. A row of V is 4 sectors, "
         "and so is a row of O."),
    ),
    Step(
        3, "shared_tiles", "tiles in shared memory",
        "Each warp reads all keys and values from global memory by itself.",
        "The warps of a block copy 32 keys to shared memory once, and all use them. A lane now computes the score of its own "
        "key. The maximum over a tile is one reduction, and so is the sum.",
        _rows(8, 256), _of_warps(8, ("KEYS", 32)),
        ("global_read", "32 * 3 * 256 * 128 + 256 * 128",
         "There are 32 blocks of 8 rows; each reads K twice and V once, and its own rows of Q."),
    ),
    Step(
        4, "register_tiles", "rows in registers",
        "Shared memory: each multiply-add reads an element of K, and one of Q.",
        "A warp computes 4 rows: an element of K or V that is read once serves four of them.",
        _rows(32, 256), _of_warps(8, ("KEYS", 32), ("ROWS", 4)),
        ("global_read", "8 * 3 * 256 * 128 + 256 * 128",
         "Blocks have 32 rows, so there are 8."),
    ),
    Step(
        5, "vectors_and_padding", "vector loads and padding",
        "Bank conflicts: rows of K lie 128 bytes apart (with heads of 64), so that all lanes read the same bank. And 2 "
        "bytes are "
        "copied at a time.",
        "16 bytes are read and copied at once, and each row is followed by 16 bytes of padding: the rows that are read "
        "together lie in different banks.",
        _rows(32, 256), _of_warps(8, ("KEYS", 32), ("ROWS", 4), ("PAD", 8)),
        ("conflicts", "0 * 256",
         "Eight lanes read 16 bytes each of rows that lie 144 bytes apart: in different banks."),
    ),
    Step(
        6, "online_softmax", "the online softmax",
        "Keys are read and multiplied twice: once for the maximum, once for the weights.",
        "One pass: the kernel keeps the maximum and the sum of the keys so far, and rescales its sums when the maximum "
        "grows.",
        _rows(32, 256), _of_warps(8, ("KEYS", 32), ("ROWS", 4), ("PAD", 8)),
        ("global_read", "8 * 2 * 256 * 128 + 256 * 128",
         "K is read once."),
    ),
    Step(
        7, "tensor_cores", "tensor cores",
        "Ordinary arithmetic, and shared memory that feeds it.",
        "A warp multiplies 16 rows by mma: lanes hold fragments of Q, S, P and O, and ldmatrix loads those of K and V.",
        _rows(64, 128), _of_warps(4, ("KEYS", "D <= 64 ? 64 : 32"), ("ROWS", 16), ("PAD", 8)),
        ("mma", "2 * 2 * 256 * 256 * 64 / 4096",
         "Two products of 256 x 256 x 64, and an mma has 4096 operations. Shared memory is read by ldmatrix, "
         "once for 16 rows. Blocks have 64 rows, so that four of them read K and V, where eight did."),
        TENSOR,
    ),
    Step(
        8, "asynchronous_copies", "asynchronous copies",
        "Latency: all warps copy, then all wait, then all multiply.",
        "cp.async copies the next tile to a second stage while this one is used: double buffering.",
        _rows(64, 128), _of_warps(4, ("KEYS", "D <= 64 ? 64 : 32"), ("ROWS", 16), ("PAD", 8), ("STAGES", 2)),
        ("barriers", "4 * 4",
         "Four blocks of 64 rows visit four tiles of 64 keys, with one barrier for each visit; step 7 has four."),
        (*TENSOR, "cp_async"),
    ),
    Step(
        9, "tma_copies", "TMA copies",
        "Instructions that copy: a thread issues a cp.async for every 16 bytes, with an address and a test for the end.",
        "One thread issues one TMA copy for a tile of K or V, which the copy engine writes with a swizzle in place of "
        "padding. An mbarrier counts its bytes. Heads of 64 elements, whose rows are 128 bytes, have this step and the next "
        "ones; they run on Hopper.",
        _rows(64, 128), _of_warps(4, ("KEYS", 64), ("ROWS", 16), ("STAGES", 2)),
        ("tma", "4 * 4 * 2",
         "Four blocks of 64 rows visit four tiles of 64 keys, with a copy of K and one of V for each visit."),
        (*TENSOR, *COPIES), "sm_90a", (64,), (("K", 64), ("V", 64)),
    ),
    Step(
        10, "warpgroup_products", "products of a warpgroup",
        "ldmatrix: each warp reads K and V from shared memory for its own 16 rows.",
        "Four warps are a warpgroup, which multiplies 64 rows by one instruction: wgmma reads Q, K and V from shared "
        "memory, and P from registers. Its sums are spread over lanes as those of mma, so that the softmax is the same.",
        _rows(64, 128), _of_warps(4, ("KEYS", 64), ("ROWS", 16), ("STAGES", 2)),
        ("wgmma_async", "4 * 4 * (64 / 16 + 64 / 16)",
         "Each of 4 * 4 visits has two products, and an instruction sums over 16 columns or keys."),
        OF_WARPGROUP, "sm_90a", (64,), ALL_MAPPED, PRODUCTS,
    ),
    Step(
        11, "warp_specialization", "warp specialization",
        "A barrier for each visit: the four warps wait for each other before the next copies may begin.",
        "A warp of its own copies. It waits for an empty stage, the consumers for a full one: each stage has two mbarriers.",
        _rows(64, 160), (("WARPS", 4), ("CONSUMERS", "32 * WARPS"), ("THREADS", "CONSUMERS + 32"), ("KEYS", 64), ("ROWS", 16),
                         ("STAGES", 2)),
        ("barriers", "4 * 1",
         "Four blocks have one barrier each, behind which the mbarriers are there."),
        (*OF_WARPGROUP, "mbarrier_arrive"), "sm_90a", (64,), ALL_MAPPED, PRODUCTS,
    ),
    Step(
        12, "persistent", "a persistent kernel",
        "The beginning and the end of a block: its first copies and its last stores run beside nothing of its own.",
        "Three blocks for each multiprocessor take one work tile of 64 rows after the other. The producer copies the next work "
        "tile's Q, K and V while the consumers still finish the last one.",
        (Launched("", ((MULTIPROCESSORS, 3),), 160),),
        (("WARPS", 4), ("CONSUMERS", "32 * WARPS"), ("THREADS", "CONSUMERS + 32"), ("KEYS", 64), ("ROWS", 16), ("STAGES", 2)),
        ("barriers", "3 * 1",
         "Here, one multiprocessor has three blocks for four work tiles."),
        (*OF_WARPGROUP, "mbarrier_arrive"), "sm_90a", (64,), ALL_MAPPED, PRODUCTS,
    ),
)  # fmt: skip

AFTER = """
From here the schedules go on, whose files differ by more: `attngen show {spec} --kernel hopper` skips tiles that are masked,
has two consumers that take turns with the tensor cores, and more rows for each tile of keys. Puzzles 16 to 19 have the parts
of steps 9 to 11 singly."""

FORWARD = Ladder(
    "forward", STEPS,
    (
        Array("Q", (*ROWS, HEAD), "input"), Array("K", (*KEYS, HEAD), "input"), Array("V", (*KEYS, HEAD), "input"),
        Array("O", (*ROWS, HEAD), "output"),
    ),
    (32, 64, 96, 128), (1, 1, 256, 256),
    ("global_read", "sectors", "shared_read", "wavefronts", "conflicts", "mma", "wgmma_async", "tma", "barriers"),
    AFTER,
)  # fmt: skip
