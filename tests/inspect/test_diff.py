"""`attngen diff`: the alignment of two schedules, the counts, and the command."""

from __future__ import annotations

import json
from functools import cache, partial
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.emit.comments import strip_comments
from attngen.inspect.diff import ADJACENT, Comparison, align, compare
from attngen.inspect.diff_text import diff_text, summary
from attngen.inspect.ladder import TOUR, program
from attngen.keywords import ScheduleName
from tests.conftest import ROOT
from tests.harness import cli, emitted, shipped

GPT2 = str(ROOT / "specs" / "gpt2.attn")
# Steps of the tour, and the least share of the shorter file that each keeps, with and without comments.
Rung = tuple[ScheduleName, str]
TURING = ("fused", "sm_75")
FUSED, WGMMA, HOPPER = TOUR
KEPT = [
    (("naive", "sm_75"), ("tiled", "sm_75"), 0.60, 0.60),
    (("tiled", "sm_75"), TURING, 0.60, 0.58),
    (TURING, FUSED, 0.51, 0.44),
    (FUSED, WGMMA, 0.60, 0.58),
    (WGMMA, HOPPER, 0.60, 0.58),
]


invoke = partial(cli, "diff")


@cache
def schedules(left: str, right: str, arch: str) -> tuple[str, str, Comparison]:
    texts = [emitted(shipped("gpt2"), schedule, arch).text for schedule in (left, right)]
    return texts[0], texts[1], compare(*texts)


def total(pairs: list[tuple[int, int]], score: list[list[int]]) -> float:
    follows = sum((i - 1, j - 1) in pairs for i, j in pairs)
    return sum(score[i][j] for i, j in pairs) + ADJACENT * follows


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=4))
def test_no_alignment_is_better(score: list[list[int]]) -> None:
    found = align(len(score), 4, lambda i, j: score[i][j])
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(found))
    assert all(score[i][j] for i, j in found)
    best = 0.0
    for size in range(min(len(score), 4) + 1):
        for rows in combinations(range(len(score)), size):
            for columns in combinations(range(4), size):
                pairs = list(zip(rows, columns, strict=True))
                if all(score[i][j] for i, j in pairs):
                    best = max(best, total(pairs, score))
    assert total(found, score) == best


LINES = st.lists(st.sampled_from(["a b", "  a b", "c", "}", "", "d e f", "g h"]), max_size=30).map("\n".join)


@given(LINES, LINES)
def test_every_line_is_shown_once_in_its_order(left: str, right: str) -> None:
    found = compare(left, right)
    for side, text in (("left", left), ("right", right)):
        shown = [line.text for row in found.rows if (line := getattr(row, side))]
        assert shown == [line for line in text.splitlines() if line.strip()]
    assert found.lines == min(sum(bool(line.strip()) for line in text.splitlines()) for text in (left, right))
    assert found.unchanged == sum(row.unchanged for row in found.rows)
    assert found.moved == sum(row.moved is not None and row.left is not None for row in found.rows)
    assert found.moved == sum(row.moved is not None and row.right is not None for row in found.rows)
    assert 0 <= found.kept <= 1
    assert not any(row.moved and row.unchanged for row in found.rows)


def test_a_text_is_itself_and_indentation_is_no_change() -> None:
    text = emitted(shipped("gpt2"), "tiled").text
    assert compare(text, text).kept == 1
    assert compare(text, "\n\n".join(f"  {line}" for line in text.splitlines())).kept == 1
    assert compare("", text).lines == 0


def test_a_block_that_moved_is_found_and_less_is_not() -> None:
    stays = [f"stays {n}" for n in range(9)]
    block = ["moves one", "moves two", "}", "moves three"]
    found = compare("\n".join([*block, *stays]), "\n".join([*stays, *block]))
    assert (found.unchanged, found.moved) == (9, 4)
    assert [(b.left, b.right) for b in found.blocks] == [((1, 4), (10, 13))]
    two = compare("\n".join([*block[:3], *stays]), "\n".join([*stays, *block[:3]]))
    assert (two.unchanged, two.moved, two.blocks) == (9, 0, ())


def test_a_line_that_changed_stands_beside_what_it_was() -> None:
    found = compare("constexpr int BLOCK_KV = 64;\nx;", "y;\nconstexpr int BLOCK_KV = 32;\nx;")
    assert [(row.left is not None, row.right is not None) for row in found.rows] == [(False, True), (True, True), (True, True)]
    assert [row.unchanged for row in found.rows] == [False, False, True]


@pytest.mark.parametrize(("left", "right", "kept", "code"), KEPT)
def test_neighbouring_rungs_of_the_tour_are_alike(left: Rung, right: Rung, kept: float, code: float) -> None:
    texts = [program("gpt2", *rung).text for rung in (left, right)]
    assert compare(*texts).kept >= kept
    assert compare(*map(strip_comments, texts)).kept >= code


def test_the_printed_shares_are_those_of_the_json() -> None:
    (numbers,) = json.loads(invoke(GPT2, "naive", "tiled", "--json").output)
    shown = invoke(GPT2, "naive", "tiled").output
    assert f": {numbers['lines']['kept']:.1%}\n" in shown
    assert f": {numbers['code']['kept']:.1%}\n" in shown
    lines = numbers["lines"]
    assert f"of the {lines['lines']} lines of the shorter file {lines['unchanged']} are unchanged" in shown


