"""A checkout as an installation has it: a copy of the package with its bytecode and the cache entries of its wheel, which
commands need not make. Needs no network."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PARTS = ("attngen", "templates", "specs")
CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Installed:
    """The copy in `root`, called `name` in tables."""

    name: str
    root: Path

    def output(self, arguments: list[str], cache: str | Path | None = None) -> str:
        """What Python prints with these arguments, in a process that imports this copy. It keeps its kernels in the directory
        `cache`, or nowhere, and runs there, where no checkout would be imported instead. Raises CalledProcessError."""
        if cache is None:
            with tempfile.TemporaryDirectory() as cache:
                return self.output(arguments, cache)
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, "PYTHONPATH": str(self.root), "ATTNGEN_CACHE_DIR": str(cache)},
            cwd=cache,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@contextmanager
def installed(before: Path | None = None) -> Iterator[tuple[Installed, ...]]:
    """This checkout as "now", and another one, if there is one, as "before"; the copies are removed in the end."""
    with tempfile.TemporaryDirectory() as directory:
        yield tuple(
            _copied(name, checkout, Path(directory) / name)
            for name, checkout in {"now": CHECKOUT, "before": before}.items()
            if checkout is not None
        )


def _copied(name: str, checkout: Path, root: Path) -> Installed:
    for part in PARTS:
        shutil.copytree(checkout / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(root, quiet=2)
    version = Installed(name, root)
    if (root / "attngen" / "inspect" / "packaged_cache.py").exists():  # older wheels contain no entries
        packaged = root / "attngen" / "_cache"
        packaged.mkdir()
        version.output(["-m", "attngen.inspect.packaged_cache"], packaged)
    return version
