"""Checks what an sdist and a wheel contain: the files that git has, and in the wheel nothing else.

    python .ci/distributions.py DIRECTORY

DIRECTORY has one of each. The exit code is 1 if a file is missing, or should not be in the wheel. Files in the sdist that git
does not have are named: build a release in a fresh clone.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IN_WHEEL = {"attngen/": "attngen/", "templates/": "attngen/_templates/", "specs/": "attngen/_specs/"}  # folders of the checkout
CACHE = "attngen/_cache/"  # made by hatch_build.py, which counts its entries
LEFT = {".git", ".venv", "__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "build", "dist", "out"}
OF_INSTALLERS = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def tracked_files() -> set[str]:
    """The files that git has; without git or its data, all of the checkout's but those that tools leave there."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return {name for name in listed.split("\0") if name}
    except (OSError, subprocess.CalledProcessError):
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return {str(path) for path in found if not LEFT.intersection(path.parts)}


def difference(what: str, found: set[str], expected: set[str]) -> list[str]:
    missing, stray = sorted(expected - found), sorted(found - expected)
    return [f"{what} lacks {name}" for name in missing] + [f"{what} has {name}, which nobody needs there" for name in stray]


def main(directory: Path) -> int:
    tracked = tracked_files()
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    cached = {name for name in names if name.startswith(CACHE)}
    package = {new + name.removeprefix(old) for old, new in IN_WHEEL.items() for name in tracked if name.startswith(old)}
    wrong = difference("the sdist", in_sdist & tracked, tracked)
    wrong += difference("the wheel", names - described - cached, package)
    wrong += difference("the wheel's metadata", {name.partition("/")[2] for name in described}, OF_INSTALLERS)
    wrong += [] if cached else [f"the wheel lacks {CACHE}"]
    for name in sorted(in_sdist - tracked - {"PKG-INFO"}):
        print(f"the sdist has {name}, which git does not have")
    print("\n".join(wrong) or f"{sdist.name}: {len(in_sdist)} files; {wheel.name}: {len(names)} files")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
