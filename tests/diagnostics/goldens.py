"""What each wrong spec gets: an `.attn` and, beside it, the `.err` that a user sees.

    python -m tests.diagnostics.goldens

rewrites every `.err`; read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

from attngen.diagnostics import DiagnosticError
from attngen.language import load_path
from attngen.plan.arch import ARCHES
from attngen.schedules import choose

HERE = Path(__file__).parent
NAMES = sorted(p.stem for p in HERE.glob("*.attn"))


def error_of(name: str) -> DiagnosticError:
    """The error of loading and planning the spec called `name`."""
    path = HERE / f"{name}.attn"
    try:
        for one in load_path(path):
            try:
                choose(one.spec, ARCHES["sm_80"])
            except DiagnosticError as error:
                raise error.located(one.spans) from None
    except DiagnosticError as error:
        return error
    raise AssertionError(f"{path.name} is a right spec")


def rendered(name: str) -> str:
    """The text without colour, whose paths are those of the file alone."""
    return error_of(name).render().replace(str(HERE) + "/", "")


if __name__ == "__main__":
    for name in NAMES:
        (HERE / f"{name}.err").write_text(rendered(name))
