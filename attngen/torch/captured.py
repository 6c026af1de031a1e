"""The tensors that a mask or score of torch captures, as inputs of a spec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attngen.spec.attention import Input
from attngen.spec.dtypes import FP32, INT32, INT64, DType
from attngen.spec.expr import Expr, Name, Type, constant, gather, name
from attngen.spec.names import name_mistakes
from attngen.spec.operator import maximum, minimum
from attngen.torch.aten import Context, Lazy, lazy, type_of
from attngen.torch.aten_tensors import chosen, linear
from attngen.torch.closures import Closure
from attngen.torch.description import ELEMENT_TYPES
from attngen.torch.graphs import ImportRefusal

MAX_CONSTANTS = 64  # elements of a tensor that a function makes of numbers: more of them are an input
# What kernels do not read is converted when the kernel is called.
_CONVERTED = {
    torch.float64: FP32,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16), INT32),
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64), INT64),
}


def element_type(tensor: Tensor) -> DType:
    """The element type with which kernels read `tensor`. Raises ImportRefusal."""
    found = ELEMENT_TYPES.get(tensor.dtype) or _CONVERTED.get(tensor.dtype)
    if found is None:
        raise ImportRefusal(
            f"a captured tensor has elements of {tensor.dtype}, which no expression can read; convert it outside the function"
        )
    return found


def as_read(tensor: Tensor, dtype: DType | None, device: torch.device) -> Tensor:
    """`tensor` as kernels on `device` read it: of a type of the language (None for its own), and a number on the device."""
    wanted = tensor.dtype if dtype is None else getattr(torch, dtype.torch)
    if tensor.dtype is not wanted:
        tensor = tensor.to(wanted)
    return tensor.to(device, non_blocking=True) if tensor.dim() == 0 and tensor.device != device else tensor


@dataclass
class Inputs:
    """The captured tensors of one import, by name, and where a call finds each: its position among the closure's tensors, or
    the tensor itself if the function made it."""

    closure: Closure
    context: Context
    taken: set[str] = field(default_factory=set)
    declared: dict[str, Input] = field(default_factory=dict)
    sources: dict[str, int | str | Tensor] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)  # params that are integers of the closure's place
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # sizes in a trace: (position in the closure, dimension)
    _of_tensor: dict[int, Lazy] = field(default_factory=dict)
    bits: int = 64  # int64 elements are kept within so many, so that what is computed with them fits 64

    def unused_name(self, wanted: str, other: str) -> str:
        """A name of the language that is not taken, like `wanted` if that is one."""
        base = re.sub("[^A-Za-z0-9_]", "_", wanted).strip("_")[:32].rstrip("_")
        if not base or base[0].isdigit() or any(True for _ in name_mistakes(base)):
            base = other
        found, count = base, 1
        while found in self.taken:
            count += 1
            found = f"{base}_{count}"
        self.taken.add(found)
        return found

    def add(
        self, wanted: str, tensor: Tensor, dims: tuple[int | str, ...] | None = None, source: int | str | Tensor | None = None
    ) -> Input:
        """Declares an input; its dimensions are free by default."""
        title = self.unused_name(wanted, "captured")
        dims = tuple(f"{title}_dim{d}" for d in range(tensor.dim())) if dims is None else dims
        declared = Input(title, element_type(tensor), dims)
        self.declared[title] = declared
        if declared.dtype.kind == "int":
            known = torch.iinfo(tensor.dtype)
            self.context.elements[title] = (known.min, min(known.max, 2**63 - 1))
        if tensor.requires_grad:
            self.context.trained.add(title)
        self.sources[title] = tensor if source is None else source
        if isinstance(source, int) and source in self.closure.shapes:
            self.sizes.update({str(n): (source, dim) for dim, n in enumerate(dims)})
        return declared

    def fix(self, operands: Iterable[object], kept: Sequence[Expr] = ()) -> None:
        """Makes torch.compile start again if a size of `operands` changes that is not one of `kept`: the expression is that of
        the traced size."""
        for operand in operands:
            if isinstance(operand, Lazy):
                for size in operand.sizes:
                    if isinstance(size, Name) and size not in kept and size.name in self.sizes:
                        place, dim = self.sizes[size.name]
                        int(self.closure.shapes[place][dim])  # a guard, if the size is a symbol
            elif isinstance(operand, (list, tuple)):
                self.fix(operand, kept)

    def read(self, tensor: Tensor, is_made: bool) -> Lazy:
        """A captured tensor as a value of the graph, or one that the function made (`is_made`) of numbers."""
        if not is_made and self.closure.place(tensor) is None:
            self.closure.opaque = tensor  # found by a way that the key does not show
        if id(tensor) not in self._of_tensor:
            self._of_tensor[id(tensor)] = self._captured(tensor, is_made)
        return self._of_tensor[id(tensor)]

    def _captured(self, tensor: Tensor, is_made: bool) -> Lazy:
        place = self.closure.place(tensor)
        is_found = place is None and tensor.device.type == "cpu" and not tensor.requires_grad
        is_known = is_made or is_found  # a function makes tensors of numbers of Python
        if is_known and tensor.numel() <= MAX_CONSTANTS and not tensor.is_complex():
            return _constants(tensor)
        wanted = "constant" if place is None else self.closure.tensors[place][0]
        if place is not None and place in self.closure.symbols:
            param = self.unused_name(wanted, "number")
            self.symbols[param] = place
            return number(torch.int64, name(param, Type.INT))
        declared = self.add(wanted, tensor, source=place)
        kind = Type(declared.dtype.kind)
        sizes = tuple(name(str(d), Type.INT) for d in declared.dims)

        def element(at: tuple[Expr, ...]) -> Expr:
            found: Expr = gather(declared.name, kind, at)
            if self.bits < 64 and declared.dtype is INT64:
                most = 2 ** (self.bits - 1)
                found = minimum(maximum(found, constant(-most)), constant(most - 1))
            return found

        return Lazy(tuple(tensor.shape), tensor.dtype, element, sizes)


def _constants(tensor: Tensor) -> Lazy:
    """A small tensor of numbers that the function itself wrote."""
    values: list[Expr] = [constant(v) for v in tensor.reshape(-1).tolist()]
    kind = type_of(tensor.dtype)
    return lazy(tensor.shape, tensor.dtype, lambda at: chosen(values, linear(tensor.shape, at), kind))


def number(dtype: torch.dtype, expr: Expr) -> Lazy:
    return lazy((), dtype, lambda _: expr)
