"""The curated ladder in `generated/`: textbook and golden set at once.

`python -m attngen.inspect.ladder` rewrites it; with `--check` it fails where a file is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attngen.emit.emitter import emit
from attngen.emit.kernel_source import KernelSource
from attngen.emit.manifest import to_manifest
from attngen.language import load_file
from attngen.plan import ARCHES, choose
from attngen.shipped import spec_directory

# (spec, kernel, architecture), in the order to read them.
LADDER: tuple[tuple[str, str, str], ...] = (
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
)


def ladder() -> dict[str, KernelSource]:
    """Every file of the ladder by the name it has in `generated/`."""
    sources = {}
    for spec_name, rung, arch in LADDER:
        (spec,) = load_file(spec_directory() / f"{spec_name}.attn")
        source = emit(spec, choose(spec, ARCHES[arch], rung))
        sources[f"{source.name}.cu"] = source
    return sources


def files() -> dict[str, str]:
    """The texts of `generated/` by file name: each kernel and its manifest."""
    sources = ladder()
    return {name: source.text for name, source in sources.items()} | {
        name.replace(".cu", ".json"): to_manifest(source) for name, source in sources.items()
    }


def main(arguments: list[str]) -> int:
    """Write the ladder, or with --check name what is not current; 1 where something is not."""
    directory = Path("generated")
    wanted = files()
    if arguments == ["--check"]:
        found = {p.name: p.read_text() for p in directory.iterdir()} if directory.is_dir() else {}
        stale = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        for name in stale:
            print(f"generated/{name} is not current; run: python -m attngen.inspect.ladder")
        return 1 if stale else 0
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
