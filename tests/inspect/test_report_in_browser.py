"""The report as a reader meets it, in headless Chromium, on a laptop's screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from attngen.device.cuda.line_table import MachineCode, MachineLine, machine_code
from attngen.inspect.machine_text import spec_lines
from attngen.language.load import load_path
from attngen.plan import ARCHES
from attngen.schedules import choose
from tests import tiers
from tests.browser import PATIENCE
from tests.conftest import ROOT
from tests.harness import cli, emitted, shipped

pytestmark = pytest.mark.browser
LAPTOP = {"width": 1366, "height": 768}
SCREENS = {1400: 900, 390: 844}  # height by width, of a desktop and of a phone
COLUMNS = ("spec", "cuda", "sass", "ptx")


PAGES = {
    "gemma_softcap_fused": ("gemma_softcap", "--kernel", "fused"),
    "gpt2_naive": ("gpt2", "--kernel", "naive", "--no-check"),
    "gpt2_tiled": ("gpt2", "--kernel", "tiled", "--no-check"),
    "cross_attention_fused": ("cross_attention", "--kernel", "fused", "--no-check", "--arch", "sm_75"),
    "packed_documents_hopper": ("packed_documents", "--kernel", "hopper", "--no-check"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a name of PAGES, written by the first test that reads it."""
    directory = tmp_path_factory.mktemp("pages")

    def page(name: str) -> Path:
        path = directory / f"{name}.html"
        if not path.exists():
            result = cli("report", *PAGES[name], "-o", str(path))
            assert result.exit_code == 0, result.output
        return path

    return page


class Reader:
    """A tab with a page, and what went wrong in it."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light", screen: dict[str, int] = LAPTOP) -> None:
        self.context = browser.new_context(viewport=screen, color_scheme=scheme, offline=True)
        self.context.set_default_timeout(PATIENCE)
        self.tab = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())

    def click(self, column: str, line: int) -> None:
        """On the line's number, which is always in sight."""
        self.tab.locator(f"#{column}-{line} .n").click()

    def marked(self, column: str, how: str = "strong") -> set[int]:
        lines = f"[...document.querySelectorAll('#{column} .line.{how}')].map(row => Number(row.dataset.n))"
        return set(self.tab.evaluate(lines))

    def focused(self) -> str:
        return str(self.tab.evaluate("document.activeElement.id || document.activeElement.closest('section')?.id || ''"))

    def in_sight(self, column: str, line: int) -> bool:
        box, row = (self.tab.locator(s).bounding_box() for s in (f"#{column}-lines", f"#{column}-{line}"))
        assert box is not None
        assert row is not None
        return bool(box["y"] <= row["y"] and row["y"] + row["height"] <= box["y"] + box["height"] + 1)


@pytest.fixture
def gemma(browser: Any, pages: Callable[[str], Path]) -> Iterator[Reader]:
    reader = Reader(browser, pages("gemma_softcap_fused"))
    yield reader
    assert reader.complaints == []
    reader.context.close()


@pytest.fixture(scope="module")
def truth() -> tuple[MachineCode, dict[int, tuple[int, ...]], list[str]]:
    """Of gemma_softcap, fused: the machine code, the spec's lines of each line of CUDA, the lines of CUDA."""
    (loaded,) = load_path(ROOT / "specs" / "gemma_softcap.attn")
    source = emitted(shipped("gemma_softcap"), "fused")
    plan = choose(loaded.spec, ARCHES["sm_80"], "fused")
    return machine_code(source), spec_lines(loaded, plan, source), source.text.splitlines()


