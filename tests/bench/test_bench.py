"""Measuring, as far as it goes without a GPU: peers made from specs, reports, pictures, counts, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from attngen.bench.counts import count
from attngen.bench.report import Measured, Report, Timing, from_json
from attngen.cli import main
from attngen.device.arrays import ArgumentError
from attngen.language import load_text
from attngen.plan import choose, find_arch
from attngen.reference.problems import Shape, sample
from attngen.spec.dtypes import DTYPES
from tests import tiers
from tests.harness import SPECS, shipped

RESULTS = tuple(
    Measured(
        f"bf16 D64 S{n}",
        "bf16",
        64,
        "32 over 8",
        masked,
        n,
        who,
        Timing(ms, ms * 0.9, ms * 1.2),
        100 / ms,
        0.2,
        0.1,
        4096,
        1e-3,
    )
    for masked in (True, False)
    for n in (512, 1024)
    for who, ms in (("attngen fused", 0.1), ("attngen hopper", 0.05), ("torch flash", 0.2), ("FlexAttention", 0.3))
)
REPORT = Report("mine", "some GPU, torch 2", 16384, 21, RESULTS)


@pytest.mark.parametrize("name", tiers.cases(SPECS, quick=["alibi", "mistral_window", "packed_documents", "retention"]))
def test_flexattention_made_from_a_spec_is_the_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from attngen.bench.peers import flex_peer
    from attngen.reference.torch_oracle import to_torch, torch_attention

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # what is compiled is torch's affair
    spec = replace(shipped(name), dtype=DTYPES["fp32"])
    problem = sample(spec, Shape(batch=2, q_heads=4, kv_heads=4, q_len=128, kv_len=128))
    q, k, v = (to_torch(a, "cpu") for a in (problem.q, problem.k, problem.v))
    inputs = {n: to_torch(a, "cpu") for n, a in problem.inputs.items()}
    complaints: list[str] = []
    found = flex_peer(spec, q, k, v, inputs, {}, complaints.append)
    assert not complaints
    assert bool(found) == (spec.normalize == "softmax" and spec.sink is None)
    for call in found.values():
        torch.testing.assert_close(call().double(), torch_attention(spec, q, k, v, inputs=inputs)[0], atol=2e-5, rtol=2e-5)


def test_torch_stands_beside_what_it_can_say() -> None:
    torch = pytest.importorskip("torch")
    from attngen.bench.peers import torch_peers
    from attngen.reference.torch_oracle import torch_attention

    q, k, v = torch.randn(3, 1, 4, 32, 64)
    causal = load_text("attention one { dtype fp32 head_dim 64 mask causal }")[0]
    found = torch_peers(causal, q, k, v)
    assert "torch math" in found
    torch.testing.assert_close(found["torch math"]().double(), torch_attention(causal, q, k, v)[0], atol=1e-5, rtol=1e-5)
    for said in ("mask window(8)", "score softcap(20.0)", "normalize sigmoid"):
        assert not torch_peers(load_text(f"attention one {{ dtype fp32 head_dim 64 {said} }}")[0], q, k, v)


def test_cases_keep_the_number_of_tokens_and_lose_the_inputs_of_the_mask() -> None:
    pytest.importorskip("torch")
    from attngen.bench.sweep import cases

    found = list(cases(shipped("packed_documents"), [512, 2048], ["bf16", "fp32"], [64, 96], True, 4096))
    assert len(found) == 16
    assert {c.batch * c.length for c in found} == {4096}
    assert {(c.spec.head_dim, c.q_heads) for c in found} == {(64, 32), (96, 21)}
    assert all(bool(c.spec.inputs) == c.masked == (c.spec.mask is not None) for c in found)


def test_pairs_are_those_that_the_mask_keeps() -> None:
    torch = pytest.importorskip("torch")
    from attngen.reference.torch_oracle import allowed_pairs

    q = torch.randn(2, 3, 50, 64)
    assert allowed_pairs(load_text("attention one { dtype fp32 head_dim 64 }")[0], q, q, {}) == 6 * 2500
    assert allowed_pairs(load_text("attention one { dtype fp32 head_dim 64 mask causal }")[0], q, q, {}) == 6 * 1275
    by_head = load_text("attention one { dtype fp32 head_dim 64 mask q >= k or h == 1 }")[0]
    assert allowed_pairs(by_head, q, q, {}) == 2 * (2 * 1275 + 2500)


def test_a_report_is_kept_and_read_again() -> None:
    assert from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT
    for bad in ({}, [], {**REPORT.to_json(), "results": [{"case": "x"}]}):
        with pytest.raises(ArgumentError, match="no report"):
            from_json(bad)


def test_the_picture_says_what_ran_where(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from attngen.bench.plot import draw

    draw(REPORT, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    draw(REPORT, tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    for said in (
        "mine",
        "some GPU, torch 2",
        "TFLOP/s",
        "sequence length",
        "FlexAttention",
        "attngen hopper",
        "FlashAttention-2 (torch)",
        "without the mask",
        "1024",
    ):
        assert said in text, said


def test_auto_is_measured_and_named_as_the_rung_that_it_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from attngen.bench import sweep
    from attngen.bench.measure import Ceilings

    def compiled(spec: Any, kernel: str, device: str) -> Any:
        arch = find_arch("sm_90a")
        assert arch is not None
        plan = choose(spec, arch, kernel)
        return SimpleNamespace(plan=plan)

    q = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    monkeypatch.setattr(sweep, "compile", compiled)
    monkeypatch.setattr(sweep, "problem", lambda case, params: (q, q, q, {}, {}))
    monkeypatch.setattr(sweep, "flex_peer", lambda *given: {})
    monkeypatch.setattr(sweep, "_call", lambda kernel, tensors, named: tensors[0])
    monkeypatch.setattr(sweep, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(sweep, "measure", lambda calls, rounds: {name: Timing(1.0, 1.0, 1.0) for name in calls})
    monkeypatch.setattr(sweep, "ceilings", lambda dtype: Ceilings(1.0, 1.0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    todo = list(sweep.cases(shipped("gpt2"), [16], [], [], False, 16))
    names = [r.candidate for r in sweep.run(todo, {}, 2, lambda text: None, ("auto", "fused", "hopper"))]
    assert [n for n in names if n.startswith("attngen")] == ["attngen hopper", "attngen fused"]


def test_counts_fall_from_rung_to_rung() -> None:
    shape = Shape(batch=1, q_heads=2, kv_heads=2, q_len=256, kv_len=256)
    naive, tiled, fused = count(shipped("gpt2"), shape, {})
    assert naive.global_read > tiled.global_read > fused.global_read
    # scores and then weights, fp32, of two heads; the fused kernel keeps none
    assert naive.workspace == 2 * 2 * 4 * 256 * 256
    # tiles of 64 x 64: of the first rows causal leaves out three of four
    assert tiled.workspace == 2 * 2 * 4 * (1 + 2 + 3 + 4) * 64 * 64
    assert fused.workspace == 0
    # one warp's mma is a product of 16 x 8 x 16; of four tiles of 128 x 128, causal leaves out one
    assert fused.tensor_core_instructions == 2 * 2 * (3 * 128 * 128 * 64) // (16 * 8 * 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the SPEC to measure"),
        (("gpt2", "--json", "x.json"), "no GPU"),
        (("gpt2", "--plot", "x.gif"), "not as .gif"),
        (("--from", "pyproject.toml"), "is not a JSON file"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attngen.device.choose.has_gpu", lambda: False)
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_a_kept_report_is_shown_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "kept.json").write_text(json.dumps(REPORT.to_json()))
    arguments = ["bench", "--from", str(tmp_path / "kept.json"), "--plot", str(tmp_path / "kept.png")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "kept.png").exists()
    assert result.output.count("attngen fused") == 4
    assert "some GPU" in result.output


def test_without_a_gpu_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.device.choose.has_gpu", lambda: False)
    result = CliRunner().invoke(main, ["bench", "gpt2"])
    assert result.exit_code == 0, result.output
    assert "no GPU found" in result.output
    assert result.output.count("fused") >= 1
