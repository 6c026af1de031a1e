"""The variant of a kernel: score, mask, scale and sink of a spec as device functions, and the tensors and numbers they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import or_
from typing import Literal

from attngen.emit.cuda_text import SCALE, CudaPrinter, Temporary, c_name
from attngen.emit.gradient_functions import CapturedFunctions, captured_functions
from attngen.emit.score_factors import of_raw_scores, score_of_two, without_factor
from attngen.plan.axes import TILE_RANGES
from attngen.plan.captured_staging import NOTHING, Element, Staged
from attngen.plan.code_size import ALWAYS_INLINED, INLINED_UP_TO, cost_of_pairs, is_inlined
from attngen.plan.index_steps import STEP_RANGES, by_steps
from attngen.plan.mask_bounds import MaskBounds
from attngen.plan.plan import Plan
from attngen.plan.precision import rough_functions
from attngen.plan.spans import Span
from attngen.spec.attention import SIZES, AttentionSpec, S
from attngen.spec.bounds import Range, ranges
from attngen.spec.dropout import dropped_of, state_elements
from attngen.spec.dtypes import DTYPES, DType
from attngen.spec.expr import (
    MAX_LENGTH,
    Const,
    Expr,
    Gather,
    Name,
    Type,
    inputs_in,
    names_in,
    walk,
)
from attngen.spec.gradient import QKV
from attngen.spec.operator import FLOAT_ONE, apply
from attngen.spec.print_attn import expression_to_text, shown
from attngen.spec.ranges import dtype_range, element_ranges, name_ranges

# How the names of expressions are spelled in kernels. Names not listed are members of `in`, the captured values.
LOCALS = {
    "s": "s",
    "b": "b_idx",
    "h": "h_idx",
    "q": "q_idx",
    "k": "kv_idx",
    "q.lo": "q_lo",
    "q.hi": "q_hi",
    "k.lo": "kv_lo",
    "k.hi": "kv_hi",
    "q.tile": "q_tile",
    "k.tile": "kv_tile",
    "q.first": "q_first",
    "q.step": "q_step",
    "k.first": "kv_first",
    "k.step": "kv_step",
    SCALE.name: "softmax_scale",
} | {size: size for size in SIZES}
Approximate = Literal["", "fast", "rough"]
MOST_ROWS = 1024  # per tile: more than any plan has
OF_THE_BLOCK = {"b", "h", *SIZES}  # indices that all pairs of a block share
LOCAL_TYPES = {"s": "float", "softmax_scale": "float"}  # the others are int


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured tensor as kernels see it: a user's input, or the tile ranges that the pre-pass writes."""

    name: str
    dtype: DType
    dims: tuple[str, ...]
    narrow: tuple[bool, ...]  # per dimension, whether its index differs from pair to pair: its step is an int then

    @property
    def c_name(self) -> str:
        return c_name(self.name)

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def ctype(self) -> str:
        """The C type of an element in registers."""
        return element_type(self.dtype)

    @property
    def address(self) -> list[str]:
        """Where the element at i0, i1, ... lies: the terms of a sum."""
        steps = (f"{'(long long)' if narrow else ''}i{d} * in.{self.c_name}_step_{d}" for d, narrow in enumerate(self.narrow))
        return [f"(const char*)in.{self.c_name}", *steps]

    def read(self, at: str) -> str:
        """The element at the address `at`."""
        element = f"*(const {self.dtype.cuda}*){at}"
        return f"to_float({element})" if self.dtype.name in ("fp16", "bf16") else element


