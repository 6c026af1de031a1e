"""Random specs and problems: what `tests.random_specs` and `tests.random_gradients` search.

Specs have masks and scores as trees of operators, nested conditions, bool and integer tensors in scores, additive masks with
finfo.min and -inf, sinks and values of any magnitude, names with a meaning in C++ or in generated code, and masks as Python
functions whose parameters have defaults.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attngen
from attngen.diagnostics import DiagnosticError
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage

Array = np.ndarray[Any, Any]

HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
SCHEDULES = (
    *[("fused", "sm_80")] * 4,
    *[("fused", "sm_90a")] * 5,
    *[("hopper", "sm_90a")] * 5,
    *[("wgmma", "sm_90a")] * 2,
    ("tiled", "sm_80"),
    ("naive", "sm_80"),
    ("decode", "sm_80"),
    ("decode", "sm_90a"),
)
# Comparisons are in parentheses where Python's & and | would bind tighter
MASKS = (
    *["causal"] * 3, "causal_bottom_right", "window(w)", "prefix(n)", "same_document(doc)", "dilated(n)", "padding(ends)",
    "k <= q + w", "k >= q - w", "q != k", "abs(q - k) < w", "q // 16 == k // 16", "(q // n - k // n) % 3 == 0", "k < 30",
    "allowed[b, h, q, k]", "key_ok[b, k]", "key_ok[b, q]", "k <= 2 * q", "2 * k <= q + w", "q + k <= 200", "k % 7 != 2",
    "q_len - q > 3", "doc[b, q] != 2", "(h % 2 == 0) or (k <= q)", "k <= reach[b, q]", "k <= far[b, q] + w",
)  # fmt: skip
SCORES = (
    *["s"] * 6, "softcap(20.0)", "softcap(20.0)", "alibi(slopes)", "s + 0.01 * (k - q)", "s - 0.1 * abs(q - k)", "s * temp",
    "relative_bias(table, 50)", "tanh(s) * 3.0", "s + by_row[h, q]", "s + by_key[b, k]", "where(q - k > 10, s, s * 0.5)",
    "s + bias[b, h, q, k]", "min(s, 2.0)", "s * exp(-0.01 * abs(q - k))", "s + sin(s)", "where(k % 2 == 0, s + 1.0, s)",
    "where(k % 5 == 1, -inf, s)", "s + 0.5 * k", "s - 0.5 * k", "s * 30.0", "s + 40.0 * ((k // 48) % 2)",
    "s - 60.0", "s + slopes[h] * (k - q)", "where(key_ok[b, k], s, s - 1.0)", "where(allowed[b, h, q, k], s, -2.0)",
    *["s + extra[b, h, q, k]"] * 3, "where(q % 3 == 0, s, s + extra[b, h, q, k])", "s + 0.25 * doc[b, k]",
)  # fmt: skip
INPUTS = {
    "doc": "int32[batch, kv_len]", "reach": "int64[batch, q_len]", "far": "int32[batch, q_len]", "ends": "int32[batch]",
    "allowed": "bool[batch, heads, q_len, kv_len]", "key_ok": "bool[batch, kv_len]", "slopes": "fp32[heads]",
    "table": "fp32[heads, 101]", "by_row": "fp32[heads, q_len]", "by_key": "{dtype}[batch, kv_len]",
    "bias": "{dtype}[batch, heads, q_len, kv_len]", "sinks": "fp32[heads]", "extra": "{dtype}[batch, heads, q_len, kv_len]",
}  # fmt: skip
TABLES = ("cosines", "sines")
# Elements of the additive mask "extra", by element type: they exclude a pair, or nearly
LOW = {"fp16": (-65504.0, -1e4, -np.inf), "bf16": (-3.3895e38, -1e9, -1e4, -np.inf), "fp32": (-3.4028234e38, -1e9, -np.inf)}
SINKS = (-np.inf, -1e37, -50.0, 50.0, 1e9, 1e37)
SIZES_OF_V = (1e-20, 1e10, 1e25)
# Words of C, C++, CUDA and generated code: valid names of inputs and params, or refused
WORDS = tuple(
    """
    size_t uint8_t int32_t string vector half float4 dim3 expf tanhf fmaxf printf gamma y0 j1 index time signal div exit abs_
    rand score sink tile stage lane warp row_max limit shift q_lo kv_lo kv_head scale in captured Fragment KvRange WorkTile smem
    kept final override import module co_await concept requires char8_t linux NULL auto register export thread_local i0 r j e
    """.split()  # noqa: SIM905
)
TILES = {
    "fused": (
        "32 x 64", "64 x 32", "64 x 64", "64 x 128", "128 x 32", "128 x 64", "128 x 128", "128 x 48", "64 x 64  stages 2",
        "128 x 64  warps 8",
    ),
    "hopper": (
        "128 x 48", "128 x 64", "128 x 80", "128 x 128", "192 x 64", "192 x 128", "256 x 64", "192 x 48  stages 2",
        "128 x 64  stages 3",
    ),
    "wgmma": ("64 x 64", "128 x 64", "128 x 128", "64 x 128", "192 x 64", "128 x 32"),
    "tiled": ("32 x 32", "64 x 64"),
    "decode": ("16 x 16", "16 x 32", "16 x 32  stages 2", "16 x 64  stages 2  warps 2", "16 x 16  warps 1"),
}  # fmt: skip
EXPECTED = {
    "E219": "an input or a param that folding leaves unused",
    "E301": "a tile that does not fit",
    "E112": "a word that is not a valid name",
}
LENGTHS = (1, 17, 64, 65, 100, 128, 129, 200, 257)


@dataclass(frozen=True)
class Case:
    text: str
    schedule: str
    arch: str
    shape: Shape
    params: dict[str, int | float]
    rows_apart: bool  # Q, K and V are stored as [batch, length, heads, head_dim]
    magnitude: float  # factor of Q, which is randn: a large one makes row maxima rise from tile to tile
    size_of_v: float = 1.0
    extreme_sinks: bool = False
    words: tuple[tuple[str, str], ...] = ()  # other names of inputs and params
    spare_keys: int = 0  # if any, storage is padded, and so many rows of NaN are after the keys of each sequence
    python_mask: str = ""  # the mask as the body of a Python function of b, h, q, k, with the params as defaults

    def spec(self) -> AttentionSpec:
        """The spec, renamed, with the mask of its Python function if it has one."""
        (spec,) = load_text(self.renamed(self.text))
        if not self.python_mask:
            return spec
        parameters = ", ".join(["b", "h", "q", "k", *(f"{n}={value}" for n, value in self.params.items())])
        mask: Callable[..., Any] = eval(f"lambda {parameters}: {self.python_mask}")
        return replace(spec, mask=attngen.define(mask=mask).mask, params=())

    def renamed(self, text: str) -> str:
        for name, word in self.words:
            text = re.sub(rf"\b{name}\b", word, text)
        return text

    def by_word(self, values: dict[str, Any]) -> dict[str, Any]:
        words = dict(self.words)
        return {words.get(name, name): value for name, value in values.items()}


def integer(r: random.Random, depth: int) -> str:
    if depth == 0 or r.random() < 0.3:
        leaves = ("q", "k", "q", "k", "w", "n", "h", "b", "doc[b, q]", "doc[b, k]", "q_len", "kv_len", str(r.randint(-20, 90)))
        return r.choice(leaves)
    a, b = integer(r, depth - 1), integer(r, depth - 1)
    divisor = r.choice(("1", "2", "3", "7", "-3", "16", "64", "n"))
    return r.choice(
        (
            f"({a} + {b})", f"({a} - {b})", f"({a} - {b})", f"({a} * {r.choice((2, 3, -1, 4, 7))})", f"({a} // {divisor})",
            f"({a} % {divisor})", f"abs({a})", f"min({a}, {b})", f"max({a}, {b})", f"where({boolean(r, depth - 1)}, {a}, {b})",
            f"clamp({a}, {r.randint(-50, 10)}, {r.randint(20, 300)})",
        )
    )  # fmt: skip


def boolean(r: random.Random, depth: int) -> str:
    if depth == 0 or r.random() < 0.5:
        if r.random() < 0.65:
            return f"({r.choice(MASKS)})"
        if r.random() < 0.2:
            return f"where({boolean(r, depth - 1)}, {boolean(r, depth - 1)}, {boolean(r, depth - 1)})" if depth else "(h > 0)"
        inner = max(0, depth - 1)
        return f"({integer(r, inner)} {r.choice(('<', '<=', '>', '>=', '==', '!='))} {integer(r, inner)})"
    operator = r.choice(("and", "and", "or", "not"))
    if operator == "not":
        return f"(not {boolean(r, depth - 1)})"
    return f"({boolean(r, depth - 1)} {operator} {boolean(r, depth - 1)})"


def number(r: random.Random, depth: int) -> str:
    """A float expression that is continuous in s, and about as large."""
    if depth == 0 or r.random() < 0.3:
        leaves = ("s", "s", "0.5", "-1.25", "slopes[h]", "by_row[h, q]", "by_key[b, k]", "bias[b, h, q, k]", "temp")
        return r.choice(leaves)
    a, b = number(r, depth - 1), number(r, depth - 1)
    return r.choice(
        (
            f"({a} + {b})", f"({a} - {b})", f"({a} * {r.choice(('0.5', '-1.0', 'slopes[h]', 'temp'))})", f"min({a}, {b})",
            f"max({a}, {b})", f"abs({a})", f"tanh({a})", f"sin({a})", f"where({boolean(r, 1)}, {a}, {b})", f"({a} / -2.0)",
            f"where(where({boolean(r, 0)}, {boolean(r, 0)}, {boolean(r, 0)}), {a}, {b})", f"({a} + 0.01 * {integer(r, 1)})",
        )
    )  # fmt: skip


def case(seed: int, kernel: str | None = None) -> Case:
    """The spec and the problem of `seed`: the first draw that the language and the planner accept."""
    r = random.Random(seed)
    while True:
        one = draw(r, kernel)
        try:
            spec = one.spec()
            choose(spec, ARCHES[one.arch], one.schedule)
        except DiagnosticError as error:
            if {d.code for d in error.diagnostics} <= set(EXPECTED):
                continue
            raise
        return one


def draw(r: random.Random, kernel: str | None = None) -> Case:
    schedule, arch = r.choice([one for one in SCHEDULES if kernel in (None, one[0])])
    dtype = r.choice(("bf16", "fp16") if schedule in ("hopper", "wgmma") else ("bf16", "fp16", "fp32"))
    mask = boolean(r, r.choice((0, 1, 1, 2, 2, 3))) if r.random() < 0.9 else ""
    score = r.choice(SCORES) if r.random() < 0.75 else number(r, r.choice((1, 2, 3)))
    normalize = "softmax" if "extra" in score else r.choice((*["softmax"] * 8, "sigmoid", "none"))
    sink = r.choice(("", "", "", "", "sinks[h]", "1.5")) if normalize == "softmax" else ""
    expressions = f"{mask} {score} {sink}"
    lines = [f"dtype {dtype}", f"head_dim {r.choice(HEAD_DIMS)}" + (f", v {r.choice(HEAD_DIMS)}" if r.random() < 0.15 else "")]
    kv_heads, group = r.choice((1, 2)), r.choice((1, 1, 2, 4))
    if r.random() < 0.5:
        lines.append(f"heads {group * kv_heads} over {kv_heads}")
    lines += [f"input {n}: {t.format(dtype=dtype)}" for n, t in INPUTS.items() if re.search(rf"\b{n}\b", expressions)]
    values = {"w": r.choice((0, 1, 3, 16, 63, 64, 65, 100, -5)), "n": r.choice((1, 2, 3, 4, 5, 16, 64, 100)), "temp": 0.7}
    params = {n: v for n, v in values.items() if re.search(rf"\b{n}\b", expressions)}
    lines += [f"param {n}: {'float' if isinstance(v, float) else 'int'}" for n, v in params.items()]
    lines += [f"{what} {e}" for what, e in (("mask", mask), ("score", score), ("sink", sink)) if e not in ("", "s")]
    if normalize != "softmax":
        lines.append(f"normalize {normalize}")
    elif r.random() < 0.25:
        lines.append("output lse")
    if r.random() < 0.15 and (dtype == "fp32" or "softcap" in score):
        lines.append("precision high")
    q_len = r.choice(LENGTHS)
    kv_len = r.choice((q_len, q_len, q_len, 1, 33, 64, 130, 190, 257, 300))
    if re.search(r"\b(doc|same_document|key_ok)\b", f"{mask} {score}"):  # read at rows and keys alike
        kv_len = max(kv_len, q_len)
    shape = Shape(r.choice((1, 2)), group * kv_heads, kv_heads, q_len, kv_len)
    if schedule in TILES and r.random() < 0.4:
        lines.append(f"kernel {schedule} {{ tile {r.choice(TILES[schedule])} }}")
    text = "attention random {\n" + "".join(f"    {line}\n" for line in lines) + "}\n"
    size_of_v = r.choice(SIZES_OF_V) if normalize == "softmax" and dtype != "fp16" and r.random() < 0.1 else 1.0
    captured = [n for n in (*INPUTS, *values) if re.search(rf"^ +(input|param) {n}:", text, re.MULTILINE)]
    words = tuple((n, r.choice(WORDS)) for n in captured if r.random() < 0.1) if r.random() < 0.5 else ()
    words = words if len({w for _, w in words}) == len(words) else ()
    # a Python function can neither read tensors of the text nor call functions of the prelude
    plain = (
        mask and not re.search(r"\[|[a-z]\(|causal|temp", mask) and not set(params) & set(re.findall(r"\w+", f"{score} {sink}"))
    )
    python_mask = python_text(mask) if plain and r.random() < 0.5 else ""
    if python_mask:
        words = ()
    if r.random() < 0.15:
        text = text.removesuffix("}\n") + f"    dropout {r.choice((0.002, 0.1, 0.5, 0.9))}\n}}\n"
    one = Case(
        text, schedule, arch, shape, params, r.random() < 0.2, r.choice((1.0, 1.0, 1.0, 4.0, 25.0, 0.0)), size_of_v,
        r.random() < 0.3, words, python_mask=python_mask,
    )  # fmt: skip
    spare_keys = r.choice((1, 60, 200)) if schedule != "wgmma" and r.random() < 0.15 else 0
    one = replace(one, spare_keys=spare_keys)
    return replace(one, text=rotated(r, one)) if r.random() < 0.12 else one


def rotated(r: random.Random, one: Case) -> str:
    """The text of `one` with a rotation, if its rows have enough elements."""
    head_dim = int(re.findall(r"head_dim (\d+)", one.text)[0])
    dims = [n for n in (16, 32, 48, 64, 128, head_dim) if n <= head_dim and n % 16 == 0]
    if not dims:
        return one.text
    dim, dtype = r.choice(dims), r.choice(("fp32", "fp32", "bf16", "fp16"))
    table = f"{dtype}[{max(one.shape.q_len, one.shape.kv_len + one.spare_keys) + 7}, {dim // 2}]"
    usual = [""] if one.shape.q_len <= one.shape.kv_len else []
    at = r.choice((*usual, *usual, " at q, k", " at q + 7, k // 2", f" at {one.shape.q_len} - q, 3"))
    lines = [f"input {name}: {table}" for name in TABLES]
    lines.append(f"rotary {dim} {r.choice(('halves', 'interleaved'))} by {', '.join(TABLES)}{at}")
    return one.text.removesuffix("}\n") + "".join(f"    {line}\n" for line in lines) + "}\n"


def python_text(text: str) -> str:
    """A condition of the language with Python's operators on arrays; its comparisons are in parentheses."""
    for word, sign in (("and", "&"), ("or", "|"), ("not", "True ^")):
        text = re.sub(rf"\b{word}\b", sign, text)
    return text