@pytest.mark.parametrize(("name", "scheme"), tiers.cases(product(PAGES, ["light", "dark"]), one_of=3))
def test_a_page_opens_alone_and_fits_the_screen(browser: Any, pages: Callable[[str], Path], name: str, scheme: str) -> None:
    reader = Reader(browser, pages(name), scheme)
    assert reader.complaints == []
    assert [url for url in reader.requests if not url.startswith(("file:", "data:"))] == []
    assert reader.tab.evaluate("document.documentElement.scrollWidth") <= LAPTOP["width"]
    for column in COLUMNS:
        box = reader.tab.locator(f"#{column}").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= LAPTOP["height"]  # all columns at once, without scrolling
        assert box["width"] > 250
    assert reader.tab.evaluate("document.documentElement.dataset.theme") == scheme
    sections = reader.tab.locator("section.panel")
    for i in range(sections.count()):
        inner = sections.nth(i).locator("svg, table, p")
        assert inner.count(), f"an empty panel: {sections.nth(i).get_attribute('id')}"
    overflowing = """[...document.querySelectorAll('.panel svg:not(.banks), .panel table')].filter(
        e => e.getBoundingClientRect().right > e.closest('.panel').getBoundingClientRect().right + 1).length"""
    assert reader.tab.evaluate(overflowing) == 0
    reader.context.close()


@pytest.mark.parametrize(
    ("name", "width"),
    tiers.cases(product(["gemma_softcap_fused", "packed_documents_hopper"], SCREENS), quick=[("gemma_softcap_fused", 390)]),
)
def test_no_line_is_cut_at_any_width(browser: Any, pages: Callable[[str], Path], name: str, width: int) -> None:
    """The page is not wider than the screen, and no line is wider than its column: scrolling down reaches everything."""
    reader = Reader(browser, pages(name), screen={"width": width, "height": SCREENS[width]})
    for level in ("brief", "teach", "none"):
        reader.tab.locator("#comments").select_option(level)
        assert reader.tab.evaluate("document.documentElement.scrollWidth") <= width
        for column in COLUMNS:
            inner, outer = reader.tab.evaluate(
                f"(e => [e.scrollWidth, e.clientWidth])(document.getElementById('{column}-lines'))"
            )
            assert inner <= outer, (column, level)
        last = reader.tab.locator("#cuda-lines .line").last
        last.scroll_into_view_if_needed()
        assert last.is_visible()
    assert reader.complaints == []
    reader.context.close()


@pytest.mark.long
def test_the_level_of_comments_changes_and_links_stay(gemma: Reader, truth: Any) -> None:
    _, _, lines = truth
    line = next(i for i, text in enumerate(lines, 1) if " = score(s)" in text)
    comment = next(i for i, text in enumerate(lines, 1) if text.strip().startswith("// the score of every pair"))
    gemma.click("spec", next(i for i, text in enumerate(_source(), 1) if text.split()[:1] == ["score"]))
    rows = gemma.tab.locator("#cuda-lines .line")
    brief, marked = rows.count(), gemma.marked("cuda")
    assert line in marked
    gemma.tab.locator("#comments").select_option("teach")
    assert rows.count() > brief
    assert gemma.marked("cuda") == marked
    assert gemma.tab.locator("#cuda-lines .note").count() > 20
    gemma.tab.locator("#comments").select_option("none")
    assert rows.count() < brief
    assert line in gemma.marked("cuda") <= marked
    assert gemma.tab.locator(f"#cuda-{comment}").count() == 0
    assert gemma.tab.locator(f"#cuda-{line} code").inner_text().strip() == lines[line - 1].split("//")[0].strip()
    gemma.tab.locator(f"#cuda-{line} .n").click()
    gemma.tab.keyboard.press("ArrowUp")
    assert line not in gemma.marked("cuda")


@pytest.mark.long
def test_search_marks_the_lines_that_contain_a_text(gemma: Reader, truth: Any) -> None:
    code, _, lines = truth
    gemma.tab.keyboard.press("/")
    assert gemma.focused() == "search"
    gemma.tab.keyboard.type("LDmatrix_x4_trans")
    assert gemma.marked("cuda") == {i for i, text in enumerate(lines, 1) if "ldmatrix_x4_trans" in text} != set()
    gemma.tab.locator("#search").fill("tanh.approx")
    assert gemma.marked("ptx") == {i for i, row in enumerate(code.ptx, 1) if "tanh.approx" in row.text}
    gemma.tab.locator("#search").fill("cp_async_commit")
    gemma.tab.keyboard.press("Enter")
    assert gemma.focused() == "cuda-lines"
    assert gemma.in_sight("cuda", min(gemma.marked("cuda")))
    gemma.tab.keyboard.press("Escape")
    assert not any(gemma.marked(column) for column in COLUMNS)
    assert gemma.tab.locator("#search").input_value() == ""


