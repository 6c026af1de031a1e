"""`attngen.jax.attention` on this GPU beside JAX's own attention: errors of O and of gradients, and times under jit.

    pip install 'attngen[jax]' 'jax[cuda13]'
    python benchmarks/jax_attention.py [--rounds 21] [--lengths 1024,4096] [--write docs/jax.md]

Causal attention of fp16, [batch, length, heads, 64], 16384 tokens and 16 query heads over 4 key heads, inputs of randn. "xla"
and "cudnn" are the implementations of `jax.nn.dot_product_attention`. Errors are the largest against float64, relative to the
largest element, for one batch and length 512. Times are medians of the rounds, in which the candidates take turns; each is the
time from the call to the end of the work on the GPU, so it includes the host. Needs a GPU with JAX for CUDA.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from markers import write_between
from words import markdown

import attngen
from attngen.jax import attention

SPEC = attngen.define(dtype="fp16", head_dim=64, heads=(16, 4), mask="causal")
HEADS, TOKENS, CHECKED = (16, 4, 4), 16384, 512
Attention = Callable[..., Any]


def candidates() -> dict[str, Attention]:
    theirs = {name: partial(jax.nn.dot_product_attention, is_causal=True, implementation=name) for name in ("xla", "cudnn")}
    return {"attngen": partial(attention, spec=SPEC, layout="bshd"), **theirs}


def inputs(batch: int, length: int) -> tuple[list[Any], Any]:
    """q, k, v, and the gradient of O."""
    random = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(random.standard_normal((batch, length, n, 64)), jnp.float16) for n in (*HEADS, HEADS[0]))
    return [q, k, v], dout


def with_gradients(function: Attention) -> Attention:
    """(O, dQ, dK, dV) of (q, k, v, dO)."""

    def call(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, backward = jax.vjp(function, q, k, v)
        return out, *backward(dout)

    return jax.jit(call)


def exact(q: Any, k: Any, v: Any) -> Any:
    """O in float64."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8
    scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(scores, -1), v)


def errors() -> list[list[str]]:
    given, dout = inputs(1, CHECKED)
    with jax.enable_x64(True):
        right = [np.asarray(x) for x in with_gradients(exact)(*(x.astype(jnp.float64) for x in (*given, dout)))]
    rows = []
    for name, function in candidates().items():
        found = [np.float64(x) for x in with_gradients(function)(*given, dout)]
        relative = [abs(a - b).max() / abs(b).max() for a, b in zip(found, right, strict=True)]
        rows.append([name, *(f"{e:.1e}" for e in relative)])
    return rows


def times(length: int, rounds: int) -> list[list[str]]:
    given, dout = inputs(TOKENS // length, length)
    calls = {name: (jax.jit(f), with_gradients(f)) for name, f in candidates().items()}
    taken: dict[tuple[str, bool], list[float]] = {}
    for turn in range(rounds + 1):  # the first compiles
        for name, (forward, both) in calls.items():
            for is_both, call in ((False, lambda: forward(*given)), (True, lambda: both(*given, dout))):  # noqa: B023
                begin = time.perf_counter()
                jax.block_until_ready(call())
                if turn:
                    taken.setdefault((name, is_both), []).append((time.perf_counter() - begin) * 1e3)
    return [[str(length), name, *(f"{median(taken[name, is_both]):.2f}" for is_both in (False, True))] for name in calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--write", type=Path, help="the page whose table between the markers is replaced")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("no GPU for JAX: jax.default_backend() is " + jax.default_backend())
    rows = [row for length in map(int, options.lengths.split(",")) for row in times(length, options.rounds)]
    text = "\n\n".join(
        (
            f"{jax.devices()[0].device_kind}, jax {jax.__version__}, median of {options.rounds}",
            markdown(["largest relative error", "O", "dQ", "dK", "dV"], errors()),
            markdown(["length", "attention", "forward, ms", "forward and gradients, ms"], rows),
        )
    )
    print(text)
    if options.write:
        write_between(options.write, "jax_attention", text)


if __name__ == "__main__":
    main()
