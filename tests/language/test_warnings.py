"""Warnings about specs that are valid, but unlikely to be meant; tests/diagnostics shows their texts."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

import attngen
from attngen.cli import main
from attngen.language import load_path, load_text
from attngen.shipped import spec_directory

HEAD = "dtype fp16 head_dim 64"
INPUTS = "input docs: int32[batch, kv_len] input free: int64[n] input ok: bool[kv_len] param size: int = 8 param rate: float"
MASKS = {
    "W201": [
        "docs[b, k] == docs[b, k]", "docs[b, q] - docs[b, q] < 1", "k >= 0", "q < q_len", "k <= kv_len",
        "q - k < q_len", "h < heads",
        "not (k < 0)", "q >= k or k > q", "(q - k) % 4 < 4", "abs(q - k) >= 0", "causal or not causal",
        "size == size", "k < n or k >= n", "docs[b, k] >= -2147483648",
    ],
    "W202": ["k < 0", "k >= kv_len", "causal and q < k", "causal and window(0)", "(q - k) % 4 == 4", "size != size"],
    "": [
        "docs[b, q] == docs[b, k]", "causal", "window(1)", "window(size)", "causal and k < kv_len",
        "q + kv_len - q_len >= k", "ok[k]",
        "k < n", "k < docs[b, k]", "rate == rate", "ok[k] or not ok[k]", "k < 1", "q < kv_len", "true",
        "prefix(size)", "q - k < kv_len",
        "docs[b, k] >= 0", "window(size) or not window(4)", "size >= 0", "b == 0", "h // 4 == 0", "rate < 3.4e38",
    ],
}  # fmt: skip


def codes(spec: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_text(spec)
    assert all(w.category is attngen.SpecWarning and w.filename == __file__ for w in caught)
    return [str(w.message).split("]")[0].removeprefix("warning[") for w in caught]


@pytest.mark.parametrize(("mask", "code"), [(mask, code) for code, masks in MASKS.items() for mask in masks])
def test_a_mask_of_one_value_is_warned_about(mask: str, code: str) -> None:
    unused = "score s + where(ok[0] or docs[0, 0] < free[0] or size < 3 or rate < 1.0, 1.0, 0.0)"
    assert codes(f"attention a {{ {HEAD} {INPUTS} mask {mask} {unused} }}") == [code] * (code != "")


@pytest.mark.parametrize("sizes", [(64, 8.0), (128, 128**0.5), (80, 80**0.5)])
def test_a_score_that_is_scaled_twice_is_warned_about(sizes: tuple[int, float]) -> None:
    head_dim, root = sizes
    head = f"attention a {{ dtype fp16 head_dim {head_dim}"
    for score in (
        "s / sqrt(head_dim)",
        f"s / {root!r}",
        f"{1 / root!r} * s",
        "rsqrt(head_dim) * s - abs(q - k)",
        f"(s + q) / {root!r}",
    ):
        assert codes(f"{head} score {score} }}") == ["W203"], score
        assert codes(f"{head} scale 1.0 score {score} }}") == []
        assert codes(f"{head} param t: float scale t score {score} }}") == []
    for score in ("s", "s / 4.0", "s * 2.0", "softcap(30.0)", f"softcap({root!r})", "s + q * 0.125", f"s + h / {root!r}"):
        assert codes(f"{head} score {score} }}") == [], score


def test_python_specs_are_warned_about_at_the_line_that_defines_them() -> None:
    with pytest.warns(attngen.SpecWarning, match="scaled twice") as caught:
        attngen.define(score=lambda s, b, h, q, k: s / 8.0)
    assert caught[0].filename == __file__
    with pytest.warns(attngen.SpecWarning, match="every pair") as caught:
        attngen.traced(mask=lambda b, h, q, k: k >= 0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("command", ["build", "explain"])
def test_commands_print_warnings_and_go_on(tmp_path: Path, command: str) -> None:
    spec = tmp_path / "wide.attn"
    spec.write_text(f"attention wide {{\n {HEAD}\n mask k >= 0\n}}\n")
    result = CliRunner().invoke(main, [command, str(spec), *(("-o", str(tmp_path)) if command == "build" else ())])
    assert result.exit_code == 0
    assert "warning[W201]: the mask allows every pair\n" in result.stderr
    assert "wide.attn:3:7\n" in result.stderr
    assert "warning[" not in result.stdout


def test_nothing_that_is_shipped_is_warned_about() -> None:
    for path in spec_directory().glob("*.attn"):
        assert [found for one in load_path(path) for found in one.suspicions()] == []
