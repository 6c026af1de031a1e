"""The report without a browser: its data, its pictures' facts, its size, and what it says where something is missing."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attngen.device.cuda import compiler
from attngen.device.cuda.line_table import machine_code, sass_code
from attngen.diagnostics import DiagnosticError
from attngen.emit.emitter import emit
from attngen.emit.templates import template_directory
from attngen.inspect.call import Call
from attngen.inspect.ladder import LADDER, ladder
from attngen.inspect.opcodes import OTHER, class_of, histogram, opcode
from attngen.inspect.report.page import Report, report
from attngen.language import Loaded, load_source
from attngen.language.load import load_path
from attngen.plan import ARCHES, Schedule
from attngen.schedules import SCHEDULES as EVERY_SCHEDULE
from attngen.schedules import choose
from attngen.schedules.hopper import HOPPER as HOPPER_SCHEDULE
from attngen.source import SourceFile
from tests import tiers
from tests.conftest import ROOT
from tests.harness import cli, emitted, shipped
from tests.hopper import HOPPER_SCHEDULES

MIB = 2**20
HOPPER = [(name, "hopper", "sm_90a") for name in ("mistral_window", "packed_documents", "gpt_oss_sinks", "gemma_softcap")]
SCHEDULES = [
    ("naive", "sm_80"), ("tiled", "sm_80"), ("fused", "sm_75"), ("fused", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a"),
]  # fmt: skip


def loaded(name: str) -> Loaded:
    (one,) = load_path(ROOT / "specs" / f"{name}.attn")
    return one


def page(one: Loaded, schedule: str, arch: str, length: int = 512) -> Report:
    plan = choose(one.spec, ARCHES[arch], schedule)
    return report(one, emit(one.spec, plan), Call(one.spec, plan, length, length), "not in this test", "nor this")


def data_of(html: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return dict(json.loads(found))


@pytest.mark.parametrize(
    ("name", "schedule", "arch"), tiers.cases([*LADDER, *HOPPER], quick=[("gpt2", "tiled", "sm_80")], one_of=6)
)
def test_a_page_is_small_whole_and_linked(name: str, schedule: str, arch: str) -> None:
    made = page(loaded(name), schedule, arch)
    assert len(made.html.encode()) < 3 * MIB
    assert made.mapped >= 0.95 * made.instructions
    assert not re.search(r'\b(src|href)="(?!#|data:,)|url\(|@import|https?://', made.html.replace("http-equiv", ""))
    data = data_of(made.html)
    columns, source = data["columns"], emitted(shipped(name), schedule, arch)
    assert len(columns["cuda"]) == source.text.count("\n")
    plain = [re.sub(r"<[^>]*>", "", line) for line in columns["cuda"]]
    assert [_unescaped(line) for line in plain] == source.text.splitlines()
    for column in ("ptx", "sass"):
        assert len(data["places"][column]) == len(columns[column])
    linked = sum(bool(data["chains"][place]) for place in data["places"]["sass"])
    assert linked == made.mapped
    spec_lines = {n for numbers in data["specOfCuda"].values() for n in numbers}
    assert spec_lines <= set(range(1, len(columns["spec"]) + 1))


def _unescaped(text: str) -> str:
    from html import unescape

    return unescape(text)


def test_the_text_of_a_spec_is_text_whatever_it_says() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
    text = f"# {hostile}\nattention a {{\n dtype fp16\n head_dim 64\n mask causal # {hostile}\n}}\n"
    (one,) = load_source(SourceFile("</title><b>.attn", text))
    made = page(one, "naive", "sm_80").html
    assert "<script>alert" not in made
    assert "<img" not in made
    assert "<b>.attn" not in made
    assert "{{ 7 * 7 }}" in "".join(data_of(made)["columns"]["spec"])
    assert made.count("<script") == 2


@pytest.mark.parametrize(("schedule", "arch"), SCHEDULES)
@pytest.mark.parametrize("name", ["gpt2", "head_dim_80", "cross_attention"])
def test_layouts_are_those_of_the_file(name: str, schedule: str, arch: str) -> None:
    """Rows as far apart as the emitted constants say, as many as a tile has, free of conflicts where they are read at once."""
    spec = shipped(name)
    try:
        plan = choose(spec, ARCHES[arch], schedule)
    except DiagnosticError:
        return  # the schedule is not supported
    constants: dict[str, int] = {}
    for constant, value in re.findall(r"^constexpr int (\w+) = ([^;,]+);", emit(spec, plan).text, re.M):
        constants[constant] = eval(value.replace("/", "//"), {}, constants)
    found = {one.name.removeprefix("a slab of ")[0]: one for one in plan.schedule.layouts(spec, plan)}
    size = {"tiled": 4, "fused_simt": 4, "hopper_fp32": 2}.get(plan.schedule.name, spec.dtype.bytes)
    strides = {
        "naive": {},
        "tiled": {"Q": "BLOCK_Q", "K": "BLOCK_KV", "P": "BLOCK_Q", "V": "BLOCK_DV"},
        "fused_simt": {"Q": "QK_STRIDE", "K": "QK_STRIDE", "V": "V_STRIDE", "P": "P_STRIDE"},
        "fused_mma": {"Q": "Q_STRIDE", "K": "K_STRIDE", "V": "V_STRIDE"},
        **{by_tma: dict.fromkeys("QKV", "ROW_BYTES // 2") for by_tma in (*HOPPER_SCHEDULES, "hopper_fp32")},
    }[plan.schedule.name]
    assert set(found) == set(strides)
    for tile, stride in strides.items():
        assert found[tile].row_bytes == size * eval(stride, {}, constants)
        assert found[tile].data_bytes <= found[tile].row_bytes
        assert found[tile].gap == ((4, size * constants["PAD"]) if plan.schedule.name == "tiled" and tile != "V" else (1, 0))
        assert found[tile].groups_read() in ({0, 8} if spec.dtype.name == "fp32" else {8})
        buffer = next((b for b in plan.buffers if b.name == tile), None)
        if buffer is not None and not plan.schedule.by_tma:
            assert buffer.bytes % (found[tile].rows * found[tile].row_bytes) == 0


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=lambda s: s.name)
def test_every_schedule_has_its_template_and_its_lesson(schedule: Schedule) -> None:
    for file in (f"kernels/{schedule.name}.cu.j2", f"lessons/{schedule.name}.j2"):
        assert (template_directory() / file).is_file()


def test_the_swizzle_is_that_of_tma() -> None:
    """The bits 4 to 6 of an address, exclusive or with its bits 7 to 9: eight rows of 128 bytes (CUDA driver API)."""
    (slab, *_) = HOPPER_SCHEDULE.layouts(shipped("gpt2"), choose(shipped("gpt2"), ARCHES["sm_90a"], "hopper"))
    for row in range(16):
        for chunk in range(8):
            address = row * 128 + chunk * 16
            assert slab.bank_group(row, chunk) == (address ^ (address >> 7 & 7) << 4) // 16 % 8
    assert slab.groups_read() == 8


@pytest.mark.parametrize("name", tiers.cases(["gpt2_fused.cu", "gpt2_hopper.cu"], quick=["gpt2_fused.cu"]))
def test_every_instruction_has_a_class(name: str) -> None:
    """Those of all kernels in generated/ have one in test_origins.py, which compiles them."""
    source = ladder()[name]
    code = [row.text for row in sass_code(source) if row.is_code]
    assert not [opcode(text) for text in code if class_of(text) == OTHER]
    counts = histogram(code)
    assert sum(counts.values()) == len(code)
    text = "\n".join(line.split("//")[0] for line in source.text.splitlines())  # comments name other kernels' instructions
    assert ("tensor cores" in counts) == ("mma" in text)


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("/*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;", "tensor cores"),
        ("/*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R1], [R2.64] ;", "global to shared"),
        ("/*0010*/                   IMAD.MOV.U32 R1, RZ, RZ, R2 ;", "moves"),
        ("/*0010*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;", "integer"),
        ("/*0010*/                   LDS.128 R4, [R2] ;", "shared memory"),
        ("/*0010*/                   LDL R4, [R1] ;", "local memory"),
        ("/*0010*/                   UNHEARD.OF R4 ;", OTHER),
    ],
)
def test_classes_are_read_off_the_opcode(instruction: str, name: str) -> None:
    assert class_of(instruction) == name


invoke = partial(cli, "report")


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    result = invoke("gpt2", "-o", str(tmp_path / "new" / "out.html"), "--kernel", "naive")
    assert result.exit_code == 0, result.output
    assert re.search(r"out\.html  0\.\d\d MiB  (\d{4}) of \1 SASS instructions with a line of CUDA", result.output)
    html = (tmp_path / "new" / "out.html").read_text()
    assert re.search(r'<tr class="own"><td>naive</td><td>\d\.\d\de-\d\d</td>.*?<td class="passed">ok</td></tr>', html)
    assert "tiled</td>" in html
    assert "fused by fused_mma</td>" in html


def test_without_a_compiler_the_page_says_that_nothing_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.device.emulated import build
    from attngen.device.protocol import DeviceError

    def missing() -> None:
        raise DeviceError("no C++ compiler was found")

    monkeypatch.setattr(build, "find_compiler", missing)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "empty"))
    result = invoke("gpt2", "-o", str(tmp_path / "out.html"))
    assert result.exit_code == 0, result.output
    assert "no table of errors: no C++ compiler" in result.stderr
    assert "Not checked: no C++ compiler was found" in (tmp_path / "out.html").read_text()
    assert "Not drawn: no C++ compiler was found" in (tmp_path / "out.html").read_text()


def test_without_nvdisasm_there_is_no_page_but_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_nvdisasm", lambda: None)
    result = invoke("gpt2", "--no-check", "-o", str(tmp_path / "out.html"))
    assert result.exit_code == 3
    assert compiler.SASS_CURE in result.stderr
    assert not (tmp_path / "out.html").exists()


def test_a_mask_that_allows_nothing_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "nothing.attn").write_text("attention nothing { dtype bf16 head_dim 64 mask q + k <= 200 and k >= q_len }")
    result = invoke(str(tmp_path / "nothing.attn"), "--no-check", "-o", str(tmp_path / "out.html"))
    assert result.exit_code == 0, result.output
    assert '<tr class="own"><td>fused</td><td>0</td>' in (tmp_path / "out.html").read_text()


@pytest.mark.long
def test_instructions_without_a_line_have_none() -> None:
    """NVRTC says line 0 of some for sm_120."""
    spec = shipped("t5_relative_bias")
    mapped, instructions = machine_code(emitted(spec, "tiled", "sm_120a")).mapped
    assert 0.95 * instructions < mapped <= instructions


def test_what_cannot_be_is_refused_with_what_could(tmp_path: Path) -> None:
    refused = invoke("gpt2", "--kernel", "hopper", "--arch", "sm_80")
    assert refused.exit_code == 2
    assert "use kernel fused, or --arch sm_90a" in refused.output
    (tmp_path / "two.attn").write_text("".join(f"attention {n} {{ dtype fp16 head_dim 64 }}\n" for n in ("one", "two")))
    path = tmp_path / "two.attn"
    assert f"name one of them: {path}:one or {path}:two" in invoke(str(path)).output
    assert invoke("gpt2", "--param", "size=3").exit_code == 2
