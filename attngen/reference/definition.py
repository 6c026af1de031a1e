"""Attention as `AttentionSpec` defines it, on arrays of numpy or torch: the one definition that both oracles run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attngen.spec.attention import AttentionSpec
from attngen.spec.evaluate import evaluate

ROW_BUDGET = 2**25  # scores held at once


@dataclass(frozen=True, slots=True)
class Problem:
    """Arrays of one call, all of one namespace `xp`: floats in the precision to compute in, integers as int64.

    q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, head_dim_v].
    """

    spec: AttentionSpec
    q: Any
    k: Any
    v: Any
    inputs: Mapping[str, Any]
    params: Mapping[str, int | float]
    xp: Any
    read: Callable[[Problem, str, tuple[Any, ...]], Any] | None = None  # in place of `read_input`

    @property
    def sizes(self) -> dict[str, int]:
        batch, q_heads, q_len, _ = self.q.shape
        _, kv_heads, kv_len, _ = self.k.shape
        sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
        for declared in self.spec.inputs:
            for dim, size in zip(declared.dims, self.inputs[declared.name].shape, strict=True):
                if isinstance(dim, str):
                    sizes.setdefault(dim, int(size))
        return sizes


def allowed_rows(problem: Problem, b: int, h: int, rows: slice) -> Any:
    """The mask of one head, for a block of query rows: [rows, kv_len], or a shape that broadcasts to it."""
    assert problem.spec.mask is not None
    return evaluate(problem.spec.mask, *_surroundings(problem, b, h, rows))


def _surroundings(problem: Problem, b: int, h: int, rows: slice) -> tuple[dict[str, Any], Any, Any, Any]:
    """What `evaluate` wants: the names of a block of rows, how inputs are read, the namespace, literals."""
    sizes = problem.sizes
    numbers = {**sizes, **problem.params, "b": b, "h": h}
    names: dict[str, Any] = {name: _literal(problem, value) for name, value in numbers.items()}
    names["q"] = _arange(problem, rows.start, rows.stop)[:, None]
    names["k"] = _arange(problem, 0, sizes["kv_len"])[None, :]
    read = problem.read or read_input
    return names, lambda name, at: read(problem, name, at), problem.xp, lambda c: _literal(problem, c)


def score_rows(problem: Problem, b: int, h: int, rows: slice) -> Any:
    """The scores of one head before the mask, for a block of query rows: [rows, kv_len]."""
    names, *rest = _surroundings(problem, b, h, rows)
    q, k = problem.q[b, h, rows], problem.k[b, _kv_head(problem, h)]
    names["s"] = (q @ k.T) * evaluate(problem.spec.scale, names, *rest)
    return _like(evaluate(problem.spec.score, names, *rest) + 0.0 * names["s"], q)


def _kv_head(problem: Problem, h: int) -> int:
    return int(h // (problem.q.shape[1] // problem.k.shape[1]))


def attention_rows(problem: Problem, b: int, h: int, rows: slice) -> tuple[Any, Any | None]:
    """O [rows, head_dim_v] and lse [rows] of one head, for a block of query rows."""
    spec, xp = problem.spec, problem.xp
    v = problem.v[b, _kv_head(problem, h)]
    scores = score_rows(problem, b, h, rows)
    if spec.mask is not None:
        forbidden = 0.0 if spec.normalize == "none" else -math.inf
        scores = xp.where(allowed_rows(problem, b, h, rows), scores, _full(scores, forbidden, xp))
    if spec.normalize == "none":
        return scores @ v, None
    if spec.normalize == "sigmoid":
        return (1.0 / (1.0 + xp.exp(-scores))) @ v, None
    sink = None
    if spec.sink is not None:
        names, *rest = _surroundings(problem, b, h, rows)
        sink = evaluate(spec.sink, names, *rest)
    return _softmax(scores, v, sink, xp)


def _softmax(scores: Any, v: Any, sink: Any | None, xp: Any) -> tuple[Any, Any]:
    """Rows with no key give O = 0; their lse is the sink, or -inf without one."""
    column = _full(scores.sum(-1)[:, None], -math.inf, xp)
    floor = column if sink is None else _full(column, 0.0, xp) + sink
    row_max = xp.maximum(xp.amax(scores, -1)[:, None], floor) if scores.shape[1] else floor
    shift = xp.where(row_max == -math.inf, _full(row_max, 0.0, xp), row_max)
    weights = xp.exp(scores - shift)
    total = weights.sum(-1)[:, None]
    if sink is not None:
        total = total + xp.exp(floor - shift)
    empty = total == 0.0
    divisor = xp.where(empty, _full(total, 1.0, xp), total)
    output = (weights / divisor) @ v
    lse = xp.where(empty, _full(total, -math.inf, xp), shift + xp.log(divisor))
    return output, lse[:, 0]


def _like(array: Any, example: Any) -> Any:
    """`array` in the precision of `example`."""
    return array.astype(example.dtype) if hasattr(array, "astype") else array.to(example.dtype)


def _full(like: Any, value: float, xp: Any) -> Any:
    return xp.full_like(like, value)


def _arange(problem: Problem, start: int, stop: int) -> Any:
    return problem.xp.arange(start, stop, dtype=problem.xp.int64, **_place(problem))


def _literal(problem: Problem, value: Any) -> Any:
    """A number for an expression: torch's functions want tensors, numpy's do better with Python's numbers."""
    if not _place(problem):
        return value
    precision = {"dtype": problem.xp.float64} if isinstance(value, float) else {}
    return problem.xp.tensor(value, **_place(problem), **precision)


def _place(problem: Problem) -> dict[str, Any]:
    return {"device": problem.q.device} if problem.xp.__name__ == "torch" else {}


def read_input(problem: Problem, name: str, indices: tuple[Any, ...]) -> Any:
    """`input[indices]`, where a dimension of size 1 is broadcast whatever the index."""
    array = problem.inputs[name]
    declared = problem.spec.input(name)
    at = tuple(
        (i * 0 if size == 1 and isinstance(dim, str) else i)
        for i, size, dim in zip(indices, array.shape, declared.dims, strict=True)
    )
    return array[at]


def block_rows(problem: Problem) -> int:
    """How many query rows to compute at once."""
    return max(1, ROW_BUDGET // max(1, int(problem.k.shape[2])))
