"""How long `attngen build` takes: the whole process, median of many.

python benchmarks/build_time.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from statistics import median


def seconds(spec: str, directory: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "attngen", "build", spec, "-o", directory], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("specs", nargs="*", default=["gpt2", "packed_documents", "t5_relative_bias"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for spec in options.specs:
            seconds(spec, directory)
            times = [seconds(spec, directory) for _ in range(options.rounds)]
            spread = f"{min(times):.3f} to {max(times):.3f}"
            print(f"attngen build {spec}: median {median(times):.3f} s of {options.rounds}, {spread}")


if __name__ == "__main__":
    main()
