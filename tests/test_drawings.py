"""Pictures show what their data says: layouts that the emulated device confirms, counts that a trace has, SVG that is whole."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from attngen.diagnostics import ArgumentError
from attngen.drawings.banks import Access, conflict, plain
from attngen.drawings.blocks import Work, placed
from attngen.drawings.catalogue import DRAWINGS
from attngen.drawings.fragments import LANES, MMA_16, MMA_TF32, OF_WGMMA, Operand
from attngen.drawings.levels import Bars
from attngen.drawings.theme import DARK, LIGHT
from attngen.inspect.call import Call
from attngen.inspect.drawn import drawn_spec, tile_map
from attngen.plan import ARCHES
from attngen.puzzles.drawn import PICTURES, drawn_puzzle
from attngen.puzzles.folder import find_folder
from attngen.puzzles.puzzle import Case
from attngen.puzzles.running import compile_program, program_of, run_case
from attngen.schedules import choose
from tests.harness import cli, shipped


def call(name: str, schedule: str, arch: str, length: int = 512, **params: int) -> Call:
    return Call(shipped(name), choose(shipped(name), ARCHES[arch], schedule), length, length, params)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]


# --- fragments


@pytest.mark.parametrize("operand", [*MMA_16, *MMA_TF32, OF_WGMMA], ids=lambda one: f"{one.name}{one.rows}x{one.columns}")
def test_each_element_of_a_fragment_has_one_holder(operand: Operand) -> None:
    held = [operand.held(*at) for at in product(range(operand.rows), range(operand.columns))]
    each = operand.rows * operand.columns // LANES
    assert sorted(held) == [(lane, element) for lane in range(LANES) for element in range(each)]


def _offset(operand: Operand, element: int, stride: int, transposed: bool) -> str:
    """C for the offset of a lane's element in a row-major (or transposed) matrix, from the picture's table."""
    places = {
        operand.held(r, c): (c * stride + r if transposed else r * stride + c)
        for r in range(operand.rows)
        for c in range(operand.columns)
    }
    table = ", ".join(str(places[lane, element]) for lane in range(LANES))
    return f"pick(lane, {table})"


def test_fragments_of_mma_are_those_that_the_device_multiplies() -> None:
    """A kernel that loads and stores by the tables of the picture computes the product."""
    a, b, d = MMA_16
    pairs = ", ".join(f"pack(q[{_offset(a, 2 * i, 16, False)}], q[{_offset(a, 2 * i + 1, 16, False)}])" for i in range(4))
    keys = ", ".join(f"pack(k[{_offset(b, 2 * i, 16, True)}], k[{_offset(b, 2 * i + 1, 16, True)}])" for i in range(2))
    stores = "".join(f"    s[{_offset(d, i, 8, False)}] = sums[{i}];\n" for i in range(4))
    body = f"""    const int lane = threadIdx.x;
    const unsigned a[4] = {{{pairs}}}, b[2] = {{{keys}}};
    float sums[4] = {{}};
    mma_16x8x16(sums, sums + 2, a, b[0], b[1]);
{stores}"""
    helpers = """template <typename... Offsets> __device__ int pick(int lane, Offsets... offsets) {
    const int table[] = {offsets...};
    return table[lane];
}
__device__ unsigned pack(fp16 low, fp16 high) {
    return *(unsigned short*)&low | unsigned(*(unsigned short*)&high) << 16;
}
"""
    folder = find_folder("13")
    text = folder.filled(body).replace('extern "C"', helpers + 'extern "C"')
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 16), (8, 16)))
    expected = q.astype(np.float32) @ k.astype(np.float32).T
    case = Case("one", {"q": q, "k": k, "keys": 8, "d": 16}, {"s": expected}, (1, 1), (32,))
    ran = run_case(compile_program(program_of(folder, text, folder.name)), case)
    assert np.array_equal(ran.written["s"], expected)


# --- tiles, blocks, banks


def test_the_walk_over_tiles_is_that_of_the_plan() -> None:
    """Causal rows of 128 and tiles of 64 keys: of four blocks 2, 4, 6 and 8 tiles; hopper visits them from the last one."""
    found = tile_map(call("gpt2", "fused", "sm_80"))
    assert found is not None
    assert [len(found.order(block)) for block in range(4)] == [2, 4, 6, 8]
    assert found.order(1) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert found.counts == {"full": 12, "partial": 8, "empty": 12}
    hopper = tile_map(call("gpt2", "hopper", "sm_90a"))
    assert hopper is not None
    assert next(iter(hopper.order(hopper.rows - 1))) == hopper.columns - 1
    drawn = drawn_spec("tiles", call("gpt2", "fused", "sm_80")).svg()
    assert max(int(text) for text in texts(drawn) if text.isdigit()) == 8


def test_a_work_tile_begins_where_a_block_ends_first() -> None:
    found = [*placed([Work(0, 0, 3), Work(1, 0, 1), Work(2, 0, 1), Work(3, 0, 4)], 2, 1)]
    assert [(one.processor, one.start) for one in found] == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_padding_and_swizzles_remove_conflicts() -> None:
    for schedule, arch in (("fused", "sm_80"), ("hopper", "sm_90a")):
        one = call("gpt2", schedule, arch)
        for layout in one.plan.schedule.layouts(one.spec, one.plan):
            if layout.read:
                assert (conflict(plain(layout)), conflict(layout)) == ("8-way bank conflict", "no bank conflict")


def test_lanes_that_ask_for_the_same_word_share_it() -> None:
    assert Access("", "", tuple((lane, 4 * lane, 4) for lane in range(32))).wavefronts == 1
    assert Access("", "", tuple((lane, 128 * lane, 4) for lane in range(32))).wavefronts == 32
    assert Access("", "", tuple((lane, 0, 4) for lane in range(32))).wavefronts == 1
    assert Access("", "", tuple((lane, 128 * lane, 16) for lane in range(8))).wavefronts == 8


def test_bars_are_as_long_as_their_numbers() -> None:
    bars = Bars({"a": {"x": 10.0}, "b": {"x": 5.0}}, "TFLOP/s")
    assert (bars.share(10.0), bars.share(5.0)) == (1.0, 0.5)
    steps = Bars({"a": {"x": 1e3}, "b": {"x": 1e6}}, "bytes", logarithmic=True)
    assert steps.share(1e6) == 1.0
    assert steps.share(1e6) - steps.share(1e5) == pytest.approx(steps.share(1e4) - steps.share(1e3))


# --- puzzles, from traced runs


def test_bank_conflicts_of_a_students_file_are_drawn() -> None:
    """The transposition without padding: 32 lanes ask for 32 words of one bank."""
    folder = find_folder("6")
    wrong = folder.solution.replace("[TILE + 1]", "[TILE]")
    assert wrong != folder.solution
    title = "\n".join(texts(drawn_puzzle("swizzle", folder, wrong, "mine").svg()))
    assert "load from tile: 32 wavefronts" in title
    assert "1 wavefront, no bank conflict" in title


def test_phases_of_a_pipeline_are_drawn() -> None:
    """Six tiles in two stages: each barrier ends several phases, and a wait for the next parity is open."""
    picture = drawn_puzzle("barriers", find_folder("16"), find_folder("16").solution, "the solution")
    shown = texts(picture.svg())
    assert {"full[0]", "full[1]", "empty[0]", "empty[1]"} <= set(shown)
    assert "+2048" in shown
    assert {"phase 0", "phase 1"} <= set(shown)


# --- files


@pytest.mark.parametrize("what", DRAWINGS)
def test_a_file_is_whole_and_has_the_colours_of_its_theme(what: str, tmp_path: Path) -> None:
    for theme in ("auto", "dark"):
        path = tmp_path / f"{theme}.svg"
        done = cli("draw", "gpt2", what, "--kernel", "hopper", "--q-len", "128", "--theme", theme, "-o", str(path))
        assert done.exit_code == 0, done.output
        text = path.read_text()
        root = ET.fromstring(text)
        assert ("prefers-color-scheme" in text) == (theme == "auto")
        assert (LIGHT["paper"] in text) == (theme == "auto")
        assert DARK["paper"] in text
        used = set(re.findall(r"var\(--([\w-]+)\)", text))
        assert used <= set(LIGHT)
        assert not re.search(r"https?://(?!www\.w3\.org)", text)
        assert all(element.get("class") for element in root.iter() if element.tag.endswith(("rect", "path")))


def test_what_a_kernel_does_not_have_is_refused() -> None:
    for name, schedule, arch, what in (
        ("gpt2", "naive", "sm_80", "tiles"),
        ("gpt2", "naive", "sm_80", "swizzle"),
        ("gpt2", "tiled", "sm_80", "fragment"),
        ("gpt2", "tiled", "sm_80", "blocks"),
        ("gpt2", "fused", "sm_80", "barriers"),
        ("gpt2", "naive", "sm_80", "timeline"),
    ):
        with pytest.raises(ArgumentError, match=r"--kernel|only forwards"):
            drawn_spec(what, call(name, schedule, arch))
    for what in ("tiles", "timeline"):
        assert what not in PICTURES
        with pytest.raises(ArgumentError, match="is drawn of specs"):
            drawn_puzzle(what, find_folder("1"), "", "mine")
    assert cli("draw", "gpt2", "circles").exit_code == 2
    assert cli("draw", "gpt2").exit_code == 2
    assert cli("draw", "6", "swizzle", "--kernel", "fused").exit_code == 2
    listed = cli("draw", "--list").output
    assert all(what in listed for what in DRAWINGS)
