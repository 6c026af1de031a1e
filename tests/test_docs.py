"""Documents: their Python runs, and prints what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.diagnostics import DiagnosticError
from attngen.language import load_source, load_text
from attngen.source import SourceFile
from attngen.spec.operators import FUNCTIONS
from tests import tiers
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = ["python", "masks", "coming_from", "gradients", "several_gpus"]  # pages whose Python takes seconds
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S))
    if re.search(r"^attention \w+ \{", block, re.M)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_specs_in_documents_are_right(block: str) -> None:
    assert load_text(block)


@pytest.mark.parametrize("page", tiers.cases([*SHORT, "serving"], quick=SHORT))
def test_python_in_documents_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after another."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert blocks
    for found in blocks:
        line = text.count("\n", 0, found.start()) + 1
        path = tmp_path / f"{page}_{line}.py"  # a file, so that functions of the page have a source
        path.write_text("\n" * line + found[1])
        exec(compile(path.read_text(), str(path), "exec"), names)


@pytest.mark.long(one_of=1)
def test_the_notebook_shows_what_happens() -> None:
    """Every cell prints the stored output; `python -m tests.notebook` updates it."""
    pytest.importorskip("nbclient")
    from tests.notebook import executed, outputs, stored

    cells = stored().cells
    assert sum(cell.cell_type == "code" for cell in cells) == 10
    assert not re.search(r"(?:from|import) attngen\.", "\n".join(cell.source for cell in cells))  # public names only
    for old, new in zip(stored().cells, executed().cells, strict=True):
        assert outputs(old) == outputs(new), old.source


def test_readme_shows_the_diagnostic_that_a_user_sees() -> None:
    page = (ROOT / "README.md").read_text()
    shown = re.search(r"^```\n(error\[.*?)^```", page, re.M | re.S)
    spec = re.search(r"^```\n(attention mine .*?)^```", page, re.M | re.S)
    assert shown is not None
    assert spec is not None
    with pytest.raises(DiagnosticError) as caught:
        load_source(SourceFile("mine.attn", spec[1].replace("causal", "causl")))
    assert str(caught.value) == shown[1]


def test_the_language_page_names_every_function_and_definition() -> None:
    from attngen.language.prelude import prelude

    page = (ROOT / "docs" / "language.md").read_text()
    for name in [*FUNCTIONS, *prelude()]:
        assert re.search(rf"\b{name}\b", page), name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_no_conflict_of_a_merge_is_left() -> None:
    for page in [*PAGES, *(ROOT / "docs" / "tour").rglob("*.*")]:
        assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), re.M), page


def test_the_architecture_is_read_in_one_sitting() -> None:
    """At most 150 lines, and one picture."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.splitlines()) <= 150
    assert text.count("```") == 2
