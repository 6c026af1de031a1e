"""`Append`: new rows of K and V that go to a cache, rotated on the way; emitted as a program of one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from attngen.emit.abi import ROW_ALIGNMENT, data
from attngen.emit.comment_text import shape_line
from attngen.emit.comments import Comments, at_level
from attngen.emit.constants import ConstantLine
from attngen.emit.emitter import environment
from attngen.emit.kernel_text import KernelText, signature_lines
from attngen.emit.primitives import with_primitives
from attngen.emit.program import Axis, Extent, KernelEntry, Parameter, Product, Program, Sum, Tensor, free
from attngen.emit.rotation import THREADS, Rotation, chunk
from attngen.spec.dtypes import DType

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

    @property
    def rotation(self) -> Rotation | None:
        """How rows are rotated, if they are."""
        if self.angles is None:
            return None
        return Rotation(self.dtype, self.head_dim, self.rotary_dim, self.interleaved, self.angles)

    @property
    def name(self) -> str:
        where = "pages" if self.paged else "cache"
        return f"append_to_{where}_{self.dtype}_{self.head_dim}" + (f"_rotary_{self.rotary_dim}" if self.rotary_dim else "")


def append_program(append: Append, arch: str, comments: Comments = "brief") -> Program:
    """The CUDA that appends, and its ABI. Pure: the same text for the same arguments."""
    tensors = {t.name: t for t in _tensors(append)}
    rotates = bool(append.rotary_dim)
    rows: Extent = Sum("q_len", "new_len") if rotates else "new_len"
    entry = KernelEntry(
        append.name, tuple(_parameters(append, tensors)), (Product((rows, "batch")), Product(()), Product(())), (THREADS, 1, 1)
    )
    rotation = append.rotation
    context: dict[str, Any] = {
        "title": append.name,
        "T": append.dtype.cuda,
        "A": append.angles.cuda if append.angles else "",
        "from_float": f"to_{append.dtype}",
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
    text = with_primitives(text, {"to_float": {append.dtype.name, append.angles.name}} if append.angles else {})
    return Program(append.name, at_level(text, comments), arch, (entry,), tuple(tensors.values()))


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
    place = (free("pages"), free("page_size")) if append.paged else (free("batch"), free("cache_len"))
    rows = (free("batch"), free("q_len"), q_heads, sizes["K"])
    tensors = [
        *(
            Tensor(n, "input", t, (free("batch"), free("new_len"), kv_heads, size), n.lower(), *layout)
            for n, size in sizes.items()
        ),
        Tensor("lengths", "input", "int32", (free("batch"),), "lengths"),
    ]
    if append.paged:
        tensors.append(Tensor("page_table", "input", "int32", (free("batch"), free("max_pages")), "page_table"))
    if append.angles is not None:
        table = (free("angles"), Axis("", append.rotary_dim // 2))
        tensors += [Tensor(n, "input", append.angles.name, table, n, unit_stride=True) for n in ("cosines", "sines")]
        tensors.append(Tensor("Q", "input", t, rows, "q", *layout))
    tensors += [
        Tensor(f"{n}_cache", "output", t, (*place, kv_heads, size), f"{n.lower()}_cache", *layout) for n, size in sizes.items()
    ]
    tensors.append(Tensor("lengths_after", "output", "int32", (free("batch"),), "lengths_after", unit_stride=True))
    if append.angles is not None:
        tensors.append(Tensor("Q_rotated", "output", t, rows, "q_rotated", *layout))
    return tensors


def _parameters(append: Append, tensors: dict[str, Tensor]) -> list[Parameter]:
    ctypes = {append.dtype.name: append.dtype.cuda, "int32": "int"}
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
