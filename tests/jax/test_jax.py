"""`attngen.jax` against JAX's own attention and its gradients, by the emulated device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attngen  # noqa: E402
from attngen.jax import attention  # noqa: E402
from attngen.jax.call import Call, call_of  # noqa: E402
from attngen.plan.plan import PlanRefusal  # noqa: E402
from attngen.spec.gradient import GradientError  # noqa: E402
from tests import tiers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::attngen.EmulatedDeviceWarning")
CAUSAL = attngen.define(dtype="fp32", head_dim=16, mask="causal", kernel="naive")
BIASED = attngen.define(
    dtype="fp32", head_dim=8, inputs={"bias": ("fp32", ("heads", "q_len", "kv_len"))}, params={"window": 9},
    mask="abs(q - k) < window", score="s + bias[h, q, k]", lse=True, kernel="naive",
)  # fmt: skip


def arrays(size: int, heads: tuple[int, int], length: int, dtype: str = "float32", layout: str = "bhsd") -> list[Any]:
    random = np.random.default_rng(0)
    shapes = [(2, n, length, size) if layout == "bhsd" else (2, length, n, size) for n in (heads[0], heads[1], heads[1])]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def gradients(function: Any, which: tuple[int, ...], *given: Any) -> Any:
    """O, and gradients of a sum of its elements that weighs each differently."""

    def loss(*given: Any) -> tuple[Any, Any]:
        results = jax.tree.leaves(function(*given))
        weigh = [jnp.cos(jnp.arange(r.size, dtype=jnp.float32)).reshape(r.shape) for r in results]
        return sum((r.astype(jnp.float32) * w).sum() for r, w in zip(results, weigh, strict=True)), results

    found, results = jax.jit(jax.grad(loss, which, has_aux=True))(*given)
    return [*results, *found]


def check(found: Any, right: Any, atol: float = 5e-6) -> None:
    assert len(found) == len(right)
    for ours, theirs in zip(found, right, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), atol=atol, rtol=0)


CASES = [
    ("float32", "bshd", "naive", 5e-6),
    ("float32", "bhsd", "fused", 5e-6),
    ("bfloat16", "bshd", "fused", 0.05),
    ("float16", "bhsd", "fused", 0.01),
]


@pytest.mark.parametrize(
    ("dtype", "layout", "kernel", "atol"), tiers.cases(CASES, quick=lambda dtype, layout, kernel, atol: kernel == "naive")
)
def test_forward_and_gradients_are_those_of_jax(dtype: str, layout: str, kernel: str, atol: float) -> None:
    """Of heads that share keys, under jit."""
    spec = attngen.define(dtype={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype], head_dim=16, mask="causal")
    given = arrays(16, (4, 2), 21, dtype, layout)

    def theirs(*given: Any) -> Any:
        wide = [x.astype("float32") if dtype == "float16" else x for x in given]  # XLA has no products of fp16 on the CPU
        inside = wide if layout == "bshd" else [x.swapaxes(1, 2) for x in wide]
        out = jax.nn.dot_product_attention(*inside, is_causal=True).astype(dtype)
        return out if layout == "bshd" else out.swapaxes(1, 2)

    ours = partial(attention, spec=spec, layout=layout, kernel=kernel, deterministic=True)
    check(gradients(ours, (0, 1, 2), *given), gradients(theirs, (0, 1, 2), *given), atol)


def test_captured_inputs_params_and_lse() -> None:
    """Their gradients, of O and lse; only of the arrays by which JAX differentiates."""
    q, k, v = arrays(8, (2, 2), 13)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((2, 13, 13)), jnp.float32)

    def theirs(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8**0.5 + bias
        index = jnp.arange(13)
        scores = jnp.where(abs(index[:, None] - index) < 4, scores, -jnp.inf)
        return jax.nn.softmax(scores) @ v, jax.nn.logsumexp(scores, -1)

    def ours(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, BIASED, bias=bias, window=4)

    check(gradients(ours, (0, 3), q, k, v, bias), gradients(theirs, (0, 3), q, k, v, bias))


def test_vmap_makes_a_call_for_each_element_and_loops_work() -> None:
    given = arrays(16, (2, 2), 9)
    one = partial(attention, spec=CAUSAL)
    several = [jnp.stack([x, 2 * x]) for x in given]
    right = jnp.stack([one(*given), one(*(2 * x for x in given))])
    np.testing.assert_array_equal(jax.vmap(one)(*several), right)
    np.testing.assert_array_equal(jax.lax.map(lambda xs: one(*xs), several), right)
    found = jax.vmap(jax.grad(lambda *given: one(*given).sum()))(*several)
    np.testing.assert_array_equal(found[0], jax.grad(lambda *given: one(*given).sum())(*given))
    assert one(*(x[:, :, :0] for x in given)).shape == (2, 2, 0, 16)


def test_mistakes_are_said_when_jax_traces() -> None:
    q, k, v = arrays(16, (2, 2), 9)
    wide = arrays(8, (2, 2), 9)
    bias = jnp.zeros((2, 9, 9))
    for message, call in {
        "`k` is .*: dimension 3 is 8, expected head_dim = 16": lambda q: attention(q, k[..., :8], v, CAUSAL),
        r"`q` has 3 dimensions, \[2, 9, 16\]; expected 4": lambda q: attention(q[0], k, v, CAUSAL),
        "`k` is .*: dimension 0 is 1, expected batch = 2": lambda q: attention(q, k[:1], v, CAUSAL),
        "`v` is .*: dimension 2 is 9, expected kv_len = 5": lambda q: attention(q, k[:, :, :5], v, CAUSAL),
        "3 query heads of `q` cannot share 2": lambda q: attention(jnp.concatenate([q, q[:, :1]], 1), k, v, CAUSAL),
        "`bias` is .*: dimension 2 is 8, expected kv_len = 9": lambda q: attention(*wide, BIASED, bias=bias[..., :8]),
        "`bias` has elements of fp16; expected fp32": lambda q: attention(*wide, BIASED, bias=bias.astype("float16")),
        "`k` is of type str; expected an array": lambda q: attention(q, "k", v, CAUSAL),
        "`v` is of type NoneType; expected an array": lambda q: attention(q, k, None, CAUSAL),
        "`spec` is None": lambda q: attention(q, k, v, None),
        "`q` has elements of bf16; expected fp32": lambda q: attention(q.astype(jnp.bfloat16), k, v, CAUSAL),
        "`q` has elements of int8": lambda q: attention(q.astype(jnp.int8), k, v, CAUSAL),
        "no input or param `bias`": lambda q: attention(q, k, v, CAUSAL, bias=bias),
        "input `bias` was not given": lambda q: attention(*wide, BIASED),
        "param `window` is a value that JAX traces": lambda q: attention(*wide, BIASED, bias=bias, window=q[0, 0, 0, 0]),
        "layout is 'sbhd'": lambda q: attention(q, k, v, CAUSAL, layout="sbhd"),
        "kernel is 'flash'": lambda q: attention(q, k, v, CAUSAL, kernel="flash"),
        "has no dropout": lambda q: attention(q, k, v, attngen.define(dropout=0.5)),
        "name one of them": lambda q: attention(q, k, v, "gemma2"),
    }.items():
        with pytest.raises(attngen.ArgumentError, match=message) as raised:
            jax.jit(call)(q)
        of_a_type = "has elements of" in message or "is of type" in message
        assert isinstance(raised.value, attngen.ArgumentTypeError) or not of_a_type


def test_what_has_no_gradient_is_said_when_jax_traces() -> None:
    """Not zeros of tables and scales, on which O depends. Of what the mask alone reads, zeros are right."""
    q, k, v = arrays(16, (2, 2), 9)
    x = {"inputs": {"x": ("fp32", ("kv_len",))}}
    scaled = attngen.define(dtype="fp32", head_dim=16, v_scale="x[k]", **x)
    tables = {"inputs": dict.fromkeys(("c", "z"), ("fp32", ("kv_len", 8)))}
    rotated = attngen.define(dtype="fp32", head_dim=16, rotary="16 halves by c, z", **tables)
    masked = attngen.define(dtype="fp32", head_dim=16, mask="x[k] > 0.0", **x)
    of_bytes = attngen.define(dtype={"q": "fp32", "k": "fp8_e4m3", "v": "fp8_e4m3"}, head_dim=16)
    ones, table = jnp.ones(9), jnp.ones((9, 8))

    def gradient(function: Any, *given: Any) -> Any:
        return jax.jit(jax.grad(lambda *given: function(*given).sum())).lower(*given)

    with pytest.raises(GradientError, match="`x` has no gradient: no schedule has gradients of a spec that scales V"):
        gradient(lambda x: attention(q, k, v, scaled, x=x), ones)
    with pytest.raises(GradientError, match="`z` has no gradient: the tables of a rotation"):
        gradient(lambda z: attention(q, k, v, rotated, c=table, z=z), table)
    with pytest.raises(PlanRefusal, match="no schedule has gradients"):
        gradient(lambda q: attention(q, k.astype("float8_e4m3fn"), v.astype("float8_e4m3fn"), of_bytes), q)
    found = jax.grad(lambda x: attention(q, k, v, masked, x=x).sum())(ones)
    assert found.shape == (9,)
    assert not found.any()


def test_what_a_kernel_finds_is_xlas_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise attngen.ArgumentError("a mistake that only the call shows")

    monkeypatch.setattr(attngen.api.CompiledAttention, "bind", refuse)
    q, k, v = arrays(16, (1, 1), 5)
    with pytest.raises(Exception, match="a mistake that only the call shows"):
        jax.block_until_ready(attention(q, k, v, CAUSAL))


def test_a_call_is_what_its_text_says() -> None:
    """So that a program that JAX keeps on disk computes the same in another process."""
    params = ("window", 4), ("scale", float("inf"))
    call = Call("text", "sm_80", None, True, params, "bhsd", ("q", "k"), "backward", ("q",), ("dq",))
    assert call_of(call.text()) == call
