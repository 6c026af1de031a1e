"""The three levels of comments leave the code unchanged; the lexer that separates comments from code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.device.cuda.compiler import compile_text
from attngen.diagnostics import DiagnosticError
from attngen.emit.comments import LEVELS, at_level, strip_comments
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.emit.templates import template_directory
from attngen.inspect.ladder import BACKWARD, LADDER, ladder, other_programs, program
from attngen.keywords import SCHEDULE_NAMES
from attngen.plan import ARCHES
from attngen.plan.plan import BACKWARD_SUFFIX
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES
from tests import tiers
from tests.conftest import ROOT
from tests.harness import SHIPPED, SPECS, shipped
from tests.hopper import HOPPER_SCHEDULES

SECTION = re.compile(r"^// (\d+\. .+)$", re.M)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("int a; // one\nint b;", "int a;\nint b;\n"),
        ("// whole\n    // lines\nint a;", "int a;\n"),
        ("int /* in */ a;", "int   a;\n"),
        ("/* of\n * three\n */\nint a;", "int a;\n"),
        ("int a; /* begins here\n ends there */ int b;", "int a;   int b;\n"),
        ('asm("// no comment"); // one', 'asm("// no comment");\n'),
        ('asm("\\"/* no comment */");', 'asm("\\"/* no comment */");\n'),
        ("char c = '\"'; // \"", "char c = '\"';\n"),
        ("char c = '\\''; // it's", "char c = '\\'';\n"),
        ("int n = 1'000; // it's", "int n = 1'000;\n"),
        ('auto s = R"x(// )" \n/* )x"; // one', 'auto s = R"x(// )"\n/* )x";\n'),
        ("int a; // goes on \\\nint hidden;\nint b;", "int a;\nint b;\n"),
        ("a = b / *p; // one", "a = b / *p;\n"),
        ("a //* one\n/ b;", "a\n/ b;\n"),
        ("int a; /* never closed", "int a; /* never closed\n"),
        ("int a;\n\n// alone\n\nint b;", "int a;\n\nint b;\n"),
    ],
)
def test_comments_are_told_from_code(text: str, code: str) -> None:
    assert strip_comments(text) == code


PIECES = ["int a;", "a /= b;", '"//"', '"/*"', "'\"'", '"\\""', "1'0", "\n", " ", "{", "}"]
REMARKS = ["// x\n", "/* x */", '// "\n', "/* ' */", "/* //\n */", "//:\n", "// /*\n"]


@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(REMARKS))))
def test_of_any_mixture_the_code_is_left(mixture: list[tuple[str, str]]) -> None:
    text = "".join(f"{piece} {remark}" for piece, remark in mixture)
    code = strip_comments(text)
    assert strip_comments(code) == code
    assert code.split() == " ".join(piece for piece, _ in mixture).split()


def plans() -> Iterator[tuple[str, AttentionSpec, str, str]]:
    """Every schedule of every shipped spec, with split operands too."""
    for name in SHIPPED:
        for dtype in (None, "fp32") if name in SPECS else (None,):
            for schedule in SCHEDULE_NAMES:
                for arch in ("sm_75", "sm_90a") if schedule == "fused" else ("sm_90a",):
                    yield f"{name}-{dtype or 'own'}-{schedule}-{arch}", shipped(name, dtype), schedule, arch


PLANS = list(plans())


@pytest.mark.parametrize(
    ("spec", "schedule", "arch"),
    tiers.cases([plan[1:] for plan in PLANS], quick=lambda spec, *_: spec.name in ("gpt2", "packed_documents"), one_of=4),
    ids=[plan[0] for plan in PLANS],
)
def test_the_levels_differ_in_comments_alone(spec: AttentionSpec, schedule: str, arch: str) -> None:
    try:
        plan = choose(spec, ARCHES[arch], schedule)
    except DiagnosticError:
        no_bf16 = arch == "sm_75" and spec.dtype is DTYPES["bf16"]
        assert schedule in HOPPER_SCHEDULES or (schedule == "decode" and spec.dropout is not None) or no_bf16
        return
    none, brief, teach = (emit(spec, plan, level) for level in LEVELS)
    assert strip_comments(none.text) == strip_comments(brief.text) == strip_comments(teach.text)
    assert none.text == f"// {spec.name}, {schedule}\n\n{strip_comments(brief.text)}"
    for source in (none, teach):
        assert (source.kernels, source.tensors, source.name) == (brief.kernels, brief.tensors, brief.name)
    for text in (none.text, brief.text, teach.text):
        assert "//:" not in text
        assert "\n\n\n" not in text
        assert not re.search(r"[ \t]+$", text, re.M)
    brief_lines = set(brief.text.splitlines())
    assert max(len(line) for line in teach.text.splitlines() if line not in brief_lines) <= 128


@pytest.mark.parametrize("path", sorted((ROOT / "generated").glob("*.cu")), ids=lambda p: p.stem)
def test_generated_files_are_the_brief_level_of_the_same_code(path: Path) -> None:
    others = [{one.name: one for one in other_programs(level)} for level in LEVELS]
    if path.stem in others[0]:
        assert {strip_comments(of_level[path.stem].text) for of_level in others} == {strip_comments(path.read_text())}
        return
    entries = [(*e, "forward") for e in LADDER] + [(*e, "backward") for e in BACKWARD]
    (entry,) = [e for e in entries if path.stem == f"{e[0]}_{e[1]}{BACKWARD_SUFFIX if e[3] == 'backward' else ''}"]
    code = {strip_comments(program(*entry, comments=level).text) for level in LEVELS}
    assert code == {strip_comments(path.read_text())}


@pytest.mark.parametrize(
    ("name", "schedule", "arch"),
    tiers.cases(
        [
            ("gpt2", "naive", "sm_80"),
            ("gpt2", "tiled", "sm_80"),
            ("gpt2", "fused", "sm_75"),
            ("gpt2", "fused", "sm_80"),
            ("gpt2", "wgmma", "sm_90a"),
            ("gpt2", "hopper", "sm_90a"),
            ("packed_documents", "fused", "sm_80"),
        ],
        quick=[("gpt2", "fused", "sm_80")],
    ),
)
def test_every_level_compiles_to_the_same_machine_code(name: str, schedule: str, arch: str) -> None:
    plan = choose(shipped(name), ARCHES[arch], schedule)
    cubins = {compile_text(emit(shipped(name), plan, level)).code for level in LEVELS}
    assert len(cubins) == 1


@pytest.mark.parametrize(
    ("schedule", "arch"),
    [("naive", "sm_80"), ("tiled", "sm_80"), ("fused", "sm_75"), ("fused", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a")],
)
@pytest.mark.parametrize(
    "name", tiers.cases(["gpt2", "packed_documents", "sigmoid_attention", "retention"], quick=["gpt2", "retention"])
)
def test_every_section_is_taught(name: str, schedule: str, arch: str) -> None:
    """Each has more to say than at the brief level, and so has the header: what the schedule before did instead."""
    plan = choose(shipped(name, "fp16"), ARCHES[arch], schedule)
    brief, teach = (sections(emit(shipped(name, "fp16"), plan, level)) for level in ("brief", "teach"))
    assert list(brief) == list(teach)
    for title, text in teach.items():
        assert text.count("//") > brief[title].count("//"), title
    order = SCHEDULE_NAMES
    before = {after: f"after {schedule}" for schedule, after in pairwise(order)} | {order[0]: "the first of the ladder"}
    assert f"// This schedule: {schedule}, {before[schedule]}\n" in teach[""]


def sections(source: Program) -> dict[str, str]:
    """The text of each section by its title, and that of the header."""
    parts = SECTION.split(source.text)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def test_paragraphs_that_teach_are_filled_and_items_and_formulas_kept() -> None:
    text = """\
// brief
//: one
//: paragraph
//:
//: - an item
//:   of two lines
//: - another
//:     x = y
    //: indented
int a;
"""
    assert (
        at_level(text, "teach")
        == """\
// brief
// one paragraph
//
// - an item of two lines
// - another
//     x = y
    // indented
int a;
"""
    )
    assert at_level(text, "brief") == "// brief\nint a;\n"
    filled = at_level("//: " + "word " * 60, "teach").splitlines()
    assert len(filled) == 3
    assert all(line.startswith("// word") and 110 < len(line) <= 124 for line in filled[:-1])


def test_only_the_templates_teach() -> None:
    """What the levels add lies beside the code it is about, and in nothing that is compiled as it stands."""
    taught = {p for p in template_directory().rglob("*") if p.is_file() and "//:" in p.read_text()}
    assert taught
    assert not [p for p in taught if p.name.endswith(".emulated.hpp")]
    assert all("//:" not in source.text for source in ladder().values())
