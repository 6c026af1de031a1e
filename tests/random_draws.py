"""Random specs and problems: what `tests.random_specs` and `tests.random_gradients` search.

Specs have masks and scores as trees of operators, nested conditions, bool and integer tensors in scores, additive masks with
finfo.min and -inf, unions and intersections of closed ranges, sinks and values of any magnitude, names with a meaning in C++ or
in generated code, and masks as Python functions whose parameters have defaults. Each is drawn with a storage and with several
problems, whose lengths `tests.random_lengths` draws from the spec.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attngen
from attngen.diagnostics import DiagnosticError
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.plan import Plan
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, Storage
from attngen.spec.dtypes import from_storage, round_to_storage, within_range
from tests.random_lengths import MOST, WORK, Call, Limits, draw_call

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
    # factors that a head's pairs share, and terms that a row's pairs share
    "s * gain[b, h]", "s * gain[b, h]", "3.0 * tanh(s * gain[b, h])", "s / (1.5 + sin(1.0 * h))",
    "s * (gain[b, h] * temp) - 0.1 * k",
    "s + sin(0.7 * q + h)", "s + exp(-0.3 * h) * sin(1.0 * h + 1.0) * (k - q)", "s * sin(by_row[h, q]) + gain[b, h] * 0.01 * k",
)  # fmt: skip
INPUTS = {
    "doc": "int32[batch, kv_len]", "reach": "int64[batch, q_len]", "far": "int32[batch, q_len]", "ends": "int32[batch]",
    "allowed": "bool[batch, heads, q_len, kv_len]", "key_ok": "bool[batch, kv_len]", "slopes": "fp32[heads]",
    "table": "fp32[heads, 101]", "by_row": "fp32[heads, q_len]", "by_key": "{dtype}[batch, kv_len]",
    "bias": "{dtype}[batch, heads, q_len, kv_len]", "sinks": "fp32[heads]", "extra": "{dtype}[batch, heads, q_len, kv_len]",
    "gain": "fp32[batch, heads]",
}  # fmt: skip
TABLES = ("cosines", "sines")
# Elements of the additive mask "extra", by element type: they exclude a pair, or nearly
LOW = {"fp16": (-65504.0, -1e4, -np.inf), "bf16": (-3.3895e38, -1e9, -1e4, -np.inf), "fp32": (-3.4028234e38, -1e9, -np.inf)}
GAINS = (0.0, 0.0, -1.0, -0.3, 0.7, 1.0, 2.0, 2.0**-70, -(2.0**-70))  # factors of heads, of any sign
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
        "128 x 64  stages 3", "64 x 48", "64 x 32  stages 2",
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
CALLS = 6  # per case
# Terms of one interval of keys for each row, or of rows for each key, at a constant {c}; and constants up to long problems
RANGES = (
    "k < {c}", "k >= {c}", "q < {c}", "q >= {c}", "q + k <= {c}", "q + k >= {c}", "k <= q - {c}", "k >= q + {c}",
    "k <= q + {c}", "k >= q - {c}", "k == {c}", "2 * k <= q + {c}", "k <= 2 * q - {c}", "q_len - q <= {c}", "kv_len - k <= {c}",
    "k <= q + kv_len - q_len - {c}", "k <= q + kv_len - q_len", "k < w", "k >= q - w", "k <= q - w", "q + k <= w", "k + n > q",
    "k < {c} * h", "k >= {c} * b", "k < ends[b]", "q >= k", "k < reach[b, q]", "w < 0", "kv_len > {c}",
)  # fmt: skip
PARTLY_EMPTY = (  # terms that leave some rows without keys
    "q + k <= {c}", "k <= q - {c}", "k >= q + {c}", "k <= q + kv_len - q_len - {c}", "k <= q + kv_len - q_len", "q + k <= w",
    "k <= q - w", "k >= q + w", "k >= {c}", "q >= {c}", "q < {c}", "kv_len - k <= q - {c}",
)  # fmt: skip
CONSTANTS = (1, 3, 5, 16, 31, 40, 64, 65, 100, 127, 200, 300, 350, 500, 900, 1500)
PARAMS = {
    "w": (0, 1, 3, 16, 63, 64, 65, 100, 300, 700, -5, -200),
    "n": (1, 2, 3, 4, 5, 16, 64, 100, 400),
    "temp": (0.7,),
}  # fmt: skip
HUGE = (2**30, -(2**30), 2**29, 1 - 2**29)  # values of `w` if it bounds indices and is in no score
# Larger ones than other schedules have: of Q and K, and of V
WIDE_OF_HOPPER = (8, 128, 256, 264, 288, 320, 384, 448, 512, 512)
WIDE_BY_MMA = (264, 320, 512, 576), (8, 64, 256, 264, 320, 512)
WIDE_HEADS = {
    "decode": WIDE_BY_MMA,
    "fused": WIDE_BY_MMA,
    "hopper": (WIDE_OF_HOPPER, WIDE_OF_HOPPER),
}  # by schedule: the sizes of Q and K, and of V
SMALL_HEADS = (8, 16, 24, 32, 40, 48, 64, 64, 64, 80, 96, 128)  # sizes for masks with large constants, which need long problems
CONVERTING = ("naive", "tiled")  # schedules whose Q, K, V and O may have any types
QUANTIZED = ("decode", "fused", "hopper", "wgmma")  # those whose K and V may have 8 bits
KEY_TYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2")
STORAGES: tuple[Storage, ...] = (*["dense"] * 4, "padded", "packed", "packed", "paged", "packed_paged")  # type: ignore[assignment]
PAGE_SIZES = {"hopper": (8, 16, 24, 48, 64, 128, 256), "wgmma": (8, 16, 48, 64, 256)}  # schedules with pages of a stated size
OTHER_PAGE_SIZES = (None, None, 1, 3, 16, 20, 64, 128)


@dataclass(frozen=True)
class Case:
    text: str
    schedule: str
    arch: str
    calls: tuple[Call, ...]
    rows_apart: bool  # the other order of heads and rows in memory: dense Q, K and V lie as [batch, length, heads, head_dim]
    magnitude: float  # factor of Q, which is randn: a large one makes row maxima rise from tile to tile
    size_of_v: float = 1.0
    extreme_sinks: bool = False
    words: tuple[tuple[str, str], ...] = ()  # other names of inputs and params
    python_mask: str = ""  # the mask as the body of a Python function of b, h, q, k, with the params as defaults
    storage: Storage = "dense"
    page_size: int | None = None  # as the spec states it

    @property
    def shape(self) -> Shape:
        """That of the first problem."""
        return self.calls[0].shape

    @property
    def params(self) -> dict[str, int | float]:
        """Those of the first problem; with a Python function those of all, as its constants."""
        return dict(self.calls[0].params)

    def given(self, call: Call) -> dict[str, Any]:
        """The params that a call takes."""
        return {} if self.python_mask else self.by_word(dict(call.params))

    def spec(self) -> AttentionSpec:
        """The spec, renamed, with the mask of its Python function if it has one, in its storage."""
        (spec,) = load_text(self.renamed(self.text))
        spec = replace(spec, kernel=replace(spec.kernel, storage=self.storage, page_size=self.page_size))
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
        constants = (str(r.randint(-20, 90)), str(r.choice(CONSTANTS)))
        leaves = ("q", "k", "q", "k", "w", "n", "h", "b", "doc[b, q]", "doc[b, k]", "q_len", "kv_len", *constants)
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


def ranges(r: random.Random, depth: int) -> str:
    """A union or an intersection of closed ranges, or of such; often one of a union with a range that is
    empty for some rows."""
    if depth == 0:
        return f"({r.choice(RANGES).format(c=r.choice(CONSTANTS))})"
    if r.random() < 0.4:
        return f"(({ranges(r, 0)} or {ranges(r, 0)}) and ({r.choice(PARTLY_EMPTY).format(c=r.choice(CONSTANTS))}))"
    return f"({ranges(r, depth - 1)} {r.choice(('and', 'or'))} {ranges(r, r.randint(0, depth - 1))})"


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
    """The spec and the problems of `seed`: the first draw that the language and the planner accept."""
    r = random.Random(seed)
    while True:
        one = draw(r, kernel)
        try:
            plan = choose(one.spec(), ARCHES[one.arch], one.schedule)
            one = replace(one, calls=draw_calls(r, one, plan))
            if r.random() < 0.12 and one.storage in ("dense", "padded", "packed"):
                one = replace(one, text=rotated(r, one))
                choose(one.spec(), ARCHES[one.arch], one.schedule)
            elif r.random() < 0.1 and one.size_of_v == 1.0:
                one = replace(one, text=with_part_of_keys(r, one))
                choose(one.spec(), ARCHES[one.arch], one.schedule)
            elif r.random() < (0.4 if one.schedule in (*CONVERTING, *QUANTIZED) else 0.05):
                one = replace(one, text=quantized(r, one))
                choose(one.spec(), ARCHES[one.arch], one.schedule)
        except DiagnosticError as error:
            if {d.code for d in error.diagnostics} <= set(EXPECTED):
                continue
            raise
        return one


def draw_calls(r: random.Random, one: Case, plan: Plan, longest: int = MOST) -> tuple[Call, ...]:
    """The problems of a case by a plan: a kernel is compiled once for all of them."""
    spec = one.spec()
    work = WORK[plan.direction][not plan.schedule.on_tensor_cores]
    of_keys = re.search(r"\b(doc|same_document|key_ok)\b", one.text)  # read at rows and keys alike
    limits = Limits(work, longest, bool(of_keys) or needs_keys(one.text))
    calls = []
    for _ in range(CALLS):
        params = one.params if one.python_mask else {name: drawn_param(r, one, name) for name in one.params}
        shape = one.shape
        heads = (spec.q_heads or shape.q_heads, spec.kv_heads or shape.kv_heads)
        calls.append(draw_call(r, spec, plan, heads, params, limits))
    return tuple(calls)


def drawn_param(r: random.Random, one: Case, name: str) -> int | float:
    in_score = re.search(rf"^ +(score|sink) .*\b{name}\b", one.text, re.MULTILINE)
    in_product = re.search(r"%|//|\*|abs|dilated|relative", one.text)
    if name == "w" and not in_score and not in_product and r.random() < 0.1:
        return r.choice(HUGE)
    return r.choice(PARAMS[name])


def needs_keys(text: str) -> bool:
    """Whether rows stand at the last keys, for a rotation whose tables have no negative positions."""
    return bool(re.search(r"^ +rotary .*sines$", text, re.MULTILINE))


def head_sizes(r: random.Random, schedule: str, sizes: Sequence[int]) -> str:
    """The statement of a spec's head sizes, of `sizes` or of the schedule's wide ones."""
    wide = WIDE_HEADS.get(schedule)
    if wide and r.random() < 0.15:
        return "head_dim {}, v {}".format(*map(r.choice, wide))
    return f"head_dim {r.choice(sizes)}" + (f", v {r.choice(sizes)}" if r.random() < 0.15 else "")


def draw(r: random.Random, kernel: str | None = None) -> Case:
    """A spec; its problems are not drawn yet, but for numbers of heads and params."""
    schedule, arch = r.choice([one for one in SCHEDULES if kernel in (None, one[0])])
    dtype = r.choice(("bf16", "fp16") if schedule == "wgmma" else ("bf16", "fp16", "fp32"))
    of_ranges = r.random() < 0.4
    mask = ranges(r, r.choice((1, 2, 2, 3))) if of_ranges else boolean(r, r.choice((0, 1, 1, 2, 2, 3)))
    mask = mask if r.random() < 0.9 else ""
    score = r.choice(SCORES) if r.random() < 0.75 else number(r, r.choice((1, 2, 3)))
    normalize = "softmax" if "extra" in score else r.choice((*["softmax"] * 8, "sigmoid", "none"))
    sink = r.choice(("", "", "", "", "sinks[h]", "1.5")) if normalize == "softmax" else ""
    expressions = f"{mask} {score} {sink}"
    lines = [f"dtype {dtype}", head_sizes(r, schedule, SMALL_HEADS if of_ranges else HEAD_DIMS)]
    kv_heads, group = r.choice((1, 1, 1, 2) if of_ranges else (1, 2)), r.choice((1, 1, 1, 2) if of_ranges else (1, 1, 2, 4))
    if r.random() < 0.5:
        lines.append(f"heads {group * kv_heads} over {kv_heads}")
    lines += [f"input {n}: {t.format(dtype=dtype)}" for n, t in INPUTS.items() if re.search(rf"\b{n}\b", expressions)]
    params = {n: r.choice(values) for n, values in PARAMS.items() if re.search(rf"\b{n}\b", expressions)}
    lines += [f"param {n}: {'float' if isinstance(v, float) else 'int'}" for n, v in params.items()]
    lines += [f"{what} {e}" for what, e in (("mask", mask), ("score", score), ("sink", sink)) if e not in ("", "s")]
    if normalize != "softmax":
        lines.append(f"normalize {normalize}")
    elif r.random() < 0.25:
        lines.append("output lse")
    if r.random() < 0.15 and (dtype == "fp32" or "softcap" in score):
        lines.append("precision high")
    if schedule in TILES and r.random() < 0.4:
        lines.append(f"kernel {schedule} {{ tile {r.choice(TILES[schedule])} }}")
    if r.random() < 0.15:
        lines.append(f"dropout {r.choice((0.002, 0.1, 0.5, 0.9))}")
    text = "attention random {\n" + "".join(f"    {line}\n" for line in lines) + "}\n"
    size_of_v = r.choice(SIZES_OF_V) if normalize == "softmax" and dtype != "fp16" and r.random() < 0.1 else 1.0
    captured = [n for n in (*INPUTS, *PARAMS) if re.search(rf"^ +(input|param) {n}:", text, re.MULTILINE)]
    words = tuple((n, r.choice(WORDS)) for n in captured if r.random() < 0.1) if r.random() < 0.5 else ()
    words = words if len({w for _, w in words}) == len(words) else ()
    # a Python function can neither read tensors of the text nor call functions of the prelude
    plain = (
        mask and not re.search(r"\[|[a-z]\(|causal|temp", mask) and not set(params) & set(re.findall(r"\w+", f"{score} {sink}"))
    )
    python_mask = python_text(mask) if plain and r.random() < 0.5 else ""
    if python_mask:
        words = ()
    storage = r.choice(STORAGES)
    paged = storage in ("paged", "packed_paged")
    heads_only = Call(Shape(1, group * kv_heads, kv_heads, 1, 1), (1,), (1,), params)
    return Case(
        text, schedule, arch, (heads_only,), r.random() < 0.2, r.choice((1.0, 1.0, 1.0, 4.0, 25.0, 0.0)), size_of_v,
        r.random() < 0.3, words, python_mask, storage,
        r.choice(PAGE_SIZES.get(schedule, OTHER_PAGE_SIZES)) if paged else None,
    )  # fmt: skip


def rotated(r: random.Random, one: Case) -> str:
    """The text of `one` with a rotation, if its rows have enough elements."""
    head_dim = int(re.findall(r"head_dim (\d+)", one.text)[0])
    dims = [n for n in (16, 32, 48, 64, 128, head_dim) if n <= head_dim and n % 16 == 0]
    if not dims:
        return one.text
    dim, dtype = r.choice(dims), r.choice(("fp32", "fp32", "bf16", "fp16"))
    longest = max(max(call.shape.q_len, call.shape.kv_len) for call in one.calls)
    table = f"{dtype}[{longest + 7}, {dim // 2}]"
    usual = [""] if all(n <= m for call in one.calls for n, m in call.lengths) else []
    at = r.choice((*usual, *usual, " at q, k", " at q + 7, k // 2", f" at {longest} - q, 3"))
    lines = [f"input {name}: {table}" for name in TABLES]
    lines.append(f"rotary {dim} {r.choice(('halves', 'interleaved'))} by {', '.join(TABLES)}{at}")
    return one.text.removesuffix("}\n") + "".join(f"    {line}\n" for line in lines) + "}\n"


def with_part_of_keys(r: random.Random, one: Case) -> str:
    """The text of `one` with values that are a part of the keys."""
    head_dim = int(re.findall(r"head_dim (\d+)", one.text)[0])
    end = r.randrange(8, head_dim + 1, 8)
    values = f"values k[{r.choice((0, 0, r.randrange(0, end, 8)))}:{end}]"
    return re.sub(r"^    head_dim (\d+).*$", rf"    head_dim \1\n    {values}", one.text, flags=re.MULTILINE)


def quantized(r: random.Random, one: Case) -> str:
    """The text of `one` with scales of K and V, and, for schedules that convert elements, types of their own for tensors."""
    words = dict(one.words)
    by_head, by_key = "size_of_head", "size_of_key"
    scales = (f"{by_head}[h]", f"{by_key}[b, k]", f"{by_head}[h] * {by_key}[b, k]", "0.5", "float(k % 3 + 1)")
    lines = []
    for tensor in r.choice(("k", "kv", "v")) if one.schedule in (*CONVERTING, *QUANTIZED) else "k":
        of_keys = tensor == "k" or one.schedule in (*CONVERTING, "fused", "hopper", "decode")  # else refused
        usable = scales if of_keys else (f"{by_head}[h]", "0.5")
        lines.append(f"scaled {tensor} by {r.choice(usable)}")
    text = "\n".join(lines)
    if by_head in text:
        lines.append(f"input {by_head}: fp32[heads]")
    if by_key in text:
        lines.append(f"input {by_key}: {r.choice(('fp32', 'bf16'))}[batch, kv_len]")
    found = one.text.removesuffix("}\n") + "".join(f"    {line}\n" for line in lines) + "}\n"
    if one.schedule not in (*CONVERTING, *QUANTIZED) or one.size_of_v != 1.0 or "extra" in words or "extra" in found:
        return found
    if one.schedule in QUANTIZED:
        (q,) = re.findall(r"^    dtype (\w+)$", found, re.MULTILINE)
        k = r.choice(("fp8_e4m3", "fp8_e5m2"))
        return re.sub(r"^    dtype \w+$", f"    dtype q {q}  k {k}  v {k}", found, flags=re.MULTILINE)
    q, k, v, o = (r.choice(types) for types in (KEY_TYPES, KEY_TYPES, KEY_TYPES, ("fp16", "bf16", "fp32")))
    v = k if one.page_size or one.storage in ("paged", "packed_paged") else v
    if q != "fp32" and "softcap" not in found:
        found = found.replace("    precision high\n", "")  # it would have no effect
    return re.sub(r"^    dtype \w+$", f"    dtype q {q}  k {k}  v {v}  o {o}", found, flags=re.MULTILINE)


def python_text(text: str) -> str:
    """A condition of the language with Python's operators on arrays; its comparisons are in parentheses."""
    for word, sign in (("and", "&"), ("or", "|"), ("not", "True ^")):
        text = re.sub(rf"\b{word}\b", sign, text)
    return text


