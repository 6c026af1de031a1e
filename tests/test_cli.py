"""The command line: output, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attngen.cli import COMMANDS
from attngen.cli.errors import reported
from attngen.emit.comments import strip_comments
from attngen.emit.manifest import from_manifest
from attngen.keywords import SCHEDULE_NAMES
from tests import tiers
from tests.conftest import ROOT
from tests.harness import cli as invoke
from tests.harness import emitted, shipped
from tests.hopper import HOPPER_SCHEDULES

GPT2 = str(ROOT / "specs" / "gpt2.attn")


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attngen", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT, check=False)


def test_build_writes_cuda_and_manifests(tmp_path: Path) -> None:
    result = invoke("build", GPT2, "-o", str(tmp_path))
    assert result.exit_code == 0
    names = {f"gpt2_{schedule}.{suffix}" for schedule in ("naive", "tiled", "fused") for suffix in ("cu", "json")}
    assert {p.name for p in tmp_path.iterdir()} == names
    text = (tmp_path / "gpt2_fused.cu").read_text()
    assert from_manifest((tmp_path / "gpt2_fused.json").read_text(), text) == emitted(shipped("gpt2"), "fused")


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_build_writes_the_schedule_that_a_spec_states(schedule: str, tmp_path: Path) -> None:
    """Or refuses: `decode` has no dropout."""
    for extra in ("", " dropout 0.1"):
        spec = tmp_path / "mine.attn"
        spec.write_text(f"attention mine {{ dtype fp16 head_dim 64{extra} kernel {schedule} }}")
        result = invoke("build", str(spec), "-o", str(tmp_path / "out"))
        if schedule == "decode" and extra:
            assert result.exit_code == 2
        else:
            assert (tmp_path / "out" / f"mine_{schedule}.cu").exists()


@pytest.mark.parametrize("level", tiers.cases(["none", "teach"], quick=["teach"]))
def test_comments_change_the_text_and_nothing_else(level: str, tmp_path: Path) -> None:
    """--comments changes neither the manifest nor the compiled text: the cache has one entry per kernel."""
    cache = tmp_path / "cache"
    for name in ("brief", level):
        arguments = ("build", GPT2, "--kernel", "naive", "--comments", name, "--cubin", "-o", str(tmp_path / name))
        assert process(*arguments, ATTNGEN_CACHE_DIR=str(cache)).returncode == 0
    assert len(list(cache.rglob("*.cubin"))) == 1
    for name in ("gpt2_naive.json", "gpt2_naive.cubin"):
        assert (tmp_path / "brief" / name).read_bytes() == (tmp_path / level / name).read_bytes()
    written, brief = ((tmp_path / name / "gpt2_naive.cu").read_text() for name in (level, "brief"))
    assert strip_comments(written) == strip_comments(brief)
    assert (len(written) > len(brief)) == (level == "teach")
    assert invoke("show", GPT2, "--kernel", "naive", "--comments", level).output == written


@pytest.mark.parametrize("schedule", ["tiled", "fused", "hopper"])
def test_build_writes_a_forward_that_gives_its_backward_all_it_reads(schedule: str, tmp_path: Path) -> None:
    common = ("build", "alibi", "--kernel", schedule, "-o", str(tmp_path))
    assert invoke(*common, "--saves-lse").exit_code == 0
    assert invoke(*common, "--backward", "--wanted", "q,k,v").exit_code == 0
    forward, backward = (json.loads((tmp_path / f"alibi_{schedule}{end}.json").read_text()) for end in ("", "_backward"))
    given = {(t["argument"], t["dtype"], *t["axes"]) for t in forward["tensors"] if t["role"] in ("input", "output")}
    read = {(t["argument"], t["dtype"], *t["axes"]) for t in backward["tensors"] if t["role"] == "input"}
    assert {name for name, *_ in read - given} == {"dout"}
    assert invoke(*common, "--saves-lse", "--backward").exit_code == 2


def test_build_gives_the_same_bytes_every_time(tmp_path: Path) -> None:
    for seed in ("0", "77"):
        done = process("build", "packed_documents", "-o", str(tmp_path / seed), PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    for path in (tmp_path / "0").iterdir():
        assert path.read_bytes() == (tmp_path / "77" / path.name).read_bytes()


def test_build_imports_neither_torch_nor_cuda_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from attngen.cli import main; "
        f"main(['build', {GPT2!r}, '-o', {str(tmp_path)!r}], standalone_mode=False); "
        "print(sorted({'torch', 'cuda', 'numpy', 'pygments'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_build_has_no_garbage_collected(tmp_path: Path) -> None:
    """Neither while modules are imported nor at the end of the process, which runs the first registered function last."""
    code = (
        "import atexit, gc, sys; from attngen.__main__ import run; "
        "collected = []; gc.callbacks.append(lambda *one: collected.append(one)); "
        "atexit.register(lambda: print(len(collected), gc.get_count()[0] < 1000)); "
        f"sys.argv = ['attngen', 'build', {GPT2!r}, '-o', {str(tmp_path)!r}]; run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "0 True"


def test_check_passes_and_says_so() -> None:
    result = invoke("check", GPT2, "--device", "emulated", "--q-len", "70", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert [r["schedule"] for r in rows if r["direction"] == "forward"] == [
        "naive",
        "tiled",
        "fused",
        "wgmma",
        "hopper",
        "decode",
    ]
    assert "naive" in [r["schedule"] for r in rows if r["direction"] == "backward"]
    assert all(r["passed"] and r["comparison"]["error"] <= r["comparison"]["allowed"] for r in rows)


def test_an_interrupted_command_is_no_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.reference import compare

    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "bound", interrupted)
    result = invoke("check", GPT2, "--device", "emulated", "--q-len", "20", "--kernel", "naive")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_check_fails_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.reference import compare

    monkeypatch.setattr(compare, "bound", lambda *_: 0.0)
    result = invoke("check", GPT2, "--device", "emulated", "--q-len", "20", "--kernel", "naive")
    assert result.exit_code == 1
    assert "FAILED" in result.output


def test_a_mistake_is_a_diagnostic_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "wrong.attn"
    path.write_text("attention a { dtype fp16 head_dim 64 mask cusal }")
    done = process("build", str(path))
    assert done.returncode == 2
    assert "did you mean `causal`?" in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("build", "nowhere.attn"), "no file and no shipped spec has this name"),
        (("build", GPT2, "--arch", "sm_10"), "unknown architecture sm_10"),
        (("build", GPT2, "--arch", "sm_80,"), "unknown architecture (no name)"),
        *(((command, GPT2, "--arch", "sm_80,sm_90a"), "unknown architecture sm_80,sm_90a") for command in ("explain", "show")),
        (("report", GPT2, "--arch", "sm_80,sm_90a"), "unknown architecture sm_80,sm_90a"),
        (("tune", GPT2, "--list", "--arch", "sm_80,sm_90a"), "unknown architecture sm_80,sm_90a"),
        (("diff", GPT2, "naive", "tiled", "--arch", "sm_80,sm_90a"), "unknown architecture sm_80,sm_90a"),
        (("trace", GPT2, "--steps", "--thread", "0-99999999999"), "thread numbers are 0 to 1023"),
        (("trace", GPT2, "--steps", "--thread", "3,5-2"), "5-2: the range ends before it begins"),
        (("trace", GPT2, "--thread", "5", "--limit", "3"), "no steps to select; leave out --thread, --limit"),
        (("trace", GPT2, "--deterministic"), "add --backward"),
        (("tune", GPT2, "--list", "--lengths", "4096", "--param", "x=1"), "times nothing; leave out --lengths, --param"),
        (("tune", GPT2, "--arch", "sm_80"), "leave out --arch"),
        (("show", GPT2, "--stage", "spec", "--backward"), "before the plan of a kernel; leave out --backward"),
        (("show", GPT2, "--stage", "tree", "--comments", "teach"), "leave out --comments"),
        (("show", GPT2, "--stage", "loops", "--comments", "teach"), "leave out --comments"),
        (("diff", GPT2, "naive", "tiled", "--deterministic"), "add --backward"),
        (("diff", GPT2, "naive@sm_80", "tiled@sm_80", "--arch", "sm_90a"), "leave out --arch"),
        (("diff", GPT2, "naive@", "tiled"), "unknown architecture (no name)"),
        (("diff", GPT2, "naive", "tiled", "--full", "--context", "1"), "leave out --context"),
        (("diff", GPT2, "naive", "tiled", "--json", "--width", "90"), "leave out --width"),
        (("check", GPT2, "--forward", "--deterministic"), "leave out --deterministic"),
        (("check", GPT2, "--forward", "--wanted", "q"), "leave out --wanted"),
        (("bench", GPT2, "--from", "pyproject.toml"), "--from reads results and measures nothing; leave out SPEC"),
        (("bench", "--from", "pyproject.toml"), "pyproject.toml is not a JSON file"),
        (("explain", "dilated", "--param", "step=2", "--param", "step=3"), "`step` is given twice"),
        (("explain", GPT2, "--q-len", "536870913"), "536870913 is not in the range 1<=x<=536870912"),
        (("explain", GPT2, "--q-len", "536870912"), "too many to classify one by one"),
        (("explain", GPT2, "--q-len", "536870912", "--kv-len", "1", "--json"), "too many to classify one by one"),
        (("explain", GPT2, "--q-len", "536870912", "--backward"), "too many to classify one by one"),
        (("report", GPT2, "--q-len", "536870912"), "too many to classify one by one"),
        (("report", GPT2, "-o", "/dev/null/x.html"), "error: /dev/null"),
        (("build", f"{GPT2}:other"), "gpt2.attn has no attention called other; it has gpt2"),
        (("build", f"other.attn:{GPT2}"), "no file and no shipped spec has this name"),
        (("report", "gemma2"), "name one of them: gemma2:gemma2_local or gemma2:gemma2_global"),
        (("check", GPT2, "--device", "tpu"), "no device is called 'tpu'"),
        (("check", GPT2, "--seed", "-1"), "-1 is not in the range"),
        (("explain", GPT2, "--q-len", "99999999999"), "99999999999 is not in the range"),
        (("check", "dilated", "--device", "emulated", "--param", "step=0"), "the divisor of `%` is 0"),
        (("check", "dilated", "--param", "step"), "is not of the form NAME=NUMBER"),
        (("check", "head_dim_80", "--device", "emulated", "--heads", "3", "--kv-heads", "2"), "cannot share"),
        (("trace", "head_dim_80", "--heads", "3", "--kv-heads", "2"), "cannot share"),
        (("explain", "packed_documents", "--q-len", "200", "--kv-len", "64"), "index 1 of `document`"),
        (("report", "packed_documents", "--q-len", "200", "--kv-len", "64"), "index 1 of `document`"),
        (("check", "dilated", "--device", "emulated", "--param", "stride=2"), "no input or param `stride`"),
        (("trace", GPT2, "--kernel", "hopper", "--arch", "sm_80"), "sm_90a"),
        (("trace", "dilated", "--param", "step=0"), "the divisor of `%` is 0"),
        (("check", GPT2, "--device", "emulated", "--kernel", "wgmma", "--dtype", "fp32"), "its products are of fp16 or bf16"),
    ],
)
def test_bad_commands_are_refused_with_words_alone(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_an_architecture_that_is_named_twice_is_built_once(tmp_path: Path) -> None:
    done = invoke("build", GPT2, "--kernel", "naive", "--arch", "sm_80, sm_80,sm_90", "-o", str(tmp_path), "--json")
    names = [f"gpt2_naive_{arch}.{kind}" for arch in ("sm_80", "sm_90a") for kind in ("cu", "json")]
    assert [Path(path).name for path in json.loads(done.output)["written"]] == names


def test_a_lack_of_memory_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, reported():
        raise MemoryError("Unable to allocate 512 GiB")
    assert left.value.code == 2
    assert "need more memory than there is (Unable to allocate 512 GiB); choose smaller ones" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("check", "--device", "emulated"), ("trace",), ("explain",), ("report",), ("bench",)])
def test_a_param_that_must_be_given_is_asked_for_as_an_option(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "reach.attn"
    path.write_text("attention reach { dtype bf16 head_dim 64 param reach: int mask causal and window(reach) }")
    done = invoke(command[0], str(path), *command[1:])
    assert done.exit_code == 2
    assert "the param `reach` has no default; add --param reach=NUMBER" in " ".join(done.stderr.split())


@pytest.mark.parametrize("statements", ["dtype fp16 kernel fused { tile 256 x 256 stages 2 }", "dtype fp32 kernel wgmma"])
def test_check_plans_everything_before_it_runs_anything(statements: str, tmp_path: Path) -> None:
    """Nothing runs if another attention of the file, or its last schedule, is refused."""
    path = tmp_path / "two.attn"
    path.write_text(f"attention one {{ head_dim 64 dtype fp16 }}\nattention two {{ head_dim 64 {statements} }}\n")
    done = invoke("check", str(path), "--device", "emulated", "--q-len", "20")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "two.attn:2:" in done.stderr


def test_a_plan_that_does_not_fit_points_at_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "big.attn"
    path.write_text("attention big {\n dtype fp16\n head_dim 128\n kernel fused { tile 128 x 128 stages 2 }\n}\n")
    done = invoke("build", str(path), "--arch", "sm_86")
    assert done.exit_code == 2
    assert "big.attn:4:9" in done.stderr
    assert "help: use tile " in done.stderr


@pytest.mark.parametrize("stage", ["tree", "spec", "plan", "cuda", "ptx"])
def test_show_prints_each_stage(stage: str) -> None:
    words = {"tree": "attention", "spec": "q >= k", "plan": "fused_mma", "cuda": "__global__", "ptx": ".visible .entry"}
    result = invoke("show", GPT2, "--stage", stage)
    assert result.exit_code == 0, result.output
    assert words[stage] in result.output


def test_explain_draws_the_tiles() -> None:
    result = invoke("explain", GPT2, "--q-len", "512")
    assert result.exit_code == 0
    assert "  ######//\n" in result.output
    assert "kv_end   = min(kv_len, q_hi + 1)" in result.output


def test_list_and_doctor() -> None:
    listed = json.loads(invoke("list", "--json").output)
    assert {"prelude", "functions", "operators", "types", "schedules", "architectures", "specs", "mistakes"} == set(listed)
    assert "gpt2" in listed["specs"]
    found = json.loads(invoke("doctor", "--json").output)
    assert {"NVRTC", "GPU", "C++ compiler"} <= {f["name"] for f in found}
    assert all(f["found"] or f["cure"] for f in found)


def test_every_command_has_help() -> None:
    for command in COMMANDS:
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert "Exit codes" in result.output
        assert f"attngen {command}" in result.output.split("Options:")[0].split("\n", 1)[1], "an example"
        assert not re.search(r"\brungs?\b", result.output), "a schedule is called a schedule"


def test_tune_needs_a_gpu_and_says_so() -> None:
    from attngen.device.select import has_gpu

    if has_gpu():
        pytest.skip("there is one here")
    result = invoke("tune", "gpt2")
    assert result.exit_code == 3
    assert "needs a GPU, and none was found" in result.stderr


TUNED = [("auto", "sm_80"), ("tiled", "sm_80"), ("decode", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a")]


@pytest.mark.parametrize(("schedule", "arch"), [*TUNED, ("auto --backward", "sm_80"), ("hopper --backward", "sm_90a")])
def test_tune_lists_what_it_would_time(schedule: str, arch: str) -> None:
    """Every knob that a `kernel` statement has, without a GPU; the planner's choice is the first."""
    result = invoke("tune", "gpt2", "--list", "--kernel", *schedule.split(), "--arch", arch)
    assert result.exit_code == 0, result.output
    title, planned, *others = result.output.splitlines()
    assert planned.endswith("planned")
    assert title.endswith(f": {1 + len(others)} combination{'s' * bool(others)}")
    assert len({planned.removesuffix("planned").strip(), *(line.strip() for line in others)}) == 1 + len(others)
    if schedule == "hopper":
        assert {line.rpartition(", ")[2].split()[1] for line in (planned, *others) if " Q " in line} == {"registers", "shared"}


