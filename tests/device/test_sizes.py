"""The sizes of a call: which arrays and numbers state them, what captured tensors must have, and what that protects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
import attngen.torch
from attngen import ArgumentError
from attngen.api import compile_later
from attngen.device.arrays import view
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Sample
from attngen.spec.attention import Storage
from attngen.spec.obligations import ObligationError
from tests import tiers

RNG = np.random.default_rng(0)
ROWS = 9  # packed: sequences of 8 rows and 1
BEGINS = np.array([0, 8, 9], np.int32)
F32 = "fp32"


def randn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def packed(*, longest: int = 8, **others: Any) -> dict[str, Any]:
    """Queries and keys of two sequences, one head."""
    arrays = {name: randn(ROWS, 1, 8) for name in "qkv"}
    return {**arrays, "cu_seqlens_q": BEGINS, "cu_seqlens_k": BEGINS, "max_q_len": longest, "max_kv_len": longest, **others}


def paged(**others: Any) -> dict[str, Any]:
    """Queries of two sequences, and keys in 2 pages of 4 for each."""
    pool, table = randn(5, 1, 4, 8), np.array([[0, 1], [2, 3]], np.int32)
    return {"q": randn(2, 1, 3, 8), "k": pool, "v": pool, "page_table": table, "seqused": np.array([8, 1], np.int32), **others}


def padded(**others: Any) -> dict[str, Any]:
    """The same with keys in arrays of 8."""
    return {
        "q": randn(2, 1, 3, 8),
        "k": randn(2, 1, 8, 8),
        "v": randn(2, 1, 8, 8),
        "seqused": np.array([8, 1], np.int32),
        **others,
    }


def bound(storage: Storage, given: dict[str, Any], **described: Any) -> Any:
    """A call of a spec that is checked; nothing is compiled."""
    spec = attngen.define(dtype=F32, head_dim=8, storage=storage, **described)
    compiled = compile_later(spec, "emulated")
    numbers = {n: v for n, v in given.items() if isinstance(v, int)}
    views, params = compiled._arguments(given["q"], given["k"], given["v"], {n: v for n, v in given.items() if n not in "qkv"})
    return compiled.bind(views, {**params, **numbers})


KEYS = {"score": "s + f[k]", "inputs": {"f": (F32, ("kv_len",))}}
QUERIES = {"score": "s + f[h, q]", "inputs": {"f": (F32, ("heads", "q_len"))}}
OVER_PAGES = {"q": randn(ROWS, 1, 8), "cu_seqlens_q": BEGINS, "max_q_len": 8}
AT_LEAST_8 = "`f` is [3]: dimension 0 is 3, expected at least kv_len = 8, as `max_kv_len` says"
ROOM = "`f` is [7]: dimension 0 is 7, expected at least kv_len = 8, for which `page_table` has room; pass max_kv_len=..."
TOO_SHORT: dict[str, tuple[Storage, dict[str, Any], dict[str, Any], str]] = {
    "packed keys": ("packed", packed(f=randn(3)), KEYS, AT_LEAST_8),
    "packed keys, none": ("packed", packed(f=randn(0)), KEYS, "`f` is [0]"),
    "packed rows": ("packed", packed(f=randn(1, 7)), QUERIES, "`f` is [1, 7]: dimension 1 is 7, expected at least q_len = 8"),
    "over pages": ("packed_paged", paged(f=randn(1, 7), **OVER_PAGES), QUERIES, "at least q_len = 8"),
    "pages": ("paged", paged(f=randn(7)), KEYS, ROOM),
    "pages, none": ("paged", paged(f=randn(0)), KEYS, "`f` is [0]"),
    "pages, a length": ("paged", paged(f=randn(3), max_kv_len=4), KEYS, "at least kv_len = 4, as `max_kv_len` says"),
    "padded": ("padded", padded(f=randn(7), max_kv_len=7), KEYS, "`f` is [7]: dimension 0 is 7, expected kv_len = 8 as in `k`"),
}


@pytest.mark.parametrize("case", TOO_SHORT)
def test_captured_tensors_have_an_element_for_each_position(case: str) -> None:
    """In packed and paged storage only the call's numbers say how long sequences are: of a shorter one more would be read."""
    storage, given, described, said = TOO_SHORT[case]
    with pytest.raises(ArgumentError) as caught:
        bound(storage, given, **described)
    assert said in str(caught.value)


