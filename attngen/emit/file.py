"""What the files of all schedules share: signatures, constants, captured values, the pre-pass. The templates do the writing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attngen.emit import abi, comment_text
from attngen.emit.cuda_text import c_name
from attngen.emit.program import Extent, KernelEntry, Parameter, Product, SharedRange, Tensor
from attngen.emit.rotation import THREADS as ROTARY_THREADS
from attngen.emit.rotation import Turned, chunk, rotation_of, rows_of, tables, turned_rows
from attngen.emit.variant import Function, Variant, range_dtype, range_tensors
from attngen.emit.wgmma import Wgmma
from attngen.plan.axes import KEYS
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Plan
from attngen.plan.spans import Span
from attngen.spec.attention import INDICES, AttentionSpec
from attngen.spec.gradient import Gradient
from attngen.spec.operator import ZERO
from attngen.spec.print_attn import expression_to_text, rotary_to_text, to_text


@dataclass(frozen=True, slots=True)
class SignatureLine:
    """One line of a kernel's signature: parameters that belong together, and what they are."""

    text: str
    comment: str


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel as its template sees it."""

    entry: KernelEntry
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
class RotatingKernel:
    """The kernel that rotates rows, or that turns gradients back."""

    kernel: KernelText
    turned: list[Turned]
    reads_captured: bool
    turn: str  # the argument that says in which direction, where the file has both


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


def shared_ranges(plan: Plan, kernel: str = "") -> tuple[SharedRange, ...]:
    """The shared memory of a kernel; without one, of every kernel of the file."""
    of_kernel = (b for b in plan.buffers if not kernel or b.kernel in ("", kernel))
    return tuple(SharedRange(b.name, b.offset, b.bytes, b.what) for b in of_kernel)


def thread_grid(row_threads: int, column_threads: int, dims: str) -> list[ConstantLine]:
    """A block's threads as a grid over a tile of S, and over its rows of O, of which a block has `dims` dimensions."""
    return [
        ConstantLine("int", "ROW_THREADS", str(row_threads), "the block's threads as a grid over a tile: its rows"),
        ConstantLine("int", "COLUMN_THREADS", str(column_threads), "and its columns"),
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
    own: Any = field(init=False)  # the schedule's own choices, see `Plan.own`
    tensors: dict[str, Tensor] = field(init=False)

    @property
    def facts(self) -> SpecFacts:
        return self.plan.facts

    def __post_init__(self) -> None:
        self.own = self.plan.own
        self.tensors = {t.name: t for t in abi.program_tensors(self.spec, self.plan, self.variant)}

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

    def is_bounded(self) -> bool:
        """Whether a constant is subtracted from all scores instead of a row maximum."""
        return False

    def equations(self) -> list[str]:
        """The equations of the header."""
        if self.plan.direction == "backward":
            return comment_text.backward_equations(self.spec, self.gradient, self.plan.wanted)
        return comment_text.equations(self.spec, self.plan.writes_lse)

    # shared

    @property
    def gradient(self) -> Gradient:
        """The derivatives of the spec, for a backward."""
        assert self.facts.gradient is not None
        return self.facts.gradient

    def launch_order(self) -> list[KernelText]:
        rotating = [one.kernel for one in self.rotating_kernels()]
        return [*rotating[:1], *(r.kernel for r in self.range_kernels()), *self.kernels().values(), *rotating[1:]]

    def context(self) -> dict[str, Any]:
        spec, variant = self.spec, self.variant
        sections = {k: v for k, v in self._all_sections() if k != "variant" or self._has_variant_section()}
        rotation = rotation_of(spec, self.plan) if self.plan.rotated else None
        numbers = {key: f"{i}. {title}" for i, (key, title) in enumerate(sections.items(), 1)}
        arguments = (variant.classify.arguments if variant.classify else ()) + variant.kv_range.arguments
        return {
            "title": f"{spec.name}, {self.plan.keyword}{', backward' if self.plan.direction == 'backward' else ''}",
            "spec_lines": [f"    {line}" for line in to_text(spec).rstrip().splitlines()],
            "equations": self.equations(),
            "shapes": [comment_text.shape_line(t) for t in self.tensors.values()],
            "plan": self.plan,
            "packed": spec.kernel.is_packed,
            "max_q_len": self.lengths["q"],
            "max_kv_len": self.lengths["k"],
            "paged": spec.kernel.is_paged,
            "counted": spec.kernel.is_counted,
            "key_rows": KEY_ROWS.get(spec.kernel.storage, "HeadRows"),
            "sequences": spec.kernel.storage != "dense",
            "tile_in_page": self.plan.schedule.is_tiled and (spec.kernel.page_size or 1) % self.plan.block_kv == 0,
            "own": self.plan.own,
            "head_dim": spec.head_dim,
            "head_dim_v": spec.head_dim_v,
            "element_bytes": spec.dtype.bytes,
            "sections": list(sections.values()),
            "section": numbers.__getitem__,
            "constants": self.constants(),
            "primitives": self._all_primitives(),
            "rotation": rotation,
            "rotary_text": rotary_to_text(spec.rotary) if spec.rotary is not None else "",
            "rotating": self.rotating_kernels(),
            "numbers_of_rotation": self._numbers_of_rotation(),
            "A": rotation.angles.cuda if rotation is not None else "",
            "variant": variant,
            "products": self.products(),
            "has_variant_section": self._has_variant_section(),
            "captured_fields": captured_fields(variant),
            "captured_initializer": comment_text.wrapped(", ".join(f.parameter for f in captured_fields(variant))),
            "text": comment_text.expression_texts(spec, self.facts.gradient),
            "affine_text": expression_to_text(self.plan.affine.term) if self.plan.affine else "",
            "normalize": spec.normalize,
            "weighing": comment_text.WEIGHING[spec.normalize],
            "pair_bytes": comment_text.PAIR_BYTES[spec.normalize],
            "solves_range": self.plan.bounds.begin is not ZERO or self.plan.bounds.end is not KEYS.length,
            "sink_by_row": variant.sink is not None and "q_idx" in variant.sink.arguments,
            "masked": "0.0f" if spec.normalize == "none" else "-INF",
            "lse": self.plan.writes_lse,
            "lse_rest": self.plan.saves_lse_rest,
            "dlse": spec.lse,
            "T": spec.dtype.cuda,
            "from_float": f"to_{spec.dtype.name}",
            "kernels": self.kernels(),
            "range_kernels": self.range_kernels(),
            "weights_equations": comment_text.weights_equations(spec, self.plan.writes_lse),
            "fused_equations": comment_text.fused_equations(spec, self.plan.writes_lse, self.is_bounded()),
            "score_each": variant.score is not None or bool(variant.score_of_two) or not variant.fold_scale,
            "tile_arguments": arguments,
            "maximum_of_lanes": spec.normalize == "softmax",
            "sum_of_lanes": spec.normalize == "softmax",
            "inline_classify": self.plan.schedule.on_tensor_cores,  # a call would hold up what runs in the background
            "scores_read_captured": self.reads_captured(*variant.of_scores, variant.mask),
            "sink_reads_captured": self.reads_captured(variant.sink, scale=False),
            "odd_v": spec.head_dim_v % 16 != 0,
            "packs_heads": self.plan.schedule.packs_heads,
        }

    def _all_sections(self) -> Iterator[tuple[str, str]]:
        """The sections of the file; that of the rotation stands before those of kernels."""
        for key, title in self.sections().items():
            yield key, title
            if key == "variant" and self.plan.rotated:
                yield "rotary", "Rotary embeddings"

    def _numbers_of_rotation(self) -> list[ConstantLine]:
        """The constants of the kernels that rotate."""
        if not self.plan.rotated:
            return []
        lines = [chunk(self.spec.dtype), *rotation_of(self.spec, self.plan).constants()]
        threads = ("ROTARY_THREADS", str(ROTARY_THREADS), "of a block, which has a row of all heads")
        return [ConstantLine("int", *line) for line in (*lines, threads)]

    def _all_primitives(self) -> list[str]:
        """Primitives in the order of their text."""
        of_lse = ["split_sum"] if self.plan.saves_lse_rest else []
        of_rotation = rotation_of(self.spec, self.plan).primitives() if self.plan.rotated else []
        return list(dict.fromkeys([*of_rotation, *self.primitives(), *self.random_primitives(), *of_lse]))

    def tile_sections(self) -> dict[str, str]:
        """The sections before the kernels, where tiles are visited."""
        prepass = {"tile_ranges": "Tile ranges of captured vectors"} if self.variant.spans else {}
        return {**FIRST_SECTIONS, "tiles": "Which tiles are visited", **prepass, "loads": "Loading tiles"}

    def _has_variant_section(self) -> bool:
        v = self.variant
        of_gradients = v.derivative or any(one.functions for one in v.captured_gradients)
        of_tiles = v.helpers  # the ranges of tiles may be solved with a division, where no pair is asked
        return bool(v.captures or any(v.of_scores) or v.score_of_two or v.mask or v.sink or of_gradients or of_tiles)

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
        if spec.kernel.page_size is not None:
            lines.append(ConstantLine("int", "page_size", str(spec.kernel.page_size), "rows of a page of keys"))
        if variant.scale_is_constant and not variant.raw_scores:
            lines.append(ConstantLine("float", "softmax_scale", variant.scale))
        return lines

    @property
    def uses_infinity(self) -> bool:
        """Whether the schedule itself uses INF: as the score of an excluded pair, or for rows without keys."""
        return self.spec.normalize != "none"

    @property
    def lengths(self) -> dict[str, str]:
        """How far each index of a pair may go, whatever the sequence."""
        lengths = (abi.whole_size(self.spec, n) for n in ("q_len", "kv_len"))
        return dict(zip(INDICES, ("batch", "q_heads", *lengths), strict=True))

    def infinity(self) -> list[ConstantLine]:
        """INF, where anything uses it: a softmax, a sigmoid's masked logits, a range of floats, the user's own `inf`."""
        v = self.variant
        of_gradients = (v.derivative, *(f for one in v.captured_gradients for f in one.functions))
        functions = (*v.of_scores, v.mask, v.sink, *of_gradients, v.kv_range, v.classify)
        texts = [t for f in functions if f for t in (*f.results, *(x.text for x in f.temporaries))]
        ranged = any(self.spec.input(s.input).dtype.kind == "float" for s in v.spans)
        used = self.uses_infinity or ranged or any("INF" in t for t in (*texts, v.scale))
        return [INFINITY] if used else []

    def conversions(self, elementwise: bool = True) -> list[str]:
        """The element types that occur and their conversions. `elementwise`: Q, K, V and O are converted one by one."""
        own = self.spec.dtype.name
        captured = {t.dtype.name for t in self.variant.tensors} | {
            self.spec.input(s.input).dtype.name for s in self.variant.spans
        }
        read = (captured - {"fp32"}) | ({own} if elementwise else set())
        if not self.plan.schedule.is_fused and self.plan.schedule.is_tiled:
            read.add("fp32")  # P
        written = {t.dtype for t in self.tensors.values() if t.role == "output" and t.name.startswith("d_")}
        primitives = []
        for name in ("fp16", "bf16", "fp32"):
            if name != "fp32" and name in captured | {own}:
                primitives.append(f"type_{name}")
            if name in read:
                primitives.append(f"to_float_{name}")
            if (elementwise and name == own) or name in written:
                primitives.append(f"to_{name}")
        return primitives

    def random_primitives(self) -> list[str]:
        """What dropout computes its decisions with."""
        if self.variant.dropout is None:
            return []
        return ["philox", *(["permute_bytes"] if self.plan.schedule.on_tensor_cores else [])]

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
        early: bool = False,
    ) -> KernelText:
        of_rotated = {name: abi.rotated(name) for name in self.plan.rotated} if suffix not in ROTATING else {}
        entry = KernelEntry(
            name=f"{self.spec.name}{self.plan.suffix}_{suffix}",
            parameters=tuple(replace(p, of=of_rotated.get(p.of, p.of)) for p in parameters),
            grid=(Product(grid, at_most), Product(()), Product(())),
            block=(self.plan.threads if threads is None else threads, 1, 1),
            shared_bytes=self.plan.shared_bytes if shared else 0,
            shared_buffers=shared_ranges(self.plan, suffix) if shared else (),
            early=early,
        )
        return KernelText(entry, signature_lines(entry, self.tensors), threads_name)

    def head_grid(self, *inner: Extent) -> tuple[Extent, ...]:
        return (*inner, abi.head_axes(self.spec)[0].size, "batch")

    def kv_head_grid(self, *inner: Extent) -> tuple[Extent, ...]:
        return (*inner, abi.head_axes(self.spec)[1].size, "batch")

    def sizes(self) -> list[Parameter]:
        batch = ("batch",) if self.variant.uses_batch else ()
        return abi.sizes(self.spec, *batch, "q_heads", "kv_heads", "q_len", "kv_len")

    def pages(self) -> list[Parameter]:
        return abi.pages(self.spec)

    def arrays(
        self, read: Iterable[str], written: Iterable[str] = (), *more: Parameter, axes: str = abi.STRIDE_LETTERS
    ) -> list[Parameter]:
        """Tensors of rows or keys that a kernel reads and writes, `more`, and the tensors' strides."""
        return [
            *(self.pointer(t) for t in read),
            *(self.pointer(t, writable=True) for t in written),
            *more,
            *(p for t in (*read, *written) for p in self.strides(t, axes)),
        ]

    def captured(self, *functions: Function | None, scale: bool = True) -> list[Parameter]:
        """The captured values, where one of `functions` or the scale reads any."""
        return abi.captured(self.variant) if self.reads_captured(*functions, scale=scale) else []

    def reads_captured(self, *functions: Function | None, scale: bool = True) -> bool:
        in_scale = scale and not self.variant.scale_is_constant
        return in_scale or any("in" in f.arguments for f in functions if f is not None)

    def lse_parameters(self) -> list[Parameter]:
        names = [*(["lse"] if self.plan.writes_lse else []), *(["lse_rest"] if self.plan.saves_lse_rest else [])]
        return [p for n in names for p in (abi.data(n, "float", writable=True), *self.strides(n, "bhs"))]

    def dlse_parameters(self) -> list[Parameter]:
        """The gradient of lse, if lse is an output."""
        return [abi.data("dlse", "float"), *self.strides("dlse", "bhs")] if self.spec.lse else []

    def strides(self, tensor: str, axes: str = abi.STRIDE_LETTERS) -> list[Parameter]:
        """The strides of a tensor of rows or keys, for those of `axes` that it has."""
        return abi.strides(self.tensors[tensor], axes)

    def tensor_map(self, tensor: str, box_rows: int) -> Parameter:
        return abi.tensor_map(self.spec, self.tensors[tensor], box_rows)

    def pointer(self, tensor: str, *, writable: bool = False, name: str | None = None) -> Parameter:
        return abi.data(tensor, self.spec.dtype.cuda, writable=writable, name=name)

    # the kernels that rotate

    def rotating_kernels(self) -> list[RotatingKernel]:
        """The kernel before the others, and in a backward that after them."""
        plan = self.plan
        if not plan.rotated:
            return []
        found = [self._rotating(ROTATING[0], [(name, abi.rotated(name)) for name in plan.rotated])]
        gradients = [f"d{name}" for name in plan.rotated if plan.wants(name.lower())]
        if gradients:
            found.append(self._rotating(ROTATING[1], [(name, name) for name in gradients]))
        return found

    def _rotating(self, suffix: str, names: list[tuple[str, str]]) -> RotatingKernel:
        turned = turned_rows(self.spec, self.variant, names)
        tensors = list(dict.fromkeys(name for pair in names for name in pair))
        parameters = [
            *(self.pointer(name, writable=self.tensors[name].is_written) for name in tensors),
            *tables(self.spec),
            *(p for name in tensors for p in self.strides(name, "bhs")),
            *self.sizes(),
            *self.captured(*(one.position for one in turned), scale=False),
        ]
        kernel = self.kernel(suffix, (rows_of(turned), "batch"), parameters, ROTARY_THREADS, "ROTARY_THREADS")
        reads = self.reads_captured(*(one.position for one in turned), scale=False)
        turn = "" if self.plan.direction == "forward" else ", 1.0f" if suffix == ROTATING[0] else ", -1.0f"
        return RotatingKernel(kernel, turned, reads, turn)

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
        parameters += abi.whole_sizes(self.spec, *dict.fromkeys(wanted))
        axes = [a for a in range(span.rank) if a != span.dim]
        others = tuple(
            {
                "axis": axis,
                "size": abi.whole_size(self.spec, str(source.dims[axis])),
                "stride": f"{vector}_stride_{axis}",
                "out_stride": f"out_stride_{position}",
            }
            for position, axis in reversed(list(enumerate(axes)))
        )
        extents = tuple(abi.range_workspaces(self.spec, self.plan, span)[0].shape)
        element = f"vector[i * {vector}_stride_{span.dim}]"
        lowest, highest = RANGE_LIMITS[range_dtype(source).name]
        return RangeKernel(
            kernel=self.kernel(f"{c_name(span.name)}_ranges", extents[::-1], parameters, threads=32, threads_name="32"),
            length=abi.whole_size(self.spec, str(source.dims[span.dim])),
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


def signature_lines(entry: KernelEntry, tensors: Mapping[str, Tensor]) -> tuple[SignatureLine, ...]:
    """The lines of a kernel's signature: parameters that belong together share one."""
    lines: list[SignatureLine] = []
    group: list[Parameter] = []

    def flush() -> None:
        if group:
            what = group[0].formula.words if group[0].formula else ""
            lines.extend(
                SignatureLine(line, what) for line in comment_text.wrapped_list([f"{p.ctype} {p.name}" for p in group])
            )
            group.clear()

    for p in entry.parameters:
        if p.binding == "data":
            flush()
            restrict = " __restrict__" if p.ctype.startswith("const ") else ""
            lines.append(SignatureLine(f"{p.ctype}{restrict} {p.name}", comment_text.shape_text(tensors[p.of])))
        else:
            if group and _line_of(group[-1]) != _line_of(p):
                flush()
            group.append(p)
    flush()
    return tuple(lines)


def _line_of(parameter: Parameter) -> tuple[str, str]:
    """What parameters on one line of a signature have in common."""
    return parameter.binding, parameter.of if parameter.binding in ("stride", "step") else ""


KEY_ROWS = {"padded": "PaddedHeadRows", "paged": "PagedHeadRows", "packed_paged": "PagedHeadRows"}  # what TMA copies keys by
ROTATING = ("rotate", "turn_back")  # the suffixes of kernels that rotate
RANGE_LIMITS = {
    "int32": ("-2147483647 - 1", "2147483647"),
    "int64": ("-9223372036854775807LL - 1", "9223372036854775807LL"),
    "fp32": ("-INF", "INF"),
    "bool": ("false", "true"),
}

FIRST_SECTIONS = {"numbers": "Numbers", "primitives": "Primitives", "variant": "This variant's score and mask"}
SLICE = "terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)"
INFINITY = ConstantLine("float", "INF", "__builtin_bit_cast(float, 0x7f800000)")
