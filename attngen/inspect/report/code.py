"""The columns of code: lines as highlighted HTML, and the links between them as numbers."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from attngen.device.cuda.line_table import Chain, MachineCode, MachineLine
from attngen.emit.program import Program
from attngen.inspect.opcodes import CLASSES, OTHER, class_of
from attngen.language import Loaded

CLASS_NAMES = (*(name for name, _ in CLASSES), OTHER)


def code_data(loaded: Loaded, source: Program, code: MachineCode, of_spec: dict[int, tuple[int, ...]]) -> dict[str, object]:
    """The data of the page's script. Lines count from 1; a place is an index into `chains`, whose first is empty."""
    chains: dict[Chain, int] = {(): 0}
    places = {
        name: [chains.setdefault(line.cuda, len(chains)) for line in lines]
        for name, lines in (("ptx", code.ptx), ("sass", code.sass))
    }
    made = Counter(line.cuda[0] for line in code.sass if line.cuda)
    return {
        "columns": {
            "spec": [_attn_html(line) for line in loaded.source.text.rstrip("\n").split("\n")],
            "cuda": cuda_html(source.text),
            "ptx": [_machine_html(line) for line in code.ptx],
            "sass": [_machine_html(line) for line in code.sass],
        },
        "chains": list(chains),
        "places": places,
        "ptxOfSass": [line.ptx for line in code.sass],
        "specOfCuda": {str(line): numbers for line, numbers in of_spec.items()},
        "instructions": {str(line): n for line, n in made.items()},
        "classes": CLASS_NAMES,
        "classOfSass": [CLASS_NAMES.index(class_of(line.text)) if line.is_code else -1 for line in code.sass],
    }


_ATTN = re.compile(r"(?P<comment>#.*)|(?P<keyword>^\s*[a-z_]+(?=\s))|(?P<number>\b\d[\w.]*)|(?P<rest>[^#\d]+|.)")


def _attn_html(line: str) -> str:
    return "".join(
        _span({"comment": "c", "keyword": "k", "number": "m"}.get(str(m.lastgroup), ""), m[0]) for m in _ATTN.finditer(line)
    )


def _span(css: str, text: str) -> Markup:
    return Markup('<span class="{}">{}</span>').format(css, text) if css else escape(text)


_MACHINE = re.compile(
    r"(?P<address>/\*[0-9a-f]{4,}\*/)?(?P<space>\s*)(?P<guard>@!?%?U?[pP]\w+\s+)?(?P<opcode>[\w.:$]+)(?P<rest>.*)"
)


def _machine_html(line: MachineLine) -> str:
    """An instruction with its opcode highlighted and its address hidden."""
    text = line.text.expandtabs(1).strip()
    found = _MACHINE.match(text) if line.is_code else None
    if found is None:
        return str(_span("c" if text.startswith("//") else "label", text))
    rest = re.sub(r"\s*;\s*$", "", found["rest"])
    address = _span("address", found["address"][2:-2] + " ") if found["address"] else ""
    return str(address + escape(found["guard"] or "") + _span("op", found["opcode"]) + escape(rest))


if TYPE_CHECKING:
    from pygments.formatters import HtmlFormatter


@cache
def _formatter() -> HtmlFormatter:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(nowrap=True)


def cuda_html(text: str) -> list[str]:
    """The lines of a CUDA file with pygments' classes; each is valid HTML by itself."""
    from pygments import highlight
    from pygments.lexers import CudaLexer

    lines = highlight(text, CudaLexer(stripnl=False), _formatter()).split("\n")
    return [re.sub(r'<span class="(?:w|p|n|o)">([^<]*)</span>', r"\1", line) for line in lines[: text.count("\n")]]
