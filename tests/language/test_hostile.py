"""Untrusted specs are data: every text gives a spec or a diagnostic, in short time."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from attngen.diagnostics import DiagnosticError
from attngen.emit.emitter import emit
from attngen.language import load_path, load_text
from attngen.language.syntax import MAX_TEXT
from attngen.plan.arch import ARCHES
from attngen.schedules import choose
from tests import tiers
from tests.conftest import ROOT

HEAD = "attention example {\n dtype fp16\n head_dim 64\n"


def doubling(body: str) -> str:
    """Forty definitions, each twice as large as the next."""
    return "".join(f" def d{i}(x) = {body.format(i + 1)}\n" for i in range(40)) + " def d40(x) = x\n"


def codes(text: str) -> list[str]:
    with pytest.raises(DiagnosticError) as caught:
        load_text(text)
    rendered = caught.value.render(color=True)
    assert 0 < max(map(len, rendered.splitlines())) < 2000
    return [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "E101"),
        (HEAD + " mask " + "(" * 1000 + "causal" + ")" * 1000 + "}", "E005"),
        (HEAD + " mask " + "(" * 100_000, "E003"),
        (HEAD + " mask " + "not " * 5000 + "causal }", "E005"),
        (HEAD + " score " + "-" * 5000 + "s }", "E005"),
        (HEAD + " score " + "tanh(" * 150 + "s" + ")" * 150 + "}", "E005"),
        (HEAD + " score s" + " + 1.0" * 5000 + "}", "E005"),
        (HEAD + " mask q < " + "9" * 5000 + "}", "E006"),
        (HEAD + " score s * 1e999999999 }", "E006"),
        (HEAD + " score s * 0." + "3" * 5000 + "}", "E006"),
        ("attention e { dtype fp16 head_dim " + "6" * 30 + "}", "E006"),
        ("x" * (MAX_TEXT + 1), "E004"),
        ("#" * 2**20, "E004"),
        ("attention \x00 {}", "E001"),
        ("attention e { dtype fp16 head_dim 64 mask \ud800 }", "E001"),
        (HEAD + ' mask "q" }', "E008"),
        (HEAD + " mask " + "q" * 100_000 + " }", "E201"),
        (HEAD + " mask __import__(1) }", "E201"),
        (HEAD + " param a: int = 1 mask q.__class__ }", "E008"),
        ("attention a/../../b { dtype fp16 head_dim 64 }", "E002"),
        (HEAD + doubling("d{0}(d{0}(x))") + " score d0(s) }", "E212"),
        (HEAD + doubling("d{0}(x) * d{0}(x)") + " score d0(s) }", "E212"),
        ("attention e { dtype fp16 head_dim 64 }\n" * 300, "E224"),
        (HEAD + " mask causal\n" * 3000 + "}", "E105"),
    ],
)  # fmt: skip
def test_hostile_text_gets_a_diagnostic(text: str, code: str) -> None:
    assert code in codes(text)


@pytest.mark.parametrize("unit", ["1", "lambda ", "a.", "/*", "1_", " ", "mask ", "&& ", "} ", "{ ", "def f = q && k\n", ", "])
@pytest.mark.parametrize("length", [1900, 2**14, 2**16])
def test_repeated_pieces_are_refused_soon(unit: str, length: int) -> None:
    began = time.process_time()
    assert codes(f"{HEAD} mask q > {unit * (length // len(unit))} $ }}")
    assert time.process_time() - began < 5


def test_a_chain_of_definitions_is_as_deep_as_what_it_stands_for() -> None:
    definitions = "".join(f"def d{i}(x) = d{i + 1}(tanh(x))\n" for i in range(400))
    assert codes(f"{definitions} def d400(x) = x\n{HEAD} score d0(s) }}") == ["E005"]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "image.attn"
    path.write_bytes(b"attention e {\n  \xff\xfe }")
    with pytest.raises(DiagnosticError, match="not UTF-8") as caught:
        load_path(path)
    assert "image.attn:2:3" in str(caught.value)


def test_a_byte_order_mark_and_carriage_returns_are_no_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "windows.attn"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEAD} mask causal\n}}\n".replace("\n", "\r\n").encode())
    assert load_path(path)[0].spec == load_text(f"{HEAD} mask causal }}")[0]


@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused"])
def test_comments_do_not_reach_the_generated_text(schedule: str) -> None:
    text = f"# */ #include <evil> \n{HEAD} mask causal # \\\n */ {{% endfor %}} {{{{ 1 }}}} \n}}"
    with pytest.raises(DiagnosticError):
        load_text(text)
    (spec,) = load_text(text.replace("\n */ {% endfor %} {{ 1 }} ", ""))
    source = emit(spec, choose(spec, ARCHES["sm_80"], schedule))
    assert "evil" not in source.text


SEEDS = [p.read_text() for p in sorted((ROOT / "specs").glob("*.attn"))]
STRANGE = {"0", "-1", "1e30", "9223372036854775807", "inf", "true", "let", "def", "fp64", "//", "\x00", "é", '"'}
PIECES = sorted({piece for text in SEEDS for piece in re.findall(r"\w+|[^\w\s]", text)} | STRANGE)


def mutated(rng: random.Random) -> str:
    text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 4)):
        words = re.findall(r"\s+|\w+|[^\w\s]", text)
        at = rng.randrange(len(words))
        match rng.randrange(6):
            case 0:
                words[at] = rng.choice(PIECES)
            case 1:
                del words[at]
            case 2:
                words.insert(at, f" {rng.choice(PIECES)} ")
            case 3:
                other = rng.randrange(len(words))
                words[at], words[other] = words[other], words[at]
            case 4:
                other = min(len(words), at + rng.randint(1, 8))
                words[at:at] = words[at:other] * rng.randint(1, 3)
            case _:
                character = rng.randrange(len(words[at]))
                words[at] = (
                    words[at][:character] + chr(rng.choice([*range(32, 127), 0, 10, 233, 0x4E2D])) + words[at][character + 1 :]
                )
        text = "".join(words)
    return text


@pytest.mark.parametrize("part", tiers.cases(range(10), quick=[0]))
def test_a_thousand_mutated_texts_give_a_spec_or_a_diagnostic(part: int) -> None:
    """Right ones are also planned and emitted: a refusal there is a diagnostic too."""
    rng = random.Random(20261121 + part)
    right, messages = 0, []
    for _ in range(1000):
        text = mutated(rng)
        try:
            specs = load_text(text)
            right += 1
            if right % 20 == 0:
                for schedule in ("naive", "tiled", "fused"):
                    emit(specs[0], choose(specs[0], ARCHES["sm_80"], schedule))
        except DiagnosticError as error:
            messages.append(str(error))
    assert all(messages)
    assert 100 < len(messages) < 900  # the mutations are neither all harmless nor all fatal