@dataclass(frozen=True, slots=True)
class Scalar:
    """A captured number: a param, or a free dimension that an expression uses."""

    name: str
    ctype: str
    is_size: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A `__device__` function printed from one or more expressions."""

    arguments: tuple[str, ...]  # names of LOCALS' spellings, in their order, then staged elements; `in` first where it is read
    signature: str
    temporaries: tuple[Temporary, ...]
    results: tuple[str, ...]
    inlined: bool  # each call is a copy of it
    ctypes: tuple[str, ...] = ()  # C types of the results

    def given(self, renamed: Mapping[str, str]) -> list[str]:
        """The arguments of a call where every one has its own name but those that are `renamed`."""
        return [renamed.get(a, a) for a in self.arguments]

    @property
    def result(self) -> str:
        (only,) = self.results
        return only

    @property
    def ctype(self) -> str:
        (only,) = self.ctypes
        return only


@dataclass(frozen=True, slots=True)
class StagedElement:
    """A staged element of a key, a row or a pair (`plan/captured_staging.py`), as kernels see it."""

    name: str
    ctype: str
    stored: str  # its C type in shared memory
    read: str  # from the captured tensor, of the kernel's own b_idx, h_idx and q_idx or kv_idx
    tensor: str  # its name in CUDA; of a term of rows ""
    indices: frozenset[str]  # b_idx and h_idx, if `read` has them
    what: str  # as the language writes it
    in_score: bool
    function: Function | None = None  # what `read` calls, of a term of rows

    @property
    def function_name(self) -> str:
        return f"{self.name}_of"


@dataclass(frozen=True, slots=True)
class Variant:
    """The device functions of one spec under one plan, and everything that they capture."""

    score: Function | None  # without the affine term; None: it is s, or two are computed at once
    score_of_two: str  # a call that replaces s0 and s1, of two keys of a row, by their scores; "": there is none
    affine: Function | None  # the score's term that is added once for a row and tile, with a multiple of `slope` for each key
    slope: Function | None
    one_score: Function | None  # whether `score` of a tile's first pair is that of all of them; None: never
    mask: Function | None  # None: every pair is allowed, or kv_range of a single row tells which; `asked`: what it is of
    asked: str
    mask_reads: bool  # the mask reads elements of captured tensors
    scale: str  # an expression of constants and captured numbers
    scale_is_constant: bool
    head_scale: Function | None  # the scale, if heads have their own
    factor: str  # multiplies all scores as part of the exponent's factor, instead of each score: kept scores lack it
    raw_scores: bool  # `score` takes Q K^T as it is; the scale is in its factors
    sink: Function | None
    v_scale: Function | None  # what the weight of a key is multiplied with before V
    dropout: Function | None  # the share that is dropped, with the arguments of `dropout_of`
    q_position: Function | None  # positions of a row and of a key, if a kernel of the file rotates them
    k_position: Function | None
    dropped: int | None  # how many of 256 weights are dropped; None: the call says it, or there is no dropout
    derivative: Function | None  # d score / d s, of a backward; None: 1
    captured_gradients: tuple[CapturedFunctions[Function], ...]  # those that are wanted
    kv_range: Function  # kv_begin, kv_end and, in closed form, full_begin, full_end
    q_range: Function | None  # the same of rows, for a block of keys
    classify: Function | None  # may, must; None where the closed forms tell all
    tensors: tuple[Captured, ...]
    scalars: tuple[Scalar, ...]
    spans: tuple[Span, ...]
    by_row: bool  # each row's range of keys is compared with; `mask` is what it does not say
    key_vectors: tuple[StagedElement, ...]
    row_elements: tuple[StagedElement, ...]
    pair_elements: tuple[StagedElement, ...]
    reads_q: bool  # score or mask would read outside a captured tensor for rows past the last one
    reads_k: bool
    uses_batch: bool  # an expression uses the size `batch`, which kernels need for nothing else
    helpers: tuple[str, ...]

    @property
    def scale_of_heads(self) -> Function | None:
        """The scale of V, if it is one for all keys of a head: O is multiplied with it in the end."""
        return None if self.scale_of_keys else self.v_scale

    @property
    def scale_of_keys(self) -> Function | None:
        """The scale of V, if keys have their own: weights are multiplied with it."""
        by_key = self.v_scale is not None and {"kv_idx", "kv_first"} & {*self.v_scale.arguments}
        return self.v_scale if by_key else None

    @property
    def of_scores(self) -> tuple[Function | None, ...]:
        """The functions that make up the score."""
        return self.score, self.affine, self.slope

    @property
    def of_row_terms(self) -> tuple[Function, ...]:
        """The functions that compute terms of rows."""
        return tuple(e.function for e in self.row_elements if e.function is not None)

    def elements_of_row(self, row: str) -> dict[str, str]:
        """The arguments of functions that are elements of a thread's row, of schedules that keep them in `row_elements`."""
        return {e.name: f"row_elements[{row}].{e.name}" for e in self.row_elements}

    @property
    def is_scale_of_call(self) -> bool:
        """Whether the scale is one number for a call, which its params say."""
        return not self.scale_is_constant and self.head_scale is None

    @property
    def scale_may_join(self) -> bool:
        """Whether the scale of a head joins the exponent's factor if it is positive."""
        return self.fold_scale and self.head_scale is not None

    @property
    def fold_scale(self) -> bool:
        """Whether the factor is the scale."""
        return self.factor == "softmax_scale"

    @property
    def exponent_varies(self) -> bool:
        """Whether the exponent's factor is that of a call: the scale joins it, and params are in the scale."""
        return self.fold_scale and not self.scale_is_constant

    @property
    def range_reads_rows(self) -> bool:
        """Whether the range of keys depends on the rows."""
        return bool({"q_lo", "q_hi"} & {*self.kv_range.arguments})

    @property
    def places_rows(self) -> bool:
        """Whether a thread needs the indices of its rows: for scores, the mask, or the range of keys of each row."""
        of_pairs = [f for f in (*self.of_scores, self.mask) if f is not None]
        by_range = self.by_row and self.range_reads_rows
        return by_range or bool(self.row_elements) or any({"q_idx", "q_first"} & {*f.arguments} for f in of_pairs)

    @property
    def captures(self) -> bool:
        return bool(self.tensors or self.scalars)


