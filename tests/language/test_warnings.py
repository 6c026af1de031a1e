"""Warnings about specs that are valid, but unlikely to be meant; tests/diagnostics shows their texts."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attngen
from attngen.cli import main
from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language import load_path, load_source, load_text
from attngen.shipped import spec_directory
from attngen.source import SourceFile
from attngen.spec import mistakes
from attngen.spec.attention import AttentionSpec
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr
from attngen.spec.print_attn import to_text
from tests.random_draws import draw
from tests.tiers import cases

HEAD = "dtype fp16 head_dim 64"
INPUTS = "input docs: int32[batch, kv_len] input free: int64[n] input ok: bool[kv_len] param size: int = 8 param rate: float"
READ = "score where(ok[0] or docs[0, 0] < free[0] or size < 3 or rate < 1.0, s, s - k)"
MASKS = {
    "W201": [
        "docs[b, k] == docs[b, k]", "docs[b, q] - docs[b, q] < 1", "k >= 0", "q < q_len", "k <= kv_len",
        "q - k < q_len", "h < heads",
        "not (k < 0)", "q >= k or k > q", "(q - k) % 4 < 4", "abs(q - k) >= 0", "causal or not causal",
        "size == size", "k < n or k >= n", "docs[b, k] >= -2147483648",
    ],
    "W202": ["k < 0", "k >= kv_len", "causal and q < k", "causal and window(0)", "(q - k) % 4 == 4", "size != size"],
    "W205": [
        "causal and docs[b, k] == docs[b, k]", "causal and k < kv_len", "window(size) and k >= 0", "causal or k < 0",
        "causal and (k < 4 or q < q_len)", "docs[b, q] == docs[b, k] and (q - k) % 4 < 4", "causal and not (q < 0)",
        "causal or docs[b, q] != docs[b, q]", "causal and abs(q - k) >= 0", "causal and h < heads",
        "prefix(4) or k < q and q < k", "causal and size == size",
    ],
    "W208": [
        "q > k", "k < q", "q - k >= 1", "causal and q != k", "not (k >= q)", "q > k and docs[b, q] == docs[b, k]",
        "q - k > 3 and window(8)", "q >= 4 and k < 4", "causal and (q - k) % 4 == 1",
    ],
    "W209": ["q < docs[b, 0]", "ok[q]", "docs[b, q] >= 0", "q < kv_len", "q < 8 or ok[q]"],
    "": [
        "docs[b, q] == docs[b, k]", "causal", "window(1)", "window(size)", "q - k < 8 and k <= q",
        "q + kv_len - q_len >= k", "ok[k]", "k > q", "causal and dilated(4)",
        "k < n", "k < docs[b, k]", "rate == rate", "ok[k] or not ok[k]", "k < 1", "true",
        "prefix(size)", "q - k < kv_len", "q != k", "abs(q - k) < 8 and q - k < 16", "causal and q // 4 == k // 4",
        "docs[b, k] >= 0", "window(size) or not window(4)", "size >= 0", "b == 0", "h // 4 == 0", "rate < 3.4e38",
    ],
}  # fmt: skip

# Statements beside HEAD
SPECS = {
    "W203": [
        "param scale: float score s * scale", "param sm_scale: float = 0.3 score sm_scale * s",
        "param heat: float = 0.125 score s * heat", "param root: float = 8.0 score s / root", "scale 0.125 score s * 0.125",
        "mask causal score where(q - k < 8, s / sqrt(head_dim), s)", "score s * rsqrt(head_dim) + 0.1 * (k - q)",
    ],
    "W204": ["score -0.1 * abs(q - k)", "input t: fp32[heads, kv_len] score t[h, k]"],
    "W206": [
        "score where(k >= 0, s, -inf)", "score where(q < q_len, s + k, s)", "score where(q >= k and k > q, 0.0, s)",
        "mask causal score s * where(k < kv_len, 2.0, 1.0)", "score s + where(h < heads, k * 0.1, 0.0)",
        "input t: fp32[kv_len] score s + t[where(q >= 0, k, 0)]",
    ],
    "W207": [
        "input t: fp32[heads] score s + t[h]", "input t: fp32[q_len] score s - t[q]", "score s + 5.0",
        "input t: fp32[batch, heads] mask causal score t[b, h] + s", "param shift: float score s - shift",
        "input t: fp32[heads] score softcap(20.0) + t[h]", "score s + 0.1 * q - 0.5 * k",
        "input t: fp32[heads] score where(q >= k, s + t[h], -inf)", "score where(q < 8, s + 1.0, s * 2.0)",
    ],
    "W210": [
        "input t: fp32[heads, 1] score s * t[h, clamp(k - q, 0, 0)]", "input t: fp32[8] score s * t[k - k]",
        "input t: fp32[8, kv_len] score s + t[q % 1 + (q - q), k]", "input t: fp32[4] score s * t[min(q, 0)]",
    ],
    "W211": [
        "def near = q - k < 8 mask causal", "let reach = 128 mask causal", "let n = 4 def near = q - k < n mask causal",
        "def soft(c) = c * tanh(s / c) score softcap(20.0)",
    ],
    "": [
        "input t: fp32[heads] score s + t[h] output lse", "input t: fp32[heads] score s + t[h] sink 0.0",
        "input t: fp32[heads] score s + t[h] normalize sigmoid", "score s - 5.0 normalize none",
        "input t: fp32[heads] score s * t[h]", "input t: fp32[heads] score s + t[h] * (k - q)",
        "score where(q < 8, s, -inf)", "score s + where(q < 8, 0.0, -inf)", "score s + where(q < 8, 0.0, -1e9)",
        "input t: fp32[heads] score softcap(20.0 * (1.0 + t[h]))", "score where(q >= k, s + 1.0, s)",
        "heads 8 over 1 input t: fp32[1] score s * t[h // 8]", "input t: fp32[1] heads 1 score s * t[h]",
        "let n = 4 let m = n + 1 mask window(m)", "def a = q >= k def c = a and q - k < 8 mask c",
        "param scale: float scale scale score s * 2.0", "param heat: float score s * heat", "scale 1.0 score s / 8.0",
        "dtype q fp16 k fp8_e4m3 v fp8_e4m3 scaled k by 0.125", "let window = 8 mask causal and window(window)",
    ],
}  # fmt: skip


def codes(spec: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_text(spec)
    assert all(w.category is attngen.SpecWarning and w.filename == __file__ for w in caught)
    return [str(w.message).split("]")[0].removeprefix("warning[") for w in caught]


@pytest.mark.parametrize("code", MASKS)
def test_masks_that_are_not_meant_are_named(code: str) -> None:
    for mask in MASKS[code]:
        assert {*codes(f"attention a {{ {HEAD} {INPUTS} mask {mask} {READ} }}")} == {code} - {""}, mask


@pytest.mark.parametrize("code", SPECS)
def test_specs_that_are_not_meant_are_named(code: str) -> None:
    for statements in SPECS[code]:
        head = "head_dim 64" if "dtype" in statements else HEAD
        assert {*codes(f"attention a {{ {head} {statements} }}")} == {code} - {""}, statements


def test_there_are_sixty_mistakes() -> None:
    assert sum(len(texts) for table in (MASKS, SPECS) for code, texts in table.items() if code) >= 60


@pytest.mark.parametrize("sizes", [(64, 8.0), (128, 128**0.5), (80, 80**0.5)])
def test_a_score_that_is_scaled_twice_is_warned_about(sizes: tuple[int, float]) -> None:
    head_dim, root = sizes
    head = f"attention a {{ dtype fp16 head_dim {head_dim}"
    for score in (
        "s / sqrt(head_dim)",
        f"s / {root!r}",
        f"{1 / root!r} * s",
        "rsqrt(head_dim) * s - abs(q - k)",
        f"(s + k) / {root!r}",
    ):
        assert codes(f"{head} score {score} }}") == ["W203"], score
        assert codes(f"{head} scale 1.0 score {score} }}") == []
        assert codes(f"{head} param t: float scale t score {score} }}") == []
    for score in ("s", "s / 4.0", "s * 2.0", "softcap(30.0)", f"softcap({root!r})", "s + k * 0.125", f"s + h * k / {root!r}"):
        assert codes(f"{head} score {score} }}") == [], score


def test_python_specs_are_warned_about_at_the_line_that_defines_them() -> None:
    with pytest.warns(attngen.SpecWarning, match="scaled twice") as caught:
        attngen.define(score=lambda s, b, h, q, k: s / 8.0)
    assert caught[0].filename == __file__
    with pytest.warns(attngen.SpecWarning, match="every pair") as caught:
        attngen.traced(mask=lambda b, h, q, k: k >= 0)
    assert caught[0].filename == __file__


def test_a_condition_of_a_general_function_is_not_warned_about() -> None:
    """A prefix of no keys is a condition of one value, which is not written in the function; `ids[k] == ids[k]` is."""
    ids = np.arange(8)

    def tree(prefix: int):
        return lambda b, h, q, k: (k < prefix) | ((k >= prefix) & (q >= k - prefix))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attngen.define(mask=tree(0))
    with pytest.warns(attngen.SpecWarning, match="W205"):
        attngen.define(mask="causal and k >= 0")
    with pytest.warns(attngen.SpecWarning, match="compares a value with itself"):
        attngen.define(mask=lambda b, h, q, k: (q >= k) & (ids[k] == ids[k]))


def test_nothing_that_people_write_for_flexattention_is_warned_about() -> None:
    pytest.importorskip("torch")
    from tests.torch.mods import mods

    found = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", attngen.SpecWarning)
        for mod in mods():
            try:
                attngen.traced(mask=mod.mask, score=mod.score)
                found += 1
            except (DiagnosticError, attngen.TraceError):  # what flex_attention takes, and a traced function does not
                continue
    assert found > 20


def test_a_spec_allows_what_it_means() -> None:
    text = f"attention a {{ {HEAD} mask q > k and k >= 0 def near = q < 3 allow W211, W208, W205 }}"
    assert codes(text) == []
    (spec,) = load_text(text)
    assert spec.allow == ("W205", "W208", "W211")
    assert load_text(to_text(spec)) == (spec,)
    assert codes(text.replace("W208, ", "")) == ["W208"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attngen.define(mask="q > k", allow="W208")
        attngen.define(mask="q > k", score="s + 1.0", allow=["W208", "W207"])
    with pytest.warns(attngen.SpecWarning, match='state `allow="W208"`'):
        attngen.define(mask="q > k", allow="W207")
    for wrong in ("W100", "E201", "W208,", 3):
        with pytest.raises((DiagnosticError, TypeError), match=r"E136|allow"):
            attngen.define(mask="q > k", allow=wrong)


@pytest.mark.parametrize("command", ["build", "explain"])
def test_commands_print_warnings_and_go_on(tmp_path: Path, command: str) -> None:
    spec = tmp_path / "wide.attn"
    spec.write_text(f"attention wide {{\n {HEAD}\n mask k >= 0\n}}\n")
    result = CliRunner().invoke(main, [command, str(spec), *(("-o", str(tmp_path)) if command == "build" else ())])
    assert result.exit_code == 0
    assert "warning[W201]: the mask allows every pair\n" in result.stderr
    assert "wide.attn:3:7\n" in result.stderr
    assert "warning[" not in result.stdout


@pytest.mark.parametrize(
    ("statements", "caret"),
    [
        ("mask causal and k >= 0 and window(8)", "k >= 0"),
        ("def inside = k < kv_len and ok[k] input ok: bool[kv_len] mask causal and inside", "inside"),
        ("score where(k > q, 0.5 * (s + 1.0), s / 8.0)", "s / 8.0"),
        ("input t: fp32[heads] score (s + k) - t[h]", "t[h]"),
        ("score 2.5 + s", "2.5"),
        ("mask window(8) and (q > k)", "(q > k)"),
        ("input t: fp32[4] score s + k * t[q - q] ", "t[q - q]"),
    ],
)
def test_the_caret_is_under_the_part_at_fault(statements: str, caret: str) -> None:
    (loaded,) = load_source(SourceFile("x", f"attention a {{ {HEAD} {statements} }}"))
    (found,) = loaded.suspicions()
    assert found.span is not None
    assert found.span.source.line(1)[found.span.column - 1 : found.span.end_column - 1] == caret


def test_nothing_that_is_shipped_is_warned_about() -> None:
    for path in spec_directory().rglob("*.attn"):
        assert [found for one in load_path(path) for found in one.suspicions()] == []


@pytest.mark.parametrize("first", cases(range(0, 240, 40), quick=[0], one_of=1))
def test_what_is_said_of_random_specs_is_true(first: int) -> None:
    """Conditions of one value, rows without keys and terms without effect, evaluated for all pairs of a call."""
    checked = 0
    for seed in range(first, first + 40):
        one = draw(random.Random(seed), None)
        try:
            loaded = load_source(SourceFile("x", one.text))
        except DiagnosticError:
            continue
        for found in (f for each in loaded for f in each.suspicions()):
            checked += is_true(loaded[0].spec, found, np.random.default_rng(seed))
    assert checked > 3


def is_true(spec: AttentionSpec, found: Diagnostic, random_numbers: np.random.Generator) -> bool:
    """Whether a warning states what is true of all pairs of a call; warnings that only a text shows are false."""
    assert isinstance(found, mistakes.Suspicion)
    heads, q_len, kv_len = spec.q_heads or 4, *(int(n) for n in random_numbers.integers(1, 60, 2))
    b, h, q, k = np.ogrid[:2, :heads, :q_len, :kv_len]
    names = {"b": b, "h": h, "q": q, "k": k, "s": random_numbers.standard_normal((2, heads, q_len, kv_len))}
    names |= {"batch": 2, "q_heads": heads, "kv_heads": spec.kv_heads or 4, "q_len": q_len, "kv_len": kv_len}
    names |= dict.fromkeys(spec.free_dims, 70) | {p.name: np.asarray(random_numbers.integers(-99, 99)) for p in spec.params}

    def read(name: str, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        mixed = sum(np.asarray(index) * prime for index, prime in zip(indices, (7, 13, 31, 37), strict=False))
        element = np.asarray(mixed) % 97 - 48
        return {"bool": element > 0, "int": element}.get(spec.input(name).dtype.kind, np.sin(element))

    def value(expr: Expr) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.broadcast_to(evaluate(expr, names, read, np), names["s"].shape)

    match found:
        case mistakes.AlwaysTrue():
            assert value(spec.mask).all()
        case mistakes.NeverTrue():
            assert not value(spec.mask).any()
        case mistakes.OneValue(value=stated):
            assert (value(found.expr) == (stated == "true")).all()
        case mistakes.BranchNeverTaken():
            condition = value(found.expr.args[0])
            assert condition.all() or not condition.any()
        case mistakes.RowWithoutKeys(what=what, index=index):
            assert not np.take(value(spec.mask), index, {"head": 1, "query": 2}[what]).any()
        case mistakes.WithoutEffect():
            term = value(found.expr)
            assert (term == term[..., :1]).all()
            assert spec.normalize == "softmax"
        case mistakes.WithoutKeys():
            assert (value(spec.mask) == value(spec.mask)[..., :1]).all()
        case _:
            return False
    return True