@pytest.mark.long
def test_another_schedule_is_laid_beside_this_one(gemma: Reader, truth: Any) -> None:
    _, _, lines = truth
    tab = gemma.tab
    assert tab.locator("#diff").is_hidden()
    tab.locator("#beside").select_option("tiled")
    shown = tab.locator("#diff > div").count()
    assert tab.locator("#diff .left").count() > 50
    assert tab.locator("#diff .right").count() > 50
    assert "unchanged" in tab.locator("#diff-says").inner_text()
    tab.locator("#whole").check()
    assert tab.locator("#diff > div").count() > shown
    assert tab.locator("#diff .fold").count() == 0
    left = tab.evaluate("[...document.querySelectorAll('#diff > div:nth-child(odd) .n')].map(e => Number(e.textContent))")
    assert [n for n in left if n] == [i for i, text in enumerate(lines, 1) if text.strip()]


@pytest.mark.long
def test_one_column_takes_the_whole_width(gemma: Reader) -> None:
    before = gemma.tab.locator("#cuda").bounding_box()
    button = gemma.tab.locator("#cuda .expand")
    button.click()
    after = gemma.tab.locator("#cuda").bounding_box()
    assert after["width"] > 1.8 * before["width"]
    assert gemma.tab.locator("#sass").is_hidden()
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert gemma.tab.locator("#cuda").bounding_box() == before


def test_a_click_on_the_spec_finds_its_instructions(gemma: Reader, truth: Any) -> None:
    """The line `score softcap(50.0)`: every reciprocal of a hyperbolic tangent, and no product of matrices."""
    code, of_spec, lines = truth
    line = next(i for i, text in enumerate(_source(), 1) if text.split()[:1] == ["score"])
    gemma.click("spec", line)
    cuda = {at for at, numbers in of_spec.items() if line in numbers}
    assert gemma.marked("cuda") == cuda
    sass = {i for i, row in enumerate(code.sass, 1) if cuda & set(row.cuda)}
    assert gemma.marked("sass") == sass
    assert gemma.marked("ptx") == {i for i, row in enumerate(code.ptx, 1) if cuda & set(row.cuda)}
    tanh = {i for i, row in enumerate(code.sass, 1) if _is_of_tanh(row, lines)}
    assert tanh <= sass
    assert tanh
    assert not any("HMMA" in code.sass[i - 1].text or "BAR" in code.sass[i - 1].text for i in sass)
    assert any(gemma.in_sight("sass", i) for i in sass)
    assert any(gemma.in_sight("cuda", i) for i in cuda)
    assert f"{len(sass)} SASS" in gemma.tab.locator("#status").inner_text()


def test_the_page_opens_with_what_the_mask_became(gemma: Reader, truth: Any) -> None:
    _, of_spec, _ = truth
    (line,) = (i for i, text in enumerate(_source(), 1) if text.split()[:1] == ["mask"])
    assert gemma.marked("spec") == {line}
    cuda = {at for at, numbers in of_spec.items() if line in numbers}
    assert cuda
    assert gemma.marked("cuda") == cuda
    assert any(gemma.in_sight("cuda", i) for i in cuda)
    assert any(gemma.in_sight("sass", i) for i in gemma.marked("sass"))


