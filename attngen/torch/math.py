"""mode="math": any attention by torch's own operations, as torch's math SDPA computes its own.

Differentiable any number of times and in forward mode, on every device, in every transform of torch. Memory grows with
q_len * kv_len. fp16 and bf16 are computed in fp32; fp32 and fp64 in themselves.

The operator `attngen::attention_math` has the arguments of `attngen::attention`, but float params are tensors, so that they
have gradients too. Unlike that one, it consists of other operators (CompositeImplicitAutograd): autograd and torch.compile see
those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError, ArrayView, Location
from attngen.device.sizes import measure
from attngen.emit.abi import input_tensors
from attngen.emit.program import Program
from attngen.plan.plan import ROTATE_BEFORE, WHY_ROTATED, refusal, rotates_bytes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec
from attngen.spec.dropout import RNG_STATE, STEPS, bytes_of_pairs
from attngen.spec.dtypes import DTYPES
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr, Type
from attngen.spec.obligations import check_obligations
from attngen.spec.torch_namespace import TorchNamespace
from attngen.torch.arguments import Lists, unpacked
from attngen.torch.layout import without_autocast
from attngen.torch.runtime import parsed

Params = Mapping[str, int | float | Tensor]  # tensors have no dimensions
SCHEMA = (
    "attention_math(Tensor q, Tensor k, Tensor v, str spec, Tensor[] inputs, SymInt[] ints, Tensor[] floats) "
    "-> (Tensor, Tensor)"
)


@dataclass(frozen=True, slots=True)
class MathCall:
    """The values that the expressions of one call read: floats in the precision of the computation, integers as int64."""

    spec: AttentionSpec
    names: Mapping[str, Tensor]  # indices broadcast to [batch, q_heads, q_len, kv_len]; sizes and params are 0-dimensional
    inputs: Mapping[str, Tensor]
    xp: TorchNamespace

    def value(self, expr: Expr, names: Mapping[str, Tensor], allowed: Tensor | None = None) -> Tensor:
        """`expr`, with `names` added to those of the call. Only pairs in `allowed` have derivatives: `where` selects them,
        so that what an excluded pair gives, NaN included, reaches no gradient."""

        def read(name: str, indices: tuple[Tensor, ...]) -> Tensor:
            element = _element(self.spec, name, self.inputs[name], indices)
            return element if allowed is None or not element.is_floating_point() else torch.where(allowed, element, 1.0)

        return evaluate(expr, {**self.names, **names}, read, self.xp, self.xp.literal)


def _element(spec: AttentionSpec, name: str, array: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
    """`array[indices]`. A dimension of size 1 that has a name is broadcast: it is read at 0 for every index."""
    dims = spec.input(name).dims
    at = tuple(
        torch.zeros_like(index) if size == 1 and isinstance(dim, str) else index
        for index, size, dim in zip(indices, array.shape, dims, strict=True)
    )
    if any(index.dim() for index in at):  # torch.compile takes the shape of an index without dimensions on the CPU for all
        at = tuple(index if index.dim() else index.reshape(1) for index in at)
    return torch.ops.aten.index(array, list(at)) if at else array  # array[at] would wait for an index without dimensions


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Params,
) -> tuple[Tensor, Tensor]:
    """O [batch, q_heads, q_len, head_dim_v] of q's type, and lse [batch, q_heads, q_len] of at least fp32, or without elements
    if the spec has none. `params` are numbers, or tensors without dimensions."""
    precision = torch.float32 if q.element_size() < 4 else q.dtype
    with without_autocast(q.device.type):  # q, k and v follow it before this operator
        call = call_of(spec, q, k, inputs, params, precision)
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        queries, keys, values = (t.to(precision) for t in (q, k, v))
        if spec.rotary is not None:
            queries = _rotated(call, queries, spec.rotary.q, "q", q.dtype)
            keys = _rotated(call, keys, spec.rotary.k, "k", q.dtype)
        allowed = None if spec.mask is None else call.value(spec.mask, {})
        if allowed is not None and allowed.dim():
            seen = _seen(allowed, group)
            keys, values = torch.where(seen, keys, 0.0), torch.where(seen, values, 0.0)
        products = (queries.unflatten(1, (k.shape[1], group)) @ keys.unsqueeze(2).mT).flatten(1, 2)
        weights, lse = _weights(call, products, allowed)
        if spec.dropout is not None:
            kept = _kept(call)
            weights = torch.where(kept == 0.0, 0.0, weights * kept)  # a dropped weight is 0, an infinite one too
        if call.spec.v_scale is not None:
            weights = weights * call.value(call.spec.v_scale, {})
        output = (weights.unflatten(1, (k.shape[1], group)) @ values.unsqueeze(2)).flatten(1, 2)
    result = q.dtype if spec.o_dtype is None else getattr(torch, spec.o_dtype.torch)
    return output.to(result), lse if spec.lse else lse.new_empty((0,))


def _rotated(call: MathCall, rows: Tensor, position: Expr, index: str, dtype: torch.dtype) -> Tensor:
    """Rows [batch, heads, length, head_dim] of Q or K, whose index is q or k, rotated by their positions and rounded to
    `dtype`."""
    rotary = call.spec.rotary
    assert rotary is not None
    at = (call.value(position, {}) + 0 * call.names[index]).flatten(2)  # [batch, 1, length]
    tables = (call.inputs[name] for name in rotary.tables)
    cosines, sines = (torch.ops.aten.index(table, [at.clamp(0, table.shape[0] - 1)]) for table in tables)
    pairs, rest = rows[..., : rotary.dim], rows[..., rotary.dim :]
    halves = rotary.pairs == "halves"
    x, y = pairs.chunk(2, -1) if halves else (pairs[..., 0::2], pairs[..., 1::2])
    both = (x * cosines - y * sines, x * sines + y * cosines)
    turned = torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)
    return torch.cat((turned, rest), -1).to(dtype).to(rows.dtype)


def _kept(call: MathCall) -> Tensor:
    """What dropout multiplies each weight with: the same weights are dropped as by kernels."""
    assert call.spec.dropout is not None
    p = call.value(call.spec.dropout, {}).float()
    dropped = torch.where(p > 0, (p * STEPS).round().clamp(1, STEPS - 1), 0.0)
    seed, offset = call.inputs[RNG_STATE.name].unbind()
    random = bytes_of_pairs(seed, offset, *(call.names[index] for index in INDICES))
    return (random >= dropped).to(call.xp.precision) * (STEPS / (STEPS - dropped)).to(call.xp.precision)


def call_of(
    spec: AttentionSpec, q: Tensor, k: Tensor, inputs: Mapping[str, Tensor], params: Params, precision: torch.dtype
) -> MathCall:
    """The values that the expressions of a call read, in `precision`."""

    def decoded(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(precision)
        return tensor if tensor.dtype is torch.bool else tensor.long()

    xp = TorchNamespace(precision, q.device)
    sizes = dict(zip(SIZES, (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2]), strict=True))
    sizes |= spec.own_sizes({name: tensor.shape for name, tensor in inputs.items()})
    names = {name: xp.number(size) for name, size in sizes.items()}
    for name, value in params.items():
        names[name] = value.to(q.device, precision) if isinstance(value, torch.Tensor) else xp.number(value)
    extents = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "k": k.shape[2]}
    for axis, (index, extent) in enumerate(extents.items()):
        shape = [-1 if axis == other else 1 for other in range(4)]
        names[index] = torch.arange(extent, device=q.device).view(shape)
    return MathCall(spec, names, {name: decoded(tensor) for name, tensor in inputs.items()}, xp)


def by_rows(call: MathCall, q: Tensor, k: Tensor, pairs: int) -> Iterator[tuple[slice, MathCall]]:
    """`call` for some rows after others, each time for at most so many `pairs`, or for one row."""
    at_once = max(1, pairs // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], at_once):
        rows = slice(start, start + at_once)
        yield rows, replace(call, names={**call.names, "q": call.names["q"][:, :, rows]})


def _seen(allowed: Tensor, group: int) -> Tensor:
    """Whether any row sees a key, [batch, kv_heads, kv_len, 1]. What lies behind others, such as padding that nobody has
    written, must not be multiplied even by 0: NaN would stay NaN."""
    seen = allowed.any(2, keepdim=True)
    return (seen if seen.shape[1] == 1 else seen.unflatten(1, (seen.shape[1] // group, group)).any(2)).mT


def _weights(call: MathCall, products: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """(P [batch, q_heads, q_len, kv_len], lse) of the products of queries and keys."""
    spec = call.spec
    scores = products * call.value(spec.scale, {})
    if allowed is not None:
        scores = torch.where(allowed, scores, 1.0)
    scores = torch.broadcast_to(call.value(spec.score, {"s": scores}, allowed), products.shape)
    if allowed is not None:
        scores = torch.where(allowed, scores, 0.0 if spec.normalize == "none" else -math.inf)
    if spec.normalize == "softmax":
        return _softmax(scores, None if spec.sink is None else call.value(spec.sink, {}))
    weights = scores if spec.normalize == "none" else torch.sigmoid(scores)
    return weights, scores.new_empty((0,))


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over keys and the sink, and its lse. A row without keys and sink has weights 0, lse -inf and no derivative: its
    logits are replaced first and its results after, so that neither meets -inf - (-inf)."""
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink.broadcast_to((*scores.shape[:3], 1)).to(scores.dtype)], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    logits = torch.where(empty, 0.0, logits)
    weights = torch.where(empty, 0.0, torch.softmax(logits, -1))[..., : scores.shape[3]]
    lse = torch.where(empty, -math.inf, torch.logsumexp(logits, -1, keepdim=True))
    return weights, lse.squeeze(-1)


