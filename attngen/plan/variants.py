"""Variants: what the mask and the score of a spec read and compute, which decides how many registers a thread needs beside
those of its tile. `SPECS` take the most registers of their kind: the table of registers is made of them."""

from __future__ import annotations

from typing import Literal

from attngen.plan.axes import KEYS, ROWS
from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Expr, Gather, Type, name, names_in, rewrite, walk
from attngen.spec.operator import sub

# plain      a softmax of s under a mask that bounds the keys of a row, without captured tensors
# closed     captured tensors that all pairs of a block share; `more`: a softmax of scores that are computed, or with a sink
# keys       elements of keys or of rows; `more`: all but a softmax of s
# distances  elements for each distance of a key from a row
# pairs      an element for each pair
# divided    distances that are divided by params
# dropout    weights are dropped; `more`: beside all but plain and keys
Variant = Literal[
    "plain", "closed", "closed,more", "keys", "keys,more", "distances", "pairs", "divided", "dropout", "dropout,more"
]
DOCUMENTS = "input ids: int32[batch, kv_len] mask causal and same_document(ids)"
SPECS: dict[Variant, tuple[str, ...]] = {
    "plain": ("mask causal output lse", "param n: int mask q - k < n and causal"),
    "closed": ("input n: int32[batch] mask prefix(n[b]) or causal output lse",),
    "closed,more": (
        "input z: fp32[heads] mask causal score s + z[h] * (k - q) sink z[h] output lse",
        "param n: int mask q - k < n and causal score softcap(20.0) output lse",
    ),
    "keys": (
        f"{DOCUMENTS} output lse",
        "input keep: bool[batch, kv_len] mask keep[b, k]",
        "input last: int32[batch, q_len] mask k <= last[b, q]",
        "input keep: bool[batch, kv_len] input last: int32[batch, q_len] mask keep[b, k] and k <= last[b, q]",
    ),
    "keys,more": (
        f"{DOCUMENTS} input z: fp32[heads] score softcap(20.0) + z[h] * (k - q) sink z[h] output lse",
        f"{DOCUMENTS} normalize sigmoid",
        "input bias: fp32[heads, kv_len] input z: fp32[heads] mask causal score s + bias[h, k] sink z[h] output lse",
    ),
    "distances": ("input table: fp32[heads, 2049] mask causal score relative_bias(table, 1024) output lse",),
    "pairs": ("input bias: fp32[heads, q_len, kv_len] mask causal score s + bias[h, q, k] output lse",),
    "divided": tuple(
        f"param side: int param every: int mask causal and (q // side - k // side) % every == 0 {output}"
        for output in ("output lse", "")
    ),
    "dropout": ("mask causal dropout 0.1 output lse", f"{DOCUMENTS} dropout 0.1"),
    "dropout,more": (
        "input bias: fp32[heads, q_len, kv_len] mask causal score s + bias[h, q, k] dropout 0.1 output lse",
        "input z: fp32[heads] mask causal score softcap(20.0) + z[h] * (k - q) sink z[h] dropout 0.1",
    ),
}


def variant(facts: SpecFacts) -> Variant:
    if facts.spec.dropout is None:
        return without_dropout(facts)
    return "dropout" if without_dropout(facts) in ("plain", "keys") else "dropout,more"


def without_dropout(facts: SpecFacts) -> Variant:
    """The variant of a spec if it had no dropout."""
    spec = facts.spec
    if facts.divides_distances:
        return "divided"
    if reads_pairs(spec):
        return "pairs"
    if pair_gathers(spec):
        return "distances"
    is_softmax, simple = spec.normalize == "softmax", spec.sink is None and spec.score == S
    if any(of_pairs(node) for node in gathers(spec)):
        return "keys" if simple and is_softmax else "keys,more"
    if not simple and is_softmax:
        return "closed,more"
    return "plain" if simple and is_softmax and facts.bounds.exact and not gathers(spec) else "closed"


@remembered
def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether each pair reads an element of its own from a captured tensor. Elements that are read by distance do not count:
    they repeat along the diagonals of a thread's pairs."""
    return any(names_in(*(rewrite(index, _distance) for index in node.args)) & {"q", "k"} for node in pair_gathers(spec))


@remembered
def gathers(spec: AttentionSpec) -> tuple[Gather, ...]:
    """Elements of captured tensors that the mask or the score reads."""
    read = walk(*(e for e in (spec.mask, spec.score) if e is not None))
    return tuple(node for node in read if isinstance(node, Gather))


@remembered
def pair_gathers(spec: AttentionSpec) -> tuple[Gather, ...]:
    """The elements whose indices depend on both the query and the key."""
    return tuple(node for node in gathers(spec) if {"q", "k"} <= names_in(*node.args))


def of_pairs(node: Gather) -> bool:
    """Whether the element depends on the query or the key; otherwise all pairs of a block share it."""
    return bool({"q", "k"} & names_in(*node.args))


def _distance(node: Expr) -> Expr | None:
    """The name that replaces `k - q` and `q - k`."""
    return name("q.k", Type.INT) if node in (sub(KEYS.at, ROWS.at), sub(ROWS.at, KEYS.at)) else None