def build_variant(spec: AttentionSpec, plan: Plan) -> Variant:
    """The variant of a spec under a plan; with the classification of tiles if the schedule has tiles."""
    bounds = plan.bounds if plan.schedule.is_tiled else MaskBounds()
    kv_range, q_range, classify, spans = _of_tiles(bounds, plan.row_bounds)
    by_row = _compares_by_row(plan, bounds)
    staged, affine, approximate = plan.staged, plan.affine, _approximate(spec, plan)
    printer = _printer(spec, spans, staged.elements, approximate)
    asked = spec.mask if not by_row else None if bounds.exact else bounds.residual
    mask = None if asked is None else staged.named(asked)
    factor, score, raw = _scores(spec, plan, approximate)
    of_two = score_of_two(printer, raw) if plan.schedule.is_warp_specialized else ""
    pairs = PairFunctions(printer, staged)
    printed = (None if of_two else raw or score, mask, _derivative(spec, plan))
    score_of_pair, mask_of_pair, derivative = (None if e is None else pairs.print(e) for e in printed)
    sink, positions = _sink(spec, plan), _positions(spec, plan)
    exprs = _read_by(spec, plan, *positions, asked, sink, *kv_range, *q_range, *classify)
    elementwise = [e for e in (mask, score, spec.v_scale) if e is not None]
    return Variant(
        score=score_of_pair,
        score_of_two=of_two,
        one_score=_function(printer, plan.facts.uniform_score) if _has_one_score(plan) else None,
        affine=_function(printer, affine.term if affine else None, staged),
        slope=_function(printer, affine.slope if affine else None, staged),
        mask=mask_of_pair,
        asked="" if asked is None else expression_to_text(asked),
        mask_reads=asked is not None and bool(inputs_in(asked)),
        scale=printer.print(apply("float", spec.scale), share=False).results[0],
        scale_is_constant=isinstance(spec.scale, Const),
        head_scale=_function(printer, spec.scale if plan.head_scale else None),
        factor=factor,
        raw_scores=raw is not None,
        sink=_function(printer, sink),
        v_scale=_function(printer, spec.v_scale),
        dropout=_dropout(printer, spec),
        q_position=_function(printer, positions[0]),
        k_position=_function(printer, positions[1]),
        dropped=dropped_of(spec.dropout.value) if isinstance(spec.dropout, Const) else None,
        derivative=derivative,
        captured_gradients=_captured_gradients(pairs, plan),
        kv_range=_functions(printer, kv_range, is_inlined(*kv_range)),
        q_range=_several(printer, q_range),
        classify=_several(printer, classify),
        tensors=_tensors(spec, spans, exprs),
        scalars=_scalars(spec, exprs),
        spans=spans,
        by_row=by_row,
        key_vectors=tuple(_staged(printer, e) for e in staged.keys),
        row_elements=tuple(_staged(printer, e) for e in staged.of_rows),
        pair_elements=tuple(_staged(printer, e) for e in staged.pairs),
        reads_q=_reads_past(spec, elementwise, "q", staged.elements),
        reads_k=_reads_past(spec, elementwise, "k", staged.elements),
        uses_batch="batch" in names_in(*exprs),
        helpers=tuple(sorted(printer.helpers)),
    )


