"""Libraries of `attngen package` on this GPU: their size, what their test programs find, and the host's time for a call.

    python benchmarks/library.py [--only gpt2,alibi] [--storage paged] [--arch sm_90a] [--ptx] [--write docs/package.md]

Each shipped spec (or those named) becomes a library of its own for `--arch`, by default the GPU's architecture. g++ builds it
with its test program. The largest error is that of all results of all its calls, as a part of what is allowed. Times are means
of bursts of 100 calls that the GPU's queue holds, with a counter of the caller: the least of 20 bursts, one library after the
other. With `--arch sm_80 --ptx` a newer GPU runs the plans for sm_80, compiled from PTX by its driver. With `--storage` the
specs have another storage than their own, pages of 64 rows. A spec without gradients has its forward alone. Needs g++, cuda.h.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from markers import write_between

from attngen.package.hub import CUDA, TORCH

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 4.0  # us, the goal for a call of one kernel
TIMED = {  # columns: the calls of a test program, by the words it prints
    "forward": "rows and keys forward",
    "decode": "few rows forward",
    "forward that saves": "rows and keys forward_saving",
    "backward": "rows and keys backward",
}


@dataclass
class Found:
    """What is known of one library. Times are microseconds, by the words of the call."""

    spec: str
    megabytes: float
    checks: int
    failed: int
    error: float  # the largest, as a part of what is allowed
    times: dict[str, float] = field(default_factory=dict)


def cuda_include() -> Path:
    """The directory of cuda.h: of a toolkit, or of the wheel of CUDA's runtime."""
    roots = [os.environ.get("CUDA_HOME", "/nonexistent"), *sorted(Path("/usr/local").glob("cuda*"))]
    roots += [Path(p) / "nvidia" / "cu13" for p in sys.path]
    for root in map(Path, roots):
        if (root / "include" / "cuda.h").is_file():
            return root / "include"
    raise SystemExit("cuda.h was not found; set CUDA_HOME, or pip install nvidia-cuda-runtime")


def in_storage(directory: Path, spec: str, storage: str) -> Path:
    """The file of a shipped spec in another storage, in `directory`."""
    from attngen.api import load
    from attngen.spec.print_attn import to_text

    one = load(spec)
    kernel = replace(one.kernel, storage=storage, page_size=64 if "paged" in storage else None)
    path = directory / f"{spec}.attn"
    path.write_text(to_text(replace(one, kernel=kernel)))
    return path


