"""The products whose operations count as the work of attention."""

from __future__ import annotations

from collections.abc import Mapping

from attngen.plan.plan import Plan
from attngen.plan.saved import delta_of
from attngen.spec.attention import AttentionSpec

# The products of each kernel of a backward that keeps S and dP in global memory, and of one that does not.
OF_UNFUSED = {
    "scores": ("Q K^T",),
    "weight_gradients": ("dO V^T",),
    "dq": ("dS K",),
    "dk": ("dS^T Q",),
    "dv": ("P^T dO",),
}
OF_FUSED = {
    "dk_dv": ("Q K^T", "dO V^T", "P^T dO", "dS^T Q"),
    "dk": ("Q K^T", "dO V^T", "dS^T Q"),
    "dv": ("Q K^T", "P^T dO"),
    "dq": ("Q K^T", "dO V^T", "dS K"),
}
OF_DELTA = ("Q K^T", "dO V^T")  # if it is a sum over keys


def counted_products(spec: AttentionSpec, wanted: tuple[str, ...] = ()) -> dict[str, int]:
    """The products of a pair of a row and a key, each with the dimensions that it sums over or adds to.

    Those of a forward; or of a backward with the gradients `wanted`, as FlashAttention's benchmarks count them: each once, even
    if two kernels compute it. With equal head sizes, five products for q, k and v are 2.5 times the work of the forward.
    """
    d, dv = spec.head_dim, spec.head_dim_v
    if not wanted:
        return {"Q K^T": d, "P V": dv}
    needed = {
        "Q K^T": (True, d),
        "dO V^T": (any(name != "v" for name in wanted), dv),
        "P^T dO": ("v" in wanted, dv),
        "dS^T Q": ("k" in wanted, d),
        "dS K": ("q" in wanted, d),
    }
    return {product: dims for product, (is_needed, dims) in needed.items() if is_needed}


def operations_of_a_pair(spec: AttentionSpec, wanted: tuple[str, ...] = ()) -> int:
    """Multiplications and additions of the products that count."""
    return 2 * sum(counted_products(spec, wanted).values())


def computed_products(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """The products of each kernel that a backward may have, by its name, if it computes any."""
    if not plan.schedule.is_fused:
        return OF_UNFUSED
    needed = {*counted_products(plan.facts.spec, plan.wanted)}
    of_fused = OF_FUSED | ({"dk_dv": (*OF_FUSED["dk_dv"], "dS K")} if "dq_sums" in plan.workspaces else {})
    of_fused |= {"delta": OF_DELTA} if delta_of(plan.facts) == "sums over keys" else {}
    of_keys = needed if plan.wants("k") or any(t.place == "keys" for t in plan.term_sums) else needed - {"dO V^T"}
    return {
        kernel: tuple(p for p in of_fused[kernel] if p in (needed if kernel in ("delta", "dq") else of_keys))
        for kernel in of_fused
    }
