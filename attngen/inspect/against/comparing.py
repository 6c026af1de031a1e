"""A spec and a user's attention on the same arrays: O and gradients, and where they differ first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attngen.diagnostics import ArgumentError
from attngen.inspect.against.calling import Call, NotComputed, Tensors, call_of
from attngen.inspect.against.own import Own
from attngen.inspect.against.why import why_different
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP32, from_storage
from attngen.spec.expr import Const, Type, walk

if TYPE_CHECKING:
    import torch

# The largest difference that is allowed, relative to the largest element. What a spec means otherwise changes more; a function
# may compute a slope or a bucket in fp32, whose rounding a float64 result shows.
ALLOWED = {"float64": 1e-4, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
USUAL_LENGTH = 48
SHORTER = 21  # queries of a problem with fewer queries than keys
BEYOND = 24  # keys beyond the largest number of a mask
MOST_PAIRS = 2**25  # pairs of all heads of a problem


@dataclass(frozen=True)
class Against:
    """What a command line states: sizes (None: chosen), params, the seed, the layout of q, k and v ("bhsd": [batch, heads,
    length, size]; "bshd"; None: that which agrees), the device (None: the CPU, or a GPU if that fails)."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    q_len: int | None = None
    kv_len: int | None = None
    params: Mapping[str, int | float] | None = None
    seed: int = 0
    layout: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Compared:
    """The comparison of one result. `error` and `allowed` are relative to its largest element; `first` is where it differs
    first, and `why` what explains that, in words. One that could not be compared has the reason in `note`, and no error."""

    result: str  # "output", or "gradient of q"
    lengths: str
    error: float | None = None
    allowed: float | None = None
    first: str = ""
    why: tuple[str, ...] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error is None or self.allowed is None or self.error <= self.allowed


def compare_against(spec: AttentionSpec, own: Own, stated: Against) -> list[Compared]:
    """The comparisons of all problems. Raises ArgumentError for what cannot be compared, or computed by the user's function."""

    if spec.dropout is not None:
        raise ArgumentError("--against: weights that dropout drops are random; remove `dropout` from the spec")
    if spec.kernel.storage != "dense":
        raise ArgumentError(f"--against compares dense arrays; this spec has storage {spec.kernel.storage}")
    spec = replace(spec, dtype=FP32, k_dtype=None, v_dtype=None, o_dtype=None)
    found: list[Compared] = []
    for shape in _shapes(spec, own, stated):
        tensors = _tensors(spec, own, shape, stated)
        lengths = f"{tensors['q'].shape[2]} x {tensors['k'].shape[2]}"
        layouts = (stated.layout,) if stated.layout else ("bhsd", "bshd") if own.kind == "attention" else ("bhsd",)
        tried: list[list[Compared]] = []
        refused: NotComputed | None = None
        for layout in layouts:
            try:
                call = call_of(own, spec, layout, stated.device, _numbers(spec, stated), tensors)
            except NotComputed as error:
                refused = refused or error
                continue
            tried.append([*_compared(spec, own, call, tensors, lengths, _numbers(spec, stated), stated.seed)])
            if all(c.passed for c in tried[-1]):
                break
        if not tried and refused is not None:
            if not found:
                raise ArgumentError(f"--against {own.title}: {refused}") from refused
            found.append(Compared("output", lengths, note=f"not compared: {refused}"))
            continue
        nearest: list[Compared] = min(tried, key=_distance)
        found += nearest
        if not all(c.passed for c in found):  # one difference is explained, others may follow from it
            return found
    found.extend(_not_reached(spec, own, stated))
    return found


def _distance(of_layout: list[Compared]) -> tuple[bool, float]:
    return not all(c.passed for c in of_layout), of_layout[0].error or 0.0


def _numbers(spec: AttentionSpec, stated: Against) -> dict[str, int | float]:
    return {p.name: p.default for p in spec.params if p.default is not None} | dict(stated.params or {})


def _largest(spec: AttentionSpec, stated: Against) -> int:
    """The largest number that a mask or a score compares positions with, as far as constants and params state it."""
    numbers = _numbers(spec, stated)
    read = [*walk(*(e for name, e in spec.expressions.items() if name in ("mask", "score")))]
    constants = [abs(node.value) for node in read if isinstance(node, Const) and node.type is Type.INT]
    named = {name for node in read for name in node.names}
    return int(max([*constants, *(abs(v) for n, v in numbers.items() if isinstance(v, int) and n in named)], default=0))


