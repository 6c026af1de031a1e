"""The documentation site: built strictly, whole, read without a network, in light and in dark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from tests.browser import PATIENCE
from tests.conftest import ROOT

pytestmark = pytest.mark.long(one_of=1)  # building the site takes long, and .ci/run builds it too
pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
CHAPTERS = {
    "README.md": "# The tour\n",
    "10_last.md": "# The last\n",
    "2_tiles.md": "# Tiles\n\n[Before](1_naive.md#one-thread-a-row), [the rest](../tour), [all of them](../../generated/).\n",
    "1_naive.md": "# One thread a row\n\n[A spec](../../specs/gpt2.attn), [what measures it](../../benchmarks/schedules.py), "
    "[to do](exercises/1_window.attn), [start](../../README.md#install).\n\n```\nattention a {\n    dtype fp16\n}\n```\n",
}


def build(config: Path, to: Path, reports: str = "") -> str:
    """What is wrong; not --quiet, which would keep MkDocs from counting its warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "--site-dir", str(to)]
    surroundings = {**os.environ, "ATTNGEN_REPORTS": reports}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    assert not build(ROOT / ".site" / "mkdocs.yml", directory, reports="gpt2")
    return directory


def copied(to: Path) -> Path:
    """A copy of what the site is made of."""
    for name in (".site", "docs", "specs", "generated", "benchmarks"):
        shutil.copytree(ROOT / name, to / name)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, to)
    (to / "attngen").symlink_to(ROOT / "attngen")
    return to


def test_every_document_spec_and_generated_file_has_a_page(site: Path) -> None:
    documents = [p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")]
    documents = [p.with_name("index") if p.name == "README" else p for p in documents]
    sources = [p.relative_to(ROOT) for p in (*ROOT.glob("specs/**/*.attn"), *ROOT.glob("generated/*.cu"))]
    for page in [
        *documents,
        *sources,
        "index",
        "reference",
        "first_kernel.ipynb",
        "specs/index",
        "specs/models/index",
        "generated/index",
    ]:
        assert (site / f"{page}.html").exists(), page
    for source in sources:
        text = re.sub(r"<[^>]+>", "", (site / f"{source}.html").read_text())
        assert (ROOT / source).read_text().split("\n", 1)[0] in text


def test_the_gallery_links_to_the_reports_that_are_there(site: Path) -> None:
    """And shows the command of the others."""
    gallery, report = ((site / name).read_text() for name in ("gallery.html", "reports/gpt2.html"))
    assert re.findall(r'href="(reports/[^"]*)"', gallery) == ["reports/gpt2.html"]
    assert "<code>attngen report alibi</code>" in gallery
    assert "gpt2_fused" in report
    assert "wgmma" in report or "mma" in report


def test_the_commands_of_tables_are_shown(site: Path) -> None:
    page = (site / "tables" / "hopper.html").read_text()
    assert "<code>python benchmarks/hopper.py --only plain --write docs/tables</code>" in page
    assert "begin (python" not in re.sub(r"<!--.*?-->", "", page, flags=re.S)


def test_specs_are_highlighted(site: Path) -> None:
    for page in ("index", "specs/gpt2.attn"):
        text = (site / f"{page}.html").read_text()
        assert re.search(r'<span class="k">\s*mask</span>', text), page
        assert '<span class="nb">causal</span>' in text


@pytest.mark.long(one_of=1)
def test_links_lead_to_pages_of_sources(tmp_path: Path) -> None:
    """Chapters are in the order of their names; what they link to is shown, wherever it lies in the repository."""
    root = copied(tmp_path / "copy")
    tour = root / "docs" / "tour"
    if tour.exists():
        shutil.rmtree(tour)
    (tour / "exercises").mkdir(parents=True)
    shutil.copy(ROOT / "specs" / "mistral_window.attn", tour / "exercises" / "1_window.attn")
    for name, text in CHAPTERS.items():
        (tour / name).write_text(text)
    for page in (root / "README.md", *(root / "docs").glob("*.md")):  # they link to the chapters that are no longer there
        page.write_text(re.sub(r"\]\((docs/|)tour[^)]*\)", r"](\1tour)", page.read_text()))
    assert not build(root / ".site" / "mkdocs.yml", tmp_path / "site")
    names = ("tour/1_naive", "tour/2_tiles", "benchmarks/schedules.py", "tour/exercises/1_window.attn")
    first, second, measures, exercise = ((tmp_path / "site" / f"{name}.html").read_text() for name in names)
    for link in ("../specs/gpt2.attn", "../benchmarks/schedules.py", "exercises/1_window.attn"):
        assert f'href="{link}.html"' in first
    assert 'href="../index.html#install"' in first
    assert '<span class="k">    dtype</span>' in first
    assert '<link rel="prev" href="1_naive.html">' in second
    assert '<link rel="next" href="10_last.html">' in second
    assert '<h1 id="benchmarksschedulespy">benchmarks/schedules.py' in measures
    assert '<span class="nc">mistral_window</span>' in exercise


@pytest.mark.long(one_of=1)
def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    root = copied(tmp_path / "copy")
    with (root / "docs" / "masks.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](../specs/nothing.attn) [c](language.md#neither)\n")
    (root / "docs" / "left_out.md").write_text("# Not in nav\n")
    wrong = build(root / ".site" / "mkdocs.yml", tmp_path / "site")
    for link in ("nowhere.md", "nothing.attn", "#neither", "left_out.md"):
        assert re.search(rf"WARNING.*{link}" if link != "left_out.md" else link, wrong), link
    assert "4 warnings" in wrong


@pytest.mark.browser
def test_it_is_read_and_searched_from_the_disk(site: Path, browser: Any) -> None:
    """No page asks for anything of another machine, or has an error; both colour schemes are there."""
    backgrounds = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, offline=True)
        context.set_default_timeout(PATIENCE)
        tab, requests, wrong = context.new_page(), [], []
        tab.on("request", lambda request, requests=requests: requests.append(request.url))
        tab.on("requestfailed", lambda request, wrong=wrong: wrong.append((request.url, request.failure)))
        tab.on("pageerror", lambda error, wrong=wrong: wrong.append(("an error", str(error))))
        for page in ("generated/gpt2_tiled.cu", "reference", "index"):
            tab.goto((site / f"{page}.html").as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
        tab.locator(".md-search__input").click()
        tab.keyboard.type("softcap")
        tab.locator(".md-search-result__item").first.wait_for()
        # A tab that leaves a page gives up what it was still asking for, its icon say: not a failure of the page.
        assert [(what, why) for what, why in wrong if why != "net::ERR_ABORTED"] == []
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        files = {Path(url2pathname(urlsplit(url).path)) for url in requests if url.startswith("file:")}
        assert [path for path in sorted(files) if not path.exists()] == []
        backgrounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert len(backgrounds) == 2
