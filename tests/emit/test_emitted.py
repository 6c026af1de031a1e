"""Properties of the emitted files: current, deterministic, self-contained, compiled without spills."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import attngen
from attngen.device.cuda.compiler import compile_text, disassemble
from attngen.device.emulated import EmulatedDevice
from attngen.diagnostics import ArgumentError, DiagnosticError
from attngen.emit import primitives
from attngen.emit.comments import tidy
from attngen.emit.emitter import emit
from attngen.emit.manifest import from_manifest, to_manifest
from attngen.emit.program import Program
from attngen.emit.templates import template_directory
from attngen.inspect.ladder import files
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.reference.compare import truth
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from tests import tiers
from tests.conftest import ROOT
from tests.harness import SHIPPED, emitted, run, shipped, spills
from tests.hopper import HOPPER_SCHEDULES

GENERATED = sorted((ROOT / "generated").glob("*.json"))


def committed(manifest: Path) -> Program:
    return from_manifest(manifest.read_text(), manifest.with_suffix(".cu").read_text())


def test_generated_is_current() -> None:
    """`python -m attngen.inspect.ladder` rewrites it."""
    wanted = files()
    assert {p.name for p in (ROOT / "generated").iterdir()} == set(wanted)
    for name, text in wanted.items():
        assert (ROOT / "generated" / name).read_text() == text, name


ONE_OF_EACH_SCHEDULE = ["gpt2_naive", "gpt2_tiled", "gpt2_fused", "gpt2_wgmma", "gpt2_hopper"]


@pytest.mark.parametrize(
    "manifest", tiers.cases(GENERATED, quick=lambda p: p.stem in ONE_OF_EACH_SCHEDULE), ids=lambda p: p.stem
)
def test_generated_files_compile_without_spills(manifest: Path) -> None:
    source = committed(manifest)
    made = compile_text(source)
    assert "never referenced" not in made.log, made.log
    found = made.resources()
    assert {r.entry for r in found} == {e.name for e in source.kernels}
    for resources in found:
        assert not spills(resources)
        entry = next(e for e in source.kernels if e.name == resources.entry)
        threads = entry.block[0] * entry.block[1] * entry.block[2]
        assert resources.registers * threads <= ARCHES[source.arch].registers_per_sm


@pytest.mark.parametrize("schedule", HOPPER_SCHEDULES)
@pytest.mark.parametrize(
    "name", tiers.cases(["padding", "dense_bias", "packed_documents", "t5_relative_bias"], quick=["packed_documents"])
)
def test_nothing_is_declared_in_vain(name: str, schedule: str) -> None:
    """Row indices are emitted if something reads them."""
    assert "never referenced" not in compile_text(emitted(shipped(name), schedule, "sm_90a")).log


@pytest.mark.parametrize("arch", tiers.cases(["sm_75", "sm_80", "sm_90a"], quick=["sm_80"]))
def test_a_multiprocessor_has_registers_for_several_blocks_of_the_tiled_schedule(arch: str) -> None:
    """What the plan gives as the reason for its tile."""
    source = emitted(shipped("gpt2"), "tiled", arch)
    threads = {e.name: e.block[0] for e in source.kernels}
    for resources in compile_text(source).resources():
        assert ARCHES[arch].registers_per_sm // (resources.registers * threads[resources.entry]) >= 4, resources


@pytest.mark.parametrize("arch", tiers.cases(["sm_80", "sm_90a", "sm_120a"], quick=["sm_80"]))
def test_the_fused_kernel_uses_tensor_cores_and_wide_loads(arch: str) -> None:
    sass = disassemble(compile_text(emitted(shipped("llama_gqa"), "fused", arch)).code)
    assert len(re.findall(r"\bHMMA\.16816\.F32\.BF16\b", sass)) >= 64
    assert len(re.findall(r"\bLDGSTS\.E\.(?:BYPASS\.)?(?:LTC128B\.)?128\b", sass)) >= 4
    assert len(re.findall(r"\bLDSM\.16\.M(?:T)?88\.4\b", sass)) >= 8


OLDEST_AND_NEWEST = ("sm_75", "sm_120a")
COMPILED = [("naive", OLDEST_AND_NEWEST[:1]), ("tiled", OLDEST_AND_NEWEST[1:]), ("fused", OLDEST_AND_NEWEST)]


@pytest.mark.parametrize(("schedule", "arches"), tiers.cases(COMPILED, quick=COMPILED[-1:]))
@pytest.mark.parametrize("name", tiers.cases(SHIPPED, quick=["packed_documents"], one_of=3))
def test_every_spec_compiles_for_the_oldest_and_the_newest_architecture(
    name: str, schedule: str, arches: tuple[str, ...]
) -> None:
    """Kernels compile with the spec's own dtype."""
    for arch in arches:
        try:
            source = emitted(shipped(name), schedule, arch)
        except DiagnosticError as error:
            assert "help: " in str(error)  # noqa: PT017
            continue
        assert compile_text(source).code


