"""Models of transformers with the attention of torch, FlexAttention and attngen: tokens a second of training and of prefill.

    python benchmarks/dropins.py [--models llama,gemma2] [--length S] [--layers N] [--rounds N]
                                 [--write docs/tables]

Layers have the widths of Llama 3 8B and Gemma 2 9B, random weights in bf16, one sequence of S tokens. `attn_implementation` is
"sdpa" with cuDNN first, "flex_attention" or "attngen". A training step is forward, backward and AdamW under torch.compile.
Prefill is the first forward of `generate`: eager, with a cache, the logits of the last token alone. Both build their masks in
each step. SDPA leaves out the soft-cap of Gemma 2. Each side runs in a process of its own with empty caches; the sides are
timed one after another, in random order within each round. `--small` has narrow layers, for a trial on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cell import Row
from markers import write_between
from words import markdown

from attngen.bench.measure import calls_in
from attngen.bench.peers import first_line
from attngen.bench.sweep import where

SIDES = {"SDPA, cuDNN": "sdpa", "FlexAttention": "flex_attention", "attngen": "attngen"}
WAYS = ("prefill", "training")
BURST = 400.0  # milliseconds
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ATTNGEN_CACHE_DIR", "CUDA_CACHE_PATH")
WIDTHS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "gemma2": {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 4096, "query_pre_attn_scalar": 256,
    },
}  # fmt: skip
SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the tokens of one step."""

    model: str
    layers: int
    length: int
    vocabulary: int
    small: bool

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers, S{self.length}"

    def build(self, implementation: str) -> Any:
        """The model with random weights, the same for every implementation."""
        from transformers import AutoConfig, AutoModelForCausalLM

        widths = WIDTHS[self.model] | (SMALL | {"head_dim": 64, "sliding_window": self.length // 2} if self.small else {})
        config = AutoConfig.for_model(self.model, num_hidden_layers=self.layers, vocab_size=self.vocabulary, **widths)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)


Side = tuple[Case, str]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def steps(case: Case, implementation: str) -> dict[str, Callable[[], object]]:
    """A step of each of WAYS."""
    model = case.build(implementation)
    tokens = torch.randint(case.vocabulary, (1, case.length), device=DEVICE)
    compiled = torch.compile(model, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    optimizer: list[torch.optim.Optimizer] = []  # its state is made by the first step

    def prefill() -> None:
        model.eval()
        with torch.no_grad():
            model(tokens, use_cache=True, logits_to_keep=1)

    def training() -> None:
        model.train()
        if not optimizer:
            optimizer.append(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
        compiled(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer[0].step()
        optimizer[0].zero_grad()

    return {"prefill": prefill, "training": training}


def first(step: Callable[[], object]) -> Row:
    """Seconds of the first call."""
    start = time.perf_counter()
    step()
    synchronize()
    return {"first_s": time.perf_counter() - start}


def later(step: Callable[[], object]) -> Row:
    """Milliseconds of the host and of the whole of a call, and its peak GiB."""
    step()
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    host, whole = [], []
    for _ in range(5):
        start = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - start))
        synchronize()
        whole.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    return {"host_ms": median(host), "peak_gib": peak, "ms": median(whole)}


def burst(step: Callable[[], object], calls: int) -> float:
    """Milliseconds of a call, of several queued at once."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


def priority(implementation: str) -> AbstractContextManager[Any]:
    """cuDNN before torch's other backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True) if implementation == "sdpa" else nullcontext()


def child(case: Case, implementation: str, pipe: Connection) -> None:
    """Answers (way, None) with `first`, (way, 0) with `later`, (way, calls) with `burst`; an error with its first line."""
    if implementation == "attngen":
        import attngen.transformers  # noqa: F401
    with priority(implementation):
        prepared = steps(case, implementation)
        while (order := pipe.recv()) is not None:
            way, calls = order
            step = prepared[way]
            try:
                pipe.send(first(step) if calls is None else burst(step, calls) if calls else later(step))
            except Exception as error:  # whatever torch.compile may raise
                pipe.send(f"{type(error).__name__}: {first_line(error)}"[:300])


def started(case: Case, caches: Path) -> dict[str, tuple[Any, Connection]]:
    """A process of each side, each with empty caches."""
    processes = multiprocessing.get_context("spawn")
    found = {}
    for side, implementation in SIDES.items():
        directory = caches / f"{case.model} {implementation}"
        os.environ |= {name: str(directory / name) for name in CACHES}
        here, there = processes.Pipe()
        process = processes.Process(target=child, args=(case, implementation, there), daemon=True)
        process.start()
        there.close()
        found[side] = (process, here)
    return found


def ask_all(pipes: dict[Side, Connection], order: tuple[str, int | None]) -> dict[Side, Any]:
    """The answers of all sides, which work at the same time; an error of a side is printed and left out."""
    for pipe in pipes.values():
        pipe.send(order)
    return {side: answer for side, pipe in pipes.items() if not failed(side[1], order[0], answer := received(pipe))}


def received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return "the process ended"


def failed(side: str, way: str, answer: Any) -> bool:
    if isinstance(answer, str):
        print(f"{side}, {way}: {answer}", flush=True)
    return isinstance(answer, str)


def ask(pipe: Connection, way: str, calls: int) -> Any:
    """The answer of one side, while the others wait."""
    pipe.send((way, calls))
    return received(pipe)


def timed(pipes: dict[str, Connection], way: str, calls: dict[str, int], rounds: int) -> dict[str, float]:
    """Milliseconds of a step of each side: medians over rounds."""
    each: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(rounds):
        for side in random.sample(sorted(each), len(each)):
            each[side].append(ask(pipes[side], way, calls[side]))
    return {side: median(found) for side, found in each.items()}


def rows(cases: Sequence[Case], rounds: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        running = {case: started(case, Path(directory)) for case in cases}
        sides = {case: {side: pipe for side, (_, pipe) in found.items()} for case, found in running.items()}
        everybody = {(case, side): pipe for case, pipes in sides.items() for side, pipe in pipes.items()}
        prefills = ask_all(everybody, ("prefill", None))  # for all cases, so that none of them starts during a measurement
        for case, pipes in sides.items():
            for way in WAYS:
                asked = prefills if way == "prefill" else ask_all({(case, s): p for s, p in pipes.items()}, (way, None))
                single = {}
                for side in (side for of, side in asked if of == case):
                    alone = ask(pipes[side], way, 0)
                    if not failed(side, way, alone):
                        single[side] = asked[case, side] | alone
                calls = {side: calls_in(BURST, alone["ms"]) for side, alone in single.items()}
                found = timed(pipes, way, calls, rounds)
                for side, ms in found.items():
                    tokens = 1e3 * case.length / ms
                    yield {"case": case.title, "way": way, "side": side, "tokens_s": tokens, **single[side]}
            for process, pipe in running[case].values():
                pipe.send(None)
                process.join()


def table(rows: Sequence[Row]) -> str:
    lines = []
    for r in rows:
        best = max(o["tokens_s"] for o in rows if (o["case"], o["way"]) == (r["case"], r["way"]) and o["side"] != "attngen")
        figures = (f"{r['first_s']:.1f}", f"{r['host_ms']:.1f}", f"{r['peak_gib']:.1f}")
        lines.append((r["case"], r["way"], r["side"], f"{r['tokens_s']:.0f}", f"{r['tokens_s'] / best:.2f}", *figures))
    titles = ("model", "step", "attention", "tokens/s", "of the faster peer", "first call, s", "host, ms", "peak memory, GiB")
    return markdown(titles, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(WIDTHS), help=f"of {','.join(WIDTHS)}")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="narrow layers")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    vocabulary = 256 if options.small else 16384
    cases = [Case(model, options.layers, options.length, vocabulary, options.small) for model in options.models.split(",")]
    found = []
    for row in rows(cases, options.rounds):
        found.append(row)
        print(json.dumps(row), flush=True)
    here = where() if DEVICE == "cuda" else "CPU"
    import transformers

    text = f"{here}, transformers {transformers.__version__}, {options.rounds} rounds\n\n{table(found)}"
    print(text)
    if options.write:
        write_between(options.write, "dropins", text)


if __name__ == "__main__":
    main()