def _beyond(spec: AttentionSpec, stated: Against) -> tuple[int, bool]:
    """The length that a problem needs for the largest number of the mask to matter, and whether there is memory for it."""
    length = _largest(spec, stated) + BEYOND
    heads = spec.q_heads or stated.heads or 1
    return length, heads * length * length <= MOST_PAIRS


def _shapes(spec: AttentionSpec, own: Own, stated: Against) -> Iterator[Shape]:
    """Problems: as many keys as queries, more keys, and more than the largest number of the mask."""
    heads = stated.heads or 4
    usual = Shape(stated.batch or 2, heads, stated.kv_heads or heads, USUAL_LENGTH, USUAL_LENGTH)
    if stated.q_len or stated.kv_len or own.kind == "arrays":
        q_len = stated.q_len or stated.kv_len or USUAL_LENGTH
        yield replace(usual, q_len=q_len, kv_len=stated.kv_len or q_len)
        return
    yield usual
    length, fits = _beyond(spec, stated)
    has_fixed = any({*i.dims} & {"q_len", "kv_len"} and i.name in own.values for i in spec.inputs)
    if not has_fixed:
        yield replace(usual, q_len=SHORTER)
        if length > USUAL_LENGTH and fits:
            yield replace(usual, batch=stated.batch or 1, q_heads=stated.heads or 1, kv_heads=1, q_len=length, kv_len=length)


def _not_reached(spec: AttentionSpec, own: Own, stated: Against) -> Iterator[Compared]:
    length, fits = _beyond(spec, stated)
    if length > USUAL_LENGTH and not fits and not stated.q_len and own.kind != "arrays":
        yield Compared("output", f"{length} x {length}", note=f"not compared: too many pairs; --q-len {length} compares them")


def _tensors(spec: AttentionSpec, own: Own, shape: Shape, stated: Against) -> Tensors:
    """q, k, v and the inputs in float64. Inputs that the functions read by name are theirs, and decide sizes. Raises
    ArgumentError."""
    import torch

    if own.kind == "arrays":
        given = {n: torch.as_tensor(own.values[n]) for n in ("q", "k", "v")}
        shape = Shape(given["q"].shape[0], given["q"].shape[1], given["k"].shape[1], given["q"].shape[2], given["k"].shape[2])
    own_inputs = {i.name: _tensor(own.values[i.name]) for i in spec.inputs if _is_array(own.values.get(i.name))}
    sizes: dict[str, int] = {}
    for declared in spec.inputs:
        if declared.name not in own_inputs:
            if own.kind == "arrays" or declared.name not in own.takes:
                where = f"name an array {declared.name} in the file" if own.kind == "arrays" else (
                    f"call its tensor {declared.name}, or take {declared.name} as an argument"
                )  # fmt: skip
                raise ArgumentError(f"--against {own.title}: the input `{declared.name}` of the spec is not known; {where}")
            continue
        if own_inputs[declared.name].ndim != len(declared.dims):
            shown = [*own_inputs[declared.name].shape]
            raise ArgumentError(f"--against: `{declared.name}` is {shown}; the spec declares {len(declared.dims)} dimensions")
        sizes |= {
            d: n for d, n in zip(declared.dims, own_inputs[declared.name].shape, strict=True) if isinstance(d, str) and n > 1
        }
    shape = replace(
        shape,
        **{n: sizes[n] for n in ("batch", "q_heads", "kv_heads", "q_len", "kv_len") if n in sizes},
        free={n: size for n, size in sizes.items() if n in spec.free_dims},
    )
    if "q_heads" in sizes and spec.q_heads is None and stated.kv_heads is None and own.kind != "arrays":
        shape = replace(shape, kv_heads=sizes["q_heads"])
    if "kv_len" in sizes and "q_len" not in sizes and own.kind != "arrays":
        shape = replace(shape, q_len=sizes["kv_len"])
    drawn = sample(spec, shape, stated.seed)
    tensors = {n: _tensor(from_storage(a)) for n, a in {"q": drawn.q, "k": drawn.k, "v": drawn.v, **drawn.inputs}.items()}
    if own.kind == "arrays":
        tensors |= given
    tensors |= own_inputs
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _tensor(value: object) -> torch.Tensor:
    import torch

    return torch.as_tensor(value).detach().cpu()