def test_tune_lists_text_alone_and_nothing_of_the_naive_schedule() -> None:
    assert invoke("tune", "gpt2", "--list", "--json").exit_code == 2
    assert "nothing is left to tune" in invoke("tune", "gpt2", "--list", "--kernel", "naive").stderr


@pytest.mark.parametrize("schedule", HOPPER_SCHEDULES)
def test_the_schedules_of_hopper_are_planned_for_the_architecture_that_has_them(schedule: str, tmp_path: Path) -> None:
    result = invoke("build", "gpt2", "--kernel", schedule, "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "wgmma.mma_async" in (tmp_path / f"gpt2_{schedule}.cu").read_text()
    refused = invoke("build", "gpt2", "--kernel", schedule, "--arch", "sm_80", "-o", str(tmp_path))
    assert refused.exit_code == 2
    assert "use kernel fused, or --arch sm_90a" in refused.output


def test_the_schedule_that_a_spec_states_is_the_one_it_gets(tmp_path: Path) -> None:
    """The tile of the named schedule is not used for another one."""
    spec = tmp_path / "mine.attn"
    spec.write_text("attention mine {\n dtype bf16\n head_dim 64\n kernel hopper { tile 192 x 128 }\n}\n")
    assert invoke("build", str(spec), "-o", str(tmp_path)).exit_code == 0
    assert "constexpr int BLOCK_Q = 192;" in (tmp_path / "mine_hopper.cu").read_text()
    assert "constexpr int BLOCK_Q = 128;" in (tmp_path / "mine_fused.cu").read_text()
    assert "// mine, hopper" in invoke("show", str(spec)).output
    spec.write_text("attention mine {\n dtype fp32\n head_dim 64\n kernel wgmma\n}\n")
    refused = invoke("build", str(spec), "-o", str(tmp_path))
    assert refused.exit_code == 2
    assert "its products are of fp16 or bf16" in refused.output


@pytest.mark.parametrize(
    ("score", "params", "place", "title"),
    [
        ("s + table[q]", "", "4:15", "index 0 of `table` can be 0 to 199, but the dimension has 16 elements"),
        ("where(q % d == 0, s, s + table[0])", "param d: int", "4:21", "the divisor of `%` is 0"),
    ],
)
def test_a_call_that_leaves_a_tensor_or_divides_by_zero_is_shown_in_the_spec(
    tmp_path: Path, score: str, params: str, place: str, title: str
) -> None:
    path = tmp_path / "wrong.attn"
    path.write_text(f"attention wrong {{\n dtype fp16 head_dim 64\n input table: fp32[16] {params}\n score    {score}\n}}\n")
    result = invoke("check", str(path), "--q-len", "200", "--kv-len", "200", *(("--param", "d=0") if params else ()))
    assert result.exit_code == 2
    assert f": {title}\n" in result.stderr
    assert f"wrong.attn:{place}\n" in result.stderr
    assert "help: " in result.stderr


def test_a_backward_is_built_and_explained(tmp_path: Path) -> None:
    built = invoke("build", "alibi", "--backward", "--kernel", "naive", "-o", str(tmp_path), "--json")
    assert built.exit_code == 0
    assert {p.name for p in tmp_path.iterdir()} == {"alibi_naive_backward.cu", "alibi_naive_backward.json"}
    manifest = json.loads((tmp_path / "alibi_naive_backward.json").read_text())
    outputs = [t["name"] for t in manifest["tensors"] if t["role"] == "output"]
    assert outputs == ["dQ", "dK", "dV", "d_slopes"]
    explained = json.loads(invoke("explain", "alibi", "--backward", "--kernel", "naive", "--json").output)["attentions"][0]
    assert explained["gradients"] == ["q", "k", "v", "slopes"]
    assert "d_slopes[h] += dS[q, k] * (float(k - q))" in " ".join(explained["equations"])
    shown = invoke("show", "alibi", "--backward", "--kernel", "naive", "--wanted", "slopes", "--stage", "loops")
    assert "d_slopes: global" in shown.output
    assert "d_slopes" in invoke("diff", "alibi", "naive", "naive_backward").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("build", "padding", "--backward", "--wanted", "lengths"), "`lengths` has no gradient: its elements are int32"),
        (("build", "gpt2", "--backward", "--wanted", ""), "no gradient is requested"),
        (("build", "gpt2", "--wanted", "q"), "gradients are those of a backward; add --backward"),
    ],
)
def test_gradients_that_do_not_exist_are_refused(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code != 0
    assert words in done.output


@pytest.mark.parametrize("command", ["build", "show", "explain", "check", "trace", "report"])
def test_every_command_refuses_gradients_of_a_cache(command: str, tmp_path: Path) -> None:
    """With the reason: no schedule has them, so none may be passed over."""
    spec = tmp_path / "padded.attn"
    spec.write_text("attention padded { dtype fp16  head_dim 64  kernel auto { storage padded } }")
    done = invoke(command, str(spec), "--backward", *(["-o", str(tmp_path)] if command == "build" else []))
    assert done.exit_code == 2, done.output
    assert "are a cache for inference, and have no gradients" in done.output


def test_a_report_of_a_backward(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = invoke("report", "alibi", "--backward", "--kernel", "naive", "--no-check", "-o", str(page))
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "d_slopes[h] +=" in text
    assert "<td>weight_gradients</td><td>dO V^T</td>" in text


@pytest.mark.parametrize(
    ("statements", "suitable"),
    [("dtype q bf16 k fp8_e4m3 head_dim 64", "naive tiled"), ("dtype bf16 head_dim 512", "naive tiled fused")],
)
def test_by_default_the_schedules_are_built_that_suit_the_spec(statements: str, suitable: str, tmp_path: Path) -> None:
    spec = tmp_path / "a.attn"
    spec.write_text(f"attention a {{ {statements} }}")
    done = invoke("build", str(spec), "-o", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.glob("*.cu")} == {f"a_{schedule}.cu" for schedule in suitable.split()}


def test_a_check_runs_each_schedule_where_it_suits_the_spec(tmp_path: Path) -> None:
    """decode needs an instruction for e4m3 that its usual architecture lacks."""
    spec = tmp_path / "a.attn"
    spec.write_text("attention a { dtype q bf16 k fp8_e4m3 v fp8_e4m3 head_dim 16 }")
    done = invoke("check", str(spec), "--device", "emulated", "--q-len", "3", "--kv-len", "20")
    assert done.exit_code == 0, done.output
    assert all(f" {schedule} " in done.stdout for schedule in ("naive", "tiled", "decode"))


@pytest.mark.parametrize("command", ["build", "check", "explain", "trace"])
@pytest.mark.parametrize(
    "statements", ["dtype q bf16 k fp8_e4m3 head_dim 64 kernel auto { storage paged }", "dtype fp16 head_dim 1024"]
)
def test_a_spec_that_suits_no_schedule_is_refused_where_it_stands(command: str, statements: str, tmp_path: Path) -> None:
    spec = tmp_path / "a.attn"
    spec.write_text(f"attention a {{ {statements} }}")
    done = invoke(command, str(spec))
    assert done.exit_code == 2
    assert "error[E301]" in done.stderr
    assert "^^^" in done.stderr
    assert "help: no schedule has" in done.stderr
