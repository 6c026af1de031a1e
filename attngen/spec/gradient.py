"""`Gradient`: the derivatives of a spec's score, sink and scale, from the derivative column of the operator table.

With S = score(s) where the mask allows, and dS the gradient of S, which follows from the normalization:

    ds   = dS * d score / d s
    dc   = sum of dS * d score / d c, over the pairs that read the element c of a captured tensor, or over all pairs for a param

A sink and a scale contribute in the same way. Masks are not differentiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from attngen.diagnostics import ArgumentError
from attngen.spec.affine import affine_form
from attngen.spec.attention import INDICES, AttentionSpec, S
from attngen.spec.derivative import derivatives
from attngen.spec.expr import Apply, Expr, ExpressionError, Gather, Name, Type, inputs_in, name, names_in, walk
from attngen.spec.operator import FLOAT_ZERO

Source = Literal["score", "sink", "scale"]
Access = Literal["pair", "key", "row", "head", "distance", "data"]

QKV = ("q", "k", "v")
INDEX_NAMES = {n: name(n, Type.INT) for n in INDICES}


class GradientError(ArgumentError):
    """A requested gradient that does not exist; the text names the tensor and the reason."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One place where an element of a captured tensor, or a param, is read.

    Its gradient grows by `factor` times the gradient of what reads it: of S for each pair ("score"), of the sink for each row
    ("sink"), of the scale for each pair ("scale").
    """

    source: Source
    element: Gather | Name
    factor: Expr
    access: Access

    @property
    def indices(self) -> tuple[Expr, ...]:
        """The indices of the element; none for a param."""
        return self.element.args


@dataclass(frozen=True, slots=True)
class CapturedGradient:
    """The gradient of a float input or param. Without contributions it is 0: what reads it does not change smoothly with it.

    `access` says which pairs add to one element, from the index expressions alone:

    pair      each index is b, h, q or k itself, with q and k among them
    key, row  the same with k, or q, alone
    head      indices depend on b and h at most; also params and tensors without dimensions
    distance  one index is a function of k - q, the others depend on b and h at most
    data      an index was read from a tensor, or anything else
    """

    name: str
    access: Access
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The derivatives of a spec.

    `ds` is d score / d s, the constant 0.0 if the score does not depend on s. `captured` has every float input and float param
    that the score, the sink or the scale reads.
    """

    ds: Expr
    captured: tuple[CapturedGradient, ...]

    def of(self, name: str) -> CapturedGradient:
        """The gradient of the captured tensor or param `name`. Raises KeyError."""
        for candidate in self.captured:
            if candidate.name == name:
                return candidate
        raise KeyError(name)


def gradient_of(spec: AttentionSpec) -> Gradient:
    """The derivatives of `spec`. Raises GradientError if an expression of them is too large."""
    contributions: dict[str, list[Contribution]] = {}
    ds: Expr = FLOAT_ZERO
    for source, expr in _smooth(spec):
        for node, factor in _derivatives(spec, expr).items():
            if node is S:
                ds = factor
            elif isinstance(node, (Gather, Name)):
                named = node.input if isinstance(node, Gather) else node.name
                contributions.setdefault(named, []).append(Contribution(source, node, factor, access_of(node)))
    return Gradient(ds, tuple(_captured(n, contributions.get(n, [])) for n in differentiable(spec)))


def _smooth(spec: AttentionSpec) -> Iterator[tuple[Source, Expr]]:
    """What a spec differentiates."""
    yield "score", spec.score
    if spec.sink is not None:
        yield "sink", spec.sink
    yield "scale", spec.scale


def _derivatives(spec: AttentionSpec, expr: Expr) -> dict[Expr, Expr]:
    if expr.type is not Type.FLOAT:  # a scale that is an integer constant
        return {}
    try:
        return derivatives(expr)
    except ExpressionError as error:
        raise GradientError(f"attention `{spec.name}`: a derivative cannot be printed: {error.message}") from error


def _captured(name: str, contributions: list[Contribution]) -> CapturedGradient:
    classes = {c.access for c in contributions}
    access: Access = "head" if not classes else classes.pop() if len(classes) == 1 else "data"
    return CapturedGradient(name, access, tuple(contributions))


def differentiable(spec: AttentionSpec) -> tuple[str, ...]:
    """The float inputs and float params that the score, the sink or the scale of `spec` reads, in their order."""
    exprs = [expr for _, expr in _smooth(spec)]
    read = inputs_in(*exprs) | names_in(*exprs)
    inputs = [i.name for i in spec.inputs if i.dtype.kind == "float"]
    return tuple(n for n in (*inputs, *(p.name for p in spec.params if p.type is Type.FLOAT)) if n in read)