def extreme(one: Case, name: str, array: Array, spec: AttentionSpec, seed: int) -> Array:
    """Elements of additive masks and sinks near the ends of their range; other inputs unchanged."""
    rng = np.random.default_rng(seed)
    if name == "sinks" and one.extreme_sinks:
        return rng.choice(SINKS, array.shape).astype(np.float32)
    if name != "extra":
        return array
    low = rng.choice(LOW[spec.dtype.name])
    forbidden = rng.random(array.shape) < rng.choice((0.2, 0.9)) if rng.random() < 0.5 else np.indices(array.shape)[-1] > 70
    forbidden[..., rng.integers(0, 5) :: 5, :] = True  # rows whose keys are all low
    return round_to_storage(np.where(forbidden, low, 0.0).astype(np.float32), spec.dtype)


def drawn_problem(one: Case, seed: int) -> Sample:
    """The problem of `one`, without its layout."""
    spec = one.spec()
    problem = sample(spec, one.shape, seed)
    q, v = (from_storage(x) * np.float32(size) for x, size in ((problem.q, one.magnitude), (problem.v, one.size_of_v)))
    problem = replace(problem, q=round_to_storage(q, spec.dtype), v=round_to_storage(v, spec.dtype))
    names = {word: name for name, word in one.words}
    at_kinks = np.random.default_rng(seed).random() < 0.25  # of `max`, `abs` and others: multiples of a half
    for word, array in problem.inputs.items():
        if at_kinks and (dtype := spec.input(word).dtype).kind == "float":
            array = round_to_storage(np.round(2 * from_storage(array)) / 2, dtype)
        problem.inputs[word] = extreme(one, names.get(word, word), array, spec, seed)
    return problem
