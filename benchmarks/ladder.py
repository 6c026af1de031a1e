"""docs/ladder*.md: the steps of `attngen ladder` with predictions and counts, and their rates on the GPU.

    python benchmarks/ladder.py --only steps --of backward --write docs/ladder_backward.md      needs no GPU
    python benchmarks/ladder.py --only rates --of backward --write docs/ladder_backward.md      needs a GPU

`--of` is forward (docs/ladder.md), backward or decoding. Rates are medians of times by CUDA events, the L2 cache flushed before
each call, steps in random order within each round. TFLOP/s count the pairs that the mask keeps, 4 * D operations each, or
10 * D of a backward; decoding states the rate at which K and V are read, each once. The schedules that follow are measured in
the same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from markers import write_between

import attngen
from attngen.device.arrays import view
from attngen.emit.program import MULTIPROCESSORS
from attngen.language import load_file, load_text
from attngen.lessons.ladder import LADDERS, Rung, rungs
from attngen.lessons.running import counted, launches, program, shapes
from attngen.lessons.step import COUNTS, SIZES, Ladder
from attngen.shipped import spec_directory
from attngen.spec.attention import AttentionSpec

Arrays = dict[str, Any]  # tensors of torch by the names of the ladder, without batch

STEP = "attention step { dtype fp16 head_dim 64 }"  # decoding: one row that sees all keys, as docs/ladder_decoding.md has it
# The problem on a GPU (q_heads, kv_heads, q_len, kv_len), and the schedules that follow.
RATED: dict[str, tuple[tuple[int, int, int, int], tuple[str, ...]]] = {
    "forward": ((16, 16, 4096, 4096), ("tiled", "fused", "wgmma", "hopper")),
    "backward": ((16, 16, 4096, 4096), ("tiled", "fused", "hopper")),
    "decoding": ((32, 8, 1, 65536), ("fused", "decode")),
}


def spec_of(ladder: Ladder) -> tuple[AttentionSpec, str]:
    """The spec that the page shows, and what the command calls it."""
    if ladder.name == "decoding":
        return load_text(STEP)[0], "step.attn --decoding"
    return load_file(spec_directory() / "gpt2.attn")[0], "gpt2" if ladder.name == "forward" else f"gpt2 --{ladder.name}"


def steps(ladder: Ladder) -> str:
    """What bounds the step before, the idea, the prediction and the counts of each step."""
    spec, called = spec_of(ladder)
    parts: list[str] = []
    before: Rung | None = None
    for rung in rungs(spec, ladder):
        step, counts = rung.step, counted(rung).counts
        what, formula, why = step.predicted
        parts += [f"### {step.number}. {step.title[0].upper()}{step.title[1:]}", ""]
        if before is not None:
            removed, added = rung.changed(before)
            parts += [f"*What bounds step {before.step.number}:* {step.bound}", ""]
            command = f"`attngen ladder {called} --diff {step.number}`"
            parts += [f"*The change*, {removed} lines removed and {added} added ({command}): {step.idea}"]
        else:
            parts += [f"*The kernel* (`attngen ladder {called} --step 1`): {step.idea}"]
        result = f"{formula} = {eval(formula):,.0f} {COUNTS[what]}"
        parts += ["", f"*Prediction:* {why} {result}. *Counted:* {counts[what]:,}.", ""]
        parts += [
            f"| {' | '.join(column.replace('_', ' ') for column in ladder.columns)} |",
            "|---:" * len(ladder.columns) + "|",
        ]
        parts += [f"| {' | '.join(f'{counts[column]:,}' for column in ladder.columns)} |", ""]
        before = rung
    return "\n".join(parts).rstrip()


def rates(ladder: Ladder, rounds: int) -> str:
    import torch

    from attngen.bench.measure import measure
    from attngen.device.select import device_by_name

    (spec, _), (problem, after) = spec_of(ladder), RATED[ladder.name]
    sizes = dict(zip(SIZES, problem, strict=True))
    device, calls, differences = device_by_name("cuda"), dict[str, Callable[[], Any]](), dict[str, float]()
    given, exact = inputs(spec, ladder, sizes)
    for rung in rungs(spec, ladder):
        source = replace(program(rung), arch=device.arch)
        kernel = device.compile(source)
        types = {a.name: torch.float32 if a.element == "float" else torch.float16 for a in ladder.arrays}
        arrays = {
            name: given[name] if name in given else torch.empty(shape, device="cuda", dtype=types[name])
            for name, shape in shapes(rung, sizes).items()
        }
        known = {**sizes, MULTIPROCESSORS: device.multiprocessors}
        launched = launches(rung, source, known, {name: array.data_ptr() for name, array in arrays.items()})
        label = f"{rung.step.number}. {rung.step.title}"
        # the arrays too: they live as long as the call
        calls[label] = lambda kernel=kernel, launched=launched, arrays=arrays: kernel.launch(launched, ())
        calls[label]()
        torch.cuda.synchronize()
        differences[label] = max(float((arrays[name].float() - one.float()).abs().max()) for name, one in exact.items())
    for schedule in after:
        calls[schedule] = (backward_call if ladder.name == "backward" else forward_call)(spec, schedule, given)
    about = f"{torch.cuda.get_device_name()}: fp16, {heads_of(sizes)} of {spec.head_dim}, {lengths_of(sizes)}"
    rate, unit = rate_of(spec, ladder, sizes)
    lines = [
        f"{about}; median of {rounds}.",
        "",
        f"| | ms | {unit} | largest difference from {after[-1]} |",
        "|---|---:|---:|---:|",
    ]
    for label, timing in measure(calls, rounds).items():
        difference = f"{differences[label]:.1e}" if label in differences else "-"
        lines.append(f"| {label} | {timing.median:.3f} | {rate / (timing.median * 1e9):.2f} | {difference} |")
    return "\n".join(lines)


def inputs(spec: AttentionSpec, ladder: Ladder, sizes: dict[str, int]) -> tuple[Arrays, Arrays]:
    """The arrays of a call without batch, and the results of the last schedule that follows, by the names of the ladder."""
    import torch

    def randn(heads: str, length: str) -> torch.Tensor:
        return torch.randn(sizes[heads], sizes[length], spec.head_dim, device="cuda", dtype=torch.float16)

    given: Arrays = {"Q": randn("q_heads", "q_len"), "K": randn("kv_heads", "kv_len"), "V": randn("kv_heads", "kv_len")}
    last = RATED[ladder.name][1][-1]
    if ladder.name != "backward":
        return given, {"O": forward_call(spec, last, given)()[0]}
    out, lse = forward_call(replace(spec, lse=True), "fused", given)()
    given |= {"dO": randn("q_heads", "q_len"), "O": out[0], "lse": lse[0]}
    return given, {f"d{name.upper()}": array[0] for name, array in backward_call(spec, last, given)().items()}


def forward_call(spec: AttentionSpec, schedule: str, given: Arrays, device: str = "cuda") -> Callable[[], Any]:
    compiled = attngen.compile(spec, kernel=schedule, device=device)
    return lambda: compiled(*(given[name][None] for name in "QKV"))


def backward_call(spec: AttentionSpec, schedule: str, given: Arrays, device: str = "cuda") -> Callable[[], dict[str, Any]]:
    """The kernels of a backward alone: the forward's results are computed now."""
    compiled = attngen.compile(spec, kernel=schedule, device=device)
    backward = compiled.gradients()
    views = {name: view(given[of][None], name) for name, of in {"q": "Q", "k": "K", "v": "V", "dout": "dO"}.items()}
    saved = compiled.saving().run({name: views[name] for name in "qkv"}, {})
    views |= {name: view(array, name) for name, array in saved.items()}
    return lambda: backward.run(backward.inputs_of(views), {})


