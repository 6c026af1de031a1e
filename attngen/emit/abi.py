"""The parameters of every kernel: which tensors, strides, sizes and numbers, in which order, under which names."""

from __future__ import annotations

from attngen.emit.cuda_text import c_name
from attngen.emit.kernel_source import Binding, CeilDiv, Extent, Parameter, TensorSpec
from attngen.emit.variant import Captured, Variant, range_tensors
from attngen.plan.plan import Plan
from attngen.plan.tiles import Span
from attngen.spec.attention import AttentionSpec

AXES = "bhsd"  # batch, head, sequence, dimension


def head_counts(spec: AttentionSpec) -> tuple[Extent, Extent]:
    """The query and key/value heads as dimensions: numbers where the spec fixes them."""
    if spec.q_heads is None or spec.kv_heads is None:
        return "q_heads", "kv_heads"
    return spec.q_heads, spec.kv_heads


def tensor_specs(spec: AttentionSpec, plan: Plan, variant: Variant) -> tuple[TensorSpec, ...]:
    """Every tensor of the kernels: Q, K, V, captured inputs, O, lse, workspaces."""
    q_heads, kv_heads = head_counts(spec)
    dtype = spec.dtype.name
    vectors = plan.on_tensor_cores  # rows are copied 16 bytes at a time
    rows = {"alignment": 16 if vectors else 0, "unit_stride": vectors}
    tensors = [
        TensorSpec("Q", "input", dtype, ("batch", q_heads, "q_len", spec.head_dim), **rows),  # type: ignore[arg-type]
        TensorSpec("K", "input", dtype, ("batch", kv_heads, "kv_len", spec.head_dim), **rows),  # type: ignore[arg-type]
        TensorSpec("V", "input", dtype, ("batch", kv_heads, "kv_len", spec.head_dim_v), **rows),  # type: ignore[arg-type]
    ]
    tensors += [TensorSpec(i.name, "input", i.dtype.name, tuple(_extent(spec, d) for d in i.dims)) for i in spec.inputs]
    output = ("batch", q_heads, "q_len", spec.head_dim_v)
    tensors.append(TensorSpec("O", "output", dtype, output, 16 if vectors else 0, vectors))
    if spec.lse:
        tensors.append(TensorSpec("lse", "output", "fp32", ("batch", q_heads, "q_len")))
    if not plan.is_fused:
        tensors.append(TensorSpec("S", "workspace", "fp32", ("batch", q_heads, "q_len", *_score_row(plan))))
    if plan.roles is not None:
        tensors.append(TensorSpec("next_work", "counter", "int32", (1,)))
    for span in variant.spans:
        tensors += range_specs(spec, plan, span)
    return tuple(tensors)


def _score_row(plan: Plan) -> tuple[Extent, ...]:
    """A row of S: the keys, in whole tiles where there are tiles."""
    return ("kv_len",) if plan.rung == "naive" else (CeilDiv("kv_len", plan.block_kv), plan.block_kv)


def _extent(spec: AttentionSpec, dim: int | str) -> Extent:
    if isinstance(dim, int):
        return dim
    q_heads, kv_heads = head_counts(spec)
    return {"q_heads": q_heads, "kv_heads": kv_heads}.get(dim, dim)


def tile_count(spec: AttentionSpec, plan: Plan, span: Span) -> Extent:
    """How many tiles the ranged dimension of `span` has."""
    dim = _extent(spec, spec.input(span.input).dims[span.axis])
    block = plan.block_q if span.index == "q" else plan.block_kv  # where of both, these are as long
    return -(-dim // block) if isinstance(dim, int) else CeilDiv(str(dim), block)


def range_specs(spec: AttentionSpec, plan: Plan, span: Span) -> list[TensorSpec]:
    source = spec.input(span.input)
    others = tuple(_extent(spec, d) for d in (*source.dims[: span.axis], *source.dims[span.axis + 1 :]))
    shape = (*others, tile_count(spec, plan, span))
    return [TensorSpec(c_name(t.name), "workspace", t.dtype.name, shape) for t in range_tensors(spec, span)]


# --- parameters -------------------------------------------------------------------------------------------------------


def data(tensor: str, ctype: str, *, writable: bool = False, name: str | None = None) -> Parameter:
    return Parameter(name or tensor, f"{ctype}*" if writable else f"const {ctype}*", "data", tensor)


def tensor_map(tensor: str, box_rows: int) -> Parameter:
    """A tensor as TMA sees it: boxes of `box_rows` rows, 128 bytes each."""
    return Parameter(f"{tensor.lower()}_map", "const __grid_constant__ TensorMap", "map", tensor, box_rows)


def strides(tensor: str, axes: str = AXES) -> list[Parameter]:
    """The strides of a tensor laid out [batch, head, sequence, dimension], for the axes named."""
    return [Parameter(f"{tensor.lower()}_stride_{a}", "long long", "stride", tensor, AXES.index(a)) for a in axes]


def sizes(spec: AttentionSpec, *wanted: str) -> list[Parameter]:
    """Sizes as parameters; head counts that the spec fixes are constants of the file instead."""
    fixed = () if spec.q_heads is None else ("q_heads", "kv_heads")
    return [Parameter(n, "int", "size", n) for n in wanted if n not in fixed]


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