@pytest.mark.long
def test_a_click_on_sass_leads_back(gemma: Reader, truth: Any) -> None:
    code, of_spec, lines = truth
    number, row = next((i, r) for i, r in enumerate(code.sass, 1) if _is_of_tanh(r, lines))
    gemma.tab.evaluate(f"document.getElementById('sass-{number}').scrollIntoView()")
    gemma.click("sass", number)
    assert gemma.marked("cuda") == {row.cuda[0]}
    assert gemma.marked("cuda", "weak") == set(row.cuda[1:]) != set()
    assert gemma.marked("spec") == {n for at in row.cuda for n in of_spec.get(at, ())} != set()
    assert gemma.marked("ptx") == {row.ptx}
    assert gemma.in_sight("cuda", row.cuda[0])
    ptx = row.ptx
    gemma.click("ptx", ptx)
    assert gemma.marked("sass") == {i for i, r in enumerate(code.sass, 1) if r.ptx == ptx} >= {number}


def test_a_click_on_cuda_tells_what_is_its_own_from_what_is_inlined(gemma: Reader, truth: Any) -> None:
    code, _, lines = truth
    line = next(i for i, text in enumerate(lines, 1) if " = score(s)" in text)
    gemma.tab.evaluate(f"document.getElementById('cuda-{line}').scrollIntoView()")
    gemma.click("cuda", line)
    own = {i for i, row in enumerate(code.sass, 1) if row.cuda[:1] == (line,)}
    assert gemma.marked("sass") == own
    assert gemma.marked("sass", "weak") == {i for i, row in enumerate(code.sass, 1) if line in row.cuda[1:]} != set()


@pytest.mark.long
def test_hovering_marks_until_a_click_stays(gemma: Reader) -> None:
    gemma.tab.keyboard.press("Escape")  # a report opens with its mask marked
    gemma.tab.locator("#spec-6 .n").hover()
    assert gemma.marked("sass")
    gemma.tab.mouse.move(5, 5)
    assert not gemma.marked("sass")
    gemma.click("spec", 6)
    kept = gemma.marked("sass")
    gemma.tab.locator("#spec-3 .n").hover()
    assert gemma.marked("sass") == kept != set()
    gemma.tab.keyboard.press("Escape")
    assert not any(gemma.marked(column) for column in COLUMNS)


def test_the_keyboard_reaches_everything(gemma: Reader) -> None:
    tab = gemma.tab
    tab.locator("#theme").focus()
    order = []
    while "ptx-lines" not in order:
        tab.keyboard.press("Tab")
        if gemma.focused() in ("comments", *COLUMNS):  # a control in a column's head
            continue
        order.append(gemma.focused())
        outline = "e => [getComputedStyle(e).outlineStyle, parseFloat(getComputedStyle(e).outlineWidth)]"
        style, width = tab.evaluate_handle("document.activeElement").evaluate(outline)
        assert style == "solid"
        assert width >= 2
    assert order == ["spec-lines", "plan", "cuda-lines", "sass-lines", "ptx-lines"]
    tab.locator("#spec-lines").focus()
    for _ in range(5):
        tab.keyboard.press("ArrowDown")
    assert tab.locator("#spec-lines").get_attribute("aria-activedescendant") == "spec-6"
    assert tab.locator("#spec-6").get_attribute("aria-selected") == "true"
    assert gemma.marked("spec") == {6}
    marked = sorted(gemma.marked("sass"))
    tab.locator("#sass-lines").focus()
    first = [n for n in marked if n > 1]
    for pressed, expected in (("n", first[0]), ("n", first[1]), ("n", first[2]), ("p", first[1])):
        tab.keyboard.press(pressed)
        assert _current(tab) == expected
        assert gemma.in_sight("sass", expected)
    tab.keyboard.press("End")
    assert gemma.in_sight("sass", _current(tab))
    tab.keyboard.press("PageUp")
    tab.keyboard.press("Home")
    assert _current(tab) == 1
    tab.keyboard.press("Escape")
    assert not gemma.marked("sass")


def _current(tab: Any) -> int:
    return int(tab.locator("#sass-lines").get_attribute("aria-activedescendant").split("-")[1])


