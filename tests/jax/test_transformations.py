"""`attngen.jax` under JAX's transformations: loops, recomputation, several devices, donated memory, programs kept on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

try:
    from jax import shard_map  # since jax 0.7
except ImportError:
    from jax.experimental.shard_map import shard_map

from attngen.jax import attention  # noqa: E402
from tests import tiers  # noqa: E402
from tests.jax.test_jax import BIASED, CAUSAL, arrays  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::attngen.EmulatedDeviceWarning")
SCALES = jnp.asarray([1.0, 0.5, 2.0])


def causal(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, CAUSAL, deterministic=True)


def squares(function: Any) -> Any:
    return lambda *given: sum((result**2).sum() for result in jax.tree.leaves(function(*given)))


def same(found: Any, right: Any) -> None:
    """To the bit, but for the order of sums over devices."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-6)


def layers(q: Any, k: Any, v: Any) -> Any:
    for scale in SCALES:
        q = causal(q * scale, k, v)
    return q


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_layers_in_a_scan(recomputed: bool) -> None:
    """The gradients of a loop over layers, with what forwards keep, or with forwards that the backward makes again."""

    def layer(x: Any, scale: Any) -> Any:
        return causal(x * scale, k, v), None

    def scanned(q: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer) if recomputed else layer, q, SCALES)[0]

    q, k, v = arrays(16, (2, 2), 9)
    same(jax.jit(scanned)(q), layers(q, k, v))
    same(jax.jit(jax.grad(squares(scanned)))(q), jax.grad(squares(layers))(q, k, v))


CUTS = {"batch": P("x"), "heads": P(None, "x")}


@pytest.mark.parametrize("cut", tiers.cases(list(CUTS), quick=["batch"]))
def test_each_device_has_a_part(cut: str) -> None:
    """Of batch or heads, in shard_map, recomputed in the backward too; and as arrays that are divided already."""
    part = CUTS[cut]
    mesh = Mesh(np.array(jax.devices()), ("x",))
    given = arrays(16, (2, 2), 9)
    right = jax.grad(squares(causal), (0, 1, 2))(*given)
    for function in causal, jax.checkpoint(causal):
        divided = shard_map(function, mesh=mesh, in_specs=(part,) * 3, out_specs=part)
        same(jax.jit(divided)(*given), causal(*given))
        same(jax.jit(jax.grad(squares(divided), (0, 1, 2)))(*given), right)
    placed = [jax.device_put(x, NamedSharding(mesh, part)) for x in given]
    same(jax.jit(jax.grad(squares(causal), (0, 1, 2)))(*placed), right)


def test_gradients_of_what_all_devices_have_are_summed() -> None:
    """Of a captured table, and of keys and values that each device's queries see; O and lse differ from device to device."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    q, k, v = arrays(8, (2, 2), 9)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((2, 9, 9)), jnp.float32)

    def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, BIASED, bias=bias, deterministic=True)

    divided = shard_map(biased, mesh=mesh, in_specs=(P("x"),) * 3 + (P(),), out_specs=P("x"))
    which = (0, 1, 2, 3)
    same(jax.jit(jax.grad(squares(divided), which))(q, k, v, bias), jax.grad(squares(biased), which)(q, k, v, bias))
    rows = shard_map(biased, mesh=mesh, in_specs=(P("x"), P(), P(), P()), out_specs=P("x"))

    def each(q: Any, *others: Any) -> Any:
        return [biased(q[i : i + 1], *others) for i in range(2)]

    one = k[:1], v[:1], bias
    same(jax.jit(jax.grad(squares(rows), which))(q, *one), jax.grad(squares(each), which)(q, *one))
    with pytest.raises(ValueError, match="out_specs"):  # O is not the same on all devices
        jax.jit(shard_map(biased, mesh=mesh, in_specs=(P("x"),) * 3 + (P(),), out_specs=P()))(q, k, v, bias)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_memory_of_arguments_may_be_donated() -> None:
    """O and updated arrays may then lie where the arguments did."""
    given = arrays(16, (2, 2), 9)
    gradients = jax.grad(squares(causal), (0, 1, 2))

    def step(*given: Any) -> Any:
        return [x - 0.1 * d for x, d in zip(given, gradients(*given), strict=True)]

    for function in causal, step:
        right = function(*given)
        donated = [jnp.array(x) for x in given]
        same(jax.jit(function, donate_argnums=(0, 1, 2))(*donated), right)
        assert donated[0].is_deleted()


def test_what_jax_refuses() -> None:
    """Forward mode, and second derivatives."""
    q, k, v = arrays(16, (1, 1), 5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: causal(q, k, v), (q,), (q,))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: squares(jax.grad(squares(causal)))(q, k, v))(q)


PROGRAM = """
import sys, warnings, jax, jax.numpy as jnp, attngen, attngen.jax
warnings.simplefilter("ignore")
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
spec = attngen.define(dtype="fp32", head_dim=16, mask="causal", kernel="naive")
x = jnp.ones((1, 1, 5, 16))
o = jax.jit(lambda x: attngen.jax.attention(x, x, x, spec))(x)
print(float(o.sum()), "/jax/compilation_cache/cache_hits" in events)
"""


@pytest.mark.long
def test_another_process_finds_what_one_kept(compiled_runtime: Path, tmp_path: Path) -> None:
    """The program in JAX's cache, and the kernels in attngen's: nothing is added to it."""
    kept, printed = [], []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "jax")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split())
        kept.append(sorted(path for path in compiled_runtime.rglob("*") if path.is_file()))
    assert [hit for _, hit in printed] == ["False", "True"]
    assert printed[0][0] == printed[1][0]
    assert kept[0] == kept[1]
