"""Where machine code comes from: line tables change nothing, cover nearly all of it, and lead back to the right statements."""

from __future__ import annotations

import re
from itertools import pairwise, product
from pathlib import Path

import pytest

from attngen.device.cuda.compiler import CACHE, compile_text, compile_with_lines, disassemble
from attngen.device.cuda.line_table import MachineLine, machine_code, read_ptx, read_sass
from attngen.diagnostics import DiagnosticError
from attngen.emit.abi import as_read
from attngen.emit.emitter import emit
from attngen.emit.loops import PlacedLoop, loop_nest
from attngen.emit.origins import origins
from attngen.emit.variant import build_variant
from attngen.inspect.ladder import ladder
from attngen.inspect.machine_text import spec_lines
from attngen.inspect.opcodes import OTHER, class_of, histogram, opcode
from attngen.language import load_source
from attngen.language.load import load_path
from attngen.plan import ARCHES
from attngen.schedules import choose
from attngen.source import SourceFile
from attngen.spec.dropout import RNG_STATE
from tests import tiers
from tests.conftest import ROOT
from tests.harness import SHIPPED, cli, emitted, shipped

LADDER = ladder()
SCHEDULE = re.compile(r"_((?:naive|tiled|fused|wgmma|hopper|decode)\w*)\.cu$")
# One file of each schedule, gpt2's where it has one
FILES = [*{SCHEDULE.findall(name)[0]: name for name in sorted(LADDER, key=lambda name: name.startswith("gpt2"))}.values()]
EVERYWHERE = [
    ("naive", "sm_75"), ("tiled", "sm_80"), ("fused", "sm_75"), ("fused", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    tiers.cases(
        ["gpt2_naive.cu", "gpt2_fused.cu", "gpt2_wgmma.cu", "gpt2_hopper.cu", "cross_attention_fused.cu"],
        quick=["gpt2_naive.cu"],
    ),
)
def test_line_tables_change_no_instruction_and_no_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))  # one that no other process writes to
    before = {e.name for e in CACHE.entries()}
    source = LADDER[name]
    assert disassemble(compile_with_lines(source)[0]) == disassemble(compile_text(source).code)
    assert {e.name for e in CACHE.entries()} == before


def test_a_compilation_without_a_log_leaves_python_as_it_was() -> None:
    """Of each byte Python has one object: what NVRTC writes, such as the end of an empty log, may not go there."""
    compile_with_lines(emitted(shipped("gpt2"), "naive"))
    assert [bytes([i])[0] for i in range(256)] == list(range(256))


@pytest.mark.parametrize("name", tiers.cases(FILES, quick=["gpt2_tiled.cu"], one_of=6))
def test_instructions_have_a_line_of_cuda(name: str) -> None:
    source = LADDER[name]
    code = machine_code(source)
    mapped, instructions = code.mapped
    plain = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", disassemble(compile_text(source).code), re.M)
    assert instructions >= len(plain) - len(source.kernels)  # padding: NOPs, and each kernel's branch to itself
    assert mapped >= 0.95 * instructions
    last = source.text.count("\n")
    assert all(1 <= line <= last for row in (*code.ptx, *code.sass) for line in row.cuda)
    assert all(row.ptx <= len(code.ptx) for row in code.sass)
    own = [row for row in code.ptx if row.is_code]
    assert sum(bool(row.cuda) for row in own) >= 0.95 * len(own)
    in_sass = [row.text for row in code.sass if row.is_code]
    assert not [opcode(text) for text in in_sass if class_of(text) == OTHER]
    assert sum(histogram(in_sass).values()) == len(in_sass)


def test_instructions_lead_to_the_lines_that_say_what_they_do() -> None:
    """Tensor cores to mma, exponentials to fast_exp2, barriers to __syncthreads: by the text of the line itself."""
    source = LADDER["gpt2_fused.cu"]
    lines = source.text.splitlines()
    code = machine_code(source)
    for name, words in (
        ("HMMA", "mma.sync"),
        ("MUFU.EX2", "ex2.approx"),
        ("BAR.SYNC", "__syncthreads"),
        ("LDSM", "ldmatrix"),
    ):
        found = [row for row in code.sass if re.search(rf"\b{name}", row.text)]
        assert found, name
        for row in found:
            inner = "\n".join(lines[row.cuda[0] - 4 : row.cuda[0] + 2])  # an asm statement is of several lines
            assert words in inner, (row, inner)
            assert code.ptx[row.ptx - 1].cuda[0] == row.cuda[0]


