"""Mesh axes along which an array differs from device to device inside of `jax.shard_map`.

JAX has them in the type of an array (`check_vma`). A custom call requires arrays of the same axes. The derivative of the
conversion adds the gradients of all devices, which those of an array with fewer axes need.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax


def manual_axes(arrays: Iterable[jax.Array]) -> frozenset[str]:
    """The axes along which any of the arrays differs; none outside of `shard_map`."""
    return frozenset().union(*map(_axes, arrays))


def _axes(array: jax.Array) -> frozenset[str]:
    described = jax.typeof(array)
    newer = getattr(described, "manual_axis_type", None)  # since jax 0.10
    found: frozenset[str] = described.vma if newer is None else newer.varying
    return found


def varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, with `axes` in its type."""
    missing = tuple(sorted(axes - _axes(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):  # since jax 0.8
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def varying_alike(arrays: Iterable[jax.Array]) -> list[jax.Array]:
    """The arrays, each with the axes of all."""
    arrays = list(arrays)
    axes = manual_axes(arrays)
    return [varying(array, axes) for array in arrays]