@pytest.mark.long
def test_buttons_lead_to_lines_and_classes(gemma: Reader, truth: Any) -> None:
    code, _, lines = truth
    tab = gemma.tab
    row = tab.locator("#loops tr", has_text="S = Q K^T")
    row.locator("button").click()
    line = int(row.locator("button").inner_text())
    assert "step < K_STEPS" in lines[line - 1]
    assert gemma.in_sight("cuda", line)
    assert gemma.focused() == "cuda-lines"
    tab.get_by_role("button", name="tensor cores").click()
    assert gemma.marked("sass") == {i for i, r in enumerate(code.sass, 1) if "HMMA" in r.text} != set()
    tab.get_by_role("button", name="tensor cores").click()
    assert not gemma.marked("sass")
    tab.get_by_role("button", name="Keys").click()
    assert tab.get_by_text("clears").is_visible()


def test_light_and_dark_can_be_read(browser: Any, pages: Callable[[str], Path]) -> None:
    """The contrast of every colour of text (WCAG 2.2, 1.4.3): 4.5 on paper, on lines that are marked, and in pictures."""
    reader = Reader(browser, pages("gemma_softcap_fused"))
    seen = set()
    for _ in range(2):
        theme = reader.tab.evaluate("document.documentElement.dataset.theme")
        seen.add(theme)
        text = ["ink", "quiet", "accent", "keyword", "comment", "number", "string", "op", "label"]
        bars = ["blue", "green", "amber", "red", "violet", "grey"]
        grounds = {**dict.fromkeys(("paper", "strong", "weak"), text), **{bar: ["on-bar"] for bar in bars}}
        grounds |= {"paper": [*text, "good", "bad"], "page": ["ink", "quiet", "accent"]}
        grounds |= {f"c{group}": ["ink"] for group in range(8)}
        read = "n => getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()"
        colors = {name: reader.tab.evaluate(read, name) for name in {*grounds, *(t for ts in grounds.values() for t in ts)}}
        for ground, texts in grounds.items():
            for one in texts:
                found = contrast(colors[one], colors[ground])
                assert found >= 4.5, (theme, one, ground, round(found, 2))
        for one, other in combinations(("paper", "strong", "weak"), 2):
            assert colors[one] != colors[other]
        reader.tab.locator("#theme").click()
    assert seen == {"light", "dark"}
    reader.context.close()


def contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_pictures_show_what_they_say(gemma: Reader) -> None:
    tab = gemma.tab
    counts = dict.fromkeys(("full", "partial", "empty"), 0.0)
    tiles = "[...document.querySelectorAll('#tiles svg rect:has(title)')]"
    boxes = f"{tiles}.map(r => [r.getAttribute('class'), +r.getAttribute('width')])"
    for css, width in tab.evaluate(boxes):
        counts[css] += width
    said = [int(n) for n in re.findall(r"(\d+) (?:full|partial|empty)", tab.locator("#tiles p").last.inner_text())]
    unit = sum(counts.values()) / sum(said)
    assert [round(n / unit) for n in counts.values()] == said
    cells = "[...document.querySelectorAll('#memory .banks')].map(s => s.querySelectorAll('rect').length)"
    assert all(n % 8 == 0 and n > 0 for n in tab.evaluate(cells))
    assert tab.locator("#roofline circle.own").count() == 1
    assert tab.locator("#pipeline rect").count() > 8
    assert tab.locator("#errors td.passed").count() == 4
    assert tab.locator("#errors td.failed").count() == 0


def _is_of_tanh(row: MachineLine, lines: list[str]) -> bool:
    """Whether it is the reciprocal in fast_tanh, by the text of its line."""
    line = lines[row.cuda[0] - 1] if row.cuda else ""
    return "MUFU.RCP" in row.text and "rcp.approx" in line and "power" in line


def _source() -> list[str]:
    return (ROOT / "specs" / "gemma_softcap.attn").read_text().splitlines()
