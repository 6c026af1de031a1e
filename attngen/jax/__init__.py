"""Attention of JAX arrays, by XLA's foreign function interface.

    import attngen.jax
    o = attngen.jax.attention(q, k, v, "gpt2")
    jax.jit(jax.grad(lambda q: attngen.jax.attention(q, k, v, spec).sum()))(q)

Works under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.checkpoint`, `jax.shard_map` and the loops of `jax.lax`. On a GPU, kernels
run on XLA's stream; on the CPU, by the emulated device.
"""

from attngen.optional import required

with required("jax", "attngen.jax", "'attngen[jax]'"):
    import jax

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 6):
    raise ImportError(f"attngen.jax requires jax 0.6 or later; this is jax {jax.__version__}")

from attngen.jax.functional import attention

__all__ = ["attention"]
