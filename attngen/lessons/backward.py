"""The backward ladder as data; see `forward.py`."""

from __future__ import annotations

from attngen.emit.program import CeilDiv
from attngen.lessons.step import HEAD, KEYS, ROWS, Array, Ladder, Launched, Step

THREADS: tuple[tuple[str, int | str], ...] = (("WARPS", 4), ("THREADS", 128))
TILES: tuple[tuple[str, int | str], ...] = (*THREADS, ("TILE", 32), ("PAD", 8))
TENSOR = ("lane_reduce", "ldmatrix", "ldmatrix_trans", "pack_TYPE", "mma_TYPE")


DELTA = Launched("_delta", (CeilDiv("q_len", 4), "q_heads"), 128)


def _two(rows: int, keys: int) -> tuple[Launched, Launched]:
    """The kernel of dQ, whose blocks have so many rows, and that of dK and dV, with so many keys."""
    return (
        Launched("_dq", (CeilDiv("q_len", rows), "q_heads"), 128),
        Launched("_dk_dv", (CeilDiv("kv_len", keys), "kv_heads"), 128),
    )


STEPS = (
    Step(
        1, "one_thread_a_row", "one thread a row", "",
        "The forward keeps O and lse, so P = exp(S - lse) is computed again. One kernel computes dQ, a row a thread; another "
        "dK and dV, a key a thread. Nothing is shared, and nothing is added by two threads.",
        _two(128, 128), (("THREADS", 128),),
        ("fma", "128 * 128 * 64 * (4 + 5)",
         "A thread of dQ has four multiply-adds for each pair and column: q k, dO v, dO O for delta, and dS k. One of dK and "
         "dV has five: dS q and P dO in the place of dS k."),
        (),
    ),
    Step(
        2, "delta", "delta in a kernel of its own",
        "delta belongs to a row, and is computed for each pair.",
        "A kernel before the others computes delta of each row once: dO O, summed by a warp.",
        (DELTA, *_two(128, 128)), THREADS,
        ("fma", "128 * 128 * 64 * (3 + 4) + 128 * 64",
         "One multiply-add less for each pair, in both kernels; and 64 for each row."),
    ),
    Step(
        3, "shared_tiles", "tiles in shared memory, sums in registers",
        "Each thread reads all rows of the other side from global memory; and its own row again for each of them, 32 sectors "
        "a warp.",
        "A block keeps 128 rows, or keys, and copies 32 of the other side at a time to shared memory. What a thread adds up "
        "stays in its registers: dQ of its row, or dK and dV of its key.",
        (DELTA, *_two(128, 128)), (*THREADS, ("TILE", 32)),
        ("global_read", "(4 + 4 + 2) * 128 * 128 + 2 * 128 * 8",
         "128 rows and keys are one block of each kernel. That of dQ reads Q, dO, K and V once, and so does that of dK and dV; "
         "both read lse and delta, 8 bytes a row. The kernel of delta reads O and dO. A row of one of "
         "these arrays has 128 bytes."),
    ),
    Step(
        4, "tensor_cores_for_dq", "tensor cores for dQ",
        "Ordinary arithmetic, and shared memory that feeds it: an element of the tile is read for each multiply-add.",
        "In the kernel of dQ, a warp multiplies 16 rows by mma. Rows of Q and dO are first operands, in registers. dS, made of "
        "two products, is the first operand of the third. ldmatrix reads the tile, transposed for the sums.",
        (DELTA, *_two(64, 128)), TILES,
        ("mma", "3 * 2 * 128 * 128 * 64 / 4096",
         "Three products of 128 x 128 x 64, Q K^T, dO V^T and dS K; an mma has 4096 operations. A block of dQ has "
         "64 rows instead of 128, so that two of them read K and V."),
        TENSOR,
    ),
    Step(
        5, "tensor_cores_for_keys", "tensor cores for dK and dV",
        "The kernel of dK and dV, with four of the seven products.",
        "The mirror image: keys and values are first operands, so that a warp has P and dS of 16 keys, transposed. They are "
        "the first operands of the sums over rows.",
        (DELTA, *_two(64, 64)), TILES,
        ("mma", "7 * 2 * 128 * 128 * 64 / 4096", "Four more: K Q^T, V dO^T, then P^T dO and dS^T Q."),
        TENSOR,
    ),
    Step(
        6, "additions_to_dq", "additions to dQ instead of a second pass",
        "P and dS are computed twice: seven products, where five are different.",
        "The kernel of dK and dV computes dS K too, and adds it to dQ in global memory, in fp32, by atomic additions. Blocks "
        "add in any order, so the last bits differ from run to run. A last kernel rounds the sums.",
        (
            DELTA,
            Launched("_gradients", (CeilDiv("kv_len", 64), "kv_heads"), 128),
            Launched("_dq", (CeilDiv("q_len", 64), "q_heads"), 128),
        ),
        (*TILES, ("KEYS", 64)),
        ("mma", "5 * 2 * 128 * 128 * 64 / 4096", "Five products."),
        (*TENSOR, "global_add_one"),
    ),
)  # fmt: skip

AFTER = """
From here the schedules go on: `attngen diff {spec} fused fused_backward` (both ways of dQ: with and without `--deterministic`),
and `attngen show {spec} --kernel hopper --backward` (TMA, wgmma, warp specialization). Puzzles 20 to 22 have the gradients
singly."""

BACKWARD = Ladder(
    "backward", STEPS,
    (
        Array("Q", (*ROWS, HEAD), "input"), Array("K", (*KEYS, HEAD), "input"), Array("V", (*KEYS, HEAD), "input"),
        Array("O", (*ROWS, HEAD), "input"), Array("dO", (*ROWS, HEAD), "input"), Array("lse", ROWS, "input", "float"),
        Array("delta", ROWS, "workspace", "float"), Array("dQ_sum", (*ROWS, HEAD), "workspace", "float"),
        Array("dQ", (*ROWS, HEAD), "output"), Array("dK", (*KEYS, HEAD), "output"), Array("dV", (*KEYS, HEAD), "output"),
    ),
    (32, 64), (1, 1, 128, 128),
    ("global_read", "global_written", "sectors", "wavefronts", "conflicts", "fma", "mma", "barriers"),
    AFTER,
)  # fmt: skip