def rate_of(spec: AttentionSpec, ladder: Ladder, sizes: dict[str, int]) -> tuple[float, str]:
    """What a call does, per millisecond of 1e9 to the unit: operations, or bytes of K and V."""
    if ladder.name == "decoding":
        return 2.0 * sizes["kv_heads"] * sizes["kv_len"] * spec.head_dim * 2, "TB/s of K and V"
    pairs = sizes["q_heads"] * sizes["q_len"] * (sizes["q_len"] + 1) // 2
    return (4.0 if ladder.name == "forward" else 10.0) * spec.head_dim * pairs, "TFLOP/s"


def heads_of(sizes: dict[str, int]) -> str:
    q_heads, kv_heads = sizes["q_heads"], sizes["kv_heads"]
    return f"{q_heads} heads" if q_heads == kv_heads else f"{q_heads} query heads over {kv_heads}"


def lengths_of(sizes: dict[str, int]) -> str:
    q_len, kv_len = sizes["q_len"], sizes["kv_len"]
    return f"{q_len} rows and keys, causal" if q_len == kv_len else f"{q_len} row, {kv_len} keys"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("steps", "rates"), required=True)
    parser.add_argument("--of", choices=tuple(LADDERS), default="forward", help="the ladder (default: forward)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--write", type=Path, help="the page whose part between the markers is replaced")
    options = parser.parse_args()
    ladder = LADDERS[options.of]
    text = steps(ladder) if options.only == "steps" else rates(ladder, options.rounds)
    print(text)
    if options.write:
        write_between(options.write, "ladder", text, options.only)


if __name__ == "__main__":
    main()
