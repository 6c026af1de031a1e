"""docs/gallery.md: every shipped spec with its text, its tiles, its rate and its report.

`python -m tests.gallery` writes the page and its pictures; rates stay, which `benchmarks/gallery.py` measures.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from attngen.drawings.picture import Picture
from attngen.drawings.tiles import tiles_picture
from attngen.inspect.call import Call
from attngen.inspect.drawn import tile_map
from attngen.language import load_file
from attngen.plan import ARCHES
from attngen.schedules import choose
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "figures" / "gallery"
LENGTH = 1024
PARAMS = {"mistral_window": {"size": 256}}  # a window shorter than the picture
RATES = re.compile(r"<!-- gallery: begin .*?<!-- gallery: end -->", re.S)
NO_RATES = "<!-- gallery: begin (python benchmarks/gallery.py --write docs/gallery.md) -->\n<!-- gallery: end -->"
HEAD = """# Gallery

The specs that are shipped, in [specs/](../specs). Each has the tiles of a head of 1024 rows and keys, by the plan for an A100.
Every command takes the name alone:

```sh
attngen check alibi           # run its kernels, compare with float64
attngen draw alibi tiles      # the picture
attngen report alibi          # its report page: spec, plan, CUDA and machine code, linked
```

`ATTNGEN_REPORTS=1 mkdocs build -f .site/mkdocs.yml` builds the site with all report pages, which takes some minutes;
`ATTNGEN_REPORTS=gpt2,alibi` makes those of two specs.

"""


@cache
def specs() -> dict[str, Path]:
    return {path.stem: path for path in sorted((ROOT / "specs").glob("*.attn"))}


def picture(name: str) -> Picture:
    """The tiles of a spec's first attention, by the fused kernel."""
    spec = load_file(specs()[name])[0]
    plan = choose(spec, ARCHES["sm_80"], None)
    found = tile_map(Call(spec, plan, LENGTH, LENGTH, PARAMS.get(name, {})))
    assert found is not None, name
    return tiles_picture(found, f"{name}, {plan.title} on sm_80")


def page(rates: str) -> str:
    """The text of the page."""
    parts = [HEAD, rates, "\n"]
    for name, path in specs().items():
        text = path.read_text()
        comment = re.match(r"(?:#.*\n)+", text)
        assert comment is not None, name
        words = " ".join(line.strip("# ") for line in comment[0].splitlines())
        given = "".join(f" --param {key}={value}" for key, value in PARAMS.get(name, {}).items())
        parts += [
            f"\n## {name}\n\n{words}\n\n```\n{text[comment.end() :].rstrip()}\n```\n\n",
            f"![Tiles of {name}](figures/gallery/{name}.svg)\n\n",
            f"`attngen draw {name} tiles{given}`, `attngen report {name}`; [the file](../specs/{name}.attn)\n",
        ]
    return "".join(parts)


def current() -> str:
    """The page as it must be, with the rates that it has."""
    found = RATES.search(PAGE.read_text()) if PAGE.exists() else None
    return page(found[0] if found else NO_RATES)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    for name in specs():
        (PICTURES / f"{name}.svg").write_text(picture(name).svg())
    PAGE.write_text(current())


if __name__ == "__main__":
    main()
