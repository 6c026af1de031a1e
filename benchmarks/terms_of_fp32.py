"""What errors products of fp32 have on tensor cores, by a model of their sums, without a GPU.

    python benchmarks/terms_of_fp32.py [--keys N]

O of 64 rows of one head, by numpy: each number is a sum of three of bf16, and a step of 16 products is added exactly to a sum
in fp32, and cut off towards 0, as tensor cores are known to do. Errors are the largest against float64, beside those of numpy
in fp32. `one level`: the sum of P V is that of all keys; `large first`: products of terms in the opposite order.
"""

from __future__ import annotations

import argparse

import numpy as np

ROWS, TILE, STEP, TERMS = 64, 64, 16, 3
KINDS = ("randn", "common")
Array = np.ndarray


def bf16(x: Array) -> Array:
    """`x` of fp32, rounded to the nearest of bf16."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def terms(x: Array) -> list[Array]:
    """The three terms of `x`, the smallest first."""
    first = bf16(x)
    second = bf16(x - first)
    return [x - first - second, second, first]


def cut(x: Array) -> Array:
    """`x` of float64 in fp32, rounded towards 0."""
    near = x.astype(np.float32)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def product(a: Array, b: Array, total: Array, small_first: bool = True) -> Array:
    """`total` + a b, by the six largest products of terms."""
    pairs = [(i, j) for j in range(TERMS) for i in range(TERMS - 1 - j, TERMS)]
    of_a, of_b = terms(a), terms(b)
    for i, j in pairs if small_first else pairs[::-1]:
        for first in range(0, a.shape[1], STEP):
            columns = slice(first, first + STEP)
            total = cut(total + of_a[i][:, columns].astype(np.float64) @ of_b[j][columns].astype(np.float64))
    return total


def attention(q: Array, k: Array, v: Array, small_first: bool = True, two_levels: bool = True) -> Array:
    nothing = np.zeros((ROWS, TILE), np.float32)
    s = np.concatenate([product(q, k[at : at + TILE].T, nothing, small_first) for at in range(0, len(k), TILE)], 1)
    scale = np.float32(q.shape[1] ** -0.5)
    p = np.exp((s - s.max(1, keepdims=True)) * scale)
    o = np.zeros_like(q)
    for at in range(0, len(k), TILE):
        of_tile = p[:, at : at + TILE], v[at : at + TILE]
        o = o + product(*of_tile, np.zeros_like(o), small_first) if two_levels else product(*of_tile, o, small_first)
    return o / p.sum(1, keepdims=True)


def plain(q: Array, k: Array, v: Array) -> Array:
    s = q @ k.T * q.dtype.type(q.shape[1] ** -0.5)
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


def errors(head_dim: int, keys: int, kind: str) -> dict[str, float]:
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((n, head_dim)).astype(np.float32) for n in (ROWS, keys, keys))
    if kind == "common":
        v += 1
    exact = plain(*(t.astype(np.float64) for t in (q, k, v)))
    ways = {
        "numpy, fp32": plain(q, k, v),
        "the kernel's": attention(q, k, v),
        "one level": attention(q, k, v, two_levels=False),
        "large first": attention(q, k, v, small_first=False),
    }
    return {name: float(np.abs(found - exact).max()) for name, found in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=4096)
    keys = parser.parse_args().keys
    for kind in KINDS:
        for head_dim in (64, 128):
            found = errors(head_dim, keys, kind)
            print(f"{kind}, D{head_dim}, {keys} keys: " + ", ".join(f"{name} {error:.1e}" for name, error in found.items()))


if __name__ == "__main__":
    main()
