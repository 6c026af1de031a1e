"""What makes the site out of this repository: README as its first page, sources as pages, and links that lead to those.

A link to a file outside `docs/`, or to a source or notebook in it, leads to a page that shows the file; a link to a directory
to a list of its files. So documents link as the repository lies, and read the same in both places. MkDocs calls `on_files`
and `on_page_markdown`.
"""

from __future__ import annotations

import json
import math
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attn_lexer  # noqa: F401  # which makes the language known to pygments
from mkdocs.structure.files import File, Files, InclusionLevel

import attngen
from attngen.inspect.ladder import LADDER

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent
ASSETS = ("iframe-worker.js", "icon.svg", "site.css")
# How a source is highlighted, by its suffix; a template of CUDA as C++.
LANGUAGES = {".attn": "attn", ".py": "python", ".lark": "text", ".ipynb": ""}
LANGUAGES |= {".cu": "cuda", ".cuh": "cuda", ".j2": "cpp", ".hpp": "cpp", ".cpp": "cpp"}
LISTED = ("specs", "specs/models", "generated")
AT_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # documents
ORDER = {f"{spec}_{schedule}.cu": i for i, (spec, schedule, _) in enumerate(LADDER)}
CODE_OR_LINK = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|`[^`\n]+`|\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)", re.M | re.S
)
SESSION_BLOCK = re.compile(r"^```console\n", re.M)
# Specs whose report pages the gallery links to: ATTNGEN_REPORTS=1 makes those of all shipped specs, =gpt2,alibi of two.
WANTED = os.environ.get("ATTNGEN_REPORTS", "")
SHIPPED = [path.stem for path in sorted((ROOT / "specs").glob("*.attn"))]
REPORTS = SHIPPED if WANTED == "1" else [name for name in WANTED.split(",") if name]
REPORT_COMMAND = re.compile(r"`attngen report (\w+)`(?=;)")
WRITTEN = re.compile(r"^<!-- [\w ]+: begin \((python [^)]*)\) -->$", re.M)  # the marker of what a command writes
SPEC_BLOCK = re.compile(r"^```\n(?=(?:#.*\n)*attention \w+ \{)", re.M)
# A source takes the room of the table of contents, and is found after the documents.
SOURCE_HEAD = "---\ntitle: {}\nhide: [toc]\nsearch:\n  boost: 0.5\n---\n\n"
REFERENCE = """# Python reference

What `attngen` and `attngen.torch` offer. [The Python API](python.md) shows it in use; the functions for masks and scores
(`attngen.where`, `attngen.tanh`, ...) are those of [the language](language.md).

## attngen
"""


def uri_of(path: str) -> str | None:
    """Where the page of a file or directory of the repository is, as the uri of its Markdown; None where it has none."""
    within = path.removeprefix("docs/")
    if path in AT_ROOT:
        return AT_ROOT[path]
    if (ROOT / path).is_dir():
        written = within != path and (ROOT / path / "README.md").exists()
        return f"{within}/{'README' if written else 'index'}.md"
    if Path(path).suffix in LANGUAGES:
        return f"{within}.md"
    return within if within != path else None  # a document, or a picture that lies beside them


def linked(text: str, home: str) -> set[str]:
    """The paths in the repository that a document refers to; `home` is its own."""
    targets = [found["target"] for found in CODE_OR_LINK.finditer(text)]
    return {_resolved(target, home) for target in targets if target}


def _resolved(target: str, home: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), target))


def rewritten(text: str, home: str, uri: str) -> str:
    """A document of the repository as Markdown of the site, where it is `uri`."""

    def place(found: re.Match[str]) -> str:
        to = uri_of(_resolved(found["target"], home)) if found["target"] else None
        return f"]({_relative(to, uri)}{found['anchor'] or ''})" if to else found[0]

    text = SESSION_BLOCK.sub("```attngen-session\n", SPEC_BLOCK.sub("```attn\n", text))
    text = WRITTEN.sub(r"Written by `\1`:\n", text)
    text = REPORT_COMMAND.sub(_report_link, text)
    return CODE_OR_LINK.sub(place, text)


def _report_link(found: re.Match[str]) -> str:
    """A command that makes a report, as a link to the page if the site has it."""
    return f'<a href="reports/{found[1]}.html">its report page</a>' if found[1] in REPORTS else found[0]


def _relative(to: str, uri: str) -> str:
    return posixpath.relpath(to, posixpath.dirname(uri) or ".")


def shown(path: str) -> str:
    """A source as Markdown."""
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        return _notebook(path, json.loads(text))
    related = ", ".join(f"[{other}]({_relative(f'{other}.md', f'{path}.md')})" for other in _relatives(path))
    beside = f"{'Emitted from it' if path.endswith('.attn') else 'Emitted from'}: {related}\n\n" if related else ""
    head = f"{SOURCE_HEAD.format(Path(path).name)}# {path}\n\n{beside}"
    return f'{head}````````{LANGUAGES[Path(path).suffix]} linenums="1"\n{text.rstrip()}\n````````\n'