@pytest.mark.parametrize("schedule", ["fused", "decode"])
def test_a_forward_that_saves_what_lse_lacks_compiles(schedule: str) -> None:
    spec = shipped("dense_mask", "fp32")
    plan = choose(spec, ARCHES["sm_80"], schedule, saves_lse=True)
    assert {"lse", "lse_rest"} <= {tensor.name for tensor in emit(spec, plan).tensors}
    assert compile_text(emit(spec, plan)).code


@pytest.mark.parametrize("name", ["gpt2", "packed_documents", "gpt_oss_sinks"])
@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused"])
def test_the_text_is_self_contained_and_says_nothing_of_its_maker(name: str, schedule: str) -> None:
    text = emitted(shipped(name), schedule).text
    assert "#include" not in text
    assert str(ROOT) not in text
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", text)
    assert not re.search(r"[ \t]+$", text, re.M)
    assert "\n\n\n" not in text
    assert max(map(len, text.splitlines())) <= 128


def unused(text: str) -> list[str]:
    """The functions, types and constants of a file that it names nowhere but where it defines them."""
    code = re.sub(r"//[^\n]*", "", text)
    defined = re.findall(r"\b(?:struct|using)\s+(?:alignas\([^{]*\) )?(\w+)", code)
    defined += re.findall(r"constexpr [\w ]+?(\w+)(?:\[\w+\])* =", code)
    functions = re.findall(r"^(?:template <.*>\s)?__device__ [^(]*?(\w+)\(", code, re.M)
    return [
        *(name for name in {*defined} if len(re.findall(rf"\b{name}\b", code)) == defined.count(name)),
        *(name for name in {*functions} if len(re.findall(rf"\b{name}[(<]", code)) == functions.count(name)),
    ]


@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused", "wgmma", "hopper", "decode"])
def test_what_is_not_used_is_not_there(schedule: str) -> None:
    """Every function is called, every type and constant is named, forwards and backwards."""
    for name in SHIPPED:
        for direction in ("forward", "backward"):
            try:
                plan = choose(shipped(name), ARCHES["sm_90a"], schedule, direction=direction)
            except (ArgumentError, DiagnosticError):
                continue
            assert not unused(emit(shipped(name), plan).text), (name, direction)


def test_generated_files_have_nothing_unused() -> None:
    for path in (ROOT / "generated").glob("*.cu"):
        assert not unused(path.read_text()), path.name


def test_unused_names_are_found() -> None:
    text = """
struct Place {
    int row;
};
using Row = int;
constexpr int ROWS = 4;
__device__ int used(int x) { return x; }  // unused() does the same
__device__ int unused(int x) { return used(x); }
"""
    assert sorted(unused(text)) == ["Place", "ROWS", "Row", "unused"]


TYPE = """%primitives%
struct Tile {
    int begin;

    // Where it begins.
    __device__ Tile(int begin) : begin(begin) {}
    // Named by `end` alone.
    __device__ static constexpr int length() { return 64; }

    // Where it ends, which the kernel reads.
    __device__ int end() const {
        return begin + length();
    }

    // Named by no one but itself and `last_row`.
    __device__ int row(int i) const { return i > 0 ? row(i - 1) + 1 : begin; }
    template <int N>
    __device__ int last_row() const {
        return row(N);
    }
};
"""


@pytest.mark.parametrize(
    ("named", "left"), [("end()", {"length", "end"}), ("last_row<4>()", {"row", "last_row"}), ("begin", set())]
)
def test_functions_of_a_type_that_nothing_names_are_left_out(named: str, left: set[str]) -> None:
    text = tidy(primitives.with_primitives(f"{TYPE}int of_kernel(Tile tile) {{ return tile.{named}; }}\n", {}))
    assert {name for name in ("length", "end", "row", "last_row") if f"int {name}(" in text} == left
    assert "Tile(int begin)" in text
    assert ("by no one" in text) == ("row" in left)
    assert ("which the kernel reads" in text) == ("end" in left)
    assert "\n\n};" not in text


