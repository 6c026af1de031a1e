"""transformers' `generate` with the attention of torch, FlexAttention and attngen: tokens a second, and whether they are right.

    python benchmarks/generate.py [--batches 1,32] [--prompt S] [--new N] [--layers N] [--dtype bf16] [--rounds N]
                                  [--seconds N] [--json FILE] [--write docs/tables]

A Llama of 1B (hidden size 2048, 16 layers, 32 heads over 8, D64) with random weights, a prompt of random tokens, greedy tokens,
a static cache, compiled as `generate` does by itself on a GPU (torch.compile, CUDA graphs). `attn_implementation` is "sdpa",
"flex_attention" or "attngen". Tokens a second are those of decoding, from the first new token to the last one. Each side runs
in a process of its own with empty caches; the first calls of all sides run at the same time, the others one after another, in
random order within each round.

Every token is compared with what "eager" has most likely after the same tokens before it. Where they differ, the gap is how
much larger eager's logit of its own token is: tokens whose logits are tied up to rounding may be exchanged. `--small` has a
narrow model, for a trial on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cell import Row
from markers import write_between
from words import markdown

from attngen.bench.sweep import where

SIDES = {"SDPA": "sdpa", "FlexAttention": "flex_attention", "attngen": "attngen"}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ATTNGEN_CACHE_DIR", "CUDA_CACHE_PATH")
WIDTHS = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT_ONCE = 2**13  # tokens of a forward of eager attention, whose scores of all pairs fill memory
COMPILING = 4  # processes in which a side compiles
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the tokens of a call."""

    batch: int
    prompt: int
    new: int
    layers: int
    vocabulary: int
    dtype: str
    small: bool

    @property
    def title(self) -> str:
        return f"{self.dtype} B{self.batch}, {self.prompt} + {self.new} tokens"

    def build(self, implementation: str) -> Any:
        """The model with random weights, the same for every implementation."""
        from transformers import AutoConfig, AutoModelForCausalLM

        longest = {"max_position_embeddings": self.prompt + self.new}
        widths = SMALL if self.small else WIDTHS
        config = AutoConfig.for_model(
            "llama", num_hidden_layers=self.layers, vocab_size=self.vocabulary, pad_token_id=0, **widths, **longest
        )
        torch.manual_seed(0)
        with torch.device(DEVICE):
            made = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=DTYPES[self.dtype])
        return made.eval()

    def tokens(self) -> torch.Tensor:
        """The prompts, [batch, prompt]."""
        return torch.randint(3, self.vocabulary, (self.batch, self.prompt), generator=torch.Generator().manual_seed(1))


Running = dict[tuple[Case, str], tuple[Any, Connection]]


class Clock:
    """The times at which `generate` has a token of every sequence, as one of its stopping criteria; it never stops."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.at.append(time.perf_counter())
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)


def generated(case: Case, model: Any, prompts: torch.Tensor) -> Row:
    """Times of a call of `generate`, its tokens, and how many graphs torch.compile has made so far."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    how: dict[str, Any] = {
        "max_new_tokens": case.new,
        "do_sample": False,
        "cache_implementation": "static",
        "eos_token_id": None,
    }
    if DEVICE == "cpu":
        how["compile_config"] = CompileConfig(backend="eager", mode="default")
        how["compile_config"]._compile_all_devices = True
    clock, start = Clock(), time.perf_counter()
    found = model.generate(prompts, attention_mask=torch.ones_like(prompts), stopping_criteria=[clock], **how)
    decoding = (clock.at[-1] - clock.at[0]) / (case.new - 1)
    return {
        "seconds": clock.at[-1] - start,
        "prefill_ms": 1e3 * (clock.at[0] - start),
        "step_ms": 1e3 * decoding,
        "graphs": counters["stats"]["unique_graphs"],
        "tokens": found[:, case.prompt :].tolist(),
    }


def child(case: Case, implementation: str, pipe: Connection) -> None:
    """Answers each order with `generated`, or with an error."""
    if implementation == "attngen":
        import attngen.transformers  # noqa: F401
    model, prompts = case.build(implementation), case.tokens().to(DEVICE)
    while pipe.recv():
        try:
            pipe.send(generated(case, model, prompts))
        except Exception:  # whatever torch.compile may raise
            pipe.send(traceback.format_exc())
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def started(cases: Sequence[Case], wanted: Sequence[str], caches: Path) -> Running:
    """A process of each case and side, each with empty caches."""
    processes = multiprocessing.get_context("spawn")
    found: Running = {}
    for case in cases:
        for side in wanted:
            implementation = SIDES[side]
            os.environ |= {name: str(caches / f"{case.batch} {implementation}" / name) for name in CACHES}
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(COMPILING)
            here, there = processes.Pipe()
            process = processes.Process(target=child, args=(case, implementation, there), daemon=True)
            process.start()
            there.close()
            found[case, side] = (process, here)
    return found


