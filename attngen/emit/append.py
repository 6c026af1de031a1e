"""`Append`: new rows of K and V that go to a cache, rotated on the way; emitted as a program of one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.emit.abi import ROW_ALIGNMENT, data
from attngen.emit.comment_text import shape_line
from attngen.emit.comments import Comments, at_level
from attngen.emit.constants import ConstantLine
from attngen.emit.emitter import environment
from attngen.emit.kernel_text import KernelText, signature_lines
from attngen.emit.primitives import with_primitives
from attngen.emit.program import Axis, Extent, KernelEntry, Parameter, Product, Program, Sum, Tensor, free
from attngen.emit.rotation import THREADS, Rotation, chunk
from attngen.plan.arch import ARCHES, Feature
from attngen.spec.dtypes import FP8_DTYPES, DType

LETTERS = {
    **dict.fromkeys(("batch", "pages"), "b"),
    **dict.fromkeys(("q_len", "new_len", "cache_len", "page_size"), "s"),
    **dict.fromkeys(("q_heads", "kv_heads"), "h"),
    **dict.fromkeys(("angles", "max_pages"), "p"),
}  # letters of the axes with these names
PlaceOfRows = Literal["new rows", "first new row", "end"]
POSITIONS: dict[PlaceOfRows, str] = {  # position of row `row` of Q, if its sequence had `begin` keys before
    "new rows": "begin + row",
    "first new row": "begin",
    "end": "begin + new_len - q_len + row",
}


@dataclass(frozen=True, slots=True)
class Append:
    """Rows to append. K, V and the caches are [batch, length, heads, size] of `dtype`; in pages, a cache is [pages, page_size,
    heads, size].

    A cache of another type, `cache`, is one of 8 bits: rows are divided by scales [batch, new_len, kv_heads] and rounded to
    nearest, ties to even. What is beyond its largest number becomes that number; NaN stays NaN.

    The first `rotary_dim` elements of rows of K, and of Q, are rotated by tables of `angles`: 0 rotates none. Pairs are
    neighbours if `interleaved`, else elements of the two halves. `q_at` says where rows of Q stand.
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    paged: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    q_at: PlaceOfRows = "new rows"
    angles: DType | None = None  # the type of cosines and sines, if anything is rotated
    cache: DType | None = None  # the type of the caches, if it is another

    @property
    def cached(self) -> DType:
        """The type of the caches."""
        return self.cache or self.dtype

    @property
    def rotation(self) -> Rotation | None:
        """How rows are rotated, if they are."""
        if self.angles is None:
            return None
        return Rotation(self.dtype, self.head_dim, self.rotary_dim, self.interleaved, self.angles)

    @property
    def name(self) -> str:
        where = "pages" if self.paged else "cache"
        to = f"_{self.cache}" if self.cache else ""
        return f"append_to_{where}{to}_{self.dtype}_{self.head_dim}" + (f"_rotary_{self.rotary_dim}" if self.rotary_dim else "")


def append_program(append: Append, arch: str, comments: Comments = "brief") -> Program:
    """The CUDA that appends, and its ABI. Pure: the same text for the same arguments."""
    tensors = {t.name: t for t in _tensors(append)}
    rotates = bool(append.rotary_dim)
    rows: Extent = Sum("q_len", "new_len") if rotates else "new_len"
    entry = KernelEntry(
        append.name, tuple(_parameters(append, tensors)), (Product((rows, "batch")), Product(()), Product(())), (THREADS, 1, 1)
    )
    rotation = append.rotation
    context: dict[str, object] = {
        "title": append.name,
        "T": append.dtype.cuda,
        "A": append.angles.cuda if append.angles else "",
        "from_float": f"to_{append.dtype}",
        "C": append.cached.cuda,
        "rows_are": "quantized" if append.cache else "copied",
        "stored": f"{append.cache}({{0}} / {{1}}_scale[b, i, h])" if append.cache else "{0}",
        "rotated_to": "auto" if append.cache else f"{append.dtype.cuda}*",
        "rotation": rotation,
        "q_position": POSITIONS[append.q_at],
        "paged": append.paged,
        "keys_in": "pages" if append.paged else "rows",
        "cache_rows": "page_size" if append.paged else "cache_len",
        "shapes": [shape_line(t) for t in tensors.values()],
        "constants": constants(append),
        "kernel": KernelText(entry, signature_lines(entry, tensors), "THREADS"),
        "moved": [("K", "PARTS"), ("V", "V_PARTS")],
    }
    text = environment().get_template("kernels/append.cu.j2").render(context)
    text = with_primitives(text, _forms(append, arch))
    return Program(append.name, at_level(text, comments), arch, (entry,), tuple(tensors.values()))