def test_primitives_stand_before_those_that_name_them() -> None:
    """What a primitive defines is not named by one that stands before it; each file has a place."""
    assert sorted(primitives.ORDER.split()) == sorted(path.stem for path in (template_directory() / "primitives").glob("*.cuh"))
    named: set[str] = set()
    for name in primitives.ORDER.split():
        pieces = primitives.primitive(name)
        defined = {*chain.from_iterable(piece.defines for piece in pieces)}
        assert not defined & named, name
        named.update(*(piece.names - defined for piece in pieces))


def test_a_manifest_round_trips() -> None:
    for name in SHIPPED:
        source = emitted(shipped(name), "fused")
        manifest = to_manifest(source)
        assert from_manifest(manifest, source.text) == source
        assert to_manifest(from_manifest(manifest, source.text)) == manifest


def test_a_manifest_of_another_version_is_refused() -> None:
    source = emitted(shipped("gpt2"), "naive")
    document = json.loads(to_manifest(source)) | {"version": 99}
    with pytest.raises(ValueError, match="99"):
        from_manifest(json.dumps(document), source.text)


# Names of generated code, of CUDA and of C's library, given to inputs, params, dimensions and definitions.
UNFORTUNATE = """
    lse O Q K V P S tile stage row_max row_sum smem threadIdx blockIdx warp lane INF THREADS BLOCK_Q BLOCK_KV mask score in t0
    captured q_idx kv_idx softmax_scale alpha fp16 bf16 float2 half uint4 size_t NULL M_PI INFINITY expf assert printf kernel
    cp_async_16 load_tile min_k q_stride_b to_float ids_at stream out memory emulator
"""


def with_names(names: Sequence[str]) -> str:
    """A spec that gives each name to an input, and derives from it names of an input, a dimension, a param, a definition."""
    declared = "\n".join(
        f"""input {n}: int32[batch, kv_len] input {n}2: fp32[own_{n}] param {n}3: int = 3 def {n}4({n}5) = {n}5 * 2"""
        for n in names
    )
    mask = " and ".join(f"{n}[b, q] == {n}[b, k] and q - k < {n}4({n}3)" for n in names)
    score = " + ".join(["s", *(f"{n}2[{n}3 - 3]" for n in names)])
    return f"attention {names[-1]} {{ dtype fp16 head_dim 16 {declared} mask {mask} score {score} }}"


def is_accepted(name: str) -> bool:
    try:
        load_text(with_names([name]))
    except DiagnosticError as error:
        assert "cannot be used" in str(error), (name, str(error))  # noqa: PT017
        return False
    return True


@pytest.mark.long  # tests/device/test_names.py has one schedule with all names
@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused"])
def test_names_of_users_never_meet_those_of_generated_code(schedule: str) -> None:
    """Kernels of 15 names each, since an attention has at most 64 declarations."""
    names = [name for name in UNFORTUNATE.split() if is_accepted(name)]
    assert len(names) > 20
    for start in range(0, len(names), 15):
        (spec,) = load_text(with_names(names[start : start + 15]))
        assert compile_text(emit(spec, choose(spec, ARCHES["sm_80"], schedule))).code


@pytest.mark.parametrize("other", ["ids_at", "ids_step_0", "ids_k_min", "ids_q_max_step_0", "ids_qk_max"])
def test_a_name_that_generated_code_derives_from_another_is_refused(other: str) -> None:
    with pytest.raises(DiagnosticError, match=f"`{other}` is taken"):
        load_text(f"""attention twins {{ dtype fp16 head_dim 16 input ids: int32[batch, kv_len] input {other}: fp32[heads]
            mask ids[b, q] == ids[b, k] score s + {other}[h] }}""")


@pytest.mark.parametrize("window", [-(2**30), -1, 0, 7, 2**30])
def test_bounds_beyond_32_bits_are_kept_within_the_keys(window: int) -> None:
    spec = attngen.define(head_dim=16, mask="q - k < 3 * n and k - q < 5 * n", params={"n": "int"})
    assert run(spec, "fused", Shape(batch=1, q_heads=1, kv_heads=1, q_len=70, kv_len=70), n=window).passed


def test_emulated_and_cuda_text_are_one() -> None:
    """The emulated device compiles the emitted text itself: a device of its own makes no other."""
    source = emitted(shipped("gpt2"), "fused")
    assert EmulatedDevice().compile(source).source is source


