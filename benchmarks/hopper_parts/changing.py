"""A mask that changes at each call: documents with new ids, host and device together.

attngen takes the new ids. FlexAttention builds its block mask again, once with `create_block_mask` as documented, and once with
the same function compiled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from cell import Cell, Row, Tensors
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from words import markdown

import attngen
from attngen.bench.measure import in_rounds

LEAST = 3.0
CELL = Cell("bf16", 128, "causal and same_document(ids)", batch=2, heads=16, q_len=8192, kv_len=8192)
DOCUMENTS = 8  # in each row of the batch
CALLS = 5  # per candidate and round
EAGER, COMPILED = "FlexAttention", "FlexAttention, create_block_mask compiled"

CallWithIds = Callable[[torch.Tensor], torch.Tensor]


def rows(rounds: int) -> Iterator[Row]:
    tensors = CELL.randn()
    spec = attngen.define(dtype="bf16", head_dim=128, mask=CELL.mask, inputs={"ids": ("int32", ("batch", "kv_len"))})
    compiled = attngen.compile(spec, kernel="hopper", device="cuda")
    torch._dynamo.reset()  # what other parts compiled would count against dynamo's limit
    calls: dict[str, CallWithIds] = {
        "attngen": lambda ids: compiled(*tensors, ids=ids),
        EAGER: flex(tensors, create_block_mask),
        COMPILED: flex(tensors, torch.compile(create_block_mask)),
    }
    fresh = itertools.cycle([new_ids() for _ in range(16)])
    ids = next(fresh)
    difference = max(
        float((calls["attngen"](ids).float() - calls[peer](ids).float()).abs().max()) for peer in (EAGER, COMPILED)
    )
    found = in_rounds(calls, rounds, lambda name: median(waited(partial(calls[name], next(fresh))) for _ in range(CALLS)))
    ratios = {peer: found.ratio("attngen", peer) for peer in (EAGER, COMPILED)}
    case = f"documents, {DOCUMENTS} a row, B2 H16 S8192 D128 bf16"
    yield {"case": case, "ms": found.medians(), "ratios": ratios, "difference": difference}


def new_ids() -> torch.Tensor:
    """int32 [batch, kv_len]: documents of random lengths, one after another."""
    starts = torch.randint(1, CELL.kv_len, (CELL.batch, DOCUMENTS - 1), device="cuda").sort().values
    places = torch.arange(CELL.kv_len, device="cuda").expand(CELL.batch, CELL.kv_len).contiguous()
    return torch.searchsorted(starts, places, right=True, out_int32=True)


def flex(tensors: Tensors, block_mask_of: Callable[..., BlockMask]) -> CallWithIds:
    """FlexAttention, given ids: they are copied to where its mask reads, so that nothing is compiled again."""
    kept = new_ids()
    attend = torch.compile(flex_attention, dynamic=False)

    def kept_pair(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (kept[b, q] == kept[b, k])

    def call(ids: torch.Tensor) -> torch.Tensor:
        kept.copy_(ids)
        block_mask = block_mask_of(kept_pair, CELL.batch, None, CELL.q_len, CELL.kv_len, device="cuda")
        result: torch.Tensor = attend(*tensors, block_mask=block_mask)
        return result

    return call


def waited(call: Callable[[], object]) -> float:
    """Milliseconds until the result is there, the host's and the device's time together."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        peers = ((f"{r['ms'][peer]:.3f}", f"{r['ratios'][peer]:.2f}") for peer in (EAGER, COMPILED))
        lines.append((r["case"], f"{r['ms']['attngen']:.3f}", *itertools.chain.from_iterable(peers)))
    titles = ("ms, new ids at each call", "attngen", EAGER, "ratio", COMPILED, "ratio")
    seen = ", ".join(f"{min(r['ratios'][peer] for r in rows):.2f} times {peer}" for peer in (EAGER, COMPILED))
    return f"{markdown(titles, lines)}\n\nGoal: {LEAST:.0f} times. Measured: {seen}."
