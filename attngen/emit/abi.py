"""The tensors of a program, and the parameters of its kernels: which, in which order, under which names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attngen.emit.cuda_text import c_name
from attngen.emit.program import Axis, Binding, CeilDiv, Extent, OneMore, PackedBlocks, Parameter, Tensor, free
from attngen.emit.variant import Captured, Variant, range_tensors
from attngen.plan.captured_sums import WORDS, TermSum, sizes_of_own_indices, sizes_of_pairs
from attngen.plan.head_scale import with_head_scale
from attngen.plan.plan import Plan
from attngen.plan.prepared import with_converted_keys
from attngen.plan.spans import Span
from attngen.plan.terms import TERMS, term_columns
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import BF16
from attngen.spec.gradient import gradient_argument

STRIDE_LETTERS = "bhsd"  # batch, or page of a pool; head, sequence, dimension
LETTERS = {
    "batch": "b",
    **dict.fromkeys(("q_heads", "kv_heads"), "h"),
    "pages": "p",
    **dict.fromkeys(("q_len", "kv_len", "total_q", "total_k", "page_size"), "s"),
    **dict.fromkeys(("head_dim", "head_dim_v"), "d"),
}  # letters of the axes with these names
BEGINNINGS = {"page_table": (free("batch"), free("max_pages")), "seqused": (free("batch"),)}  # axes; of others batch + 1
TOTALS = {"cu_seqlens_q": "total_q", "cu_seqlens_k": "total_k"}  # the sizes of the rows and keys of all sequences
TRANSPOSED_BYTES = 128  # bytes of a row of transposed values: what the swizzle permutes
ROW_ALIGNMENT = 16  # bytes: one copy of the kernels on tensor cores


def head_axes(spec: AttentionSpec) -> tuple[Axis, Axis]:
    """The axes of query and key/value heads: of fixed sizes if the spec fixes them."""
    if spec.q_heads is None or spec.kv_heads is None:
        return free("q_heads"), free("kv_heads")
    return Axis("q_heads", spec.q_heads), Axis("kv_heads", spec.kv_heads)


def rows_of_heads(spec: AttentionSpec, *last: Axis) -> tuple[Axis, ...]:
    """The axes of an array with something for each row of each query head: a vector along `last`, or a number without it."""
    return _of_heads(spec, head_axes(spec)[0], "q_len", "total_q", *last)


def keys_of_heads(spec: AttentionSpec, *last: Axis) -> tuple[Axis, ...]:
    """The same for each key of each key/value head."""
    kernel = spec.kernel
    if kernel.is_paged:
        page = free("page_size") if kernel.page_size is None else Axis("page_size", kernel.page_size)
        return free("pages"), head_axes(spec)[1], page, *last
    if kernel.is_counted:
        return free("batch"), head_axes(spec)[1], free("kv_len"), *last
    return _of_heads(spec, head_axes(spec)[1], "kv_len", "total_k", *last)


def every_row(spec: AttentionSpec, *last: Axis) -> tuple[Axis, ...]:
    """The axes of a workspace with numbers for each row of each query head, whatever the storage."""
    return free("batch"), head_axes(spec)[0], free("q_len"), *last


def _of_heads(spec: AttentionSpec, heads: Axis, length: str, total: str, *last: Axis) -> tuple[Axis, ...]:
    if not spec.kernel.is_packed:
        return free("batch"), heads, free(length), *last
    return (free(total), heads, *last) if last else (heads, free(total))


def input_tensors(
    spec: AttentionSpec,
    alignment: int = 0,
    unit_stride: bool = False,
    rotated: tuple[str, ...] = (),
    converted: tuple[str, ...] = (),
) -> Iterator[Tensor]:
    """What every call of a spec is given: Q, K, V, where packed or paged sequences are, and the captured tensors. Those that a
    kernel rotates, `rotated`, or converts, `converted`, lie as its copies require, and tables are read row by row."""
    dtypes = {tensor: dtype.name for tensor, dtype in spec.dtypes.items()}
    head_dim, head_dim_v = Axis("head_dim", spec.head_dim), Axis("head_dim_v", spec.head_dim_v)
    of_qk = (ROW_ALIGNMENT, True) if rotated else (alignment, unit_stride)
    yield Tensor("Q", "input", dtypes["q"], rows_of_heads(spec, head_dim), "q", *of_qk)
    of_parts = (ROW_ALIGNMENT // spec.dtype.bytes, True)  # as many elements of a byte as a copy of 16 bytes has
    of_k, of_v = (of_parts if name in converted else usual for name, usual in (("K", of_qk), ("V", (alignment, unit_stride))))
    yield Tensor("K", "input", dtypes["k"], keys_of_heads(spec, head_dim), "k", *of_k)
    yield Tensor("V", "input", dtypes["v"], keys_of_heads(spec, head_dim_v), "v", *of_v)
    for name in spec.kernel.beginnings:
        yield Tensor(name, "input", "int32", BEGINNINGS.get(name, (Axis("", OneMore("batch")),)), name, unit_stride=True)
    tables = spec.rotary.tables if spec.rotary is not None and rotated else ()
    for i in spec.inputs:
        axes, is_table = captured_axes(spec, i.dims), i.name in tables
        yield Tensor(i.name, "input", i.dtype.name, axes, i.name, unit_stride=is_table, broadcasts=True)


def program_tensors(
    spec: AttentionSpec, plan: Plan, variant: Variant, axes_of: Callable[[str], tuple[Axis, ...]]
) -> Iterator[Tensor]:
    """Every tensor of the kernels. What is known of a tensor is stated here, except the axes of the workspaces that the plan
    names, `axes_of`."""
    layout = (ROW_ALIGNMENT, True) if plan.schedule.on_tensor_cores else (0, False)
    yield from input_tensors(spec, *layout, plan.rotated, plan.converted)
    for name in plan.rotated:
        axes = rows_of_heads if name == "Q" else keys_of_heads
        yield Tensor(rotated(name), "workspace", spec.dtypes[name.lower()].name, axes(spec, Axis("head_dim", spec.head_dim)))
    for name in plan.converted:
        size = Axis("head_dim", spec.head_dim) if name == "K" else Axis("head_dim_v", spec.head_dim_v)
        yield Tensor(converted(name), "workspace", spec.dtype.name, keys_of_heads(as_read(spec, plan), size))
    for name in plan.transposed:
        yield Tensor(transposed(name), "workspace", spec.dtypes[name.lower()].name, transposed_axes(spec, plan.block_kv))
    for name in plan.in_terms:
        axes = rows_of_heads if name == "Q" else keys_of_heads
        of_name, columns = ("head_dim_v", spec.head_dim_v) if name == "V" else ("head_dim", spec.head_dim)
        wide = Axis(of_name, TERMS * term_columns(columns))
        yield Tensor(in_terms(name), "workspace", BF16.name, axes(spec, wide))
    yield from (backward_tensors if plan.direction == "backward" else forward_tensors)(spec, plan, layout)
    for name in plan.workspaces:
        yield Tensor(name, "workspace", "fp32", axes_of(name))
    for terms in plan.term_sums:
        yield _term_workspace(spec, plan, terms)
    if plan.schedule.is_warp_specialized:
        yield NEXT_WORK
    for span in variant.spans:
        yield from range_workspaces(spec, plan, span)


def forward_tensors(spec: AttentionSpec, plan: Plan, layout: tuple[int, bool]) -> Iterator[Tensor]:
    """The results of a forward."""
    yield Tensor("O", "output", spec.dtypes["o"].name, rows_of_heads(spec, Axis("head_dim_v", spec.head_dim_v)), "out", *layout)
    for name in plan.numbers_of_rows:
        yield Tensor(name, "output", "fp32", rows_of_heads(spec), name)


def backward_tensors(spec: AttentionSpec, plan: Plan, layout: tuple[int, bool]) -> Iterator[Tensor]:
    """What the forward saved, the gradients of its results, the gradients that are wanted."""
    dtypes = {tensor: dtype.name for tensor, dtype in spec.dtypes.items()}
    rows = rows_of_heads(spec)
    head_dim, head_dim_v = Axis("head_dim", spec.head_dim), Axis("head_dim_v", spec.head_dim_v)
    if "out" in plan.saved:
        yield Tensor("O", "input", dtypes["o"], rows_of_heads(spec, head_dim_v), "out", *layout)
    for name in ("lse", "lse_rest"):
        if name in plan.saved:
            yield Tensor(name, "input", "fp32", rows, name)
    yield Tensor("dO", "input", dtypes["o"], rows_of_heads(spec, head_dim_v), "dout", *layout)
    if spec.lse:
        yield Tensor("dlse", "input", "fp32", rows, "dlse")
    results = {
        "q": ("dQ", rows_of_heads(spec, head_dim)),
        "k": ("dK", keys_of_heads(spec, head_dim)),
        "v": ("dV", keys_of_heads(spec, head_dim_v)),
    }
    for wanted, (name, axes) in results.items():
        if plan.wants(wanted):
            of_name = (ROW_ALIGNMENT, True) if wanted.upper() in plan.rotated else layout
            yield Tensor(name, "output", dtypes[wanted], axes, name.lower(), *of_name)
    for i in spec.inputs:
        if plan.wants(i.name):
            argument, dims, of_pairs = gradient_argument(i.name), captured_axes(spec, i.dims), i.name in plan.written_pairs
            if of_pairs:
                assert plan.facts.gradient is not None
                dims = captured_axes(spec, sizes_of_pairs(plan.facts.gradient.of(i.name)))
            yield Tensor(argument, "output", i.dtype.name, dims, argument, broadcasts=not of_pairs, like=i.name)
    for param in spec.params:
        if plan.wants(param.name):
            yield Tensor(gradient_argument(param.name), "output", "fp32", (), gradient_argument(param.name))


def _term_workspace(spec: AttentionSpec, plan: Plan, terms: TermSum) -> Tensor:
    """What the gradients of captured tensors are added up in. Where each element has a single pair, the term of a pair is the
    gradient itself, and is written there; every pair is visited if there is no mask."""
    heads = (free("batch"), head_axes(spec)[0])
    match terms.place:
        case "rows":
            return Tensor(terms.name, "workspace", "fp32", (*heads, free("q_len")))
        case "keys":
            return Tensor(terms.name, "workspace", "fp32", (*heads, free("kv_len")))
        case "pairs":
            assert plan.facts.gradient is not None
            every = spec.kernel.storage == "dense" and not spec.mask
            sizes = sizes_of_own_indices(plan.facts.gradient.of(terms.captured)) if every else ()
            axes = (*heads, free("q_len"), free("kv_len"))
            return Tensor(terms.name, "workspace", "fp32", axes, unless=sizes, unless_of=terms.captured if sizes else "")
    elements = captured_axes(spec, spec.input(terms.captured).dims)
    return Tensor(terms.name, "workspace", "int64", (*elements, Axis("", WORDS)), like=terms.captured)


def _dimension(extent: Extent) -> str | int:
    """The dimension that an extent follows from, if it is one."""
    match extent:
        case CeilDiv() | OneMore():
            return extent.size
        case PackedBlocks():
            return extent.total
    return extent if isinstance(extent, (int, str)) else str(extent)


def rotated(name: str) -> str:
    """The workspace with the rotated rows of a tensor, which other kernels read in its place."""
    return f"{name}_rotated"


def converted(name: str) -> str:
    """The workspace with the rows of a tensor in the type of Q, which other kernels read in its place."""
    return f"{name}_converted"


def transposed(name: str) -> str:
    """The workspace with the columns of a tensor as rows, which other kernels read in its place."""
    return f"{name}_transposed"


def in_terms(name: str) -> str:
    """The workspace with three terms of each number of a tensor, which other kernels read in its place."""
    return f"{name}_terms"


def transposed_axes(spec: AttentionSpec, keys: int) -> tuple[Axis, ...]:
    """The axes of transposed values: slabs of so many keys, in rows of TRANSPOSED_BYTES, which have these of one column, or of
    several. A sequence begins with a slab of its own; packed sequences follow one another."""
    packed = spec.kernel.is_packed and not spec.kernel.is_counted
    batch = Axis("batch", 1) if packed else free("batch")
    slabs = PackedBlocks("total_k", keys, "batch") if packed else CeilDiv("kv_len", keys)
    rows = Axis("head_dim_v", spec.head_dim_v * keys // TRANSPOSED_BYTES)
    return batch, head_axes(spec)[1], Axis("", slabs), rows, Axis("", TRANSPOSED_BYTES)


def as_read(spec: AttentionSpec, plan: Plan) -> AttentionSpec:
    """`spec` as the kernels read it that come after those which prepare rows: keys and values of the type of Q, in no pages;
    and with the scale of a head."""
    of_keys = with_converted_keys(spec) if plan.converted else spec
    return with_head_scale(of_keys) if plan.head_scale else of_keys


def is_of_pairs(tensor: Tensor) -> bool:
    """Whether a tensor has an element for each pair of a row and a key."""
    sizes = {_dimension(axis.size) for axis in tensor.axes}
    return {"q_len", "kv_len"} <= sizes


NEXT_WORK = Tensor("next_work", "counter", "int32", (Axis("", 1),))


def captured_axes(spec: AttentionSpec, dims: tuple[int | str, ...]) -> tuple[Axis, ...]:
    """The axes of a captured tensor that the spec declares with `dims`."""
    heads = {axis.name: axis for axis in head_axes(spec)}
    return tuple(Axis("", d) if isinstance(d, int) else heads.get(d) or free(d) for d in dims)


def range_workspaces(spec: AttentionSpec, plan: Plan, span: Span) -> list[Tensor]:
    """The minima and maxima of a captured vector over each tile."""
    source = spec.input(span.input)
    axes = captured_axes(spec, source.dims)
    length = axes[span.dim].size
    block = plan.block_q if span.index == "q" else plan.block_kv  # for both, the two are equal
    tiles = -(-length // block) if isinstance(length, int) else CeilDiv(str(length), block)
    shape = (*axes[: span.dim], *axes[span.dim + 1 :], Axis("", tiles))
    return [Tensor(c_name(t.name), "workspace", t.dtype.name, shape) for t in range_tensors(spec, span)]


# --- parameters -------------------------------------------------------------------------------------------------------


def data(tensor: str, ctype: str, *, writable: bool = False, name: str | None = None) -> Parameter:
    return Parameter(name or tensor, f"{ctype}*" if writable else f"const {ctype}*", "data", tensor)


def tensor_map(spec: AttentionSpec, tensor: Tensor, box_rows: int) -> Parameter:
    """A tensor as TMA sees it: boxes of `box_rows` rows, 128 bytes each."""
    ends_early = spec.kernel.is_counted and "kv_len" in {axis.name for axis in tensor.axes}  # a batch is one page
    binding = "paged_map" if ends_early else MAPS[LETTERS[tensor.axes[0].name]]
    return Parameter(map_name(tensor.name), "const __grid_constant__ TensorMap", binding, tensor.name, box_rows)


def map_name(tensor: str) -> str:
    """The parameter with the tensor map of `tensor`, as q_map of Q."""
    return f"{tensor.lower()}_map"


MAPS: dict[str, Binding] = {"b": "map", "s": "packed_map", "p": "paged_map"}  # by the letter of a tensor's first axis


def strides(tensor: Tensor, axes: str = STRIDE_LETTERS) -> list[Parameter]:
    """The strides of a tensor of rows or keys, for those of the axes batch, head, sequence, dimension that it has."""
    letters = [LETTERS[axis.name] for axis in tensor.axes]
    name = tensor.name
    return [
        Parameter(f"{name.lower()}_stride_{a}", "long long", "stride", name, letters.index(a))
        for a in axes.replace("b", "bp")
        if a in letters
    ]


def sizes(spec: AttentionSpec, *wanted: str) -> list[Parameter]:
    """Sizes as parameters; those that the spec fixes are constants of the file instead. Lengths are at least those of the
    longest sequence; unless storage is dense, those of each are read from memory, and if rows are packed, so is where each
    begins: no sequence has rows past the last one of all."""
    begins = {"q_len": "cu_seqlens_q", "kv_len": "seqused" if spec.kernel.is_counted else "cu_seqlens_k"}
    read = [begins[n] for n in wanted if whole_size(spec, n) != n]
    totals = [TOTALS[name] for name in read if name in TOTALS and TOTALS[name] not in wanted]
    return [data(name, "int") for name in read] + whole_sizes(spec, *wanted, *totals)


def whole_sizes(spec: AttentionSpec, *wanted: str) -> list[Parameter]:
    """`sizes` of dimensions, whatever the sequence."""
    fixed = () if spec.q_heads is None else ("q_heads", "kv_heads")
    return [Parameter(whole_size(spec, n), "int", "size", n) for n in wanted if n not in fixed]


def whole_size(spec: AttentionSpec, name: str) -> str:
    """The name of the size of a dimension, whatever the sequence."""
    return f"max_{name}" if f"max_{name}" in spec.kernel.longest else name


def pages(spec: AttentionSpec) -> list[Parameter]:
    """What a kernel that reads paged keys or values knows of their pages."""
    if not spec.kernel.is_paged:
        return []
    size = [] if spec.kernel.page_size is not None else [Parameter("page_size", "int", "size", "page_size")]
    return [data("page_table", "int"), Parameter("page_table_stride_b", "long long", "stride", "page_table", 0), *size]


def extents(tensor: Tensor) -> list[Parameter]:
    """The sizes of the array of a tensor: 1 where it is broadcast."""
    return [Parameter(f"{tensor.name}_size_{d}", "int", "extent", tensor.name, d) for d in range(len(tensor.axes))]


def all_strides(tensor: Tensor) -> list[Parameter]:
    """The strides of a tensor with any axes."""
    return [Parameter(f"{tensor.name}_stride_{d}", "long long", "stride", tensor.name, d) for d in range(len(tensor.axes))]


def steps(tensor: Captured) -> list[Parameter]:
    """The strides of a captured tensor in bytes."""
    names = [f"captured_{tensor.c_name}_step_{d}" for d in range(tensor.rank)]
    ctypes = ["int" if narrow else "long long" for narrow in tensor.narrow]
    return [Parameter(n, c, "step", tensor.c_name, d) for d, (n, c) in enumerate(zip(names, ctypes, strict=True))]


def captured(variant: Variant) -> list[Parameter]:
    """Everything that the variant's functions read besides indices and sizes."""
    parameters: list[Parameter] = []
    for t in variant.tensors:
        parameters += [Parameter(f"captured_{t.c_name}", f"const {t.dtype.cuda}*", "data", t.c_name), *steps(t)]
    for scalar in variant.scalars:
        binding: Binding = "size" if scalar.is_size else "param"
        parameters.append(Parameter(f"captured_{scalar.name}", scalar.ctype, binding, scalar.name))
    return parameters
