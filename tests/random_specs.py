"""Random specs: every schedule must give the numbers of an independent evaluation of the same text by Python and numpy, and the
same where numbers that the mask hides are NaN or infinite.

    python -m tests.random_specs [--seed 0] [--minutes 10] [--kernel hopper] [--gradients]

searches longer than the tests do, and prints each spec that fails with its seed, which reproduces it, and in the end how many
specs it drew of each direction, schedule and storage.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import attngen
from attngen.api import CompiledAttention
from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import Device
from attngen.reference.compare import Comparison, Truth, compare, truth
from attngen.reference.problems import Sample
from attngen.reference.stored import of_lengths, of_sequences
from attngen.spec.attention import AttentionSpec
from attngen.spec.dropout import bytes_of_pairs
from attngen.spec.dtypes import FP32, from_storage, round_to_storage
from tests.harness import call, call_stored
from tests.random_draws import CALLS, SCHEDULES, TABLES, Array, Case, case, drawn_problem, python_text
from tests.random_gradients import GradientCase, gradient_case, gradient_failure
from tests.random_lengths import Call
from tests.random_problems import arrays_of
from tests.special_numbers import special_numbers

MULTIPROCESSORS = (2, 16, 132)  # with many, decode splits keys over blocks; with few, a persistent kernel has several tiles


def meant(one: Case, spec: AttentionSpec, problem: Sample, params: Mapping[str, int | float]) -> tuple[Array, Array]:
    """O and lse in float64, evaluated from the text by numpy: `and`, `or`, `not` as & | ^, prelude functions as Python's."""
    batch, q_heads, q_len, _ = problem.q.shape
    kv_heads, kv_len = problem.k.shape[1:3]
    b, h, q, k = np.ogrid[:batch, :q_heads, :q_len, :kv_len]
    names: dict[str, Any] = {n: from_storage(a) for n, a in problem.inputs.items()}
    names = {n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in names.items()}
    names |= {n: np.asarray(x)[()] for n, x in {**params, "q_len": q_len, "kv_len": kv_len}.items()}
    names |= {
        "b": b, "h": h, "q": q, "k": k, "inf": np.inf, "abs": np.abs, "min": np.fmin,
        "max": np.fmax, "where": np.where, "exp": np.exp, "sin": np.sin, "tanh": np.tanh,
        "float": np.float64,
        "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
        "causal": q >= k, "causal_bottom_right": q + kv_len - q_len >= k, "window": lambda w: q - k < w,
        "prefix": lambda n: k < n, "dilated": lambda d: (q - k) % d == 0, "padding": lambda ends: k < ends[b],
        "same_document": lambda ids: ids[b, q] == ids[b, k],
    }  # fmt: skip

    def read(what: str, otherwise: str) -> Any:
        found = re.search(rf"^ +{what} (.+)$", one.text, re.MULTILINE)
        text = found[1] if found else otherwise
        return eval(python_text(text), {}, names)

    group = q_heads // kv_heads
    wide_q, wide_k, wide_v = (from_storage(x).astype(np.float64) for x in (problem.q, problem.k, problem.v))
    if part := re.search(r"values k\[(\d+):(\d+)\]", one.text):
        wide_v = wide_k[..., int(part[1]) : int(part[2])]
    rotation = re.search(r"rotary (\d+) (\w+) by \w+, \w+(?: at (.+), (.+))?$", one.text, re.MULTILINE)
    if rotation:
        dim, pairs, of_q, of_k = rotation.groups()
        for_q = np.broadcast_to(eval(of_q or "q + kv_len - q_len", {}, names), q.shape).reshape(-1)
        for_k = np.broadcast_to(eval(of_k or "k", {}, names), k.shape).reshape(-1)
        wide_q = turned(wide_q, problem, int(dim), pairs, for_q, spec)
        wide_k = turned(wide_k, problem, int(dim), pairs, for_k, spec)
    wide_k, wide_v = wide_k.repeat(group, axis=1), wide_v.repeat(group, axis=1)
    s = np.einsum("bhqd,bhkd->bhqk", wide_q, wide_k) / np.sqrt(spec.head_dim)
    s = names["s"] = s * read("scaled k by", "1.0")
    names |= {
        "softcap": lambda c: c * np.tanh(s / c), "alibi": lambda slopes: s + slopes[h] * (k - q),
        "relative_bias": lambda table, reach: s + table[h, np.clip(k - q, -reach, reach) + reach],
    }  # fmt: skip
    with np.errstate(all="ignore"):
        allowed = np.broadcast_to(np.asarray(read("mask", "True"), bool), s.shape)
        scores = np.where(allowed, read("score", "s"), -np.inf)
        dropped = round(256 * float(read("dropout", "0")))
        is_kept: Any = True
        if dropped:
            is_kept = bytes_of_pairs(*problem.inputs["rng_state"][:, None, None, None, None], b, h, q, k) >= dropped

        def times_v(weights: Array) -> Array:
            kept = np.where(is_kept, weights * (256 / (256 - dropped)), 0.0)
            return (kept * np.broadcast_to(read("scaled v by", "1.0"), s.shape)) @ wide_v  # type: ignore[no-any-return]

        if spec.normalize == "sigmoid":
            return times_v(np.where(allowed, 1 / (1 + np.exp(-scores)), 0.0)), np.empty(0)
        if spec.normalize == "none":
            return times_v(np.where(allowed, scores, 0.0)), np.empty(0)
        sink = np.broadcast_to(np.asarray(read("sink", "-inf"), np.float64), (*s.shape[:3], 1))
        largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        finite = np.where(np.isfinite(largest), largest, 0.0)
        weights = np.exp(scores - finite)
        total = weights.sum(-1, keepdims=True) + np.exp(sink - finite)
        output = times_v(weights / np.where(total == 0, 1.0, total))
        return output, (finite + np.log(total))[..., 0]