def test_an_inlined_function_keeps_the_place_of_its_call() -> None:
    source = emitted(shipped("alibi"), "fused")
    lines = source.text.splitlines()
    called = [row.cuda for row in machine_code(source).sass if row.cuda and "slopes_at(in, h_idx)" in lines[row.cuda[0] - 1]]
    assert called
    assert all(" = score(in, s" in lines[chain[1] - 1] for chain in called)


def test_routines_of_the_compiler_belong_to_the_lines_that_call_them() -> None:
    source = LADDER["cross_attention_fused.cu"]
    rows = machine_code(source).sass
    start = next(i for i, row in enumerate(rows) if row.text.startswith("$__internal"))
    (line,) = {source.text.splitlines()[line - 1] for row in rows[start:] for line in row.cuda}
    assert line.endswith("= to_fp32(O_frag[r][c + n] / divisor);")


def test_what_the_compiler_did_not_place_has_no_line() -> None:
    sass = [
        "\t.section\t.text.k,\"ax\"", "k:", "        /*0000*/ MOV R1, R2 ;",
        '\t//## File "/x/k.cu", line 7 inlined at "/x/k.cu", line 9',
        '\t//## File "/x/k.cu", line 9', '\t//## File ".nv_debug_ptx_txt", line 3', "        /*0010*/ EXIT ;", ".L_x_0:",
        "        /*0020*/ BRA `(.L_x_0);", "        /*0030*/ NOP;",
    ]  # fmt: skip
    rows = list(read_sass("\n".join(sass), ("k",)))
    assert [(row.cuda, row.ptx) for row in rows if row.is_code] == [((), 0), ((7, 9), 3)]
    ptx = [
        "{",
        "\tmov.u32 %r1, 0;",
        "\t.loc\t1 9 5",
        "\t.loc\t1 7 5, function_name $L__info_string0, inlined_at 1 9 5",
        "\tret;",
        "}",
    ]
    assert [row for row in read_ptx("\n".join(ptx)) if row.is_code] == [
        MachineLine("\tmov.u32 %r1, 0;", (), is_code=True),
        MachineLine("\tret;", (7, 9), is_code=True),
    ]


@pytest.mark.parametrize(("schedule", "arch"), EVERYWHERE)
@pytest.mark.parametrize("name", tiers.cases(SHIPPED, quick=["alibi", "gpt_oss_sinks", "packed_documents", "t5_relative_bias"]))
def test_every_line_of_a_users_expression_has_its_statement(name: str, schedule: str, arch: str) -> None:
    (loaded,) = load_path(ROOT / "specs" / f"{name}.attn")
    spec = loaded.spec
    try:
        plan = choose(spec, ARCHES[arch], schedule)
    except DiagnosticError:
        return  # the schedule is not supported
    source = emit(spec, plan)
    lines, found = source.text.splitlines(), origins(spec, plan, source)
    of_spec = spec_lines(loaded, plan, source)
    variant = build_variant(as_read(spec, plan), plan)
    functions = {"mask": variant.mask, "score": variant.score, "sink": variant.sink}
    for statement, function in functions.items():
        if function is not None:
            texts = [f"{t.name} = {t.text};" for t in function.temporaries] + [f"return {function.result};"]
        elif statement == "score" and variant.score_of_two:
            texts = [f"{variant.score_of_two};"]
        else:
            continue
        body = [i for i, line in enumerate(lines, 1) if found.get(i, ("",))[0] == statement and not line.startswith("//")]
        assert all(any(text in lines[i - 1] for i in body) for text in texts), (statement, texts)
        call = re.compile(rf"(= |\(|, ){statement}\(|{statement}\(.*\) \?|\) {statement}_of_two\(")
        calls = [i for i, line in enumerate(lines, 1) if call.search(line.split("//")[0])]
        assert calls
        stated = statement if statement in loaded.spans else "scaled k"  # the score, then
        for i in (*body, *calls):
            assert statement in found[i]
            assert loaded.spans[stated].line in of_spec[i]
            assert loaded.source.line(of_spec[i][0]).split()[0] == stated.split()[0] or found[i][0] != statement
    for declared in (*spec.inputs, *spec.params):
        kind = "input" if declared in spec.inputs else "param"
        origin = "dropout" if declared == RNG_STATE else f"{kind} {declared.name}"
        reads = [i for i, line in enumerate(lines, 1) if re.search(rf"\bin\.{declared.name}\b|\b{declared.name}_at\(", line)]
        for i in reads:
            assert origin in found[i], lines[i - 1]
            assert loaded.spans[origin].line in of_spec[i]


