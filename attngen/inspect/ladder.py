"""The curated ladder in `generated/`: textbook and golden set at once.

`python -m attngen.inspect.ladder` rewrites it; `--check` fails if a file is not current.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

from attngen.emit.append import Append, append_program
from attngen.emit.comments import Comments
from attngen.emit.emitter import emit
from attngen.emit.manifest import to_manifest
from attngen.emit.program import Program
from attngen.keywords import ScheduleName
from attngen.language import define, load_file
from attngen.plan.arch import ARCHES
from attngen.plan.plan import Direction, Plan
from attngen.schedules import choose
from attngen.shipped import spec_directory
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.dtypes import BF16, FP32
from attngen.spec.gradient import QKV, differentiable

# The tour's kernels of gpt2 are chosen for reading: their tiles are stated, so that they, and the steps from rung to rung, do
# not follow the fastest plans.
TOUR: dict[tuple[ScheduleName, str], KernelRequest] = {
    ("fused", "sm_80"): KernelRequest("fused", 128, 64, 2),
    ("wgmma", "sm_90a"): KernelRequest("wgmma", 128, 128, 2),
    ("hopper", "sm_90a"): KernelRequest("hopper", 128, 128, 3),
}

# (spec, schedule, architecture), in reading order.
LADDER: tuple[tuple[str, ScheduleName, str], ...] = (
    ("gpt2", "naive", "sm_80"),
    ("gpt2", "tiled", "sm_80"),
    ("gpt2", "fused", "sm_80"),
    ("gpt2", "wgmma", "sm_90a"),
    ("gpt2", "hopper", "sm_90a"),
    ("cross_attention", "naive", "sm_75"),
    ("cross_attention", "tiled", "sm_75"),
    ("cross_attention", "fused", "sm_75"),
    ("llama_gqa", "fused", "sm_80"),
    ("mistral_window", "fused", "sm_86"),
    ("alibi", "fused", "sm_89"),
    ("prefix_lm", "fused", "sm_80"),
    ("packed_documents", "fused", "sm_90a"),
    ("gemma_softcap", "fused", "sm_80"),
    ("gpt_oss_sinks", "fused", "sm_90a"),
    ("head_dim_80", "fused", "sm_120a"),
    ("retention", "fused", "sm_100a"),
    ("mistral_window", "decode", "sm_90a"),
    ("llama_gqa", "decode", "sm_90a"),
    ("fp8_cache", "decode", "sm_90a"),
    ("latent_decode", "decode", "sm_90a"),
)
PAGED = ("llama_gqa", "decode")  # with keys in pages

# (spec, schedule, architecture) of the backwards, which compute the gradients of q, k, v and of all captured tensors, each with
# the same bits in every run: the kernels of all schedules then have the same owners of sums, and a `diff` of two is short.
BACKWARD: tuple[tuple[str, ScheduleName, str], ...] = (
    ("gpt2", "naive", "sm_80"),
    ("gpt2", "tiled", "sm_80"),
    ("gpt2", "fused", "sm_80"),
    ("gpt2", "hopper", "sm_90a"),
    ("alibi", "naive", "sm_80"),
    ("packed_documents", "fused", "sm_90a"),
    ("alibi", "fused", "sm_80"),
    ("cross_attention", "fused", "sm_75"),
)


def planned(spec_name: str, schedule: ScheduleName, arch: str, direction: Direction = "forward") -> tuple[AttentionSpec, Plan]:
    """A shipped spec as a file of the ladder has it, and its plan: of gpt2's forward with the tour's tile."""
    (spec,) = load_file(spec_directory() / f"{spec_name}.attn")
    if direction == "backward":
        wanted = (*QKV, *differentiable(spec))
        return spec, choose(spec, ARCHES[arch], schedule, wanted=wanted, deterministic=True)
    if spec_name == "gpt2":
        spec = replace(spec, kernel=TOUR.get((schedule, arch), spec.kernel))
    if (spec_name, schedule) == PAGED:
        spec = replace(spec, kernel=KernelRequest(schedule, storage="paged"))
    return spec, choose(spec, ARCHES[arch], schedule)


def planned_rotary() -> list[tuple[AttentionSpec, Plan]]:
    """A spec whose rows are rotated, and the plans of both directions."""
    tables = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", 64)))
    spec = define(
        name="llama_rotary", dtype="bf16", head_dim=128, heads=(32, 8), mask="causal", inputs=tables,
        rotary="128 halves by cosines, sines",
    )  # fmt: skip
    return [(spec, choose(spec, ARCHES["sm_80"], "fused", direction=direction)) for direction in get_args(Direction)]


def planned_wide() -> tuple[AttentionSpec, Plan]:
    """A spec of wide heads, which hopper computes with another kernel."""
    spec = define(name="wide_heads", dtype="bf16", head_dim=512, heads=(8, 4), mask="causal")
    return spec, choose(spec, ARCHES["sm_90a"], "hopper")


def program(
    spec_name: str, schedule: ScheduleName, arch: str, direction: Direction = "forward", comments: Comments = "brief"
) -> Program:
    return emit(*planned(spec_name, schedule, arch, direction), comments)


def other_programs(comments: Comments = "brief") -> list[Program]:
    """Of specs that are not shipped: kernels that rotate rows, before and after those of a schedule, and of new rows that go to
    pages; and hopper's of wide heads."""
    append = Append(BF16, 128, 128, True, 128, False, "end", FP32)
    specs = (*planned_rotary(), planned_wide())
    return [*(emit(*one, comments) for one in specs), append_program(append, "sm_80", comments)]


def kernels() -> list[tuple[AttentionSpec, Plan]]:
    """The spec and plan of every file of `generated/` that is a kernel of a spec."""
    backwards = [planned(*entry, "backward") for entry in BACKWARD]
    return [*(planned(*entry) for entry in LADDER), *backwards, *planned_rotary(), planned_wide()]


def ladder() -> dict[str, Program]:
    """Every file of the ladder by its name in `generated/`."""
    programs = [*(program(*entry) for entry in LADDER), *(program(*entry, "backward") for entry in BACKWARD)]
    return {f"{one.name}.cu": one for one in programs}


def files() -> dict[str, str]:
    """The texts of `generated/` by file name: each kernel and its manifest."""
    sources = ladder() | {f"{one.name}.cu": one for one in other_programs()}
    return {name: source.text for name, source in sources.items()} | {
        name.replace(".cu", ".json"): to_manifest(source) for name, source in sources.items()
    }


def main(arguments: list[str]) -> int:
    """Writes the ladder; with --check, prints the files that are not current, and returns 1 if there are any."""
    directory = Path("generated")
    wanted = files()
    if arguments == ["--check"]:
        found = {p.name: p.read_text("utf-8") for p in directory.iterdir()} if directory.is_dir() else {}
        stale = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        for name in stale:
            print(f"generated/{name} is not current; run: python -m attngen.inspect.ladder")
        return 1 if stale else 0
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
