"""`check --against`: specs compared with attentions of their users, right and wrong, and what is said of the difference."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from attngen.language import load_text
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Shape, sample
from tests.harness import cli

OWN = Path(__file__).with_name("own_attentions.py")
check = partial(cli, "check")

RIGHT = [
    ("gpt2", "sdpa"), ("gpt2", "by_softmax"), ("gpt2", "flash_like"), ("gpt2", "layer"), ("gpt2", "causal"),
    ("alibi", "with_slopes"), ("alibi", "alibi,causal"), ("alibi", "causal,alibi"), ("packed_documents", "packed"),
]  # fmt: skip
WRONG = [
    ("gpt2", "without_itself", "q = 0", "query 0 (b = 0, h = 0) reads key 0 in the spec, which without_itself excludes"),
    ("gpt2", "with_the_next", "q = 0", "query 0 (b = 0, h = 0) reads key 1 in with_the_next, which the mask of"),
    ("gpt2", "unscaled", "q = 1", "scores of unscaled are 8 times those of the spec: its scale differs, 0.125 * 8 = 1"),
    ("gpt2", "aligned_to_the_end", "21 x 48", "reads keys 1, 2, 3 and 24 more in aligned_to_the_end"),
    ("gpt2", "with_a_sink", "q = 0", "in with_a_sink, to 1 in the spec: a sink differs"),
    ("gpt2", "with_wrong_gradients", "gradient of k", "k = 0, element = 0"),
    ("alibi", "alibi_of_the_next_head,causal", "h = 0, q = 1", "grow by -0.1875 more than those of the spec: a bias"),
    ("alibi", "causal", "q = 1", "a bias by distance differs"),
    ("packed_documents", "packed_forgotten", "q = 13", "query 13 (b = 0, h = 0) reads keys 0, 1, 2 and 10 more"),
]  # fmt: skip
REFUSED = [
    ("sdap", "did you mean sdpa?"), ("Layer", "it is a class; name an instance"), ("HEADS", "it is int, not a function"),
    ("of_four", "its arguments nonsense are neither inputs nor params"), ("of_seven", "expected an attention (q, k, v)"),
    ("fails", "it raised IndexError"), ("sdpa,causal", "two functions are one of a score and one of a mask"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "function"), RIGHT)
def test_what_agrees(spec: str, function: str) -> None:
    result = check(spec, "--against", f"{OWN}:{function}")
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.output
    assert "gradient of q" in result.output


@pytest.mark.parametrize(("spec", "function", "where", "why"), WRONG)
def test_what_differs_is_explained(spec: str, function: str, where: str, why: str) -> None:
    result = check(spec, "--against", f"{OWN}:{function}")
    assert result.exit_code == 1, result.output
    assert where in result.output
    assert why in result.output


def test_another_key_head_is_named() -> None:
    result = check("gpt2", "--against", f"{OWN}:other_key_heads", "--heads", "4", "--kv-heads", "2")
    assert "query head 1 reads values of key head 1 in other_key_heads, and of 0 in the spec" in result.output
    assert check("gpt2", "--against", f"{OWN}:other_key_heads", "--heads", "2", "--kv-heads", "1").exit_code == 0


def test_a_window_is_compared_beyond_its_size(tmp_path: Path) -> None:
    spec = tmp_path / "near.attn"
    spec.write_text("attention near { dtype fp16 head_dim 64 param size: int = 60 mask causal and window(size) }")
    result = check(str(spec), "--against", f"{OWN}:window_of_one_more")
    assert result.exit_code == 1
    assert "query 60 (b = 0, h = 0) reads key 0 in window_of_one_more, which the mask of the spec excludes" in result.output


def test_a_function_without_gradients_is_compared_by_its_output() -> None:
    result = check("gpt2", "--against", f"{OWN}:without_gradients")
    assert (result.exit_code, "not compared: its result has no gradients" in result.output) == (0, True)


@pytest.mark.parametrize(("function", "why"), REFUSED)
def test_refusals_say_what_to_write(function: str, why: str) -> None:
    result = check("gpt2", "--against", f"{OWN}:{function}")
    assert (result.exit_code, why in result.output) == (2, True), result.output


def test_other_refusals(tmp_path: Path) -> None:
    for arguments, why in (
        (("gpt2", "--against", "nothing.py:f"), "there is no such file"),
        (("gpt2", "--against", "no_such_module:f"), "No module named 'no_such_module'"),
        (("gpt2", "--against", str(OWN)), "expected MODULE:FUNCTION"),
        (("dropout", "--against", f"{OWN}:sdpa"), "remove `dropout`"),
        (("padding", "--against", f"{OWN}:sdpa"), "take lengths as an argument"),
        (("gpt2", "--against", f"{OWN}:sdpa", "--kernel", "naive"), "leave out --kernel"),
        (("gpt2", "--layout", "bshd"), "leave out --layout"),
    ):
        result = check(*arguments)
        assert (result.exit_code, why in result.output) == (2, True), result.output


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_arrays_of_a_file(tmp_path: Path, kind: str) -> None:
    (spec,) = load_text("attention a { dtype fp32 head_dim 16 input slopes: fp32[heads] mask causal score alibi(slopes) }")
    (tmp_path / "a.attn").write_text("attention a { dtype fp16 head_dim 16 mask causal }")
    (plain,) = load_text((tmp_path / "a.attn").read_text().replace("fp16", "fp32"))
    of = spec if kind == "npz" else plain
    problem = sample(of, Shape(2, 4, 2, 9, 9))
    output = numpy_attention(of, problem).output
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, "o": output, **problem.inputs}
    path = tmp_path / f"o.{kind}"
    text = "alibi16.attn" if kind == "npz" else "a.attn"
    (tmp_path / "alibi16.attn").write_text(
        "attention a { dtype fp16 head_dim 16 input slopes: fp32[heads] mask causal score alibi(slopes) }"
    )
    for wrong in (False, True):
        arrays["o"] = output + wrong * np.eye(9)[None, None, :, :1]
        if kind == "npz":
            np.savez(path, **arrays)
        else:
            for name in ("q", "k", "v", "o"):
                np.save(tmp_path / f"{name}.npy", arrays[name])
        result = check(str(tmp_path / text), "--against", str(path), "--json")
        assert (result.exit_code, len(json.loads(result.output))) == (int(wrong), 1), result.output
    assert "b = 0, h = 0, q = 0, element = 0" in json.loads(result.output)[0]["first"]
    np.savez(tmp_path / "half.npz", q=problem.q)
    assert "it has no k, v, o" in check("gpt2", "--against", str(tmp_path / "half.npz")).output