def extreme(one: Case, name: str, array: Array, spec: AttentionSpec, seed: int) -> Array:
    """Elements of additive masks and sinks near the ends of their range, and factors of heads of any sign; other inputs
    unchanged."""
    rng = np.random.default_rng(seed)
    if name in ("gain", "size_of_head") and seed % 2:
        return rng.choice(GAINS, array.shape).astype(np.float32)
    if name == "sinks" and one.extreme_sinks:
        return rng.choice(SINKS, array.shape).astype(np.float32)
    if name != "extra":
        return array
    low = rng.choice(LOW[spec.dtype.name])
    forbidden = rng.random(array.shape) < rng.choice((0.2, 0.9)) if rng.random() < 0.5 else np.indices(array.shape)[-1] > 70
    forbidden[..., rng.integers(0, 5) :: 5, :] = True  # rows whose keys are all low
    return round_to_storage(np.where(forbidden, low, 0.0).astype(np.float32), spec.dtype)


def drawn_problem(one: Case, seed: int, call: Call | None = None) -> Sample:
    """A problem of `one`, by default the first, with all rows and keys, without its layout."""
    spec = one.spec()
    problem = sample(spec, (call or one.calls[0]).shape, seed)
    q, v = (
        round_to_storage(within_range(from_storage(x) * np.float32(size), dtype), dtype)
        for x, size, dtype in ((problem.q, one.magnitude, spec.dtypes["q"]), (problem.v, one.size_of_v, spec.dtypes["v"]))
    )
    problem = replace(problem, q=q, v=v)
    names = {word: name for name, word in one.words}
    at_kinks = np.random.default_rng(seed).random() < 0.25  # kinks of `max`, `abs` and others: multiples of a half
    for word, array in problem.inputs.items():
        if at_kinks and (dtype := spec.input(word).dtype).kind == "float":
            array = round_to_storage(np.round(2 * from_storage(array)) / 2, dtype)
        problem.inputs[word] = extreme(one, names.get(word, word), array, spec, seed)
    return problem