def _approximate(spec: AttentionSpec, plan: Plan) -> Approximate:
    """How scores are approximated. A result that is rounded to 16 bits may be; an lse, which is not, must not."""
    if not plan.schedule.on_tensor_cores or spec.dtype.bytes > 2 or spec.lse:
        return ""
    return "rough" if rough_functions(spec) else "fast"


def _scores(spec: AttentionSpec, plan: Plan, approximate: Approximate) -> tuple[str, Expr | None, Expr | None]:
    """The factor of all scores, the score of a pair without it, None if that is s, and the same of Q K^T as it is, if it is."""
    whole = plan.affine.rest if plan.affine else spec.score
    score = None if whole is S else _of_pairs(spec, plan, whole)
    factor = ""
    if plan.affine is None and plan.schedule.on_tensor_cores:  # an affine term is in the units of scores
        factor, score = without_factor(spec, score, plan.head_scale)
    is_raw = approximate and plan.direction == "forward"  # a derivative needs s
    return factor, score, of_raw_scores(score, spec.scale) if is_raw else None


def _derivative(spec: AttentionSpec, plan: Plan) -> Expr | None:
    """d score / d s, of a backward; None: 1."""
    gradient = plan.facts.gradient
    return None if gradient is None or gradient.ds is FLOAT_ONE else _of_pairs(spec, plan, gradient.ds)


def _sink(spec: AttentionSpec, plan: Plan) -> Expr | None:
    """The sink, unless a backward reads it as a part of lse."""
    lse_has_it = plan.direction == "backward" and "lse" in plan.saved and {*plan.wanted} <= {*QKV}
    return None if lse_has_it else spec.sink


def _positions(spec: AttentionSpec, plan: Plan) -> tuple[Expr | None, Expr | None]:
    """The positions of a row and of a key, where a kernel of the file rotates them."""
    return spec.rotary.positions if spec.rotary is not None and plan.rotated else (None, None)


def _has_one_score(plan: Plan) -> bool:
    """Whether kernels ask if a tile has one score."""
    return plan.direction == "forward" and plan.schedule.is_tiled and not plan.schedule.packs_heads


def _read_by(spec: AttentionSpec, plan: Plan, *others: Expr | None) -> list[Expr]:
    """All expressions that kernels compute: `others`, and those that every variant has."""
    dropout = () if spec.dropout is None else (spec.dropout, *state_elements())
    elements = [e.expr for e in (*plan.staged.keys, *plan.staged.of_rows)]
    return [e for e in (*dropout, spec.score, spec.scale, spec.v_scale, *others, *elements) if e is not None]


def _of_tiles(bounds: MaskBounds, row_bounds: MaskBounds | None) -> tuple[list[Expr], list[Expr], list[Expr], tuple[Span, ...]]:
    """What says which tiles are visited: the range of keys, that of rows, the test of a tile, and the spans that these read."""
    axes = [b for b in (bounds, row_bounds) if b is not None]
    tested = next((b for b in axes if b.per_tile), None)  # one axis without closed forms: tiles of both are tested
    tests = [tested.may, tested.must] if tested else []
    ends = [(b.begin, b.end) if tested else (b.begin, b.end, b.full_begin, b.full_end) for b in axes]
    of_keys, of_rows = (*([e for e in exprs if e is not None] for exprs in ends), [])[:2]
    read = inputs_in(*of_keys, *of_rows, *tests)
    return of_keys, of_rows, tests, tuple(dict.fromkeys(s for b in axes for s in b.spans if not read.isdisjoint(s.ends)))


