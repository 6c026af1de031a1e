"""What the report of a problem advises: by its kind, or by its kind and the words of its message."""

from __future__ import annotations

import re

HELP = {
    "signature": "write it as expected: the check passes arguments in this order. Your own functions may stand before it",
    "does not compile": "correct this error first: later ones often follow from it",
    "include": "remove it: the file has the primitives that the puzzle needs, and CUDA's built-in functions need no header",
    "dynamic": "declare it with its size, `__shared__ float name[SIZE]`: the launch has no dynamic shared memory",
    "shared memory": "a block has at most 48 KB of arrays declared __shared__ (0xc000 bytes): keep a tile there, not the whole",
    "trap": "the kernel stops itself here; printf shows values: what it prints comes before the report",
    "time limit": "the sizes are small: no thread needs more than some thousand steps. Does a loop run too often, or forever?",
    "empty": "replace the comment by code that writes every element; `attngen puzzle hint {number}` helps to begin",
    "never written": "is there a thread for this element, and does its condition let it write? Think of the last block, too",
    "wrong": "compute this one element by hand from the contract, and compare with what this statement does; has every "
    "variable a value before it is read?",
    "nan": "NaN comes from -INFINITY - (-INFINITY), 0 / 0, INFINITY / INFINITY or 0 * NaN, from an element that nobody wrote, "
    "or from sums of wgmma that are read before wgmma_wait: print the parts of this statement",
    "out of bounds": "compare the index with the size of the array before the access; the last block may have threads to spare",
    "write to a read-only tensor": "the contract names the arrays that the kernel writes; a cast must not remove const",
    "semicolon": "a `;` is often missing at the end of the line before",
    "uninitialized shared read": "write the element before it is read; a barrier must be between if another thread reads it",
    "uninitialized global read": "the output has no contents before the kernel writes it: begin with a local variable",
    "race": "put a barrier between the two accesses: __syncthreads() for threads of a block, __syncwarp() for those of a warp",
    "two writers": "each element must have one writer and no other reader: does the index leave threadIdx or blockIdx out, or "
    "does a thread past the end of a row write into the next one?",
    "copy in flight": "wait for the copy, then put a barrier before other threads read or replace what it brings",
    "misaligned access": "an access of N bytes needs an address that is a multiple of N: float4 needs 16",
    "divergent barrier": "every thread must reach __syncthreads(): move it out of the condition; let no thread return before",
    "deadlock": "somebody must arrive where these threads wait: count the arrivals of each phase, and the parity of each wait",
    "lanes missing": "all lanes of a warp must come to its shuffles: let none leave, or skip one, unless the whole warp does",
    "runaway loop": "does the loop's variable change, and does its condition become false?",
    "barrier misuse": "a phase must expect exactly the bytes that its copies bring, and the arrivals that mbarrier_init states",
    "divergent warpgroup": "all 128 threads of a warpgroup must issue the same wgmma: no condition may divide them",
    "missing proxy fence": "after the writes of threads, call async_proxy_fence(), then a barrier, then TMA or wgmma",
    "missing wgmma fence": "call wgmma_fence() before the first product that uses these accumulators",
    "accumulator in use": "call wgmma_commit() and wgmma_wait<0>() before the accumulators are read or written",
    "division by zero": "check the divisor; is it a size that can be zero here?",
    "gpu": "threads of a GPU run in another order, many at once: what differs in a large launch?",
    "stack overflow": "a thread's local arrays must be small, and recursion must end",
}

# Of a kind and a pattern in the message; the first one that fits is taken before HELP.
CLOSER = (
    (
        "race",
        "two writes",
        "if all of them write the same, let one thread write it; else each needs its own element, or a barrier between them",
    ),
    (
        "copy in flight",
        "a wgmma of it",
        "close the group by wgmma_commit(), and wait by wgmma_wait<0>() before the sums are used",
    ),
    (
        "race",
        "after its initialization",
        "all threads of the block call __syncthreads() between mbarrier_init, with its fence, and the first use",
    ),
    (
        "copy in flight",
        "a wgmma reads",
        "products read their tiles until they have been waited for: wgmma_commit(), wgmma_wait<0>(), and only then arrive at "
        "the mbarrier that lets the tile be replaced. If you do: does this copy write the tile that was released?",
    ),
    (
        "copy in flight",
        "TMA load",
        "wait for the mbarrier of this copy, by the parity of its phase. If you do: was the buffer filled again too early? A "
        "copy must wait until all threads that read what it replaces have arrived",
    ),
    (
        "copy in flight",
        "asynchronous copy",
        "close the group of the copies by cp_async_commit(), wait for it by cp_async_wait, then put a barrier",
    ),
    (
        "misaligned access",
        "asynchronous copy",
        "both addresses must be multiples of 16: an array alignas(16), whose rows are multiples of 16 bytes",
    ),
    (
        "barrier misuse",
        "more threads arrive",
        "in a phase as many threads arrive as mbarrier_init states: do more threads run this line, or does one come "
        "again before the phase has ended, because it does not wait for the empty buffer?",
    ),
    ("barrier misuse", "initialized a second time", "one thread initializes each mbarrier, once: `if (threadIdx.x == 0)`"),
    (
        "missing proxy fence",
        "its initialization",
        "the thread that has called mbarrier_init calls mbarrier_init_fence() behind it; then __syncthreads()",
    ),
    (
        "uninitialized shared read",
        "of shared memory)",
        "this address is in no array declared __shared__: compare the index with the sizes of the array. The operands of wgmma "
        "count in units of 16 bytes",
    ),
    (
        "deadlock",
        "block barrier",
        "__syncthreads() waits for all threads of the block: call it where none of them waits for something else",
    ),
    ("deadlock", "unannounced", "announce them by mbarrier_expect_bytes, in the thread that issues the copy, before the copy"),
)
REPLACED = (
    "this copy replaces what other threads still read: each arrives at an mbarrier after its last read, and the copy waits for "
    "the phase that expects all of them"
)
LATER_ROUND = (
    "a barrier stands between these lines: one of the two accesses is of a later round of the loop, by a faster thread; put a "
    "barrier at the end of the round, too"
)
_EARLIER = re.compile(r"an earlier (?=(?:read|write) of shared)")
_WAITS = re.compile(r"(?P<thread>thread \d+) waits for (?P<what>.*) at line (?P<line>\d+) \((?P<statement>.*?);?\)")
_TOO_MANY_BYTES = re.compile(r"(?P<before>lacks \d+ of \d+ arrivals) and -(?P<bytes>\d+) bytes")


def advice(kind: str, message: str) -> str:
    """The advice for a problem, or an empty string."""
    for of, pattern, text in CLOSER:
        if of == kind and pattern in message:
            return text
    return HELP.get(kind, "")


def in_words(message: str) -> str:
    """A finding's message, without numbers that need the runtime's source to be understood."""
    message = _TOO_MANY_BYTES.sub(r"\g<before> (\g<bytes> bytes have come unannounced)", message)
    # The order in which the emulated device runs threads is not that of the student's lines.
    return _EARLIER.sub("a ", message.replace(" arrivals and 0 bytes", " arrivals"))


def waiting(message: str) -> list[str]:
    """The threads of a deadlock, one in each line: where each waits, and for what. The statement of the first is shown."""
    lines: list[str] = []
    for one in re.split(r"; (?=thread \d+ )", message):
        found = _WAITS.fullmatch(one)
        statement = f": {found['statement']}" if found and lines else ""
        lines.append(f"{found['thread']} waits at line {found['line']} for {found['what']}{statement}" if found else one)
    return lines
