"""What each wrong spec gets: an `.attn` and, beside it, the `.err` that a user sees.

    python -m tests.diagnostics.goldens

rewrites every `.err`; read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language import load_source
from attngen.plan.arch import ARCHES
from attngen.schedules import choose, default_arch
from attngen.source import SourceFile

HERE = Path(__file__).parent
NAMES = sorted(p.stem for p in HERE.glob("*.attn"))


def error_of(name: str) -> DiagnosticError:
    """The error of loading and planning the spec called `name`."""
    path = HERE / f"{name}.attn"
    found = mistakes_of(path.read_text(), str(path))
    assert found, f"{path.name} is a spec that nothing is said about"
    return DiagnosticError(*found)


def mistakes_of(text: str, name: str = "<text>") -> tuple[Diagnostic, ...]:
    """The mistakes of loading and planning the specs of `text`; if there are none, the warnings."""
    try:
        loaded = load_source(SourceFile(name, text))
        for one in loaded:
            try:
                choose(one.spec, ARCHES[default_arch(one.spec.kernel.schedule)])
            except DiagnosticError as error:
                raise error.located(one.spans) from None
    except DiagnosticError as error:
        return error.diagnostics
    return tuple(warning for one in loaded for warning in one.suspicions())


def rendered(name: str) -> str:
    """The text without colour, whose paths are those of the file alone."""
    return error_of(name).render().replace(str(HERE) + "/", "")


if __name__ == "__main__":
    for name in NAMES:
        (HERE / f"{name}.err").write_text(rendered(name))