def test_literals_compile_as_they_are_meant() -> None:
    (spec,) = load_text("attention e { dtype fp32 head_dim 8 score s * 1e-40 + 3e38 - 16777217.0 + 30.0 mask q > -2147483648 }")
    text = emitted_text(spec)
    assert "30.0f" in text
    assert compile_text(emit(spec, choose(spec, ARCHES["sm_80"], "naive"))).code
    problem = sample(spec, Shape(q_len=5, kv_len=5), 0)
    assert np.isfinite(truth(spec, problem).reference.output).all()


@pytest.mark.parametrize("score", ["s * 1e-50 + -1e-46 * s", "s / 1e-50", "s / -1e-45", "s * 3e38 * 3e38", "tanh(s) / 1e-40"])
def test_literals_that_fp32_does_not_have_compile(score: str) -> None:
    """NVRTC refuses those that are rounded to 0 or to infinity; a derivative may have some that no spec states."""
    (spec,) = load_text(f"attention e {{ dtype fp16 head_dim 64 score {score} }}")
    for plan in (choose(spec, ARCHES["sm_80"], "fused"), choose(spec, ARCHES["sm_80"], "naive", direction="backward")):
        assert compile_text(emit(spec, plan)).code


def emitted_text(spec) -> str:
    return emit(spec, choose(spec, ARCHES["sm_80"], "naive")).text


def test_what_decides_a_step_is_not_approximated() -> None:
    """49 times the reciprocal of 49 is less than 1."""
    spec = attngen.define(
        dtype="fp16",
        head_dim=64,
        mask="float(q - k) / 49.0 <= 1.0 and -1.0 <= float(q - k) / 49.0",
        score="s / 3.0 + floor(float(q - k) / 7.0) * 0.25 + float(int(float(k) / 41.0)) * tanh(s / 3.0)",
    )
    text = emitted(spec, "fused").text
    assert all(printed in text for printed in ("/ 49.0f", "/ 7.0f)", "/ 41.0f)", "fast_tanh(s, "))
    found = run(spec, "fused", sample(spec, Shape(1, 1, 1, 130, 130)))
    assert found.passed, found


def test_approximations_are_for_results_of_16_bits() -> None:
    """tanh on the special function unit and division by a constant as a product: where nothing of it can be seen."""
    softcap = {"head_dim": 64, "score": "softcap(20.0)"}
    fast = emitted(attngen.define(dtype="bf16", **softcap), "fused").text
    assert f"return fast_tanh(s, {0.125 / 20}f);" in fast  # the scale, 1 / sqrt(64), is in the constant
    assert "EXPONENT_SCALE = 20.0f * LOG2_E" in fast
    for spec, schedule in (
        (attngen.define(dtype="fp32", **softcap), "fused"),
        (attngen.define(dtype="fp32", precision="high", **softcap), "fused"),
        (attngen.define(dtype="bf16", **softcap), "tiled"),
    ):
        text = emitted(spec, schedule).text
        assert "20.0f * tanhf(s / 20.0f)" in text
        assert "fast_tanh" not in text
    text = emitted(attngen.define(dtype="bf16", lse=True, **softcap), "fused").text  # an lse is fp32
    assert "return tanhf(s / 20.0f);" in text
    rough = emitted(attngen.define(dtype="bf16", precision="high", **softcap), "fused").text
    assert f"return rough_tanh(s * {0.125 / 20}f);" in rough
    assert "wrong by up to 2^-11" in rough
    for divisor, printed in (("-3.0", "s * (1.0f / -3.0f)"), ("1e-35", "s / 1.0e-35f"), ("(1.0 + s)", "s / (1.0f + s)")):
        text = emitted(attngen.define(dtype="fp16", head_dim=64, score=f"s / {divisor} + 0.1 * s * s"), "fused").text
        assert printed in text, text[text.index("float score") :][:200]


@pytest.mark.parametrize("wanted", [None, ("q", "k", "v")])
def test_a_manifest_of_packed_sequences_round_trips(wanted: tuple[str, ...] | None) -> None:
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal", storage="packed")
    source = emit(spec, choose(spec, ARCHES["sm_90a"], "hopper", wanted=wanted, deterministic=False))
    manifest = to_manifest(source)
    assert from_manifest(manifest, source.text) == source
    assert "packed_map" in manifest
