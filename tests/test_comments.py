"""A trailing comment says what the value is: it does not continue a sentence whose noun the reader must guess."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

CONTINUES = re.compile(r"#:?\s*(?:of|that|which|whose)\b")
CONTINUES_CODE = re.compile(r"[;,{})]\s+//:?\s*(?:of|that|which|whose)\b")  # in CUDA


def trailing_comments(path: Path) -> Iterator[tuple[int, str]]:
    """The comments after code, with the numbers of their lines."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
                yield token.start[0], token.string


def test_trailing_comments_begin_with_their_noun() -> None:
    files = [path for folder in ("attngen", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files
        for line, text in trailing_comments(path)
        if CONTINUES.match(text)
    ]
    assert not offenders, "\n".join(offenders)


def test_trailing_comments_of_templates_begin_with_their_noun() -> None:
    lines = [
        (path, number, text)
        for path in sorted((ROOT / "templates").rglob("*"))
        if path.is_file()
        for number, text in enumerate(path.read_text().splitlines(), 1)
    ]
    assert any("//" in text for _, _, text in lines)
    offenders = [f"{path.relative_to(ROOT)}:{number}: {text}" for path, number, text in lines if CONTINUES_CODE.search(text)]
    assert not offenders, "\n".join(offenders)
