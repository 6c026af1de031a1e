"""`attngen check --source FILE`: which spec, schedule and direction a changed file has, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from attngen.diagnostics import ArgumentError
from attngen.emit.emitter import emit
from attngen.plan import ARCHES
from attngen.schedules import choose, schedules_for
from attngen.spec.gradient import QKV
from tests.harness import cli as invoke
from tests.harness import emitted, shipped


@pytest.mark.parametrize(
    ("spec", "schedule", "arguments", "words"),
    [
        (
            "gpt2",
            "fused",
            ["alibi"],
            "contains gpt2_fused; alibi has alibi_scores, alibi_softmax, alibi_weighted_sum; or alibi_fused",
        ),
        ("gpt2", "fused", ["gpt2", "--kernel", "tiled"], "contains the fused kernel of gpt2; add --kernel fused"),
        ("gpt2", "fused", ["gpt2", "--arch", "sm_75"], "was built for sm_80, and this run is for sm_75"),
        ("gpt2", "fused", ["packed_documents"], "contains gpt2_fused; packed_documents has"),
        ("gpt2", "fused", ["gpt2", "--backward"], "kernel.cu contains a forward"),
    ],
)
@pytest.mark.parametrize("command", ["check", "trace"])
def test_a_file_of_something_else_is_answered_in_words(
    command: str, spec: str, schedule: str, arguments: list[str], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(emitted(shipped(spec), schedule).text)
    device = ["--device", "emulated"] if command == "check" else []
    result = invoke(command, *arguments, "--source", str(path), *device)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("int heads_in_l2)", "int heads_in_l2, int more)", "the parameters of gpt2_fused are not those"),
        ("BLOCK_Q = 128;", "BLOCK_Q = 64;", "BLOCK_Q is 64, and the plan for sm_80 launches the kernel for 128"),
        ("__global__", "", "has no __global__ function"),
        ("const fp16* __restrict__ Q,", "const bf16* __restrict__ Q,", "parameter Q of gpt2_fused has the type const bf16*"),
        ("__launch_bounds__(THREADS)", "__launch_bounds__(64)", "gpt2_fused has the launch bound 64, and the plan for"),
        ("long long q_stride_b,", "int q_stride_b,", "parameter q_stride_b of gpt2_fused has the type int"),
        ('extern "C" __global__', "__global__", 'gpt2_fused is not declared extern "C"'),
        ("LOG2_E;", "LOG3_E;", "kernel.cu:{line}:"),
        ("asm(", "asm((", "the asm statement at line "),
    ],
)
def test_what_cannot_be_launched_or_compiled_is_said_of_the_user_s_file(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    text = emitted(shipped("gpt2"), "fused").text
    line = text[: text.index(old)].count("\n") + 1
    path.write_text(text.replace(old, new))
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated")
    assert result.exit_code in (2, 3)
    assert words.format(line=line) in result.stderr
    assert "internal error" not in result.stderr
    assert "/tmp/" not in result.stderr.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("encode", "words"),
    [
        (lambda text: text.encode("utf-16"), "is not UTF-8 text"),
        (
            lambda text: text.replace("// 1. Numbers", "// 1. \xdcbersicht").encode("latin-1"),
            "kernel.cu:{line}: this is not UTF-8",
        ),
        (lambda text: text.replace("// 1. Numbers", "// 1.\0").encode(), "kernel.cu:{line}: a character with the code 0"),
        (lambda text: text.encode() + b"//" * 2**22, "a file of `attngen build` has at most"),
        (
            lambda text: text.replace("gpt2_softmax(", "my_softmax(").encode(),
            "lacks the kernel gpt2_softmax that gpt2 launches",
        ),
    ],
)
def test_a_file_that_is_not_text_or_lacks_a_kernel_is_refused_with_its_line(
    encode: Callable[[str], bytes], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.cu"
    text = emitted(shipped("gpt2"), "naive").text
    path.write_bytes(encode(text))
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated")
    assert result.exit_code == 2
    line = text[: text.index("// 1. Numbers")].count("\n") + 1
    assert words.format(line=line) in result.stderr


@pytest.mark.parametrize("change", [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n")])
def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(change: Callable[[str], str], tmp_path: Path) -> None:
    from attngen.inspect.changed_file import changed_file

    spec = shipped("gpt2")
    text = emitted(spec, "naive").text
    path = tmp_path / "kernel.cu"
    path.write_bytes(change(text).encode())
    assert changed_file(path, [spec], None, None).text == text


def test_a_file_of_another_element_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(emitted(shipped("gpt2"), "naive").text)
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated", "--dtype", "bf16")
    assert result.exit_code == 2
    assert "parameter Q of gpt2_scores has the type const fp16*, and the plan for sm_80 passes const bf16*" in result.stderr


@pytest.mark.parametrize("schedule", ["naive", "fused", "hopper"])
def test_backwards_are_detected_and_deterministic_ones_on_request(schedule: str, tmp_path: Path) -> None:
    from attngen.inspect.changed_file import changed_file

    spec, arch = shipped("gpt2"), ARCHES["sm_90a" if schedule == "hopper" else "sm_80"]
    path = tmp_path / "kernel.cu"
    for deterministic in (False, True):
        path.write_text(emit(spec, choose(spec, arch, schedule, wanted=QKV, deterministic=deterministic)).text)
        assert changed_file(path, [spec], None, None).wanted == QKV
        if deterministic or schedule == "naive":
            assert changed_file(path, [spec], None, None, deterministic=True).deterministic
        else:
            with pytest.raises(ArgumentError, match="a backward whose gradients differ from run to run; leave out --det"):
                changed_file(path, [spec], None, None, deterministic=True)
    path.write_text(emitted(spec, "naive").text)
    for command in (["check", "--device", "emulated"], ["trace"]):
        refused = invoke(command[0], "gpt2", "--source", str(path), *command[1:], "--deterministic")
        assert refused.exit_code == 2
        assert "contains a forward; leave out --deterministic" in refused.stderr


@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused", "wgmma", "hopper", "decode"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_schedule_and_architecture_are_detected_in_the_file(schedule: str, arch: str, tmp_path: Path) -> None:
    """A file is recognized under any name, and without comments."""
    from attngen.emit.comments import strip_comments
    from attngen.inspect.changed_file import changed_file

    spec = shipped("gpt2")
    if schedule not in schedules_for(spec, ARCHES[arch]):
        return
    path = tmp_path / "mine.cu"
    text = emitted(spec, schedule, arch).text
    path.write_text(text)
    held = changed_file(path, [shipped("alibi"), spec], None, None)
    assert (held.spec, held.schedule, held.arch.name) == (spec, schedule, arch)
    path.write_text(strip_comments(text))
    assert changed_file(path, [spec], schedule, None).schedule == schedule


@pytest.mark.parametrize("wanted", [("q", "k", "v"), ("q",), ("k", "v")])
@pytest.mark.parametrize(("schedule", "arch"), [("naive", "sm_75"), ("fused", "sm_80"), ("hopper", "sm_90a")])
def test_the_backward_of_a_file_is_recognized(schedule: str, arch: str, wanted: tuple[str, ...], tmp_path: Path) -> None:
    """Also if it writes gradients by tensor maps; another schedule is refused with the one that the file has."""
    from attngen.inspect.changed_file import changed_file

    spec = shipped("gpt2")
    path = tmp_path / "mine.cu"
    path.write_text(emit(spec, choose(spec, ARCHES[arch], schedule, wanted=wanted)).text)
    held = changed_file(path, [spec], None, None)
    assert (held.schedule, held.arch.name, held.wanted) == (schedule, arch, wanted)
    with pytest.raises(ArgumentError, match=f"contains the {schedule} kernel of gpt2; add --kernel {schedule}"):
        changed_file(path, [spec], "tiled", None)


def test_a_changed_backward_is_detected_and_its_wrong_gradients_named(tmp_path: Path) -> None:
    invoke("build", "alibi", "--backward", "--kernel", "naive", "--wanted", "q,slopes", "-o", str(tmp_path))
    path = tmp_path / "alibi_naive_backward.cu"
    path.write_text(path.read_text().replace("p * (dp - delta[row])", "p * dp"))
    result = invoke("check", "alibi", "--device", "emulated", "--source", str(path), "--q-len", "20")
    assert result.exit_code == 1
    assert "naive backward" in result.output
    assert "elements of dq are wrong" in result.output
    assert "first at d_slopes[q_heads=0]" in result.output


def test_a_file_of_a_backward_computes_the_gradients_that_are_named_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    spec = shipped("gpt2")
    path.write_text(emit(spec, choose(spec, ARCHES["sm_80"], "naive", wanted=("q", "k", "v"))).text)
    arguments = ("check", "gpt2", "--source", str(path), "--device", "emulated", "--heads", "1", "--q-len", "9")
    assert invoke(*arguments, "--backward", "--wanted", "v,k,q").exit_code == 0
    for more, words in (
        (["--wanted", "q"], "contains a backward that computes q, k, v"),
        (["--forward"], "contains a backward"),
    ):
        refused = invoke(*arguments, *more)
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_a_function_that_the_emulated_device_does_not_know_is_answered_in_the_user_s_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(emitted(shipped("gpt2"), "naive").text.replace("float dot = 0.0f;", "float dot = clock64();"))
    result = invoke("check", "gpt2", "--source", str(path), "--device", "emulated")
    assert result.exit_code == 2
    assert "clock64" in result.stderr
    assert "functions of CUDA that docs/trace.md lists" in result.stderr
    assert "/tmp/tmp" not in result.stderr.replace(str(tmp_path), "")
    assert ".hpp" not in result.stderr


def built(tmp_path: Path, *arguments: str) -> Path:
    """The file that `attngen build gpt2` writes with these arguments."""
    done = invoke("build", "gpt2", "-o", str(tmp_path), *arguments)
    assert done.exit_code == 0
    return Path(next(line for line in done.output.splitlines() if line.endswith(".cu")))


def check_of(path: Path, command: str = "check") -> Result:
    device = ["--device", "emulated", "--heads", "1", "--q-len", "9"] if command == "check" else []
    return invoke(command, "gpt2", "--source", str(path), *device)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"block": [\n        128,',
            '"block": [\n        256,',
            "[gpt2_scores].block[0] is 256, and the plan for sm_80 has 128",
        ),
        ('"shared_bytes": 0', '"shared_bytes": 1024', "entry_points[gpt2_scores].shared_bytes is 1024, and the plan"),
        ('"by": 128', '"by": 64', "grid[0][0].by is 64, and the plan for sm_80 has 128"),
        ('"early": false', '"early": true', "early is true, and the plan for sm_80 has false"),
        ('"alignment": 0', '"alignment": 16', "tensors[Q].alignment is 16, and the plan for sm_80 has 0"),
        ('"name": "gpt2_softmax"', '"name": "my_softmax"', 'entry_points is ["gpt2_scores", "my_softmax", "gpt2_we'),
        ('"version": 2', '"version": 1', "is a manifest of version 1, and this attngen reads version 2"),
        ('"arch": "sm_80",\n', "", 'arch is missing, and the plan for sm_80 has "sm_80"'),
        ('"arch": "sm_80",\n', '"arch": "sm_80",\n"stages": 3,', "stages is 3, and the plan for sm_80 has no such entry"),
        ('"tensors": [', '"tensors": [[', "is not a manifest: Expecting"),
    ],
)
def test_a_manifest_that_contradicts_the_plan_is_refused_with_both_values(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    path = built(tmp_path, "--kernel", "naive")
    manifest = path.with_suffix(".json")
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new, 1))
    for command in ("check", "trace"):
        refused = check_of(path, command)
        assert refused.exit_code == 2
        assert words in refused.stderr
        assert "build the file again, or delete gpt2_naive.json" in refused.stderr
    manifest.unlink()
    assert check_of(path).exit_code == 0


def test_a_manifest_of_another_build_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path, "--kernel", "fused", "--arch", "sm_80")
    other = built(tmp_path / "other", "--kernel", "fused", "--arch", "sm_86")
    path.with_suffix(".json").write_bytes(other.with_suffix(".json").read_bytes())
    refused = check_of(path)
    assert refused.exit_code == 2
    assert 'arch is "sm_86", and the plan for sm_80 has "sm_80"' in refused.stderr
    assert "more entries differ" in refused.stderr


def test_a_changed_or_renamed_file_and_its_own_manifest_agree(tmp_path: Path) -> None:
    """Also if the manifest has the new name, and without comments, where it tells the architecture."""
    from attngen.emit.comments import strip_comments
    from attngen.inspect.changed_file import changed_file

    path = built(tmp_path, "--kernel", "fused", "--arch", "sm_86")
    path.write_text(strip_comments(path.read_text()).replace("RESCALE_THRESHOLD = 8.0f", "RESCALE_THRESHOLD = 4.0f"))
    manifest = path.with_suffix(".json").read_text()
    mine = path.rename(tmp_path / "mine.cu")
    for text in (manifest, manifest.replace('"gpt2_fused.cu"', '"mine.cu"')):
        mine.with_suffix(".json").write_text(text)
        assert changed_file(mine, [shipped("gpt2")], None, None).arch.name == "sm_86"


def test_json_beside_a_file_that_is_no_manifest_says_nothing(tmp_path: Path) -> None:
    path = built(tmp_path, "--kernel", "naive")
    path.with_suffix(".json").write_text('[{"attention": "gpt2", "passed": true}]')
    assert check_of(path).exit_code == 0


def test_what_few_heads_show_is_not_lost_with_all_heads(tmp_path: Path) -> None:
    """32 heads over 8, checked as 4 over 2 first: with all heads, keys are split as they were."""
    text = emitted(shipped("mistral_window"), "decode").text
    guard = "            if (weight == 0.0f) continue;  // a split that has no key has written no sums\n"
    assert text.count(guard) == 1
    path = tmp_path / "kernel.cu"
    path.write_text(text.replace(guard, ""))
    found = invoke("check", "mistral_window", "--source", str(path), "--device", "emulated")
    assert found.exit_code != 0
    assert "uninitialized global read in mistral_window_join" in found.output + found.stderr