def _operator(
    q: Tensor, k: Tensor, v: Tensor, spec: str, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    captured, params = check_by_torch(q, k, v, spec, inputs, ints, floats)
    return math_attention(q, k, v, parsed(spec), captured, params)


def _check(spec: AttentionSpec, tensors: Mapping[str, Tensor], params: Params) -> None:
    """Raises ArgumentError for elements, and for shapes, indices or divisors of sizes that are known: traced ones are not."""
    views = {}
    for tensor in input_tensors(spec):
        given, declared = tensors[tensor.key], DTYPES[tensor.dtype]
        floats = given.is_floating_point()
        if floats != (declared.kind == "float") or (given.dtype is torch.bool) != (declared.kind == "bool"):
            raise ArgumentTypeError(f"`{tensor.key}` has elements of {given.dtype}; expected {declared}")
        wanted = tensors["q"].dtype
        if not spec.is_mixed and tensor.key in ("k", "v") and given.dtype is not wanted:
            raise ArgumentTypeError(f"`{tensor.key}` has elements of {given.dtype}; expected {wanted}, as `q` has")
        place = Location(given.device.type, given.device.index or 0)
        views[tensor.key] = ArrayView(tensor.key, 0, tuple(given.shape), tuple(given.stride()), declared, place, given)
    if any(type(size) is not int for view in views.values() for size in view.shape):
        return
    sizes = measure(Program(spec.name, "", "", (), tuple(input_tensors(spec))), views)
    check_obligations(spec, sizes, {name: value for name, value in params.items() if not isinstance(value, torch.Tensor)})


_LIBRARY = torch.library.Library("attngen", "FRAGMENT")
_LIBRARY.define(SCHEMA)
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):  # vmap does not look into operators of its own accord
    _LIBRARY.impl("attention_math", _operator, _key)

