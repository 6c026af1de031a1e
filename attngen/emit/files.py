"""What each schedule's file holds: its kernels, numbers, primitives and sections. The templates do the writing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attngen.emit import abi, words
from attngen.emit.cuda_text import c_name
from attngen.emit.kernel_source import CeilDiv, EntryPoint, Extent, Parameter, Product, TensorSpec
from attngen.emit.variant import Captured, Function, Variant, range_dtype, range_tensors
from attngen.plan import fused_mma, fused_simt, tiled
from attngen.plan.plan import Plan
from attngen.plan.tiles import Span
from attngen.spec.attention import AttentionSpec
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
            "sections": list(sections.values()),
            "section": numbers.__getitem__,
            "constants": self.constants(),
            "primitives": self.primitives(),
            "variant": variant,
            "has_variant_section": self._has_variant_section(),
            "captured_fields": captured_fields(variant),
            "captured_initializer": words.wrapped(", ".join(f.parameter for f in captured_fields(variant))),
            "text": words.expression_texts(spec),
            "normalize": spec.normalize,
            "masked": "0.0f" if spec.normalize == "none" else "-INF",
            "lse": spec.lse,
            "T": spec.dtype.cuda,
            "from_float": f"to_{spec.dtype.name}",
            "kernels": self.kernels(),
            "range_kernels": self.range_kernels(),
            "weights_equations": words.weights_equations(spec),
            "fused_equations": words.fused_equations(spec),
            "score_each": variant.score is not None or not variant.fold_scale,
            "tile_arguments": arguments,
            "scores_read_captured": self.reads_captured(variant.score, variant.mask),
            "sink_reads_captured": self.reads_captured(variant.sink, scale=False),
            "odd_v": spec.head_dim_v % 16 != 0,
        }

    def _has_variant_section(self) -> bool:
        v = self.variant
        return bool(v.captures or v.score or v.mask or v.sink)

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
        if variant.scale_is_constant:
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

    def kernel(
        self,
        suffix: str,
        grid: tuple[Extent, ...],
        parameters: list[Parameter],
        threads: int | None = None,
        threads_name: str = "THREADS",
        shared: bool = False,
    ) -> KernelText:
        entry = EntryPoint(
            name=f"{self.spec.name}_{suffix}",
            parameters=tuple(parameters),
            grid=(Product(grid), Product(()), Product(())),
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
                lines.append(SignatureLine(", ".join(f"{p.ctype} {p.name}" for p in group), ""))
                group.clear()

        for p in entry.parameters:
            if p.binding == "data":
                flush()
                restrict = " __restrict__" if p.ctype.startswith("const ") else ""
                lines.append(SignatureLine(f"{p.ctype}{restrict} {p.name}", words.shape_text(self.tensors[p.of])))
            else:
                if group and (group[-1].binding, group[-1].of if p.binding == "stride" else "") != (
                    p.binding,
                    p.of if p.binding == "stride" else "",
                ):
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

    def pointer(self, tensor: str, *, writable: bool = False, name: str | None = None) -> Parameter:
        return abi.data(tensor, self.spec.dtype.cuda, writable=writable, name=name)

    # the pre-pass

    def range_kernels(self) -> list[RangeKernel]:
        return [self._range_kernel(span) for span in self.variant.spans]

    def _range_kernel(self, span: Span) -> RangeKernel:
        source = self.spec.input(span.input)
        captured = Captured(source.name, source.dtype, tuple(map(str, source.dims)))
        parameters = abi.captured_tensor(captured)
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
                "stride": f"captured_{source.name}_stride_{axis}",
                "out_stride": f"out_stride_{position}",
            }
            for position, axis in reversed(list(enumerate(axes)))
        )
        extents = tuple(abi.range_specs(self.spec, self.plan, span)[0].shape)
        element = f"vector[i * captured_{source.name}_stride_{span.axis}]"
        lowest, highest = RANGE_LIMITS[range_dtype(source).name]
        return RangeKernel(
            kernel=self.kernel(f"{c_name(span.name)}_ranges", extents[::-1], parameters, threads=32, threads_name="32"),
            length=str(source.dims[span.axis]),
            block="BLOCK_Q" if span.index == "q" else "BLOCK_KV",
            others=others,
            element=source.dtype.cuda,
            pointer=f"captured_{source.name}",
            read=f"to_float({element})" if source.dtype.name in ("fp16", "bf16") else element,
            ctype=ctype,
            lowest=lowest,
            highest=highest,
            is_float=source.dtype.kind == "float",
            min=low.c_name,
            max=high.c_name,
        )


RANGE_LIMITS = {
    "int32": ("-2147483647 - 1", "2147483647"),
    "int64": ("-9223372036854775807LL - 1", "9223372036854775807LL"),
    "fp32": ("-INF", "INF"),
    "bool": ("false", "true"),
}


class ThreeKernels(File):
    """The naive and the tiled rung: scores, row weights, weighted sum."""

    def sections(self) -> dict[str, str]:
        sections = {"numbers": "Numbers", "primitives": "Element types", "variant": "This variant's score and mask"}
        if self.plan.rung == "tiled":
            sections["tiles"] = "Tiles in shared memory"
        weights = {"softmax": "Softmax", "sigmoid": "Sigmoid"}.get(self.spec.normalize)
        sections["scores"] = "Scores"
        if weights is not None:
            sections["weights"] = weights
        return sections | {"weighted_sum": "Weighted sum"}

    def kernels(self) -> dict[str, KernelText]:
        naive = self.plan.rung == "naive"
        threads = self.plan.threads
        q_blocks: Extent = "q_len" if naive else CeilDiv("q_len", self.plan.block_q)
        s = Parameter("S", "float*", "data", "S")
        lse = [Parameter("lse", "float*", "data", "lse"), *abi.strides("lse", "bhs")] if self.spec.lse else []
        v = self.variant
        kernels = {
            "scores": self.kernel(
                "scores",
                self.head_grid(CeilDiv("kv_len", threads if naive else self.plan.block_kv), q_blocks),
                [
                    self.pointer("Q"),
                    self.pointer("K"),
                    s,
                    *abi.strides("Q"),
                    *abi.strides("K"),
                    *self.sizes(),
                    *self.captured(v.score, v.mask),
                ],
            )
        }
        if self.spec.normalize != "none":
            kernels["weights"] = self.kernel(
                self.spec.normalize,
                self.head_grid(CeilDiv("q_len", threads) if naive else "q_len"),
                [s, *lse, *self.sizes(), *self.captured(v.sink, scale=False)],
            )
        d_blocks = 1 if naive else -(-self.spec.head_dim_v // self.plan.block_kv)
        kernels["weighted_sum"] = self.kernel(
            "weighted_sum",
            self.head_grid(d_blocks, q_blocks) if not naive else self.head_grid("q_len"),
            [
                Parameter("P", "const float*", "data", "S"),
                self.pointer("V"),
                self.pointer("O", writable=True),
                *abi.strides("V"),
                *abi.strides("O"),
                *self.sizes(),
            ],
            threads=self._d_threads() if naive else None,
            threads_name="THREADS_D" if naive else "THREADS",
        )
        return kernels

    def _d_threads(self) -> int:
        return -(-self.spec.head_dim_v // 32) * 32

    def constants(self) -> list[ConstantLine]:
        lines = [*self.infinity(), *self.numbers(), ConstantLine("int", "THREADS", str(self.plan.threads))]
        if self.plan.rung == "naive":
            lines += [
                ConstantLine("int", "THREADS_D", str(self._d_threads()), "the head size of V in whole warps"),
                ConstantLine("int", "SUM_BLOCK", "16", SUM_BLOCK),
            ]
        if self.plan.rung == "tiled":
            lines += [
                *([ConstantLine("int", "WARPS", "THREADS / 32")] if self.spec.normalize == "softmax" else []),
                ConstantLine("int", "BLOCK_Q", str(tiled.BLOCK)),
                ConstantLine("int", "BLOCK_KV", str(tiled.BLOCK)),
                ConstantLine("int", "BLOCK_D", "16", "terms of a sum in shared memory at a time"),
                ConstantLine("int", "OUTPUTS", "BLOCK_Q / 16", "rows, and columns, of a thread"),
            ]
        return lines

    def primitives(self) -> list[str]:
        return self.conversions()


class Fused(File):
    """What both fused schedules share."""

    def fused_kernel(self, axes: str) -> dict[str, KernelText]:
        lse = [Parameter("lse", "float*", "data", "lse"), *abi.strides("lse", "bhs")] if self.spec.lse else []
        v = self.variant
        parameters = [
            self.pointer("Q"),
            self.pointer("K"),
            self.pointer("V"),
            self.pointer("O", writable=True),
            *(p for t in "QKVO" for p in abi.strides(t, axes)),
            *lse,
            *self.sizes(),
            *self.captured(v.score, v.mask, v.sink, v.kv_range, v.classify),
        ]
        grid = self.head_grid(CeilDiv("q_len", self.plan.block_q))
        return {"fused": self.kernel("fused", grid, parameters, shared=True)}

    def sections(self) -> dict[str, str]:
        prepass = {"tile_ranges": "Tile ranges of captured vectors"} if self.variant.spans else {}
        return {
            "numbers": "Numbers",
            "primitives": "Primitives",
            "variant": "This variant's score and mask",
            "tiles": "Which tiles are visited",
            **prepass,
            "loads": "Loading tiles",
            "fused": "The fused kernel",
        }

    def fused_numbers(self) -> list[ConstantLine]:
        plan = self.plan
        exponent = "softmax_scale * LOG2_E" if self.variant.fold_scale else "LOG2_E"
        what = "exp(x) = 2^(x log2(e)); softmax_scale joins the factor" if self.variant.fold_scale else "exp(x) = 2^(x log2(e))"
        softmax = [
            ConstantLine("float", "LOG2_E", "1.4426950408889634f"),
            ConstantLine("float", "EXPONENT_SCALE", exponent, what),
        ]
        return [
            *self.infinity(),
            *self.numbers(),
            *(softmax if self.exponentials() else []),
            ConstantLine("int", "BLOCK_Q", str(plan.block_q), "query rows of a block"),
            ConstantLine("int", "BLOCK_KV", str(plan.block_kv), "keys of a tile"),
            ConstantLine("int", "THREADS", str(plan.threads)),
            *(ConstantLine("int", f"{b.name}_SMEM", str(b.offset)) for b in plan.buffers),
        ]

    def exponentials(self) -> list[str]:
        """The primitives of a softmax in base 2."""
        return []


class FusedSimt(Fused):
    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhsd")

    def primitives(self) -> list[str]:
        return self.conversions()

    def constants(self) -> list[ConstantLine]:
        per_thread = self.spec.head_dim_v // fused_simt.COLUMN_THREADS
        vector = next(n for n in (4, 2, 1) if per_thread % n == 0)
        return [
            *self.fused_numbers(),
            ConstantLine("int", "ROW_THREADS", str(fused_simt.ROW_THREADS)),
            ConstantLine("int", "COLUMN_THREADS", str(fused_simt.COLUMN_THREADS)),
            ConstantLine("int", "ROWS", "BLOCK_Q / ROW_THREADS", "of a thread"),
            ConstantLine("int", "COLUMNS", "BLOCK_KV / COLUMN_THREADS", "keys of a thread in a tile"),
            ConstantLine("int", "SUM_BLOCK", str(16 if self.spec.head_dim % 16 == 0 else 8), SUM_BLOCK),
            ConstantLine("int", "VECTOR", str(vector), "neighbouring dimensions of O that a thread has"),
            ConstantLine("int", "QK_STRIDE", f"HEAD_DIM + {fused_simt.PAD}", "floats from row to row in shared memory"),
            ConstantLine("int", "V_STRIDE", f"HEAD_DIM_V + {fused_simt.PAD}"),
            ConstantLine("int", "P_STRIDE", f"BLOCK_KV + {fused_simt.PAD}"),
        ]


class FusedMma(Fused):
    def exponentials(self) -> list[str]:
        return ["exp2_log2"] if self.spec.normalize == "softmax" else []

    def kernels(self) -> dict[str, KernelText]:
        return self.fused_kernel("bhs")

    def primitives(self) -> list[str]:
        dtype = self.spec.dtype.name
        odd = ["ldmatrix_x2"] if self.spec.head_dim_v % 16 else []
        return [
            *self.conversions(elementwise=False),
            f"pack_{dtype}",
            *self.exponentials(),
            "cp_async",
            "ldmatrix",
            *odd,
            f"mma_{dtype}",
        ]

    def constants(self) -> list[ConstantLine]:
        padded = fused_mma.padded_head_dim(self.spec)
        what = "" if padded == self.spec.head_dim else f"{padded - self.spec.head_dim} zeros fill the last step of Q K^T"
        return [
            *self.fused_numbers(),
            ConstantLine("int", "K_STEPS", str(padded // 16), "mma steps of 16 over the head size"),
            ConstantLine("int", "PAD", str(fused_mma.PAD)),
            ConstantLine("int", "QK_STRIDE", "16 * K_STEPS + PAD", what),
            ConstantLine("int", "V_STRIDE", "HEAD_DIM_V + PAD"),
        ]


SUM_BLOCK = "terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)"
INFINITY = ConstantLine("float", "INF", "__builtin_bit_cast(float, 0x7f800000)")

FILES: dict[str, type[File]] = {
    "naive": ThreeKernels,
    "tiled": ThreeKernels,
    "fused_simt": FusedSimt,
    "fused_mma": FusedMma,
}


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
        fields += [
            CapturedField("long long", f"{t.c_name}_stride_{d}", f"captured_{t.c_name}_stride_{d}", "") for d in range(t.rank)
        ]
    fields += [CapturedField(s.ctype, s.name, f"captured_{s.name}", "") for s in variant.scalars]
    return fields