def test_the_step_of_an_online_softmax_is_what_moves_from_tiled_to_fused() -> None:
    left, right, found = schedules("tiled", "fused", "sm_75")
    (block,) = found.blocks
    moved = left.splitlines()[block.left[0] - 1 : block.left[1]]
    assert moved == right.splitlines()[block.right[0] - 1 : block.right[1]]
    assert any("raise_max(float& row_max" in line for line in moved)


@pytest.mark.parametrize("width", [120, 160, 240])
def test_side_by_side_every_line_of_both_files_is_there(width: int) -> None:
    left, right, found = schedules("naive", "tiled", "sm_80")
    shown = diff_text(found, ("left", "right"), width, None, False)
    assert max(map(len, shown.splitlines())) <= width
    rows = shown.splitlines()
    numbers = [row[:4].strip() for row in rows]
    wanted = [str(n) for n, line in enumerate(left.splitlines(), 1) if line.strip()]
    assert [n for n in numbers if n.isdigit()] == wanted
    middle = 5 + (width - 15) // 2 + 5
    others = [row[middle : middle + 4].strip() for row in rows]
    assert [n for n in others if n.isdigit()] == [str(n) for n, line in enumerate(right.splitlines(), 1) if line.strip()]


def test_narrow_terminals_get_one_file_under_the_other() -> None:
    left, right, found = schedules("naive", "tiled", "sm_80")
    shown = diff_text(found, ("left", "right"), 80, None, False).splitlines()[5:]
    without = {mark: [line[4:] for line in shown if line[:1] in (" ", mark) and line.strip()] for mark in "<>"}
    assert [line.strip() for line in without["<"]] == [line.strip() for line in left.splitlines() if line.strip()]
    assert [line.strip() for line in without[">"]] == [line.strip() for line in right.splitlines() if line.strip()]


def test_unchanged_lines_far_from_a_change_are_counted_instead() -> None:
    text = "\n".join(f"line {n}" for n in range(40))
    found = compare(f"{text}\nold word", f"{text}\nother")
    shown = diff_text(found, ("left", "right"), 80, 2, False)
    assert "... 38 lines unchanged" in shown
    assert "line 37" not in shown
    assert "line 38" in shown


def test_colours_are_for_terminals() -> None:
    _, _, found = schedules("naive", "tiled", "sm_80")
    assert "\x1b[" in diff_text(found, ("left", "right"), 160, 3, True)
    assert "\x1b" not in invoke(GPT2, "naive", "tiled", "--width", "160").output


def test_the_summary_says_how_many_blocks_moved() -> None:
    assert summary(Comparison((), (), 200, 100, 0), "lines") == "of the 200 lines 100 are unchanged: 50.0%"
    assert schedules("tiled", "fused", "sm_75")[2].moved == 8
    assert " and 8 moved in 1 block: " in invoke(GPT2, "tiled", "fused").output


def test_an_architecture_of_a_side_and_where_to_look_on() -> None:
    shown = invoke(GPT2, "tiled", "fused").output
    assert "gpt2_fused, template fused_simt, for sm_75" in shown
    assert f"on sm_80, fused uses the template fused_mma: attngen diff {GPT2} fused@sm_75 fused@sm_80" in shown
    assert ": attngen diff" not in invoke(GPT2, "fused@sm_75", "fused@sm_80").output
    shown = invoke(GPT2, "tiled", "fused", "--arch", "sm_86").output
    assert "gpt2_fused, template fused_mma, for sm_86" in shown
    assert "attngen diff" not in shown
    assert invoke("alibi", "fused", "hopper").exit_code == 0


def test_the_levels_of_comments_are_compared_as_asked() -> None:
    few, many = (json.loads(invoke(GPT2, "naive", "tiled", "--json", "--comments", c).output)[0] for c in ("none", "teach"))
    assert few["lines"]["lines"] < many["lines"]["lines"]
    assert few["code"] == many["code"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((GPT2, "naive", "naive"), "both sides are naive for sm_75; name two schedules"),
        ((GPT2, "fused@sm_80", "fused@sm_80"), "both sides are fused for sm_80"),
        ((GPT2, "naive", "flash"), "unknown schedule flash; known: naive, tiled, fused, wgmma, hopper"),
        ((GPT2, "naive", "tiled@sm_10"), "unknown architecture sm_10"),
        (("cross_attention", "fused", "wgmma"), "its products are of fp16 or bf16"),
        ((GPT2, "fused", "hopper@sm_80"), "use kernel fused, or --arch sm_90a"),
        ((GPT2, "naive"), "Missing argument"),
    ],
)
def test_bad_commands_are_refused_with_words(arguments: tuple[str, ...], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_every_attention_of_a_file_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "two.attn"
    path.write_text("attention one { dtype fp16 head_dim 64 }\nattention two { dtype fp32 head_dim 32 mask causal }\n")
    found = json.loads(invoke(str(path), "naive", "tiled", "--json").output)
    assert [f["attention"] for f in found] == ["one", "two"]