def _compares_by_row(plan: Plan, bounds: MaskBounds) -> bool:
    """Whether each key is compared with the range of its row, which says all or a part of what the mask says."""
    by_range = bounds.exact or (bounds.per_tile and bool(plan.staged.keys))
    return plan.schedule.is_warp_specialized and plan.direction == "forward" and by_range


def _captured_gradients(pairs: PairFunctions, plan: Plan) -> tuple[CapturedFunctions[Function], ...]:
    """The functions of the captured gradients that are wanted."""
    staged, gradient = plan.staged, plan.facts.gradient
    wanted = [one for one in gradient.captured if one.name in plan.wanted] if gradient else []
    return tuple(captured_functions(one, lambda e: pairs.print(staged.named(e))) for one in wanted)


def _of_pairs(spec: AttentionSpec, plan: Plan, expr: Expr) -> Expr:
    """`expr` as it is computed for each pair: with staged elements, and floats of indices by steps if a thread has several."""
    several, terms = plan.schedule.is_fused, Staged(terms=plan.staged.terms)
    expr = terms.named(expr)
    return plan.staged.named(by_steps(expr, name_ranges(spec), element_ranges(spec)) if several else expr)


def _printer(spec: AttentionSpec, spans: Iterable[Span], staged: tuple[Element, ...], approximate: Approximate) -> CudaPrinter:
    elements = element_ranges(spec)
    for span in spans:
        if span.input in elements:
            elements |= {f"{span.name}.{end}": elements[span.input] for end in ("min", "max")}
    captured = (*spec.free_dims, *(p.name for p in spec.params))
    names = {n: f"in.{n}" for n in captured} | LOCALS | {e.symbol.name: e.name for e in staged}
    return CudaPrinter(names, name_ranges(spec) | TILE_RANGES | STEP_RANGES | staged_ranges(staged), elements, approximate)


@dataclass(slots=True)
class PairFunctions:
    """Prints the functions of pairs. Each pair of a thread has a copy of those that are inlined, which together cost at most
    INLINED_UP_TO; the others are called."""

    printer: CudaPrinter
    staged: Staged
    left: int = INLINED_UP_TO

    def print(self, expr: Expr) -> Function:
        own = cost_of_pairs(expr)
        inlined = own <= max(self.left, ALWAYS_INLINED)
        self.left -= own if inlined else 0
        return _functions(self.printer, [expr], inlined, self.staged.elements)


def _function(printer: CudaPrinter, expr: Expr | None, staged: Staged = NOTHING) -> Function | None:
    if expr is None:
        return None
    named = staged.named(expr)
    return _functions(printer, [named], is_inlined(named), staged.elements)


def _several(printer: CudaPrinter, exprs: list[Expr]) -> Function | None:
    return _functions(printer, exprs, is_inlined(*exprs)) if exprs else None


def _functions(printer: CudaPrinter, exprs: list[Expr], inlined: bool, staged: tuple[Element, ...] = ()) -> Function:
    text = printer.print(*exprs, inlined=inlined)
    used = names_in(*exprs)
    ctypes = {n: (c, LOCAL_TYPES.get(c, "int")) for n, c in LOCALS.items()}
    ctypes |= {e.symbol.name: (e.name, element_type(e.dtype)) for e in staged}
    reads_captured = any(isinstance(n, Gather) or (isinstance(n, Name) and n.name not in ctypes) for n in walk(*exprs))
    declared = {"in": "const Captured& in"} if reads_captured else {}
    declared |= {argument: f"{ctype} {argument}" for n, (argument, ctype) in ctypes.items() if n in used}
    signature = ", ".join(declared.values())
    return Function(tuple(declared), signature, text.temporaries, text.results, inlined, text.ctypes)