def turned(rows: Array, problem: Sample, dim: int, pairs: str, at: Array, spec: AttentionSpec) -> Array:
    """Rows [batch, heads, length, size], rotated at the positions `at` [length], as numbers of their type."""
    first, second = (np.s_[: dim // 2], np.s_[dim // 2 : dim]) if pairs == "halves" else (np.s_[:dim:2], np.s_[1:dim:2])
    angles = [from_storage(problem.inputs[name]).astype(np.float64)[at] for name in TABLES]
    pairs_as_numbers = (rows[..., first] + 1j * rows[..., second]) * (angles[0] + 1j * angles[1])
    found = rows.copy()
    found[..., first], found[..., second] = pairs_as_numbers.real, pairs_as_numbers.imag
    return from_storage(round_to_storage(found.astype(np.float32), spec.dtype)).astype(np.float64)


def failure(one: Case, seed: int = 0, device: Device | None = None) -> str:
    """What is wrong with `one` on `device`, by default the emulated one; "" if nothing is. Raises the exceptions of attngen."""
    if device is None:
        device = EmulatedDevice(arch=one.arch, checked=True, seed=seed % 5, multiprocessors=MULTIPROCESSORS[seed % 3])
    kernel: CompiledAttention = attngen.compile(one.spec(), kernel=one.schedule, device=device)
    for call_of in one.calls:
        try:
            wrong = _failure(one, call_of, kernel, seed)
        except Exception as error:
            error.add_note(str(call_of))
            raise
        if wrong:
            return f"{wrong}\n{call_of}"
    return ""


def _failure(one: Case, call_of: Call, kernel: CompiledAttention, seed: int) -> str:
    """What is wrong with one of its problems."""
    spec, problem, params = kernel.spec, drawn_problem(one, seed, call_of), one.given(call_of)
    expected: dict[tuple[int, int], Truth] = {}  # truth for the whole batch, by the lengths of its sequences
    for lengths in dict.fromkeys(call_of.lengths):
        part = of_lengths(spec, problem, *lengths)
        expected[lengths] = whole = truth(spec, part, params, of_bytes=kernel.plan.schedule.multiplies_bytes)
        if wrong := misread(one, call_of, spec, part, whole):
            return wrong
    is_finite = all(np.isfinite(one.reference.output).all() for one in expected.values())
    if spec.dtype is FP32 and one.schedule == "fused" and not is_finite:
        return ""  # infinite weights, of `normalize none`: NaN on tensor cores, see docs/limits.md
    output, lse = call_stored(kernel, arrays_of(one, call_of, spec, problem, seed), **params)
    for b, (lengths, found) in enumerate(zip(call_of.lengths, of_sequences(spec, call_of.rows, output, lse), strict=True)):
        comparison = compare(*found, expected[lengths].of_batch(b))
        if not is_right(comparison):
            return f"sequence {b}: {comparison}"
    if spec.mask is not None and one.storage == "dense" and is_finite and problem.q.size:
        (whole,) = expected.values()
        special = special_numbers(spec, problem, problem.q, params, seed)
        output, lse = call(kernel, special.problem, **params)
        output = special.left_out({"O": output}, {"O": whole.reference.output}, spec)["O"]
        comparison = compare(output, None if lse is None else np.where(special.rows, whole.reference.lse, lse), whole)
        return "" if is_right(comparison) else f"beside numbers that are not finite: {comparison}"
    return ""


def misread(one: Case, call_of: Call, spec: AttentionSpec, problem: Sample, expected: Truth) -> str:
    """Whether the oracle's result is not what the text says."""
    names = {word: name for name, word in one.words}
    by_name = replace(problem, inputs={names.get(w, w): x for w, x in problem.inputs.items()})
    exact = expected.reference
    for name, ours, theirs in zip(
        ("O", "lse"), (exact.output, exact.lse), meant(one, spec, by_name, call_of.params), strict=True
    ):
        if (
            ours is not None
            and ours.size == theirs.size
            and not np.allclose(ours, theirs, rtol=1e-9, atol=1e-9 * max(1.0, one.size_of_v), equal_nan=True)
        ):
            return f"the oracle's {name} is not what the text says"
    return ""


def is_right(found: Comparison) -> bool:
    """Whether errors are within twice the bound: among many problems, few rows exceed it by chance; wrong ones by far more."""
    return found.error <= 2 * found.allowed and (found.lse_error is None or found.lse_error <= 2 * found.allowed_lse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kernel", choices=sorted({name for name, _ in SCHEDULES}), help="specs of this schedule alone")
    parser.add_argument("--gradients", action="store_true", help="gradients of the specs, not their results")
    parser.add_argument("--gpu", action="store_true", help="with --gradients: on the GPU, not on the emulated device")
    options = parser.parse_args()
    if options.gpu and not options.gradients:
        parser.error("--gpu searches gradients alone; tests/gpu/test_random_specs_on_gpu.py has results")
    end = time.monotonic() + 60 * options.minutes
    seed, failed, counts = options.seed, 0, Counter[str]()
    while time.monotonic() < end:
        one: Any = None
        try:
            one = gradient_case(seed, options.kernel, options.gpu) if options.gradients else case(seed, options.kernel)
            wrong = failure(one, seed) if isinstance(one, Case) else gradient_failure(one, seed) if one is not None else ""
        except Exception as error:
            wrong = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if wrong:
            failed += 1
            print(f"\nseed {seed}: {wrong}\n{one}\n{getattr(one, 'case', one).text if one else ''}", flush=True)
        seed += 1
        if one is None and not wrong:  # its gradients are none of this schedule
            continue
        counts[what(one)] += 1
        count = f"{counts.total()} specs, {failed} failed"
        if sys.stdout.isatty():
            print(f"\r{count}", end="", flush=True)
        elif counts.total() % 100 == 0:
            print(count, flush=True)
    print("\n" * sys.stdout.isatty() + "\n".join(f"{n:6} {kind}" for kind, n in sorted(counts.items())))
    print(f"{counts.total()} specs with {CALLS} problems each, {failed} failed; the next seed is {seed}")
    sys.exit(1 if failed else 0)


def what(one: Case | GradientCase | None) -> str:
    """Direction, schedule, architecture and storage."""
    if one is None:
        return "not drawn"
    direction, storage = ("forward", one.storage) if isinstance(one, Case) else ("backward", one.case.storage)
    return f"{direction:8} {one.schedule:6} {one.arch:6} {storage}"


if __name__ == "__main__":
    main()
