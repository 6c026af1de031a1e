"""Dropout of weights: which are kept, a function of the generator's state and of b, h, q and k alone.

Random bits are those of Philox 4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): of
its variants that pass all tests of BigCrush, the one with the fewest rounds. FlashAttention has it too. A call has a seed and
an offset of 64 bits each. Each head has a key of its own:

    (key, tail) = philox(counter = (offset, b, h), key = seed)

and a call of Philox makes 16 decisions of 8 bits each, for pairs that one thread has in the accumulators of tensor cores:

    words = philox(counter = (q / 16 * 8 + q % 8, k / 32 * 4 + k % 8 / 2, tail), key)
    byte  = byte q % 16 / 8 * 2 + k % 2 of word k % 32 / 8
    kept  = byte >= dropped,  dropped = p in 256ths

So p is rounded to a multiple of 1/256, but to 0 only if it is 0, and never to 1. Kept weights are multiplied by
256 / (256 - dropped), so that the mean of O is that without dropout. The functions here compute with integers, or with arrays
of 64-bit integers of any library.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from attngen.spec.attention import AttentionSpec, Input
from attngen.spec.dtypes import INT64
from attngen.spec.expr import Const, Expr, Gather, Type, constant, gather

STEPS = 256  # the share that is dropped is a multiple of 1 / STEPS
RNG_STATE = Input("rng_state", INT64, (2,))  # (seed, offset): an input of every spec with dropout

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 0xFFFFFFFF

Words = tuple[Any, Any, Any, Any]


def state_elements() -> tuple[Gather, Gather]:
    """The elements of RNG_STATE as expressions: seed, offset."""
    seed, offset = (gather(RNG_STATE.name, Type.INT, (constant(i),)) for i in (0, 1))
    return seed, offset


def with_state(inputs: tuple[Input, ...], dropout: Expr | None) -> tuple[Input, ...]:
    """The inputs of a spec with this `dropout`, of which `inputs` are declared."""
    return inputs if dropout is None else (*inputs, RNG_STATE)


def or_none(p: Expr | None) -> Expr | None:
    """`p` as a spec has it: a spec that drops nothing has no dropout."""
    return None if isinstance(p, Const) and p.value == 0 else p


def without_dropout(spec: AttentionSpec) -> AttentionSpec:
    """`spec` with all weights."""
    return replace(spec, dropout=None, inputs=tuple(i for i in spec.inputs if spec.dropout is None or i != RNG_STATE))


def dropped_of(p: float) -> int:
    """How many of 256 weights are dropped, for a p of fp32 from 0 to below 1."""
    (rounded,) = struct.unpack("f", struct.pack("f", p))
    return min(max(round(rounded * STEPS), 1), STEPS - 1) if rounded > 0 else 0


def kept_factor(dropped: int) -> float:
    """What kept weights are multiplied with."""
    return STEPS / (STEPS - dropped)


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Four random words of 32 bits."""
    x0, x1, x2, x3 = counter
    key0, key1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(x0, MULTIPLIERS[0]), _product(x2, MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
        key0, key1 = (key0 + INCREMENTS[0]) & WORD, (key1 + INCREMENTS[1]) & WORD
    return x0, x1, x2, x3


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """The upper and the lower word of a product of two words, in parts that fit 63 bits."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def bytes_of_pairs(seed: Any, offset: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The byte that decides about each pair; the arguments broadcast."""
    head = philox((offset & WORD, offset >> 32 & WORD, b, h), (seed & WORD, seed >> 32 & WORD))
    words = philox((q // 16 * 8 + q % 8, k // 32 * 4 + k % 8 // 2, head[2], head[3]), (head[0], head[1]))
    number, place = k % 32 // 8, q % 16 // 8 * 16 + k % 2 * 8
    return sum((number == n) * (word >> place & 0xFF) for n, word in enumerate(words))
