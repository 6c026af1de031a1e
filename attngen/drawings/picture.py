"""`Picture`: rectangles, lines and texts at coordinates, and the SVG file of them. Units are pixels; y grows downwards."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from attngen.drawings.theme import Theme, style, variables

NAMESPACE = "http://www.w3.org/2000/svg"
MARGIN, LINE = 16.0, 17.0  # around a file's picture; height of a line of its title and caption
LETTER, BOLD = 6.9, 9.4  # pixels of a letter of a caption and of a title, about, for wrapping and placing


def number(value: float) -> str:
    """At most two decimals, so that a file is small and the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def width_of(words: str, letter: float = LETTER) -> float:
    """About how wide a text is."""
    return len(words) * letter


@dataclass(slots=True)
class Picture:
    """What is drawn within `width` x `height`; `title` and `says` (a caption of whole sentences) stand around it in a file."""

    title: str
    says: str = ""
    width: float = 0.0
    height: float = 0.0
    body: ET.Element = field(default_factory=lambda: ET.Element("g"))

    def _reaches(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def _add(self, tag: str, css: str, **attributes: float | str) -> ET.Element:
        named = {name: number(value) if isinstance(value, float | int) else value for name, value in attributes.items()}
        return ET.SubElement(self.body, tag, ({"class": css} if css else {}) | named)

    def rect(self, x: float, y: float, width: float, height: float, css: str, tip: str = "") -> None:
        """A rectangle; `tip` is shown where a pointer rests on it."""
        self._reaches(x + width, y + height)
        added = self._add("rect", css, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0))
        if tip:
            ET.SubElement(added, "title").text = tip

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        """A text whose baseline is at y; `anchor`: start, middle or end."""
        self._reaches(
            x + (width_of(words) if anchor == "start" else width_of(words) / 2 if anchor == "middle" else 0.0), y + 4.0
        )
        place: dict[str, float | str] = {"x": x, "y": y}
        self._add("text", css, **place, **({} if anchor == "start" else {"text-anchor": anchor})).text = words

    def path(self, d: str, css: str) -> None:
        """A path of SVG's path language; it must lie within what is drawn otherwise."""
        self._add("path", css, d=d)

    def line(self, x: float, y: float, to_x: float, to_y: float, css: str = "rule") -> None:
        self._reaches(max(x, to_x), max(y, to_y))
        self.path(f"M{number(x)} {number(y)}L{number(to_x)} {number(to_y)}", css)

    def legend(self, x: float, y: float, *entries: tuple[str, str]) -> None:
        """Squares of colour (class, words) in a row; y is the baseline of the words."""
        for css, words in entries:
            self.rect(x, y - 10.0, 11.0, 11.0, css)
            self.text(x + 16.0, y, words, "quiet")
            x += 34.0 + width_of(words)

    def place(self, other: Picture, x: float, y: float) -> None:
        """Puts another picture's drawing at (x, y), under its title as a heading."""
        self.text(x, y + 12.0, other.title, "head")
        group = ET.SubElement(self.body, "g", {"transform": f"translate({number(x)} {number(y + 24.0)})"})
        group.extend(list(other.body))
        self._reaches(x + other.width, y + 24.0 + other.height)

    def inline(self, css: str = "") -> str:
        """An `svg` element for a page whose style sheet has `style()` and the variables; without title and caption."""
        root = self._root(self.width, self.height, css, {"width": number(self.width)})
        root.append(self.body)
        return ET.tostring(root, encoding="unicode")

    def svg(self, theme: Theme = "auto") -> str:
        """A whole file: background, title, drawing, caption, and colours for light and dark."""
        inner = max(self.width, 420.0)
        caption, title = textwrap.wrap(self.says, int(inner / LETTER)), textwrap.wrap(self.title, int(inner / BOLD))
        top = MARGIN + 20.0 * len(title) + 8.0
        height = top + self.height + (8.0 + LINE * len(caption) if caption else 0.0) + MARGIN
        width = inner + 2 * MARGIN
        root = self._root(width, height, "", {"xmlns": NAMESPACE, "width": number(width), "height": number(height)})
        ET.SubElement(root, "title").text = self.title
        ET.SubElement(root, "desc").text = self.says
        ET.SubElement(root, "style").text = variables(theme, "svg.drawing") + style()
        ET.SubElement(root, "rect", {"class": "paper", "width": number(width), "height": number(height), "rx": "6"})
        for i, line in enumerate(title):
            ET.SubElement(
                root, "text", {"class": "title", "x": number(MARGIN), "y": number(MARGIN + 13.0 + 20.0 * i)}
            ).text = line
        group = ET.SubElement(root, "g", {"transform": f"translate({number(MARGIN)} {number(top)})"})
        group.append(self.body)
        for i, line in enumerate(caption):
            y = top + self.height + 20.0 + LINE * i
            ET.SubElement(root, "text", {"class": "quiet", "x": number(MARGIN), "y": number(y)}).text = line
        ET.indent(root, "")
        return ET.tostring(root, encoding="unicode") + "\n"

    def _root(self, width: float, height: float, css: str, more: dict[str, str] | None = None) -> ET.Element:
        box = f"0 0 {number(width)} {number(height)}"
        about = {"role": "img", "aria-label": self.title} | (more or {})
        return ET.Element("svg", {"class": f"drawing {css}".strip(), "viewBox": box} | about)


def stacked(title: str, says: str, pictures: list[Picture]) -> Picture:
    """Pictures below one another."""
    whole = Picture(title, says)
    for one in pictures:
        whole.place(one, 0.0, whole.height + (22.0 if whole.height else 0.0))
    return whole
