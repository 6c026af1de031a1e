"""Whether this checkout's kernels compile to the same machine code as another checkout's, and as fast. Needs no GPU.

    git worktree add --detach ../before REVISION
    python benchmarks/same_code.py ../before [--specs gpt2,alibi] [--kernels fused,hopper] [--rounds 3]

Every file of `generated/`, or with `--specs` the kernels that `attngen build` writes for these specs, is emitted by both
checkouts, compiled by the same NVRTC, and compared by the instructions of each kernel: names and comments may differ.
Exit code 1: some code differs, spills more, or is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from words import geometric_mean

from attngen.device.cuda.compiler import Compiled, compile_text
from attngen.emit.manifest import from_manifest

HERE = Path(__file__).resolve().parent.parent
HOPPER = ("wgmma", "hopper")


def instructions(cubin: bytes) -> dict[int, bytes]:
    """The code of each kernel of an ELF file, in the order of their sections."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    text = headers[names][4]
    named = ((cubin[text + h[0] : cubin.index(b"\0", text + h[0])], h) for h in headers)
    return dict(enumerate(sorted(cubin[h[4] : h[4] + h[5]] for name, h in named if name.startswith(b".text."))))


def built(checkout: Path, specs: list[str], kernels: list[str], out: Path) -> Path:
    """The folder of the files of `checkout`: those it has in generated/, or those it builds."""
    if not specs:
        return checkout / "generated"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    for kernel in kernels:
        arch = "sm_90a" if kernel in HOPPER else "sm_80"
        for spec in specs:
            path = str(checkout / "specs" / f"{spec}.attn")
            command = [sys.executable, "-m", "attngen", "build", path, "--kernel", kernel, "--arch", arch, "-o", str(out)]
            done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
            if done.returncode:  # fp32 has no wgmma, for instance: then neither checkout has the file
                print(f"{spec} {kernel}: {done.stderr.strip().splitlines()[0]}", file=sys.stderr)
    return out


def compiled(folder: Path, name: str) -> tuple[Compiled, float]:
    """The kernel of a file, and the seconds of its compilation."""
    source = from_manifest((folder / f"{name}.json").read_text(), (folder / f"{name}.cu").read_text())
    start = time.perf_counter()
    return compile_text(source), time.perf_counter() - start


def spills(kernel: Compiled) -> int:
    return sum(r.spill_store_bytes + r.spill_load_bytes for r in kernel.resources())


def rows(before: Path, now: Path, rounds: int) -> Iterator[dict[str, object]]:
    old, new = ({p.stem for p in folder.glob("*.cu")} for folder in (before, now))
    for name in sorted(old ^ new):
        yield {"name": name, "same": False, "what": "only before" if name in old else "new"}
    for name in sorted(old & new):
        runs = [(compiled(before, name), compiled(now, name)) for _ in range(rounds)]
        (a, _), (b, _) = runs[0]
        seconds = [min(run[side][1] for run in runs) for side in (0, 1)]
        same = instructions(a.code) == instructions(b.code)
        registers = [max(r.registers for r in k.resources()) for k in (a, b)]
        yield {
            "name": name,
            "same": same,
            "what": f"registers {registers[0]} -> {registers[1]}, spills {spills(a)} -> {spills(b)}",
            "more_spills": spills(b) > spills(a),
            "seconds": seconds,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the folder of another checkout")
    parser.add_argument("--specs", default="", help="names of specs/, or all; default: the files of generated/")
    parser.add_argument("--kernels", default="naive,tiled,fused,wgmma,hopper")
    parser.add_argument("--rounds", type=int, default=1, help="compilations of each file; the fastest counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    every = sorted(p.stem for p in (HERE / "specs").glob("*.attn"))
    specs = every if options.specs == "all" else [s for s in options.specs.split(",") if s]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        folders = [Path(directory, side) for side in ("before", "now")]
        for folder in folders:
            folder.mkdir()
        before, now = (
            built(checkout.resolve(), specs, options.kernels.split(","), folder)
            for checkout, folder in zip((options.before, HERE), folders, strict=True)
        )
        for row in rows(before, now, options.rounds):
            found.append(row)
            times = "{:.2f} s -> {:.2f} s".format(*row["seconds"]) if "seconds" in row else ""  # type: ignore[misc]
            print(f"{row['name']:32} {'same' if row['same'] else 'DIFFERS'}  {row['what']}  {times}", flush=True)
    timed = [row["seconds"] for row in found if "seconds" in row]
    if timed:
        print(f"compile time: {geometric_mean([b / a for a, b in timed]):.3f} of before (geometric mean)")  # type: ignore[misc]
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(not row["same"] or row.get("more_spills") for row in found))


if __name__ == "__main__":
    sys.exit(main())
