"""How long NVRTC takes for pathological specs: everything that is accepted must compile in seconds.

    python -m tests.compile_times [--seed 0] [--minutes 10] [--most 10]

draws specs that are as large as they may be, compiles the file of a schedule, forward or backward, and prints the slowest.
Times are CPU seconds of the process, since other programs may share its cores; the first line is that of a plain causal kernel
of Hopper, which takes about one second on an idle core, for comparison. Fails if one takes longer than `--most`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attngen.device.cuda.compiler import compile_text
from attngen.diagnostics import ArgumentError, DiagnosticError, SpecWarning
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.schedules import choose
from attngen.spec.gradient import QKV, differentiable

SCHEDULES = (
    ("naive", "sm_80"), ("tiled", "sm_80"), ("fused", "sm_75"), ("fused", "sm_80"), ("fused", "sm_90a"), ("decode", "sm_90a"),
    ("wgmma", "sm_90a"), ("hopper", "sm_90a"), ("hopper", "sm_90a"),
)  # fmt: skip
COUNTS = (1, 2, 4, 8, 16, 40, 100, 300, 800, 2000)


@dataclass(frozen=True)
class Case:
    body: str
    dtype: str
    head_dim: int
    schedule: str
    arch: str
    backward: bool

    @property
    def text(self) -> str:
        return f"attention t {{ dtype {self.dtype} head_dim {self.head_dim} {self.body} kernel {self.schedule} }}"

    def program(self) -> Program:
        """The file of this case. Raises DiagnosticError or ArgumentError if it is refused."""
        (spec,) = load_text(self.text)
        wanted = (*QKV, *differentiable(spec)) if self.backward else None
        return emit(spec, choose(spec, ARCHES[self.arch], wanted=wanted, deterministic=False))


def joined(operator: str, terms: Sequence[str]) -> str:
    """`terms` joined as a balanced tree."""
    while len(terms) > 1:
        terms = [f"({f' {operator} '.join(terms[i : i + 2])})" for i in range(0, len(terms), 2)]
    return terms[0]


# Terms of a score, of a sink and of a mask, by their number
SCORES: tuple[Callable[[int], str], ...] = (
    lambda i: f"exp(s * 0.{i + 1})", lambda i: f"sin(s + {i}.5)", lambda i: f"cos(s * {i}.5)", lambda i: f"pow(s, {i}.5 + s)",
    lambda i: f"{i}.5 / (s + {i}.25)", lambda i: f"log(s + {i}.5)", lambda i: f"tanh(s * {i}.5)",
    lambda i: f"sigmoid(s + {i}.5)",
    lambda i: f"atan2(s, s + {i}.5)", lambda i: f"sqrt(s + {i}.5)", lambda i: f"erf(s + {i}.5)", lambda i: f"s * {i}.5",
    lambda i: f"where(q - k > {i}, s, {i}.5)", lambda i: f"float((q - k + {i}) % n)", lambda i: f"float((q * k + {i}) // n)",
    lambda i: f"float(q * {i} - k)", lambda i: f"t{i % 40}[h]", lambda i: f"u[h, q, min(k, {i})]", lambda i: f"1e{i % 30} * s",
    lambda i: f"min(s, {i}.5)", lambda i: f"floor(s * {i}.5)", lambda i: f"tanh(s * t{i % 40}[h])",
)  # fmt: skip
SINKS = (lambda i: f"sin(float(h) + {i}.5)", lambda i: f"exp(float(h + {i}))", lambda i: f"log(float(q + {i}))")
MASKS: tuple[Callable[[int], str], ...] = (
    lambda i: f"(q - k >= {9 * i} and q - k < {9 * i + 4})", lambda i: f"d{i % 90}[b, q] == d{i % 90}[b, k]",
    lambda i: f"(q + {i}) // n >= (k + {i}) // n", lambda i: f"(q * k + {i}) % {i + 2} == 0", lambda i: f"k % {i + 2} != 1",
    lambda i: f"where(q > {i}, k < {i}, k > q - {i})", lambda i: f"d0[b, q] + {i} == d0[b, k]",
    lambda i: f"k < d{i % 90}[b, 0]",
    lambda i: f"keep[h, q // {64 + i}, k // {64 + i}]",
)  # fmt: skip


def expression(r: random.Random, terms: Sequence[Callable[[int], str]], operators: Sequence[str]) -> str:
    term, count = r.choice(terms), r.choice(COUNTS)
    other = r.choice(terms)
    return joined(r.choice(operators), [(other if r.random() < 0.1 else term)(i) for i in range(count)])


def draw(r: random.Random) -> Case:
    lines = []
    if r.random() < 0.7:
        lines.append(f"score {expression(r, SCORES, ('+', '+', '*'))} + 0.5 * s")
    if r.random() < 0.6:
        lines.append(f"mask {expression(r, MASKS, ('and', 'or'))}")
    if r.random() < 0.3:
        lines.append(f"sink {expression(r, SINKS, ('+', '*'))}")
    if r.random() < 0.1:
        lines.append(f"scale {joined('+', [f'exp(p + {i}.5)' for i in range(r.choice(COUNTS[:7]))])}")
    if r.random() < 0.15:
        lines.append("dropout 0.1")
    body = " ".join(lines)
    names = {*body.replace("[", " ").replace("(", " ").replace(")", " ").replace(",", " ").split()}
    declared = [f"input t{i}: fp32[heads]" for i in range(40) if f"t{i}" in names]
    declared += [f"input d{i}: int32[batch, kv_len]" for i in range(90) if f"d{i}" in names]
    declared += ["input u: fp32[heads, q_len, 4096]"] if "u" in names else []
    declared += ["input keep: bool[heads, rows, keys]"] if "keep" in names else []
    declared += [f"param {n}: {t}" for n, t in (("n", "int = 3"), ("p", "float = 0.5")) if n in names]
    if r.random() < 0.15:
        declared += ["input c: fp32[positions, 8] input z: fp32[positions, 8]"]
        lines.append("rotary 16 halves by c, z")
    schedule, arch = r.choice(SCHEDULES)
    dtype = r.choice(("fp16", "bf16") if schedule in ("wgmma", "hopper") else ("fp16", "bf16", "fp32"))
    head_dim = r.choice((32, 64, 128, 128, 256))
    return Case(" ".join(declared + lines), dtype, head_dim, schedule, arch, r.random() < 0.4)


def seconds(program: Program) -> float:
    """CPU time of NVRTC."""
    began = time.process_time()
    compile_text(program)
    return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--most", type=float, default=10.0, help="CPU seconds that a file may take")
    options = parser.parse_args()
    warnings.simplefilter("ignore", SpecWarning)
    plain = Case("mask causal", "fp16", 64, "hopper", "sm_90a", False)
    print(f"plain: {seconds(plain.program()):.1f} s of CPU time", flush=True)
    end, seed, refused = time.monotonic() + 60 * options.minutes, options.seed, 0
    found: list[tuple[float, int, Case]] = []
    while time.monotonic() < end:
        case = draw(random.Random(seed))
        began = time.process_time()
        try:
            program = case.program()
        except (DiagnosticError, ArgumentError):
            refused += 1
        else:
            host = time.process_time() - began
            found.append((took := seconds(program), seed, case))
            if took > options.most or host > options.most:
                print(f"seed {seed}: {took:.1f} s, {host:.1f} s before it\n{case.text[:300]}\n", flush=True)
        seed += 1
    print(f"{len(found)} files, {refused} specs refused; the slowest:")
    for took, one, case in sorted(found, key=lambda f: -f[0])[:10]:
        kind = f"{case.schedule} {'backward' if case.backward else 'forward'} {case.arch} {case.dtype} D{case.head_dim}"
        print(f"{took:6.1f} s  seed {one}: {kind}: {case.text[:160]}")
    return int(any(took > options.most for took, _, _ in found))


if __name__ == "__main__":
    sys.exit(main())
