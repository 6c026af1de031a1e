"""The kernels of backwards that keep S and dP in global memory."""

from __future__ import annotations

from attngen.plan.facts import SpecFacts
from attngen.spec.expr import names_in
from attngen.spec.gradient import gradient_argument
from attngen.spec.operator import FLOAT_ONE


def kernels_and_workspaces(facts: SpecFacts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kernels that the wanted gradients need, and what they keep in global memory."""
    assert facts.gradient is not None
    wanted, ds, normalize = facts.wanted, facts.gradient.ds, facts.spec.normalize
    captured = facts.captured_gradients
    contributions = [c for one in captured for c in one.contributions]
    sources = {c.source for c in contributions}
    needs_ds = bool({"q", "k"} & set(wanted)) or "scale" in sources
    needs_scores = needs_ds or "score" in sources  # dS
    of_scores = needs_scores or "sink" in sources
    has_ds = ds is not FLOAT_ONE and needs_ds
    s_of_factors = any("s" in names_in(c.factor, *c.indices) or c.source == "scale" for c in contributions)
    kernels = {
        "scores": True,
        "weights": normalize != "none",
        "weight_gradients": of_scores,
        "delta": of_scores and normalize == "softmax",
        "score_gradients": needs_scores and (normalize != "none" or has_ds),
        "dropout": "v" in wanted and facts.spec.dropout is not None,
        "dq": "q" in wanted,
        "dk": "k" in wanted,
        "dv": "v" in wanted,
        **{gradient_argument(one.name): True for one in captured},
    }
    kept = {
        "S": True,
        "QK": (has_ds and "s" in names_in(ds)) or s_of_factors,
        "dP": of_scores,
        "delta": kernels["delta"],
        "ds": has_ds,
        "sink_weight": "sink" in sources,
    }
    return tuple(n for n, needed in kernels.items() if needed), tuple(n for n, needed in kept.items() if needed)
