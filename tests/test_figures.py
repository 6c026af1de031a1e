"""The pictures of documents are those that `python -m tests.figures` draws now, and documents show all of them."""

from __future__ import annotations

import re

import pytest

from attngen.drawings.concepts import EXAMPLE
from tests import figures, gallery, tiers
from tests.conftest import ROOT


@pytest.mark.parametrize("name", tiers.cases(figures.ALL, quick=lambda name: name in figures.QUICK, one_of=1))
def test_a_picture_is_current(name: str) -> None:
    assert figures.path_of(name).read_text() == figures.ALL[name]().svg(), f"run: python -m tests.figures {name}"


def test_documents_show_all_pictures_and_no_others() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {found for page in pages for found in re.findall(r"figures/(\w+)\.svg", page.read_text())}
    assert shown == {*figures.ALL} == {path.stem for path in figures.FIGURES.glob("*.svg")}


def test_the_row_of_the_picture_is_attention() -> None:
    assert EXAMPLE.scores[:3] == [1.0, 3.0, 2.0]
    assert sum(EXAMPLE.weights) == pytest.approx(1.0)
    assert EXAMPLE.weights[3] == 0.0
    assert EXAMPLE.output == pytest.approx([0.5795, 1.3305, 0.90997, 0.33476], abs=1e-3)


def test_the_gallery_is_current() -> None:
    assert gallery.PAGE.read_text() == gallery.current(), "run: python -m tests.gallery"
    assert {path.stem for path in gallery.PICTURES.glob("*.svg")} == {*gallery.specs()}
    for name in gallery.specs():
        assert (gallery.PICTURES / f"{name}.svg").read_text() == gallery.picture(name).svg(), name
