"""The one place that knows where the CUDA text lies: `templates/` beside the package in a checkout, inside it in a wheel."""

from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


@cache
def template_directory() -> Path:
    """The directory with `kernels/`, `parts/` and `primitives/`."""
    for candidate in (PACKAGE / "_templates", PACKAGE.parent / "templates"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError("attngen's templates are missing: the installation is incomplete; reinstall attngen")