@pytest.mark.parametrize("size", [1, 8, 12])
def test_captured_tensors_may_be_longer_or_have_one_element(size: int) -> None:
    bound("packed", packed(f=randn(size)), **KEYS)
    bound("packed", packed(f=randn(1, size)), **QUERIES)
    bound("paged", paged(f=randn(size)), **KEYS)
    bound("paged", paged(f=randn(3), max_kv_len=3), **KEYS)


def test_every_way_to_a_kernel_compares_sizes() -> None:
    """A backward, and torch's operator, which remembers calls."""
    spec = attngen.define(dtype=F32, head_dim=8, storage="packed", kernel="naive", **KEYS)
    compiled = compile_later(spec, "emulated")
    short = packed(f=randn(3))
    with pytest.raises(ArgumentError, match=r"`f` is \[3\].*at least kv_len = 8"):
        compiled.backward(randn(ROWS, 1, 8), short.pop("q"), short.pop("k"), short.pop("v"), **short)
    backward = compiled.gradients()
    arrays = packed(f=randn(3), out=randn(ROWS, 1, 8), lse=randn(1, ROWS), dout=randn(ROWS, 1, 8))
    views = {n: view(a, n) for n, a in arrays.items() if isinstance(a, np.ndarray)}
    with pytest.raises(ArgumentError, match=r"`f` is \[3\].*at least kv_len = 8"):
        backward.bind(backward.inputs_of(views), {"max_q_len": 8, "max_kv_len": 8})


TWO = {"B": ("bool", ("batch", "kv_len")), "f": (F32, ("heads", "kv_len"))}
OWN = {"u": (F32, ("n",)), "w": (F32, ("n",))}


def test_the_order_of_arrays_makes_no_difference() -> None:
    """An array with one element along a dimension is for any size, before and after the one that states it."""
    one, many = np.ones((2, 1), np.bool_), randn(1, 8)
    for inputs in (TWO, dict(reversed(TWO.items()))):
        for storage, call in (("packed", packed), ("paged", paged)):
            bound(storage, call(B=one, f=many), mask="B[b, k]", score="s + f[h, k]", inputs=inputs)
    for inputs in (OWN, dict(reversed(OWN.items()))):
        for sizes in ((1, 5), (5, 1), (1, 1), (5, 5)):
            given = {
                "q": randn(2, 1, 3, 8),
                "k": randn(2, 1, 8, 8),
                "v": randn(2, 1, 8, 8),
                "u": randn(sizes[0]),
                "w": randn(sizes[1]),
            }
            bound("dense", given, score="s + u[clamp(k, 0, n - 1)] * w[clamp(q, 0, n - 1)]", inputs=inputs)
            given["w"] = randn(4)
            if sizes[0] == 5:
                with pytest.raises(ArgumentError, match="dimension 0 is"):
                    bound("dense", given, score="s + u[clamp(k, 0, n - 1)] * w[clamp(q, 0, n - 1)]", inputs=inputs)


TABLE = {"table": (F32, ("n",))}


@pytest.mark.parametrize(
    ("index", "elements"),
    [("table[9 - kv_len]", 2), ("table[q + kv_len - q_len]", 8), ("table[kv_len - 1 - k]", 7), ("table[7 % (kv_len - 3)]", 8)],
)
def test_indices_hold_for_sequences_of_every_length(index: str, elements: int) -> None:
    """Each sequence has lengths of its own, from 1 to the longest: an index that is inside for that one alone is refused."""
    with pytest.raises(ObligationError, match=r"of `table` can be|divisor"):
        bound("packed", packed(table=randn(elements)), score=f"s + {index}", inputs=TABLE)


def test_indices_of_sequences_that_are_always_inside() -> None:
    """Bounds that need what keys and lengths have in common, and clamps."""
    for index, elements in (("kv_len - 1 - k", 8), ("q + kv_len - q_len + 7", 15), ("clamp(k - kv_len, -4, 0) + 4", 5)):
        bound("packed", packed(table=randn(elements)), score=f"s + table[{index}]", inputs=TABLE)
    bound("paged", paged(table=randn(8)), score="s + table[kv_len - 1 - k]", inputs=TABLE)