def wanted_gradients(spec: AttentionSpec, wanted: Iterable[str] | None = None) -> tuple[str, ...]:
    """`wanted`, names of arguments, in the order of a call: q, k, v, inputs, params. By default those of q, k and v.

    Raises GradientError for a name that has no gradient.
    """
    names = QKV if wanted is None else tuple(wanted)
    if not names:
        raise GradientError("no gradient is requested; name at least one of q, k, v and the captured tensors")
    order = (*QKV, *differentiable(spec))
    for one in names:
        if one not in order:
            raise GradientError(f"`{one}` has no gradient: {_reason(spec, one)}")
    return tuple(n for n in order if n in names)


def gradients_of_call(spec: AttentionSpec, wanted: Iterable[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The gradients `wanted` of what a call is given, and those that kernels compute for them: that of V too, which is added to
    that of K, if V is a part of K. Raises GradientError."""
    if spec.values is None:
        names = wanted_gradients(spec, wanted)
        return names, names
    names = wanted_gradients(spec, QKV[:2] if wanted is None else wanted)
    if "v" in names:
        raise GradientError("`v` has no gradient of its own: it is a part of k")
    return names, tuple(n for name in names for n in ((name, "v") if name == "k" else (name,)))


def gradient_argument(name: str) -> str:
    """The name of the argument that holds the gradient of the argument `name`."""
    return f"d{name}" if name in QKV else f"d_{name}"


def _reason(spec: AttentionSpec, named: str) -> str:
    types = {i.name: str(i.dtype) for i in spec.inputs} | {p.name: str(p.type) for p in spec.params}
    if named not in types:
        return f"attention `{spec.name}` has no input or param of that name"
    is_float = named in {i.name for i in spec.inputs if i.dtype.kind == "float"}
    is_float = is_float or any(p.name == named and p.type is Type.FLOAT for p in spec.params)
    if not is_float:
        return f"its elements are {types[named]}, and only floats have derivatives"
    if spec.rotary is not None and named in spec.rotary.tables:
        return "the tables of a rotation have no gradients"
    if _scales_v(spec, named):
        return "no schedule has gradients of a spec that scales V"
    return "only the mask reads it, and masks have no derivative"


def _scales_v(spec: AttentionSpec, named: str) -> bool:
    return spec.v_scale is not None and named in inputs_in(spec.v_scale) | names_in(spec.v_scale)


def is_constant_in(spec: AttentionSpec, named: str) -> bool:
    """Whether the derivative of a spec's results by the input `named` is 0: it is no float, or only the mask reads it."""
    if spec.input(named).dtype.kind != "float":
        return True
    tables = spec.rotary.tables if spec.rotary is not None else ()
    return named not in (*differentiable(spec), *tables) and not _scales_v(spec, named)


# --- classes of access ------------------------------------------------------------------------------------------------


def access_of(element: Gather | Name) -> Access:
    """The class of one read, see `CapturedGradient`."""
    indices = element.args
    names = names_in(*indices)
    if inputs_in(*indices) or "s" in names or any(_is_from_float(i) for i in indices):
        return "data"
    if not names & {"q", "k"}:
        return "head"
    itself = [i for i in indices if i in INDEX_NAMES.values()]
    if len(itself) == len(indices) == len(set(itself)):
        return "pair" if {"q", "k"} <= names else "key" if "k" in names else "row"
    moving = [i for i in indices if names_in(i) & {"q", "k"}]
    return "distance" if len(moving) == 1 and is_of_distance(moving[0]) else "data"


def _is_from_float(index: Expr) -> bool:
    return any(node.type is Type.FLOAT for node in walk(index))


def is_of_distance(index: Expr) -> bool:
    """Whether an integer expression depends on q and k by their difference k - q alone."""
    known: dict[Expr, bool] = {}
    for node in walk(index):
        if not names_in(node) & {"q", "k"}:
            known[node] = True
            continue
        if not isinstance(node, Apply):
            known[node] = False
            continue
        form = affine_form(node) if node.type is Type.INT else None
        if form is not None and set(form.coefficients) != {node}:
            of_q, rest = form.without(INDEX_NAMES["q"])
            of_k, rest = rest.without(INDEX_NAMES["k"])
            known[node] = of_q == -of_k and all(known[leaf] for leaf in rest.coefficients)
        else:
            known[node] = all(known[a] for a in node.args)
    return known[index]