def _forms(append: Append, arch: str) -> dict[str, set[str]]:
    """The primitives of several forms that the file may have."""
    way = "cvt" if ARCHES[arch].has(Feature.CVT_E4M3) else "bits"
    own = {append.dtype.name} if append.cache else set()
    angles = {append.dtype.name, append.angles.name} if append.angles else set()
    return {"to_float": own | angles} | {f"quantize_{t}": {way} if t is append.cache else set() for t in FP8_DTYPES}


def constants(append: Append) -> list[ConstantLine]:
    """The numbers of the file."""
    lines = [
        ConstantLine("HEAD_DIM", append.head_dim),
        ConstantLine("HEAD_DIM_V", append.head_dim_v),
        ConstantLine("THREADS", THREADS),
        chunk(append.dtype),
        ConstantLine("V_PARTS", "HEAD_DIM_V / CHUNK", "of a row of V, each moved by a thread"),
    ]
    if append.rotation is None:
        return [*lines, ConstantLine("PARTS", "HEAD_DIM / CHUNK", "of a row of K")]
    return [*lines, *append.rotation.constants()]


def _tensors(append: Append) -> list[Tensor]:
    t, q_heads, kv_heads = append.dtype.name, free("q_heads"), free("kv_heads")
    sizes = {"K": Axis("head_dim", append.head_dim), "V": Axis("head_dim_v", append.head_dim_v)}
    layout: tuple[int, bool] = (ROW_ALIGNMENT, True)
    of_cache = (ROW_ALIGNMENT * append.cached.bytes // append.dtype.bytes, True)  # as many elements as of a new row
    place = (free("pages"), free("page_size")) if append.paged else (free("batch"), free("cache_len"))
    rows = (free("batch"), free("q_len"), q_heads, sizes["K"])
    tensors = [
        *(
            Tensor(n, "input", t, (free("batch"), free("new_len"), kv_heads, size), n.lower(), *layout)
            for n, size in sizes.items()
        ),
        Tensor("lengths", "input", "int32", (free("batch"),), "lengths"),
    ]
    if append.cache is not None:
        scaled = (free("batch"), free("new_len"), kv_heads)
        tensors += [Tensor(f"{n}_scale", "input", "fp32", scaled, f"{n}_scale", broadcasts=True) for n in "kv"]
    if append.paged:
        tensors.append(Tensor("page_table", "input", "int32", (free("batch"), free("max_pages")), "page_table"))
    if append.angles is not None:
        table = (free("angles"), Axis("", append.rotary_dim // 2))
        tensors += [Tensor(n, "input", append.angles.name, table, n, unit_stride=True) for n in ("cosines", "sines")]
        tensors.append(Tensor("Q", "input", t, rows, "q", *layout))
    tensors += [
        Tensor(f"{n}_cache", "output", append.cached.name, (*place, kv_heads, size), f"{n.lower()}_cache", *of_cache)
        for n, size in sizes.items()
    ]
    tensors.append(Tensor("lengths_after", "output", "int32", (free("batch"),), "lengths_after", unit_stride=True))
    if append.angles is not None:
        tensors.append(Tensor("Q_rotated", "output", t, rows, "q_rotated", *layout))
    return tensors


def _parameters(append: Append, tensors: dict[str, Tensor]) -> list[Parameter]:
    ctypes = {append.dtype.name: append.dtype.cuda, append.cached.name: append.cached.cuda, "fp32": "float", "int32": "int"}
    if append.angles is not None:
        ctypes[append.angles.name] = append.angles.cuda
    pointers = [data(t.name, ctypes[t.dtype], writable=t.is_written) for t in tensors.values()]
    strides = [
        Parameter(f"{t.name.lower()}_stride_{LETTERS[axis.name]}", "long long", "stride", t.name, d)
        for t in tensors.values()
        for d, axis in enumerate(t.axes)
        if axis.name in LETTERS and t.name != "lengths_after"
    ]
    sizes = ["new_len", "kv_heads", "page_size" if append.paged else "cache_len"]
    sizes += ["pages", "max_pages"] if append.paged else []
    sizes += ["q_len", "q_heads", "angles"] if append.angles is not None else []
    return [*pointers, *strides, *(Parameter(n, "int", "size", n) for n in sizes)]