def first_calls(running: Running, seconds: float) -> dict[tuple[Case, str], Row]:
    """The first calls, all at the same time. A side with an error, or one that takes longer than `seconds`, is left out."""
    waiting = {pipe: key for key, (_, pipe) in running.items()}
    for pipe in waiting:
        pipe.send(True)
    end, found = time.monotonic() + seconds, {}
    while waiting and (ready := wait(list(waiting), max(end - time.monotonic(), 0.0))):
        for pipe in ready:
            case, side = waiting.pop(pipe)  # type: ignore[index]
            answered = answer(pipe)  # type: ignore[arg-type]
            if isinstance(answered, str):
                print(f"{case.title}, {side}: {answered}", flush=True)
            else:
                found[case, side] = answered
                print(f"{case.title}, {side}: first call {answered['seconds']:.0f} s", flush=True)
    for case, side in waiting.values():
        print(f"{case.title}, {side}: no first call in {seconds:.0f} s", flush=True)
    for key, (process, _) in running.items():
        if key not in found:
            process.terminate()
    return found


def answer(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return "the process ended"


def timed(case: Case, sides: dict[str, Connection], firsts: dict[str, Row], rounds: int) -> list[Row]:
    """A row of each side: medians over rounds, and the tokens of the last one."""
    each: dict[str, list[Row]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in random.sample(sorted(each), len(each)):
            sides[side].send(True)
            each[side].append(answer(sides[side]))
    rows = []
    for side, calls in each.items():
        step = median(one["step_ms"] for one in calls)
        found = {"case": case.title, "side": side, "tokens_s": 1e3 * case.batch / step, "step_ms": step}
        found |= {"prefill_ms": median(one["prefill_ms"] for one in calls), "first_s": firsts[side]["seconds"]}
        rows.append(found | {key: calls[-1][key] for key in ("graphs", "tokens")})
        print(json.dumps(found), flush=True)
    return rows


@torch.no_grad()
def compared(case: Case, eager: Any, tokens: Tokens) -> Row:
    """How many of the new tokens are eager's, and the largest gap of the others."""
    whole = torch.cat([case.tokens(), torch.tensor(tokens)], 1).to(DEVICE)
    equal, gap = 0, 0.0
    for part in whole.split(max(AT_ONCE // whole.shape[1], 1)):
        logits = eager(part[:, :-1], use_cache=False, logits_to_keep=case.new).logits.float()
        best, chosen = logits.amax(-1), logits.gather(-1, part[:, case.prompt :, None])[..., 0]
        equal += int((best == chosen).sum())
        gap = max(gap, float((best - chosen).max()))
    return {"equal": equal / (case.batch * case.new), "gap": gap}


def rows(cases: Sequence[Case], wanted: Sequence[str], rounds: int, seconds: float) -> list[Row]:
    found = []
    with tempfile.TemporaryDirectory() as directory:
        running = started(cases, wanted, Path(directory))
        firsts = first_calls(running, seconds)
        for case in cases:
            sides = {side: running[of, side][1] for of, side in firsts if of == case}
            measured = timed(case, sides, {side: firsts[case, side] for side in sides}, rounds)
            for pipe in sides.values():
                pipe.send(False)
            eager = case.build("eager")
            for row in measured:
                row |= compared(case, eager, row.pop("tokens"))
                print(json.dumps(row), flush=True)
            found += measured
            del eager
    return found


def table(rows: Sequence[Row]) -> str:
    lines = []
    for r in rows:
        peers = [o["tokens_s"] for o in rows if o["case"] == r["case"] and o["side"] != "attngen"]
        share = f"{r['tokens_s'] / max(peers):.2f}" if peers else "-"
        times = (f"{r['tokens_s']:.0f}", share, f"{r['step_ms']:.2f}", f"{r['prefill_ms']:.0f}", f"{r['first_s']:.0f}")
        lines.append((r["case"], r["side"], *times, str(r["graphs"]), f"{r['equal']:.2%}", f"{r['gap']:.3f}"))
    titles = ("case", "attention", "tokens/s", "of the faster peer", "ms a step", "prefill, ms", "first call, s", "graphs")
    return markdown((*titles, "eager's tokens", "largest gap of others"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"of {','.join(SIDES)}")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256, help="new tokens, at least 2")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="for first calls, which compile; a side that takes longer is left out"
    )
    parser.add_argument("--small", action="store_true", help="a narrow model")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    sizes = (options.prompt, options.new, options.layers, options.vocabulary, options.dtype, options.small)
    cases = [Case(int(batch), *sizes) for batch in options.batches.split(",")]
    found = rows(cases, options.sides.split(","), options.rounds, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    import transformers

    here = where() if DEVICE == "cuda" else "CPU"
    rounds = f"{options.rounds} round{'s' * (options.rounds != 1)}"
    text = f"{here}, transformers {transformers.__version__}, {rounds}\n\n{table(found)}"
    print(text)
    if options.write:
        write_between(options.write, "generate", text)


if __name__ == "__main__":
    main()