_math_operator = torch.ops.attngen.attention_math.default


def check_by_torch(q: Tensor, k: Tensor, v: Tensor, text: str, *lists: *Lists) -> tuple[dict[str, Tensor], Params]:
    """Inputs and params by their names. Raises what `by_torch` would raise for its arguments; nothing runs."""
    spec, (inputs, ints, floats) = parsed(text), unpacked(lists)
    storage = spec.kernel.storage
    if storage != "dense":
        raise ArgumentError(f"torch's own operations compute dense storage alone, and this attention has storage {storage}")
    if rotates_bytes(spec):
        raise refusal("rotary", f"`rotary` of attention `{spec.name}` does not suit mode math", WHY_ROTATED, ROTATE_BEFORE)
    numbers = {Type.INT: iter(ints), Type.FLOAT: iter(floats)}
    captured = dict(zip((i.name for i in spec.inputs), inputs, strict=True))
    params = {p.name: next(numbers[p.type]) for p in spec.params}
    _check(spec, {"q": q, "k": k, "v": v, **captured}, params)
    return captured, params


def by_torch(q: Tensor, k: Tensor, v: Tensor, text: str, *lists: *Lists) -> tuple[Tensor, Tensor]:
    """(O, lse) of the attention of `text`. `lists` are inputs, ints and floats, each in the order of declaration; floats are
    numbers or tensors without dimensions."""
    inputs, ints, floats = unpacked(lists)
    tensors = [f if isinstance(f, torch.Tensor) else torch.full((), f, dtype=torch.float64, device=q.device) for f in floats]
    return _math_operator(q, k, v, text, list(inputs), list(ints), tensors)