def built(directory: Path, include: Path, options: list[str], storage: str, spec: str) -> float:
    """Packages and compiles a spec; returns the megabytes of its code."""
    out = directory / spec
    named = str(in_storage(directory, spec, storage)) if storage else spec
    command = [sys.executable, "-m", "attngen", "package", named, "-o", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "--only forward packages the forward" in done.stderr:
        done = subprocess.run([*command, "--only", "forward"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    sources = [out / "attngen.cpp", out / "attngen_test.cpp", *sorted((out / "code").iterdir())]
    compile = ["g++", "-std=c++17", "-O2", f"-I{include}", *map(str, sources), "-ldl", "-lpthread", "-o", str(out / "test")]
    subprocess.run(compile, check=True)
    found = re.search(r"in all ([\d.]+) MB", printed)
    assert found is not None, printed
    return float(found[1])


def read(spec: str, megabytes: float, printed: str) -> Found:
    """What a test program printed."""
    errors = [(float(e), float(most)) for e, most in re.findall(r"error +(\S+) of the largest, +(\S+) allowed", printed)]
    totals = re.search(r"(\d+) checks, (\d+) failed", printed)
    assert totals is not None, printed
    times = re.findall(rf"{spec} (.*): ([\d.]+) us of the host a call", printed)
    worst = max((error / most for error, most in errors), default=0.0)
    return Found(spec, megabytes, int(totals[1]), int(totals[2]), worst, {words: float(us) for words, us in times})


def table(found: list[Found]) -> str:
    columns = ["attention", "code, MB", "checks", "failed", "largest error, of the allowed", *(f"{t}, us" for t in TIMED)]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in found:
        times = " | ".join(f"{one.times[words]:.1f}" if words in one.times else "-" for words in TIMED.values())
        lines.append(f"| {one.spec} | {one.megabytes:.2f} | {one.checks} | {one.failed} | {one.error:.2f} | {times} |")
    of_one = [one.times[TIMED["forward"]] for one in found if TIMED["forward"] in one.times]
    if of_one:
        goal = f"Goal: at most {LIMIT:.0f} us of the host for a forward of one kernel."
        lines.append(f"\n{goal} Forwards of several kernels take longer: {min(of_one):.1f} to {max(of_one):.1f} us here.")
    return "\n".join(lines)


def from_python(directory: Path, include: Path) -> str:
    """GPT-2's attention by the library's functions of torch tensors, as the package `kernels` loads them if it is installed,
    beside torch's in float64: the largest errors of O and of the gradients."""
    import torch

    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return "Python's headers are missing: the module for Python was not built"
    library = directory / "gpt2"
    sources = [library / "attngen_kernels.cpp", library / "attngen.cpp", *sorted((library / "code").iterdir())]
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include}", f"-I{headers}", "-ldl"]
    tree = directory / "hub" / "build" / f"{TORCH}-{CUDA}-{platform.machine()}-linux"
    shutil.copytree(library / "hub", tree)
    subprocess.run(["g++", *map(str, sources), *flags, "-o", str(tree / "attngen_kernels.abi3.so")], check=True)
    module, loaded = loaded_tree(directory / "hub", tree)
    found = []
    for q_len, kv_len in ((512, 512), (1, 512)):
        lengths = (q_len, kv_len, kv_len)
        q, k, v = (torch.randn(2, 12, n, 64, device="cuda", dtype=torch.float16, requires_grad=True) for n in lengths)
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        ours, exact = module.gpt2(q, k, v), torch.nn.functional.scaled_dot_product_attention(*doubles, is_causal=True)
        dout = torch.randn_like(ours)
        ours = (ours, *torch.autograd.grad(ours, (q, k, v), dout))
        exact = (exact, *torch.autograd.grad(exact, doubles, dout.double()))
        found.append(", ".join(f"{(a - b).abs().max().item():.1e}" for a, b in zip(ours, exact, strict=True)))
    return f"{loaded}: largest errors of O, dQ, dK, dV beside torch in float64 {found[0]}; of one row {found[1]}"


def loaded_tree(repository: Path, tree: Path) -> tuple[ModuleType, str]:
    """The package of a repository for Hugging Face's kernels, and by what it was loaded."""
    try:
        from kernels import __version__, get_local_kernel
    except ImportError:
        spec = importlib.util.spec_from_file_location("library_of_gpt2", tree / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module, "loaded without the package kernels"
    return get_local_kernel(repository), f"loaded by kernels {__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="specs, separated by commas")
    parser.add_argument("--storage", default="", help="the storage of the specs, by default their own")
    parser.add_argument("--arch", help="the architecture")
    parser.add_argument("--ptx", action="store_true", help="also as PTX")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    shipped = sorted(path.stem for path in (ROOT / "specs").glob("*.attn"))
    specs = options.only.split(",") if options.only else shipped
    import torch

    from attngen.device.cuda.device import arch_name

    arch = options.arch or arch_name(*torch.cuda.get_device_capability())
    flags = ["--arch", arch, *(["--ptx"] if options.ptx else [])]
    with tempfile.TemporaryDirectory() as directory:
        build = partial(built, Path(directory), cuda_include(), flags, options.storage)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sizes = list(pool.map(build, specs))
        found = []
        for spec, size in zip(specs, sizes, strict=True):
            command = [Path(directory) / spec / "test", "--time", spec]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found.append(read(spec, size, done.stdout))
            print(found[-1], flush=True)
        form = (f", storage {options.storage}" if options.storage else "") + (", from PTX" if options.ptx else "")
        text = f"{torch.cuda.get_device_name()}, {arch}{form}\n\n{table(found)}"
        print(text)
        if options.write:
            write_between(options.write, "library", text, arch)
        if "gpt2" in specs and not options.storage:
            print(from_python(Path(directory), cuda_include()))
    if any(one.failed for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