def _relatives(path: str) -> Iterable[str]:
    """Of a spec the files that were generated of it, of a generated file its spec."""
    for spec, schedule, _ in LADDER:
        pair = (f"specs/{spec}.attn", f"generated/{spec}_{schedule}.cu")
        if path in pair:
            yield pair[1 - pair.index(path)]


def _notebook(path: str, notebook: dict[str, Any]) -> str:
    """The cells of a notebook, and what they printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append(f"````text\n{''.join(text).rstrip()}\n````")
    parts.insert(1, f"[Download the notebook]({Path(path).name}).")
    return rewritten("\n\n".join(parts), path, uri_of(path) or "")


def listing(directory: str) -> str:
    """The sources of a directory, each with the first sentence of the comment that it begins with."""
    names = [(posixpath.basename(path), posixpath.basename(uri_of(path) or ""), path) for path in sources(directory)]
    rows = (f"| [{name}]({page}) | {_sentence(ROOT / path)} |\n" for name, page, path in names)
    return f"# {directory}\n\n| file | what it is |\n|---|---|\n{''.join(rows)}"


def sources(directory: str) -> list[str]:
    """The sources right in a directory, the ladder in the order to read it."""
    found = [p for p in (ROOT / directory).iterdir() if p.suffix in (*LANGUAGES, ".md")]
    return [f"{directory}/{p.name}" for p in sorted(found, key=lambda p: (ORDER.get(p.name, -1), p.name))]


def _sentence(path: Path) -> str:
    comment = re.match(r'(?:(?://|#|""").*\n)+', path.read_text())
    words = " ".join(line.strip(' #/"') for line in comment[0].split("\n")) if comment else ""
    return re.split(r"(?<=\.)(?<! al\.) | =+ ", words)[0].replace("|", "\\|")


def reference() -> str:
    names = [f"attngen.{name}" for name in sorted(attngen.__all__, key=str.lower)]
    of_torch = ["attngen.torch.attention", "attngen.torch.Attention", "attngen.torch.TileBalancer"]
    blocks = ["".join(f"::: {name}\n\n" for name in each) for each in (names, of_torch)]
    return REFERENCE + "\n" + "## attngen.torch\n\n".join(blocks)


def on_files(files: Files, config: Any) -> Files:
    def add(uri: str, content: str, listed: bool = True) -> None:
        file = File.generated(config, uri, content=content)
        file.inclusion = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
        files.append(file)

    at_root = {path: (ROOT / path).read_text() for path in AT_ROOT}
    documents = {f"docs/{f.src_uri}": f.content_string for f in files.documentation_pages()} | at_root
    notebooks = {f"docs/{f.src_uri}" for f in files if f.src_uri.endswith(".ipynb")}
    for path, text in at_root.items():
        add(AT_ROOT[path], rewritten(text, path, AT_ROOT[path]))
    add("reference.md", reference())
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", content=(SITE / name).read_text()))
    for path in sorted(_all_linked(documents) | {path for each in LISTED for path in sources(each)} | notebooks):
        uri = uri_of(path)
        if uri and files.get_file_from_path(uri) is None and (ROOT / path).exists():
            add(uri, (listing if (ROOT / path).is_dir() else shown)(path), path.startswith(LISTED) or path in notebooks)
    for name in REPORTS:
        files.append(File.generated(config, f"reports/{name}.html", content=report_of(name)))
    config.nav = _expanded(config.nav, files)
    return files


def report_of(name: str) -> str:
    """The report page of a shipped spec."""
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        subprocess.run(
            [sys.executable, "-m", "attngen", "report", name, "-o", str(page)], check=True, stdout=subprocess.DEVNULL
        )
        return page.read_text()


def _all_linked(documents: dict[str, str]) -> set[str]:
    """What the documents link to, and the files of the directories among that."""
    found = {path for home, text in documents.items() for path in linked(text, home)} | set(LISTED)
    return found | {path for each in found if (ROOT / each).is_dir() for path in sources(each)}


def _expanded(nav: list[Any], files: Files) -> list[Any]:
    """`nav` with the pages of a folder in the place of `folder/`."""
    expanded: list[Any] = []
    for entry in nav:
        title, value = next(iter(entry.items()))
        if isinstance(value, list):
            expanded.append({title: _expanded(value, files)})
        elif value.endswith("/"):
            pages = [f.src_uri for f in files.documentation_pages() if posixpath.dirname(f.src_uri) == value[:-1]]
            pages.sort(key=_order)
            if pages:
                expanded.append({title: pages})
        else:
            expanded.append(entry)
    return expanded


def _order(uri: str) -> tuple[bool, int, float, str]:
    """The first page of a folder, the ladder in reading order, numbered chapters by number, then what has no number."""
    name = posixpath.basename(uri)
    number = re.match(r"\d+", name)
    place = ORDER.get(name.removesuffix(".md"), -1)
    return name not in ("index.md", "README.md"), place, float(number[0]) if number else math.inf, name


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages that `on_files` made are as they should be."""
    uri = page.file.src_uri
    return markdown if page.file.generated_by else rewritten(markdown, f"docs/{uri}", uri)
