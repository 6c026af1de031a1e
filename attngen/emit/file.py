"""What the files of all schedules share: signatures, constants, captured values, the pre-pass. The templates do the writing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attngen.emit import abi, words
from attngen.emit.cuda_text import c_name
from attngen.emit.kernel_source import EntryPoint, Extent, Parameter, Product, TensorSpec
from attngen.emit.variant import Function, Variant, range_dtype, range_tensors
from attngen.emit.wgmma import Wgmma
from attngen.plan.plan import Plan
from attngen.plan.tiles import KV_LEN, Span
from attngen.spec.attention import AttentionSpec
from attngen.spec.operator import ZERO
from attngen.spec.print_attn import to_text


@dataclass(frozen=True, slots=True)
class SignatureLine:
    """One line of a kernel's signature: parameters that belong together, and what they are."""

    text: str
    comment: str


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel as its template sees it."""

    entry: EntryPoint
    signature: tuple[SignatureLine, ...]

    threads: str  # as the launch bounds say it: a constant's name or a number

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True, slots=True)
class ConstantLine:
    ctype: str
    name: str
    value: str
    comment: str = ""


@dataclass(frozen=True, slots=True)
class RangeKernel:
    """One kernel of the pre-pass."""

    kernel: KernelText
    length: str
    block: str
    others: tuple[dict[str, object], ...]
    element: str
    pointer: str
    read: str
    ctype: str
    lowest: str
    highest: str
    is_float: bool
    min: str
    max: str


@dataclass(frozen=True, slots=True)
class CapturedField:
    ctype: str
    name: str
    parameter: str
    comment: str


def captured_fields(variant: Variant) -> list[CapturedField]:
    fields: list[CapturedField] = []
    for t in variant.tensors:
        shape = f"{t.dtype.name} [{', '.join(t.dims)}]"
        fields.append(CapturedField(f"const {t.dtype.cuda}*", t.c_name, f"captured_{t.c_name}", shape))
        fields += [CapturedField(p.ctype, f"{t.c_name}_step_{p.dim}", p.name, "") for p in abi.steps(t)]
    fields += [CapturedField(s.ctype, s.name, f"captured_{s.name}", "") for s in variant.scalars]
    return fields


def thread_grid(row_threads: int, column_threads: int, dims: str) -> list[ConstantLine]:
    """A block's threads as a grid over a tile of S, and over its rows of O, of which a block has `dims` dimensions."""
    return [
        ConstantLine("int", "ROW_THREADS", str(row_threads), "of the block's threads, as a grid over a tile"),
        ConstantLine("int", "COLUMN_THREADS", str(column_threads)),
        ConstantLine("int", "ROWS", "BLOCK_Q / ROW_THREADS", "of a thread"),
        ConstantLine("int", "COLUMNS", "BLOCK_KV / COLUMN_THREADS", "keys of a thread in a tile"),
        ConstantLine("int", "DIMS", f"{dims} / COLUMN_THREADS", "dimensions of O of a thread"),
    ]


