"""Which weights dropout keeps: Philox, the share of them, and that nothing else has to do with it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

import attngen
from attngen.diagnostics import DiagnosticError
from attngen.emit.emitter import emit
from attngen.language import load_text, to_text
from attngen.plan import ARCHES
from attngen.reference.gradients import numpy_gradients, sample_loss
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose, plans_for
from attngen.spec.dropout import RNG_STATE, WORD, bytes_of_pairs, dropped_of, kept_factor, philox
from attngen.spec.dtypes import from_storage

# Of the distribution of Random123, by the authors of Philox: counter, key, result (kat_vectors, philox4x32 7).
VECTORS = (
    ((0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((WORD,) * 4, (WORD, WORD), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_is_that_of_its_authors(counter: tuple, key: tuple, words: tuple) -> None:
    assert philox(counter, key) == words
    assert [int(w[0]) for w in philox(tuple(np.array([c]) for c in counter), key)] == [*words]


def drawn(seed: int, offset: int, b: int, h: int, rows: int = 300, keys: int = 500) -> np.ndarray:
    q, k = np.arange(rows)[:, None], np.arange(keys)[None, :]
    return bytes_of_pairs(np.array([seed]), np.array([offset]), np.array([b]), np.array([h]), q, k)


def test_bytes_are_uniform_and_independent() -> None:
    """Each of 256 values within 5 standard deviations of its mean; and correlations, of the bytes of other heads, batches,
    seeds and offsets, and of pairs at distances that the layout of a call of Philox has, within 5 standard deviations of 0."""
    far = [(7 + 2**40, 0, 0, 0), (7, 2**40, 0, 0), (-7, -1, 0, 0)]
    places = [(7, 0, 0, 0), (7, 0, 0, 1), (7, 0, 1, 0), (7, 1, 0, 0), (8, 0, 0, 0), *far]
    fields = [drawn(*place) for place in places]
    n = fields[0].size
    for field in fields:
        counts = np.bincount(field.ravel(), minlength=256)
        assert np.abs(counts - n / 256).max() < 5 * np.sqrt(n / 256)
    centred = [(f - 127.5) / np.sqrt((256**2 - 1) / 12) for f in fields]
    for a, b in combinations(centred, 2):
        assert abs((a * b).sum()) < 5 * np.sqrt(n)
    field = centred[0]
    for rows, keys in ((0, 1), (0, 2), (0, 8), (0, 32), (1, 0), (8, 0), (16, 0), (8, 1), (8, 8), (16, 32)):
        products = field[rows:, keys:] * field[: 300 - rows, : 500 - keys]
        assert abs(products.sum()) < 5 * np.sqrt(products.size), (rows, keys)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.9999])
def test_the_share_of_kept_weights_and_their_factor_go_together(p: float) -> None:
    dropped = dropped_of(p)
    assert 1 <= dropped <= 255
    assert abs(dropped / 256 - p) <= 1 / 256
    kept = drawn(3, 4, 0, 5) >= dropped
    share = 1 / kept_factor(dropped)
    assert abs(kept.mean() - share) < 5 * np.sqrt(share * (1 - share) / kept.size)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_the_tiles_of_lengths_use_all_bits_of_a_call(head_dim: int) -> None:
    spec = attngen.define(head_dim=head_dim, dropout=0.1)
    assert {plan.block_kv % 32 for plan in plans_for(spec, ARCHES["sm_90a"], "hopper")} == {0}


def test_without_dropout_there_is_none() -> None:
    plain, zero = attngen.define(mask="causal"), attngen.define(mask="causal", dropout=0.0)
    assert zero == plain
    assert dropped_of(0.0) == 0
    (text,) = load_text(to_text(plain).replace("mask", "dropout 0\n    mask"))
    assert emit(text, choose(text, ARCHES["sm_90a"])).text == emit(plain, choose(plain, ARCHES["sm_90a"])).text


def test_a_spec_with_dropout_has_an_input_more_and_its_text_says_so() -> None:
    spec = attngen.define(params={"p": ("float", 0.1)}, dropout="p", inputs={"x": ("fp32", ("heads",))}, score="s + x[h]")
    assert [i.name for i in spec.inputs] == ["x", RNG_STATE.name]
    assert RNG_STATE.name not in to_text(spec)
    assert load_text(to_text(spec)) == (spec,)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dropout": 1.0}, "share of dropped weights is 1.0"),
        ({"dropout": -0.1}, "share of dropped weights is -0.1"),
        ({"params": {"p": ("float", 1.5)}, "dropout": "p"}, "share of dropped weights is 1.5"),
        ({"params": {"p": ("float", 0.5)}, "dropout": "p / 2.0"}, "is an expression"),
        ({"dropout": "0.1 * float(q)"}, "the dropout is one number for the whole call"),
        ({"params": {"seed": ("float", 0.5)}, "dropout": "seed"}, "argument of calls with dropout"),
        ({"dropout": "q < 3"}, "dropout"),
    ],
)
def test_what_is_no_share_is_refused(keywords: dict, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        attngen.define(**keywords)


def test_gradients_by_finite_differences() -> None:
    """Of the float64 reference, with the same weights dropped on both sides of a difference."""
    spec = attngen.define(dtype="fp32", head_dim=8, mask="causal", score="softcap(3.0)", sink=0.5, dropout=0.4)
    problem = sample(spec, Shape(1, 2, 1, 20, 40))
    wanted = ("q", "k", "v")
    loss = sample_loss(spec, problem)
    found = numpy_gradients(spec, problem, loss, wanted)
    direction = {n: np.random.default_rng(1).standard_normal(getattr(problem, n).shape) for n in wanted}

    def value(step: float) -> float:
        moved = {n: getattr(problem, n).astype(np.float64) + step * direction[n] for n in wanted}
        output = numpy_attention(spec, Sample(**moved, inputs=problem.inputs)).output
        return float((output * from_storage(loss.dout)).sum())

    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    assert difference == pytest.approx(sum((found[n].value * direction[n]).sum() for n in wanted), rel=1e-7)