def test_statements_bring_the_definitions_that_they_use() -> None:
    text = """def near(d) = q - k < d
attention a {
    dtype fp16
    head_dim 64
    let size = 100
    mask causal and
         near(size)
}
"""
    (loaded,) = load_source(SourceFile("a.attn", text))
    plan = choose(loaded.spec, ARCHES["sm_80"], "naive")
    source = emit(loaded.spec, plan)
    of_spec = spec_lines(loaded, plan, source)
    lines = source.text.splitlines()
    assert of_spec[next(i for i, line in enumerate(lines, 1) if "bool mask(" in line)] == (6, 7, 1, 5)
    assert of_spec[next(i for i, line in enumerate(lines, 1) if "float softmax_scale =" in line)] == (4,)  # its default


PREPARING = ("_ranges", "_convert", "_split_q", "_split_kv")  # kernels before the others, whose loops no page shows


@pytest.mark.parametrize(("schedule", "arch"), EVERYWHERE)
def test_loop_nests_are_those_of_the_files(schedule: str, arch: str) -> None:
    """Every loop's line is there, below that of its kernel, and its fixed ranges are the file's own constants."""
    for name in SHIPPED:
        try:
            plan = choose(shipped(name), ARCHES[arch], schedule)
        except DiagnosticError:
            continue
        source = emit(shipped(name), plan)
        lines = source.text.splitlines()
        nest = loop_nest(shipped(name), plan, source)
        assert 3 <= len(nest) <= 12 + 2 * (name == "dropout")  # dropout is a kernel of its own
        launched = {e.name for e in source.kernels if not e.name.endswith(PREPARING)}
        assert {lines[p.line - 1] for p in nest if p.depth == 0} == {f"{entry}(" for entry in launched}
        for p in nest:
            assert p.loop.anchor in lines[p.line - 1]
        _check_ranges(nest, source.text)


@pytest.mark.parametrize(("schedule", "arch"), EVERYWHERE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_loop_nests_of_backwards_are_those_of_the_files(schedule: str, arch: str, deterministic: bool) -> None:
    for name, wanted in product(SHIPPED, (("q", "k", "v"), ("q",), ("k", "v"))):
        spec = shipped(name)
        try:
            plan = choose(spec, ARCHES[arch], schedule, wanted=wanted, deterministic=deterministic)
        except DiagnosticError:
            continue
        source = emit(spec, plan)
        lines = source.text.splitlines()
        for p in loop_nest(spec, plan, source):
            assert p.loop.anchor in lines[p.line - 1]


def _check_ranges(nest: tuple[PlacedLoop, ...], text: str) -> None:
    constants: dict[str, int] = {}
    for name, value in re.findall(r"^constexpr int (\w+) = ([^;,]+);", text, re.M):
        constants[name] = eval(value.replace("/", "//"), {}, constants)
    for p in nest:
        bound = re.search(r"< ([A-Z_ /0-9]+);", text.splitlines()[p.line - 1])
        if bound is None:
            continue
        step = re.search(r"\+= (\w+)\)", text.splitlines()[p.line - 1])
        by = 1 if step is None else constants.get(step[1], 0) or int(step[1])
        trips = eval(bound[1].replace("/", "//"), {}, constants) // by
        assert int(re.findall(r"\d+", p.loop.range)[-1]) == trips, (p.loop, bound[1])


def test_nests_go_inwards() -> None:
    for schedule, arch in EVERYWHERE:
        source = emitted(shipped("gpt2"), schedule, arch)
        nest = loop_nest(shipped("gpt2"), choose(shipped("gpt2"), ARCHES[arch], schedule), source)
        assert nest[0].depth == 0
        assert all(after.depth <= before.depth + 1 for before, after in pairwise(nest))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stage", "loops"), "pipeline stage, 1 of 2"),
        (("--stage", "loops", "--kernel", "wgmma"), "by TMA, in the background"),
        (("--stage", "loops", "--kernel", "hopper"), "producer: work tiles"),
        (("--stage", "sass"), "// spec    5: mask"),
        (("--stage", "ptx", "--kernel", "naive"), "// spec    5: mask"),
    ],
)
def test_show_says_where_code_is_from(arguments: tuple[str, ...], words: str) -> None:
    result = cli("show", "gpt2", *arguments)
    assert result.exit_code == 0, result.output
    assert words in result.output
    assert str(ROOT) not in result.output