@dataclass(slots=True)
class File:
    """One file to be: what all schedules share. A subclass says which kernels, numbers and primitives it has."""

    spec: AttentionSpec
    plan: Plan
    variant: Variant
    tensors: dict[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {t.name: t for t in abi.tensor_specs(self.spec, self.plan, self.variant)}

    # what a subclass gives

    def kernels(self) -> dict[str, KernelText]:
        raise NotImplementedError

    def constants(self) -> list[ConstantLine]:
        raise NotImplementedError

    def primitives(self) -> list[str]:
        raise NotImplementedError

    def sections(self) -> dict[str, str]:
        raise NotImplementedError

    def products(self) -> list[Wgmma]:
        """The products of warpgroups."""
        return []

    # shared

    def launch_order(self) -> list[KernelText]:
        return [*(r.kernel for r in self.range_kernels()), *self.kernels().values()]

    def context(self) -> dict[str, Any]:
        spec, variant = self.spec, self.variant
        sections = {k: v for k, v in self.sections().items() if k != "variant" or self._has_variant_section()}
        numbers = {key: f"{i}. {title}" for i, (key, title) in enumerate(sections.items(), 1)}
        arguments = (variant.classify.arguments if variant.classify else ()) + variant.kv_range.arguments
        return {
            "title": f"{spec.name}, {self.plan.rung}",
            "spec_lines": [f"    {line}" for line in to_text(spec).rstrip().splitlines()],
            "equations": words.equations(spec),
            "shapes": [words.shape_line(t) for t in self.tensors.values()],
            "plan": self.plan,
            "head_dim": spec.head_dim,
            "head_dim_v": spec.head_dim_v,
            "element_bytes": spec.dtype.bytes,
            "sections": list(sections.values()),
            "section": numbers.__getitem__,
            "constants": self.constants(),
            "primitives": self.primitives(),
            "variant": variant,
            "products": self.products(),
            "has_variant_section": self._has_variant_section(),
            "captured_fields": captured_fields(variant),
            "captured_initializer": words.wrapped(", ".join(f.parameter for f in captured_fields(variant))),
            "text": words.expression_texts(spec),
            "normalize": spec.normalize,
            "weighing": words.WEIGHING[spec.normalize],
            "pair_bytes": words.PAIR_BYTES[spec.normalize],
            "solves_range": self.plan.bounds.kv_begin is not ZERO or self.plan.bounds.kv_end is not KV_LEN,
            "masked": "0.0f" if spec.normalize == "none" else "-INF",
            "lse": spec.lse,
            "T": spec.dtype.cuda,
            "from_float": f"to_{spec.dtype.name}",
            "kernels": self.kernels(),
            "range_kernels": self.range_kernels(),
            "weights_equations": words.weights_equations(spec),
            "fused_equations": words.fused_equations(spec, self.plan.is_bounded),
            "score_each": variant.score is not None or bool(variant.score_of_two) or not variant.fold_scale,
            "tile_arguments": arguments,
            "maximum_of_lanes": spec.normalize == "softmax",
            "sum_of_lanes": spec.normalize == "softmax",
            "inline_classify": bool(self.products()),  # a call would hold up what runs in the background
            "scores_read_captured": self.reads_captured(variant.score, variant.mask),
            "sink_reads_captured": self.reads_captured(variant.sink, scale=False),
            "odd_v": spec.head_dim_v % 16 != 0,
            "from_block": "0",  # of a warp's blocks of 16 rows, and of a thread's rows: the first that a tile is multiplied for
            "from_row": "0",
            "places_anew": False,  # which rows, batch and head a block has is found anew, not kept from tile to tile
            "lane_anew": False,  # the end of a block finds its lane's number anew
            "partial_anew": False,  # partial tiles compute anew where their pairs are
        }

    def tile_sections(self) -> dict[str, str]:
        """The sections before the kernels, where tiles are visited."""
        prepass = {"tile_ranges": "Tile ranges of captured vectors"} if self.variant.spans else {}
        return {**FIRST_SECTIONS, "tiles": "Which tiles are visited", **prepass, "loads": "Loading tiles"}

    def _has_variant_section(self) -> bool:
        v = self.variant
        return bool(v.captures or v.score or v.score_of_two or v.mask or v.sink)

    def numbers(self) -> list[ConstantLine]:
        """The constants that every schedule has."""
        spec, variant = self.spec, self.variant
        lines = [
            ConstantLine("int", "HEAD_DIM", str(spec.head_dim)),
            ConstantLine("int", "HEAD_DIM_V", str(spec.head_dim_v)),
        ]
        if spec.q_heads is not None:
            lines += [
                ConstantLine("int", "q_heads", str(spec.q_heads)),
                ConstantLine("int", "kv_heads", str(spec.kv_heads)),
            ]
        if variant.scale_is_constant and not variant.raw_scores:
            lines.append(ConstantLine("float", "softmax_scale", variant.scale))
        return lines

    def infinity(self) -> list[ConstantLine]:
        """INF, where anything uses it: a softmax, a sigmoid's masked logits, a range of floats, the user's own `inf`."""
        v = self.variant
        functions = (v.score, v.mask, v.sink, v.kv_range, v.classify)
        texts = [t for f in functions if f for t in (*f.results, *(x.text for x in f.temporaries))]
        ranged = any(self.spec.input(s.input).dtype.kind == "float" for s in v.spans)
        used = self.spec.normalize != "none" or ranged or any("INF" in t for t in (*texts, v.scale))
        return [INFINITY] if used else []

    def conversions(self, elementwise: bool = True) -> list[str]:
        """The element types that occur and their conversions. `elementwise`: Q, K, V and O are converted one by one."""
        own = self.spec.dtype.name
        captured = {t.dtype.name for t in self.variant.tensors} | {
            self.spec.input(s.input).dtype.name for s in self.variant.spans
        }
        read = (captured - {"fp32"}) | ({own} if elementwise else set())
        if self.plan.rung == "tiled":
            read.add("fp32")  # P
        primitives = []
        for name in ("fp16", "bf16", "fp32"):
            if name != "fp32" and name in captured | {own}:
                primitives.append(f"type_{name}")
            if name in read:
                primitives.append(f"to_float_{name}")
            if elementwise and name == own:
                primitives.append(f"to_{name}")
        return primitives

    def reductions(self) -> list[str]:
        """What combines the lanes that share a row, where a softmax needs it."""
        return ["lane_reduce"] if self.spec.normalize == "softmax" else []

    def kernel(
        self,
        suffix: str,
        grid: tuple[Extent, ...],
        parameters: list[Parameter],
        threads: int | None = None,
        threads_name: str = "THREADS",
        shared: bool = False,
        at_most: str = "",
    ) -> KernelText:
        entry = EntryPoint(
            name=f"{self.spec.name}_{suffix}",
            parameters=tuple(parameters),
            grid=(Product(grid, at_most), Product(()), Product(())),
            block=(self.plan.threads if threads is None else threads, 1, 1),
            shared_bytes=self.plan.shared_bytes if shared else 0,
            shared_buffers=self.plan.buffers if shared else (),
        )
        return KernelText(entry, self._signature(entry), threads_name)

    def _signature(self, entry: EntryPoint) -> tuple[SignatureLine, ...]:
        lines: list[SignatureLine] = []
        group: list[Parameter] = []

        def flush() -> None:
            if group:
                what = SECTION if group[0].binding == "section" else ""
                lines.extend(SignatureLine(line, what) for line in words.wrapped_list([f"{p.ctype} {p.name}" for p in group]))
                group.clear()

        for p in entry.parameters:
            if p.binding == "data":
                flush()
                restrict = " __restrict__" if p.ctype.startswith("const ") else ""
                lines.append(SignatureLine(f"{p.ctype}{restrict} {p.name}", words.shape_text(self.tensors[p.of])))
            else:
                if group and _line_of(group[-1]) != _line_of(p):
                    flush()
                group.append(p)
        flush()
        return tuple(lines)

    def head_grid(self, *inner: Extent) -> tuple[Extent, ...]:
        return (*inner, abi.head_counts(self.spec)[0], "batch")

    def sizes(self) -> list[Parameter]:
        batch = ("batch",) if self.variant.uses_batch else ()
        return abi.sizes(self.spec, *batch, "q_heads", "kv_heads", "q_len", "kv_len")

    def captured(self, *functions: Function | None, scale: bool = True) -> list[Parameter]:
        """The captured values, where one of `functions` or the scale reads any."""
        return abi.captured(self.variant) if self.reads_captured(*functions, scale=scale) else []

    def reads_captured(self, *functions: Function | None, scale: bool = True) -> bool:
        in_scale = scale and not self.variant.scale_is_constant
        return in_scale or any("in" in f.arguments for f in functions if f is not None)

    def lse_parameters(self) -> list[Parameter]:
        return [Parameter("lse", "float*", "data", "lse"), *abi.strides("lse", "bhs")] if self.spec.lse else []

    def pointer(self, tensor: str, *, writable: bool = False, name: str | None = None) -> Parameter:
        return abi.data(tensor, self.spec.dtype.cuda, writable=writable, name=name)

    # the pre-pass

    def range_kernels(self) -> list[RangeKernel]:
        return [self._range_kernel(span) for span in self.variant.spans]

    def _range_kernel(self, span: Span) -> RangeKernel:
        source = self.spec.input(span.input)
        vector = f"captured_{source.name}"
        parameters = [Parameter(vector, f"const {source.dtype.cuda}*", "data", source.name)]
        parameters += [Parameter(f"{vector}_stride_{d}", "long long", "stride", source.name, d) for d in range(span.rank)]
        low, high = range_tensors(self.spec, span)
        ctype = low.dtype.cuda
        parameters += [Parameter(t.c_name, f"{ctype}*", "data", t.c_name) for t in (low, high)]
        parameters += [Parameter(f"out_stride_{d}", "long long", "stride", low.c_name, d) for d in range(span.rank - 1)]
        wanted = [d for d in source.dims if isinstance(d, str)]
        parameters += abi.sizes(self.spec, *dict.fromkeys(wanted))
        axes = [a for a in range(span.rank) if a != span.axis]
        others = tuple(
            {
                "axis": axis,
                "size": str(source.dims[axis]),
                "stride": f"{vector}_stride_{axis}",
                "out_stride": f"out_stride_{position}",
            }
            for position, axis in reversed(list(enumerate(axes)))
        )
        extents = tuple(abi.range_specs(self.spec, self.plan, span)[0].shape)
        element = f"vector[i * {vector}_stride_{span.axis}]"
        lowest, highest = RANGE_LIMITS[range_dtype(source).name]
        return RangeKernel(
            kernel=self.kernel(f"{c_name(span.name)}_ranges", extents[::-1], parameters, threads=32, threads_name="32"),
            length=str(source.dims[span.axis]),
            block="BLOCK_Q" if span.index == "q" else "BLOCK_KV",
            others=others,
            element=source.dtype.cuda,
            pointer=vector,
            read=f"to_float({element})" if source.dtype.name in ("fp16", "bf16") else element,
            ctype=ctype,
            lowest=lowest,
            highest=highest,
            is_float=source.dtype.kind == "float",
            min=low.c_name,
            max=high.c_name,
        )


def _line_of(parameter: Parameter) -> tuple[str, str]:
    """What parameters on one line of a signature have in common."""
    return parameter.binding, parameter.of if parameter.binding in ("stride", "step") else ""


SECTION = "query heads whose blocks are numbered together"
RANGE_LIMITS = {
    "int32": ("-2147483647 - 1", "2147483647"),
    "int64": ("-9223372036854775807LL - 1", "9223372036854775807LL"),
    "fp32": ("-INF", "INF"),
    "bool": ("false", "true"),
}

FIRST_SECTIONS = {"numbers": "Numbers", "primitives": "Primitives", "variant": "This variant's score and mask"}
SLICE = "terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)"
INFINITY = ConstantLine("float", "INF", "__builtin_bit_cast(float, 0x7f800000)")
