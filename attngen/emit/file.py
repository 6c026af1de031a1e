"""What the files of all schedules share: constants, what templates read. The templates do the writing."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi, comment_text
from attngen.emit.constants import INFINITY, ConstantLine
from attngen.emit.conversion import conversion, converting_kernels
from attngen.emit.kernel_maker import KernelMaker
from attngen.emit.kernel_text import KernelText
from attngen.emit.pair_layout import FRAGMENTS, KEYS_OF_WARPGROUP, PACKED_HEADS, ROWS_OF_WARPGROUP, TRANSPOSED, WARPGROUP
from attngen.emit.rotation import THREADS as ROTARY_THREADS
from attngen.emit.rotation import chunk, rotating_kernels, rotation_of
from attngen.emit.terms import splitting, splitting_kernels
from attngen.emit.tile_ranges import RangeKernel, range_kernel
from attngen.emit.transposition import transposing_kernels, transposition
from attngen.emit.variant import Variant
from attngen.emit.wgmma import Wgmma
from attngen.plan.arch import Feature
from attngen.plan.axes import KEYS
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import Gradient
from attngen.spec.operator import ZERO
from attngen.spec.print_attn import expression_to_text, rotary_to_text, to_text
from attngen.spec.scales import LEAST_SCALE, MOST_SCALE


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


@dataclass(slots=True)
class File(KernelMaker):
    """One file to be: what all schedules share. A subclass says which kernels and numbers it has."""

    # what a subclass gives

    def kernels(self) -> dict[str, KernelText]:
        raise NotImplementedError

    def constants(self) -> list[ConstantLine]:
        raise NotImplementedError

    def products(self) -> list[Wgmma]:
        """The products of warpgroups."""
        return []

    @property
    def by_tma(self) -> bool:
        """Whether TMA copies keys."""
        return self.plan.schedule.by_tma

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
    def scales_each(self) -> bool:
        """Whether each dot product is multiplied by the scale, which is then no part of a factor."""
        return not (self.variant.raw_scores or self.variant.fold_scale)

    @property
    def scale_of_scores(self) -> str:
        """The name of what dot products are multiplied with, if any are."""
        return "head_scale" if self.variant.head_scale else "softmax_scale"

    @property
    def gradient(self) -> Gradient:
        """The derivatives of the spec, for a backward."""
        assert self.facts.gradient is not None
        return self.facts.gradient

    def launch_order(self) -> list[KernelText]:
        rotating = [one.kernel for one in rotating_kernels(self)]
        ranges = (r.kernel for r in self.range_kernels())
        prepared = (*converting_kernels(self), *transposing_kernels(self), *splitting_kernels(self))
        return [*rotating[:1], *prepared, *ranges, *self.kernels().values(), *rotating[1:]]

    def range_kernels(self) -> list[RangeKernel]:
        """The pre-pass."""
        return [range_kernel(self, span) for span in self.variant.spans]

    def context(self) -> dict[str, object]:
        spec, plan, variant = self.spec, self.plan, self.variant
        return {
            **self._header(),
            **self._storage(),
            **self._rotation(),
            **conversion(self),
            **transposition(self),
            **splitting(self),
            "preparing": self._preparing(),
            **self._captured(),
            "plan": plan,
            "own": plan.own,
            "variant": variant,
            "head_dim": spec.head_dim,
            "head_dim_v": spec.head_dim_v,
            "odd_v": spec.head_dim_v % 16 != 0,
            "T": spec.dtype.cuda,
            "types": self.types(),
            "from_float": f"to_{spec.dtypes['o'].name}",
            "element_bytes": spec.dtype.bytes,
            "slab_columns": ROW_BYTES // spec.dtype.bytes,
            "key_bytes": spec.dtypes["k"].bytes,
            "constants": self.constants(),
            "products": self.products(),
            "kernels": self.kernels(),
            "range_kernels": self.range_kernels(),
            "text": comment_text.expression_texts(spec, self.facts.gradient),
            "affine_text": expression_to_text(plan.affine.term) if plan.affine else "",
            "normalize": spec.normalize,
            "weighing": comment_text.WEIGHING[spec.normalize],
            "pair_bytes": comment_text.PAIR_BYTES[spec.normalize],
            "weights_equations": comment_text.weights_equations(spec, plan.writes_lse),
            "fused_equations": comment_text.fused_equations(spec, plan.writes_lse, self.is_bounded()),
            "masked": "0.0f" if spec.normalize == "none" else "-INF",
            "sink_by_row": variant.sink is not None and "q_idx" in variant.sink.arguments,
            "exponent_scale": "exponent_scale" if variant.exponent_varies else "EXPONENT_SCALE",
            "exponent_varies": variant.exponent_varies,
            "scale_arguments": ["exponent_scale"] if variant.exponent_varies else [],
            "scale_members": ["softmax.exponent_scale"] if variant.exponent_varies else [],
            "sink_scale": ["softmax_scale"] if variant.exponent_varies else [],
            "threshold": "threshold" if variant.exponent_varies else "RESCALE_THRESHOLD / EXPONENT_SCALE",
            "power_of_two": "(1.0f / RESCALE_THRESHOLD) * threshold" if variant.exponent_varies else "(1.0f / EXPONENT_SCALE)",
            "score_each": variant.score is not None or bool(variant.score_of_two) or not variant.fold_scale,
            "times_scale": f" * {self.scale_of_scores}" if self.scales_each else "",
            "scale_of_scores": self.scale_of_scores,
            "fragments": PACKED_HEADS if plan.schedule.packs_heads else FRAGMENTS,
            "transposed": TRANSPOSED,
            "warpgroup": WARPGROUP,
            "rows_of_warpgroup": ROWS_OF_WARPGROUP,
            "keys_of_warpgroup": KEYS_OF_WARPGROUP,
            "lse": plan.writes_lse,
            "lse_rest": "lse_rest" in plan.numbers_of_rows,
            "dlse": spec.lse,
            "minus_dlse": " - dlse[q]" if spec.lse else "",
            "plus_dlse": " + dlse" if spec.lse else "",
            **self._classification(),
            "tile_kinds": "classified" if variant.classify else "solved",
            "classify_arguments": variant.classify.arguments if variant.classify else (),
            # a call would hold up what runs in the background
            "inline_classify": plan.schedule.on_tensor_cores and variant.classify is not None and variant.classify.inlined,
            "packs_heads": plan.schedule.packs_heads,
            # rounded to 16 bits or fewer, weights need no exact exponential and no IEEE division
            "approximate_weights": plan.schedule.on_tensor_cores and self.spec.dtype.bytes <= 2,
        }

    def types(self) -> dict[str, str]:
        """The type of the elements of each tensor, in CUDA."""
        return {name: DTYPES[self.read(name).dtype].cuda for name in self.tensors}

    def _preparing(self) -> list[str]:
        """The kernels that prepare rows, `parts/NAME.cu.j2`."""
        plan = self.plan
        kinds = {"rotary": plan.rotated, "converted": plan.converted, "transposed": plan.transposed, "terms": plan.in_terms}
        return [kind for kind, tensors in kinds.items() if tensors]

    def _classification(self) -> dict[str, object]:
        """What is said of the tiles that are visited."""
        plan, classify = self.plan, self.variant.classify
        solves = plan.bounds.begin is not ZERO or plan.bounds.end is not KEYS.length
        by_row_tile = classify is not None and "q_tile" in classify.arguments
        return {
            "solved_from": f", solved from {expression_to_text(self.spec.mask)}" if solves and self.spec.mask else "",
            "solved_part": SOLVED_PART if solves else NO_SOLVED_PART,
            "ranges_of_two_tiles": by_row_tile
            and plan.block_q > plan.block_kv
            and not any(s.index == "q" for s in self.variant.spans),
        }

    def _header(self) -> dict[str, object]:
        """What the header says of the file."""
        return {
            "title": f"{self.spec.name}, {self.plan.keyword}{', backward' if self.plan.direction == 'backward' else ''}",
            "spec_lines": [f"    {line}" for line in to_text(self.given).rstrip().splitlines()],
            "equations": self.equations(),
            "shapes": [comment_text.shape_line(t) for t in self.tensors.values()],
        }

    def _storage(self) -> dict[str, object]:
        """Where the rows of a sequence are."""
        kernel = self.spec.kernel
        key_rows = "PagedHeadRows" if kernel.is_paged else "PaddedHeadRows" if kernel.is_counted else "HeadRows"
        return {
            "packed": kernel.is_packed,
            "rows_in": "sequences" if kernel.is_packed else "batches",
            "paged": kernel.is_paged,
            "keys_in": "pages" if kernel.is_paged else "rows",
            "counted": kernel.is_counted,
            "sequences": kernel.storage != "dense",
            "by_tma": self.by_tma,
            "reads_ahead": False,
            "key_rows": key_rows,
            "value_rows": "TransposedRows" if self.plan.transposed else key_rows,
            "transposed_values": bool(self.plan.transposed),
            "tile_in_page": self.plan.schedule.is_tiled and (kernel.page_size or 1) % self.plan.block_kv == 0,
            "lengths": self.lengths,
            "max_q_len": self.lengths["q"],
            "max_kv_len": self.lengths["k"],
        }

    def _rotation(self) -> dict[str, object]:
        """The kernels that rotate, if there are any."""
        rotation = rotation_of(self.spec, self.plan)
        if rotation is None:
            return {"rotating": []}
        threads = ConstantLine("ROTARY_THREADS", ROTARY_THREADS, "of a block, which has a row of all heads")
        return {
            "rotating": rotating_kernels(self),
            "rotation": rotation,
            "rows_are": "copied",
            "rotary_text": rotary_to_text(self.spec.rotary) if self.spec.rotary is not None else "",
            "numbers_of_rotation": [chunk(self.spec.dtype), *rotation.constants(), threads],
            "A": rotation.angles.cuda,
        }

    def _captured(self) -> dict[str, object]:
        """The captured values, and which functions read them."""
        fields = captured_fields(self.variant)
        return {
            "captured_fields": fields,
            "captured_initializer": comment_text.wrapped(", ".join(f.parameter for f in fields)),
        }

    def numbers(self) -> list[ConstantLine]:
        """The constants that any schedule may name."""
        spec, variant = self.spec, self.variant
        lines = [INFINITY, ConstantLine("HEAD_DIM", spec.head_dim), ConstantLine("HEAD_DIM_V", spec.head_dim_v)]
        if spec.q_heads is not None and spec.kv_heads is not None:
            lines += [ConstantLine("q_heads", spec.q_heads), ConstantLine("kv_heads", spec.kv_heads)]
        if spec.kernel.page_size is not None:
            lines.append(ConstantLine("page_size", spec.kernel.page_size, "rows of a page of keys"))
        if variant.scale_is_constant:
            lines.append(ConstantLine("softmax_scale", variant.scale, ctype="float"))
        if variant.scale_may_join:
            lines += [
                ConstantLine("LEAST_SCALE", f"{LEAST_SCALE}f", "that joins the exponent's factor", ctype="float"),
                ConstantLine("MOST_SCALE", f"{MOST_SCALE}f", "such a factor is far from overflow", ctype="float"),
            ]
        return lines

    @property
    def product_type(self) -> str:
        """The type of the operands of tensor cores."""
        return self.spec.dtype.name

    @property
    def split(self) -> str:
        """The type of the two parts of each number that tensor cores multiply; empty: numbers are not split."""
        return ""

    def forms_of_primitives(self) -> dict[str, set[str]]:
        """Of primitives that have one name for several types, or instructions, those of this file."""
        own, schedule = self.spec.dtype.name, self.plan.schedule
        read = {t.dtype.name for t in self.variant.tensors} | {self.spec.input(s.input).dtype.name for s in self.variant.spans}
        read.discard("fp32")
        if not schedule.on_tensor_cores:  # Q, K, V and O are converted one by one
            read |= {dtype.name for dtype in self.spec.dtypes.values()}
        if schedule.is_tiled and not schedule.is_fused:
            read.add("fp32")  # P
        read |= {self.tensors[name].dtype for name in self.plan.converted}
        if rotation := rotation_of(self.spec, self.plan):
            read |= {own, rotation.angles.name}
        of_products = {kind: {self.split or self.product_type} for kind in ("pack", "unpack", "mma")}
        of_products["halves"] = {self.spec.dtypes["k"].name}
        reduce_add = {"redux" if self.plan.arch.has(Feature.REDUX) else "shuffles"}
        return {"to_float": read, "special": {own}, "split": {self.split}, "reduce_add": reduce_add, **of_products}


ROW_BYTES = 128  # bytes of a row of a swizzled slab
SOLVED_PART = "Only a part of this mask can be solved for k: it gives the range below. Within this range"
NO_SOLVED_PART = "No part of this mask can be solved for k: the range below holds every key, and"
