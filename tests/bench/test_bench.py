"""Benchmarks without a GPU: peers made from specs, reports, plots, counts, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attngen.bench.report import Measured, Report, Timing, from_json
from attngen.cli import bench as bench_command
from attngen.device.arrays import ArgumentError
from attngen.inspect.tracing import trace_spec
from attngen.keywords import PORTABLE_SCHEDULES
from attngen.language import load_text
from attngen.plan import find_arch
from attngen.plan.products import operations_of_a_pair
from attngen.reference.problems import Shape, sample
from attngen.schedules import candidates, choose
from attngen.spec.dtypes import DTYPES
from tests import tiers
from tests.harness import SPECS, cli, shipped

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
    assert bool(found) == (spec.normalize == "softmax" and spec.sink is None and spec.dropout is None)
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
    of_gradients = replace(REPORT, wanted=("q", "k"))
    assert from_json(json.loads(json.dumps(of_gradients.to_json()))) == of_gradients
    for bad in ({}, [], {**REPORT.to_json(), "results": [{"case": "x"}]}):
        with pytest.raises(ArgumentError, match="not a report"):
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


def test_auto_is_measured_and_named_as_the_schedule_that_it_selects(monkeypatch: pytest.MonkeyPatch) -> None:
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


ONE = "attention one { dtype fp32 head_dim 16 heads 2 input slopes: fp32[heads] mask causal score s + slopes[h] * (k - q) }"


@pytest.mark.parametrize("gradients", tiers.cases(["q,k,v", "k,slopes"], quick=["k,slopes"]))
def test_a_backward_is_measured_beside_autograd(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the CPU, with a timer that is replaced."""
    torch = pytest.importorskip("torch")
    from attngen.api import compile
    from attngen.bench import gradients as bench_gradients
    from attngen.bench import sweep
    from attngen.bench.measure import Ceilings
    from attngen.bench.peers import CAUSAL
    from attngen.device.emulated import EmulatedDevice

    on_cpu, wanted = EmulatedDevice(arch="sm_75"), tuple(gradients.split(","))
    captured, length, ran = "slopes" in wanted, 20, []

    def measured(calls: dict[str, Any], rounds: int) -> dict[str, Timing]:
        ran.extend(set(call()) for call in calls.values())
        return {name: Timing(1.0, 1.0, 1.0) for name in calls}

    def math_attention(spec: Any, q: Any, k: Any, v: Any, inputs: dict[str, Any], *rest: Any) -> dict[str, Any]:
        distance = torch.arange(length) - torch.arange(length)[:, None]
        bias = (inputs["slopes"][:, None, None] if captured else 0.0) * distance
        mask = bias.masked_fill(distance > 0, -torch.inf)
        return {"FlexAttention": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)}

    spec = load_text(ONE if captured else "attention one { dtype fp32 head_dim 16 heads 2 mask causal }")[0]
    assert spec.mask is CAUSAL
    q, k, v, slopes = *torch.randn(3, 1, 2, length, 16), torch.rand(2)
    monkeypatch.setattr(sweep, "compile", lambda spec, kernel, device: compile(spec, kernel=kernel, device=on_cpu))
    monkeypatch.setattr(sweep, "problem", lambda case, params: (q, k, v, {"slopes": slopes} if captured else {}, {}))
    monkeypatch.setattr(sweep, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(sweep, "measure", measured)
    monkeypatch.setattr(sweep, "ceilings", lambda dtype: Ceilings(1.0, 1.0))
    monkeypatch.setattr(bench_gradients, "flex_peer", math_attention)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    todo = list(sweep.cases(spec, [length], [], [], False, length))
    results = list(sweep.run(todo, {}, 2, lambda text: None, ("naive", "fused"), wanted))
    names = {r.candidate for r in results}
    assert {"attngen naive", "attngen fused", "FlexAttention"} <= names
    assert ("torch math" in names) == (not captured)
    assert all(found == set(wanted) for found in ran)
    assert all(r.error is not None and r.error < 1e-5 for r in results)
    products = 5 if not captured else 3  # Q K^T, dO V^T and dS^T Q
    operations = products * 2 * 16 * 2 * length * (length + 1) / 2
    assert [r.tflops for r in results] == pytest.approx([operations / 1e9] * len(results))


def test_products_of_a_backward_are_those_that_the_gradients_need() -> None:
    spec = load_text("attention one { dtype fp32 head_dim 16, v 32 }")[0]
    assert operations_of_a_pair(spec) == 2 * (16 + 32)
    assert operations_of_a_pair(spec, ("q", "k", "v")) == 2 * (3 * 16 + 2 * 32)
    assert operations_of_a_pair(spec, ("v",)) == 2 * (16 + 32)
    equal = replace(spec, head_dim_v=16)
    assert operations_of_a_pair(equal, ("q", "k", "v")) == 2.5 * operations_of_a_pair(equal)


@pytest.mark.long
def test_counts_of_backwards() -> None:
    shape = Shape(1, 2, 2, 64, 64)
    found = list(trace_spec(load_text(ONE)[0], PORTABLE_SCHEDULES, "sm_80", shape, {}, None, wanted=("q", "slopes")))
    assert [c.plan.schedule.name for c in found] == ["naive_backward", "tiled_backward", "fused_mma_backward"]
    assert all(c.totals.global_written > 0 for c in found)
    assert found[0].workspace > found[-1].workspace > 0  # scores and their gradients; delta


def test_counts_fall_from_schedule_to_schedule() -> None:
    shape = Shape(batch=1, q_heads=2, kv_heads=2, q_len=256, kv_len=256)
    naive, tiled, fused = trace_spec(shipped("gpt2"), PORTABLE_SCHEDULES, "sm_80", shape, {}, watch=None)
    assert naive.totals.global_read > tiled.totals.global_read > fused.totals.global_read
    # scores and then weights, fp32, of two heads; the fused kernel keeps none
    assert naive.workspace == 2 * 2 * 4 * 256 * 256
    # tiles of 64 x 64: of the first rows causal leaves out three of four
    assert tiled.workspace == 2 * 2 * 4 * (1 + 2 + 3 + 4) * 64 * 64
    assert fused.workspace == 0
    # one warp's mma is a product of 16 x 8 x 16; of four tiles of 128 x 128, causal leaves out one
    assert fused.totals.mma == 2 * 2 * (3 * 128 * 128 * 64) // (16 * 8 * 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the SPEC to measure"),
        (("gpt2", "--json", "x.json"), "no GPU"),
        (("gpt2", "--wanted", "q"), "add --backward"),
        (("gpt2", "--plot", "x.gif"), "no GPU"),
        (("--from", "pyproject.toml", "--plot", "x.gif"), "not as .gif"),
        (("--from", "pyproject.toml"), "is not a JSON file"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attngen.device.select.has_gpu", lambda: False)
    result = cli("bench", *arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kernel", ""), "unknown schedule (no name)"),
        (("--kernel", "flash"), "unknown schedule flash"),
        (("--lengths", ""), "'' is not a list of positive whole numbers"),
        (("--lengths", "-5"), "'-5' is not a list of positive whole numbers"),
        (("--dtypes", "int32"), "unknown element type int32; known: fp16, bf16, fp32"),
        (("--head-dims", "0"), "Invalid value for --head-dims: '0' is not a list"),
        (("--plot", "x.gif"), "not as .gif"),
    ],
)
def test_a_wrong_option_is_said_after_a_missing_gpu(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu, said in {True: words, False: f"counted instead without {arguments[0]}. `attngen check` compares"}.items():
        monkeypatch.setattr("attngen.device.select.has_gpu", lambda has=gpu: has)
        result = cli("bench", "gpt2", *arguments)
        assert result.exit_code == 2
        assert said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "arguments", [("no_such_spec",), ("no_such_spec", "--lengths", "x", "--plot", "x.gif")], ids=["counts", "timings"]
)
def test_a_missing_gpu_is_said_first_and_without_torch(arguments: tuple[str, ...]) -> None:
    """Before a mistake in SPEC or in the options, and before packages are imported that take seconds to import."""
    call = f"import sys\nfrom attngen.__main__ import run\nsys.argv = ['attngen', 'bench', *{arguments}]\n"
    call += "try: run()\nfinally: print({'torch', 'matplotlib'} & set(sys.modules))"
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", call], env=no_gpu, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    usage = "--plot" in arguments
    assert " ".join(done.stderr.split("Error: " if usage else "\n")[usage].split()).startswith("no GPU found"), done.stderr


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First what no package cures, with the packages; no file is written, and nothing measured."""
    find = bench_command.find_spec
    absent = {"torch", "matplotlib"}
    monkeypatch.setattr(bench_command, "find_spec", lambda name: None if name in absent else find(name))
    files = ("--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png"))
    said = {}
    for gpu in (False, True):
        monkeypatch.setattr("attngen.device.select.has_gpu", lambda has=gpu: has)
        result = cli("bench", "gpt2", *files)
        assert result.exit_code == 2
        said[gpu] = " ".join(result.output.replace("│", " ").split())
    assert "no GPU found, so nothing can be timed" in said[False]
    assert (
        "without --json, --plot; with one, torch and matplotlib would be missing too: pip install 'attngen[bench]'"
        in said[False]
    )
    assert "measuring and a plot need torch and matplotlib: pip install 'attngen[bench]'" in said[True]
    absent.remove("torch")
    (tmp_path / "kept.json").write_text(json.dumps(REPORT.to_json()))
    result = cli("bench", "--from", str(tmp_path / "kept.json"), "--plot", str(tmp_path / "x.png"))
    assert "a plot needs matplotlib: pip install 'attngen[bench]'" in " ".join(result.output.split())
    assert [p.name for p in tmp_path.iterdir()] == ["kept.json"]


def test_a_kept_report_is_shown_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "kept.json").write_text(json.dumps(REPORT.to_json()))
    arguments = ["bench", "--from", str(tmp_path / "kept.json"), "--plot", str(tmp_path / "kept.png")]
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "kept.png").exists()
    assert result.output.count("attngen fused") == 4
    assert "some GPU" in result.output


def test_without_a_gpu_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.device.select.has_gpu", lambda: False)
    result = cli("bench", "gpt2")
    assert result.exit_code == 0, result.output
    assert "no GPU found" in result.output
    assert result.output.count("fused") >= 1


@pytest.mark.usefixtures("compiled_runtime")
@pytest.mark.parametrize("gradients", tiers.cases(["", "q,slopes"], quick=["q,slopes"]))
def test_tuning_keeps_the_fastest(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning on the emulated device, with a timer that is replaced."""
    torch = pytest.importorskip("torch")
    from attngen.bench import sweep, tune
    from attngen.device.emulated import EmulatedDevice
    from attngen.device.tuning_cache import remembered

    def timings(calls: dict[str, Any], rounds: int) -> dict[str, Timing]:
        return {name: Timing(1.0 - 0.1 * int(name), 0.0, 2.0) for name in calls}  # later candidates are faster

    wanted = tuple(gradients.split(",")) if gradients else ()
    monkeypatch.setattr(tune, "CudaDevice", lambda: EmulatedDevice(arch="sm_75"))
    monkeypatch.setattr(sys.modules["attngen.schedules.tuning"], "candidates", lambda *asked: candidates(*asked)[:2])
    monkeypatch.setattr(tune, "_compile_all", lambda programs, progress: None)
    monkeypatch.setattr(tune, "measure", timings)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    q, slopes = torch.randn(1, 2, 20, 16), torch.rand(2)
    monkeypatch.setattr(tune, "problem", lambda case, params: (q, q, q, {"slopes": slopes}, {}))
    text = (
        "attention one { dtype fp32 head_dim 16 heads 2 input slopes: fp32[heads] mask causal score s + slopes[h] * (k - q) }"
    )
    (case,) = sweep.cases(load_text(text)[0], [20], [], [], False, 20)
    outcome = tune.tune(case, {}, 2, lambda said: None, wanted, bool(wanted))
    assert {t.plan.facts.deterministic for t in outcome.tried} == {bool(wanted)}
    assert outcome.kept
    assert outcome.tried[0].kernel == outcome.winner.kernel != next(t.kernel for t in outcome.tried if t.planned)
    assert remembered(case.spec, "sm_75", "fused", wanted, bool(wanted)) == {outcome.bucket: outcome.winner}
    assert not remembered(case.spec, "sm_75", "fused", () if wanted else ("q", "slopes"))


def test_a_case_of_few_rows_says_so() -> None:
    pytest.importorskip("torch")
    from attngen.bench import sweep

    (case,) = sweep.cases(shipped("llama_gqa"), [64], [], [], False, 64)
    assert (case.q_len, replace(case, rows=1).q_len) == (64, 1)
    assert replace(case, rows=1).title == case.title.replace("S64", "S1/64")


def test_gradients_by_autograd_are_those_of_the_derivation() -> None:
    pytest.importorskip("torch")
    from attngen.reference.gradients import numpy_gradients, sample_loss
    from attngen.reference.torch_oracle import to_torch, torch_gradients

    spec = load_text(
        "attention one { dtype fp32 head_dim 16 input bias: fp32[heads, q_len, 1] param heat: float = 1.5 "
        "mask causal score s * heat + bias[h, q, 0] }"
    )[0]
    problem = sample(spec, Shape(2, 4, 2, 20, 30))
    loss, wanted = sample_loss(spec, problem), ("q", "k", "v", "bias", "heat")
    expected = numpy_gradients(spec, problem, loss, wanted)
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    tensors = {name: to_torch(array, "cpu") for name, array in arrays.items()}
    found = torch_gradients(spec, tensors, {}, to_torch(loss.dout, "cpu"), wanted)
    for name in wanted:
        np.testing.assert_allclose(found[name].numpy(), expected[name].value, atol=1e-9)