def _compared(
    spec: AttentionSpec, own: Own, call: Call, tensors: Tensors, lengths: str, numbers: Mapping[str, int | float], seed: int
) -> Iterator[Compared]:
    """The comparisons of O and of gradients of one problem."""
    import torch

    from attngen.reference.torch_oracle import torch_attention, torch_gradients

    inputs = {i.name: tensors[i.name] for i in spec.inputs}
    wanted, _ = torch_attention(spec, tensors["q"], tensors["k"], tensors["v"], inputs=inputs, params=numbers)
    found, leaves = call.with_gradients(tensors)
    if found.shape != wanted.shape:
        raise NotComputed(f"its result is {[*found.shape]}; the output of the spec is {[*wanted.shape]}")
    output = found.detach().double().cpu().clone()  # autograd may have saved the result itself
    spoiled = output.isnan().any(-1) & (wanted == 0).all(-1)  # rows without keys: NaN of a softmax, 0 of the spec
    output[spoiled] = 0.0
    note = "rows without keys are NaN in it and 0 in the spec, which is not counted" if spoiled.any() else ""
    limit = ALLOWED[call.dtype]
    result = _difference("output", lengths, output, wanted, limit, note)
    if not result.passed:
        rows = _rows(output, wanted, limit)
        result = replace(result, why=why_different(spec, own.title, call, tensors, numbers, rows, limit))
    yield result
    if own.kind == "arrays" or not result.passed:  # gradients of another output are others
        return
    if not found.requires_grad or spoiled.any():
        reason = "rows without keys are NaN" if spoiled.any() else "its result has no gradients"
        yield Compared("gradients", lengths, note=f"not compared: {reason}")
        return
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    try:
        gradients = torch.autograd.grad(found, [*leaves.values()], dout.to(found), allow_unused=True)
    except RuntimeError as error:
        yield Compared("gradients", lengths, note=f"not compared: {str(error).splitlines()[0]}")
        return
    true = torch_gradients(spec, tensors, numbers, dout, (*leaves,))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        got = torch.zeros_like(leaf) if gradient is None else gradient
        yield _difference(f"gradient of {name}", lengths, got.detach().double().cpu(), true[name], 3 * limit)


def _rows(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first row that differs, and the last one of its head: by a causal mask, that with most keys."""
    largest = float(wanted.abs().max()) or 1.0
    wrong = ((found - wanted).abs().nan_to_num(math.inf) > limit * largest).any(-1)
    b, h, q = (int(i) for i in wrong.nonzero()[0])
    return (b, h, q), (b, h, int(wrong[b, h].nonzero()[-1]))


def _difference(result: str, lengths: str, found: torch.Tensor, wanted: torch.Tensor, limit: float, note: str = "") -> Compared:
    """How far `found` is from `wanted`, and where first."""
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    error = float((found - wanted).abs().nan_to_num(math.inf).max()) / (largest or 1.0) if wanted.numel() else 0.0
    first = ""
    if error > limit:
        at = _first(found, wanted, limit)
        place = ", ".join(f"{n} = {i}" for n, i in zip(_axes(result, found.ndim), at, strict=True))
        first = f"{place}: {float(wanted[at]):.6g} by the spec, {float(found[at]):.6g} by it"
    return Compared(result, lengths, error, limit, first, note=note)


def _axes(result: str, rank: int) -> tuple[str, ...]:
    length = "q" if result in ("output", "gradient of q") else "k"
    if result in ("output", "gradient of q", "gradient of k", "gradient of v"):
        return ("b", "h" if length == "q" else "key head", length, "element")
    return tuple(f"index {axis}" for axis in range(rank))


def _first(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> tuple[int, ...]:
    """The first element, in the order of indices, that differs by more than the limit."""
    largest = float(wanted.abs().max()) or 1.0
    wrong = (found - wanted).abs().nan_to_num(math.inf) > limit * largest
    return tuple(int(i) for i in wrong.nonzero()[0])