def test_a_sink_is_read_for_rows_without_keys_too() -> None:
    """In a call without keys, and in a sequence that has none."""
    last = {"sink": "f[kv_len - 1]", "inputs": {"f": (F32, ("kv_len",))}}
    none = randn(1, 1, 0, 8)
    with pytest.raises(ObligationError, match="index 0 of `f` is -1"):
        bound("dense", {"q": randn(1, 1, 3, 8), "k": none, "v": none, "f": randn(0)}, **last)
    with pytest.raises(ObligationError, match="index 0 of `f` can be -1 to 7"):
        bound("packed", packed(f=randn(8)), **last)
    bound("packed", packed(f=randn(8)), **{**last, "sink": "f[max(kv_len - 1, 0)]"})


def test_a_mask_is_bounded_for_rows_without_keys_too() -> None:
    """Kernels that skip tiles evaluate it before they know that a sequence has none."""
    last = {"mask": "k < f[kv_len - 1]", "inputs": {"f": ("int32", ("kv_len",))}}
    f = np.full(8, 3, np.int32)
    with pytest.raises(ObligationError, match="index 0 of `f` can be -1 to 7"):
        bound("packed", packed(f=f), **last)
    bound("packed", packed(f=f), **{**last, "mask": "k < f[max(kv_len - 1, 0)]"})
    bound("packed", packed(f=f), **{**last, "mask": "k < f[kv_len - 1 - k]"})
    none, rows = randn(1, 1, 0, 8), randn(1, 1, 3, 8)
    first = {"mask": "f[0] and k <= q", "inputs": {"f": ("bool", ("n",))}}
    for q, k in ((rows, none), (none, rows)):
        with pytest.raises(ObligationError, match="index 0 of `f` is 0"):
            bound("dense", {"q": q, "k": k, "v": k, "f": np.zeros(0, np.bool_)}, **first)
    bound("dense", {"q": rows, "k": none, "v": none, "f": np.zeros(0, np.int32)}, **{**last, "mask": "f[k] < 3"})


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_arrays_makes_no_difference_to_references(order: int) -> None:
    """Nor to `math`, which computes by torch: the size of a dimension is not that of an array for any size."""
    torch = pytest.importorskip("torch")
    inputs = dict(list(OWN.items())[::order])
    spec = attngen.define(dtype=F32, head_dim=8, score="s + u[clamp(k, 0, n - 1)] * w[clamp(q, 0, n - 1)]", inputs=inputs)
    q, k, u = randn(1, 1, 4, 8), randn(1, 1, 6, 8), randn(5)
    whole = {"u": u, "w": np.full(5, 2, np.float32)}
    one = {"u": u, "w": np.full(1, 2, np.float32)}
    expected = numpy_attention(spec, Sample(q, k, k, whole)).output
    np.testing.assert_array_equal(numpy_attention(spec, Sample(q, k, k, one)).output, expected)
    tensors = {name: torch.from_numpy(array) for name, array in one.items()}
    found = attngen.torch.Attention(spec, layout="bhsd", mode="math")(*map(torch.from_numpy, (q, k, k)), **tensors)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


GRADIENTS = {
    "pairs": ("s + f[q, k]", ("q_len", "kv_len"), (12, 16)),
    "keys": ("s + f[k]", ("kv_len",), (12,)),
    "words": ("s + f[clamp(k + 1, 0, kv_len - 1)]", ("kv_len",), (16,)),
    "pairs of each sequence": ("s + f[b, h, q, k]", ("batch", "heads", "q_len", "kv_len"), (2, 1, 9, 8)),
}


@pytest.mark.parametrize("kernel", tiers.cases(["naive", "tiled", "fused"], quick=["naive"]))
@pytest.mark.parametrize("access", tiers.cases(list(GRADIENTS), quick=["pairs"]))
def test_the_gradient_of_a_tensor_that_is_longer_than_any_sequence(kernel: str, access: str) -> None:
    """Elements that no pair reads have a gradient of 0; the others have that of a tensor without them."""
    score, dims, shape = GRADIENTS[access]
    spec = attngen.define(dtype=F32, head_dim=8, storage="packed", kernel=kernel, score=score, inputs={"f": (F32, dims)})
    compiled = attngen.compile(spec, device="emulated")
    f, dout, given = randn(*shape), randn(ROWS, 1, 8), packed()
    q, k, v = (given.pop(name) for name in "qkv")
    needed = tuple(slice(0, 8 if str(dim).endswith("_len") else None) for dim in dims)
    found = compiled.backward(dout, q, k, v, f=f, wanted=("f",), **given)["f"]
    expected = np.zeros_like(f)
    expected[needed] = compiled.backward(dout, q, k, v, f=np.ascontiguousarray(f[needed]), wanted=("f",), **given)["f"]
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(found, expected)