def _dropout(printer: CudaPrinter, spec: AttentionSpec) -> Function | None:
    """The share that is dropped, with the arguments that a head's generator needs."""
    if spec.dropout is None:
        return None
    arguments = {"in": "const Captured& in", "b_idx": "int b_idx", "h_idx": "int h_idx"}
    results = printer.print(spec.dropout, share=False).results
    return Function(tuple(arguments), ", ".join(arguments.values()), (), results, True, ("float",))


def _staged(printer: CudaPrinter, element: Element) -> StagedElement:
    indices = frozenset(LOCALS[n] for n in names_in(element.expr) & {"b", "h"})
    what = shown(element.expr)
    types = element_type(element.dtype), element.stored.cuda
    if isinstance(element.expr, Gather):
        (read,) = printer.print(element.expr, share=False).results
        return StagedElement(element.name, *types, read, c_name(element.input), indices, what, element.in_score)
    function = _functions(printer, [element.expr], inlined=True)
    read = f"{element.name}_of({', '.join(function.arguments)})"
    return StagedElement(element.name, *types, read, "", indices, what, element.in_score, function)


def staged_ranges(staged: tuple[Element, ...]) -> dict[str, Range]:
    """The ranges of staged integers by the names that replace them; elements of keys past the end are 0."""
    return {e.symbol.name: known for e in staged if (known := dtype_range(e.dtype)) is not None}


def element_type(dtype: DType) -> str:
    """The C type of an element in registers."""
    return "float" if dtype.kind == "float" else dtype.cuda


def _tensors(spec: AttentionSpec, spans: tuple[Span, ...], exprs: list[Expr]) -> tuple[Captured, ...]:
    reads = [n for n in walk(*exprs) if isinstance(n, Gather)]
    narrow: dict[str, tuple[bool, ...]] = {}
    for node in reads:
        differs = tuple(not names_in(a) <= OF_THE_BLOCK or bool(inputs_in(a)) for a in node.args)
        narrow[node.input] = tuple(map(or_, differs, narrow.get(node.input, differs)))
    users = [Captured(i.name, i.dtype, tuple(map(str, i.dims)), narrow[i.name]) for i in spec.inputs if i.name in narrow]
    return (*users, *(r for span in spans for r in range_tensors(spec, span)))


def range_tensors(spec: AttentionSpec, span: Span) -> tuple[Captured, Captured]:
    """The two tensors that the pre-pass writes for `span`, of the type of the input; fp32 for floats."""
    source = spec.input(span.input)
    others = tuple(map(str, (*source.dims[: span.dim], *source.dims[span.dim + 1 :])))
    dims = (*others, f"tiles of {' and '.join(span.index)}")
    dtype = DTYPES["fp32"] if source.dtype.kind == "float" else source.dtype
    narrow = (*(False for _ in others), True)
    return Captured(f"{span.name}.min", dtype, dims, narrow), Captured(f"{span.name}.max", dtype, dims, narrow)


def _scalars(spec: AttentionSpec, exprs: list[Expr]) -> tuple[Scalar, ...]:
    used = names_in(*exprs)
    sizes = [Scalar(n, "int", True) for n in spec.free_dims if n in used]
    params = [Scalar(p.name, "int" if p.type is Type.INT else "float", False) for p in spec.params if p.name in used]
    return (*sizes, *params)


def _reads_past(spec: AttentionSpec, exprs: list[Expr], index: str, staged: tuple[Element, ...]) -> bool:
    """Whether rows or keys past the last one, which tiles contain, would read outside a captured tensor."""
    every = name_ranges(spec) | dict.fromkeys(("q", "k"), (0, MAX_LENGTH + MOST_ROWS)) | staged_ranges(staged)
    for node in walk(*exprs):
        if isinstance(node, Gather):
            for arg, dim in zip(node.args, spec.input(node.input).dims, strict=True):
                low, high = ranges(arg, every, element_ranges(spec))[arg]
                if index in names_in(arg) and not (isinstance(dim, int) and low >= 0 and high < dim):
                    return True
    return False
