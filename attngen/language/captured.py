"""`CapturedArray`: the stand-in for an array that a traced function indexes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from attngen.diagnostics import counted
from attngen.language.tracer import TraceError, Tracer, is_array, lift
from attngen.spec.dtypes import DTYPES, INPUT_DTYPES, NUMPY_BFLOAT16
from attngen.spec.expr import ExpressionError, Type, gather
from attngen.spec.names import check_name, name_mistakes

_FACTS = frozenset(("device", "dtype", "is_cuda", "ndim", "numel", "size"))  # attributes that do not depend on the elements


class CapturedArray:
    """The stand-in for an array that a traced function indexes. `dtype_name` is None if kernels do not support the element
    type; `prefix` has the indices given so far: `bias[b][q]` is `bias[b, q]`. It is added to `captures`, if given, when an
    element is read."""

    def __init__(
        self,
        name: str,
        array: Any,
        dtype_name: str | None,
        prefix: tuple[object, ...] = (),
        captures: dict[str, CapturedArray] | None = None,
    ) -> None:
        self.name, self.array, self.dtype_name, self._prefix, self._captures = name, array, dtype_name, prefix, captures

    @property
    def title(self) -> str:
        """Its name in the spec: another one if the spec cannot have that name, as `q`, which is the query's position."""
        return f"captured_{self.name}" if any(True for _ in name_mistakes(self.name)) else self.name

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.array.shape)[len(self._prefix) :]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Tracer | CapturedArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, indices: object) -> Tracer | CapturedArray:
        at = (*self._prefix, *(indices if isinstance(indices, tuple) else (indices,)))
        sizes = tuple(self.array.shape)
        if len(at) > len(sizes):
            raise TraceError(f"`{self.name}` has {counted(len(sizes), 'dimension')} and is indexed with {len(at)}")
        for index in at:
            if not isinstance(index, Tracer) and not _is_whole(index):
                raise TraceError(f"`{self.name}` is indexed with {index!r}; expected one integer for each dimension")
        if len(at) < len(sizes):
            return CapturedArray(self.name, self.array, self.dtype_name, at, self._captures)
        return self.element(tuple(_from_the_end(i, size) for i, size in zip(at, sizes, strict=True)))

    def element(self, at: tuple[object, ...] = ()) -> Tracer:
        """The element at these indices. It is read at each call, so that the array may change between calls."""
        if self.dtype_name is None:
            raise TraceError(
                f"`{self.name}` has elements of {str(self.array.dtype).removeprefix('torch.')}; expected one of "
                f"{', '.join(t.name for t in INPUT_DTYPES)}. Convert it outside the function"
            )
        if self._captures is not None:
            if self.title not in self._captures:
                check_name(self.title)
            if self._captures.setdefault(self.title, self).array is not self.array:
                raise TraceError(f"two different arrays are called `{self.title}`; rename one")
        try:
            return Tracer(gather(self.title, Type(DTYPES[self.dtype_name].kind), tuple(lift(i) for i in at)))
        except ExpressionError as error:
            raise TraceError(f"{error.message}{'; ' + error.help if error.help else ''}") from error

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        if attribute not in _FACTS:
            raise TraceError(
                f"`{self.name}.{attribute}` would be computed once, when the function is traced: compute it outside the "
                "function, and refer to the result"
            )
        return getattr(self.array, attribute)

    def refuse(self, *others: object) -> NoReturn:
        """Raises TraceError: an array is used like one of its elements."""
        indices = ", ".join("bhqk"[-len(self.shape) :] if len(self.shape) <= 4 else "k")
        shown = self.name + "".join(f"[{i.expr if isinstance(i, Tracer) else i}]" for i in self._prefix)
        raise TraceError(f"`{shown}` is an array: index it, one integer for each dimension, as in {shown}[{indices}]")

    def __array_ufunc__(self, *args: object, **kwargs: object) -> NoReturn:
        self.refuse()

    def __array_function__(self, *args: object) -> NoReturn:
        self.refuse()

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> NoReturn:
        next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, CapturedArray)).refuse()

    __hash__ = object.__hash__


for _operator in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "radd", "rsub",
    "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "rand", "ror", "rxor", "lt", "le", "gt", "ge", "eq", "ne",
    "neg", "pos", "invert", "abs", "bool", "float", "int", "index", "contains",
):  # fmt: skip
    setattr(CapturedArray, f"__{_operator}__", CapturedArray.refuse)


def _is_whole(index: object) -> bool:
    return hasattr(index, "__index__") and not isinstance(index, (bool, CapturedArray)) and not is_array(index)


def _from_the_end(index: Any, size: object) -> Tracer | int:
    """The index; a negative one counts from the end, as in Python, if the size of the dimension is a number."""
    if isinstance(index, Tracer):
        return index
    whole = operator.index(index)
    return whole + size if whole < 0 and isinstance(size, int) else whole


def array_dtype(value: object) -> str | None:
    """The name of the element type of an array of any library; None for other values and unsupported types."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return None
    if dtype == NUMPY_BFLOAT16:
        return "bf16"
    text = str(dtype).removeprefix("torch.")
    return next((t.name for t in INPUT_DTYPES if t.torch == text), None)
