"""Functions of torch as ATen graphs: a mask or score is run once on fake numbers by `make_fx`.

Torch's modes refuse, while it runs, what a graph would not show: numbers that Python reads, and changes of tensors that others
see. They also annotate each operator with the line of the function that calls it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from attngen.language.tracer import TraceError
from attngen.torch.block_mask import Function
from attngen.torch.closures import Closure
from attngen.torch.decompositions import decompositions
from attngen.torch.layout import without_autocast
from attngen.torch.private import (
    FakeTensor,
    TorchDispatchMode,
    is_of_transform,
    items_as_indices,
    jit_trace,
    set_jit_trace,
    tree_leaves,
    tree_map_only,
)

Named = Mapping[str, object] | None
READ_ON_THE_HOST = (
    "a number that may change from call to call is read on the host; use the tensor itself, without item(), float(), int() or "
    "`if`, and torch.minimum and torch.maximum in the place of clamp"
)
MAKES_CONSTANTS: tuple[object, ...] = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
)  # by torch.tensor(NUMBER)
CALLED, LINE = "attngen.called", "attngen.line"  # what nodes of a graph are annotated with
_LOCK = RLock()  # torch.fx traces in one thread at a time
COPIES_TO_THE_HOST = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "storage_offset", "untyped_storage")


class ImportRefusal(TraceError):
    """A function of torch that cannot be an expression; the text names the operator and its place."""


class WriteRefusal(RuntimeError):
    """A function changes a tensor that others see too. No TypeError: after one, Python would run `x += 1` as x = x + 1."""


def stand_in(buffer: object) -> Tensor:
    """A tensor of the shape, type and device of one of a trace or a transform, with the memory of one element; a number for a
    symbol."""
    if not isinstance(buffer, torch.Tensor):
        return torch.zeros((), dtype=torch.int64)
    shape = tuple(map(hint, buffer.shape))
    device = buffer.device if buffer.device.type != "meta" else "cpu"
    one = torch.zeros((), dtype=buffer.dtype, device=device).expand(shape)
    return one.detach().requires_grad_() if buffer.requires_grad and one.is_floating_point() else one.detach()


def hint(size: int | torch.SymInt) -> int:
    """A size of the traced call's example. Raises ImportRefusal for one that depends on data."""
    found = size if isinstance(size, int) else size.node.hint
    if found is None:
        raise ImportRefusal("a size depends on data, which torch.compile cannot know")
    return int(found)


class _Operator(Protocol):
    """An operator as torch's dispatcher has it."""

    _schema: torch.FunctionSchema
    tags: Sequence[torch.Tag]

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class _Places(TorchDispatchMode):
    """Annotates each node of the graph with the operator that was called, and with the line of a function, one of `codes`."""

    def __init__(self, codes: set[types.CodeType]) -> None:
        super().__init__()
        self._codes = set(map(id, codes))  # by id: code that Dynamo makes of frames below has slices as constants, and no hash

    def __torch_dispatch__(
        self, function: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named = None
    ) -> object:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame.f_code) not in self._codes:
            frame = frame.f_back
        line = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        with annotate({CALLED: function, LINE: line}):
            return function(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    """Refuses to change a captured tensor, or one that has a view or is one: in the graph the other would stay as it was."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, Tensor] = {}  # views and what they are of, by their id, kept so that it stays theirs

    def __torch_dispatch__(
        self, function: _Operator, types: object, args: Sequence[object] = (), kwargs: Named = None
    ) -> object:
        schema = function._schema
        if schema.is_mutable:
            written = args[0]
            if not isinstance(written, FakeTensor) or id(written) in self._shared:
                what = "that has a view or is one" if isinstance(written, FakeTensor) else "that the function captures"
                raise WriteRefusal(f"{shown_operator(function)} changes a tensor {what}: make a new one, as x = x + 1 does")
        result = function(*args, **(kwargs or {}))
        if not schema.is_mutable and any(r.alias_info for r in schema.returns) and function not in MAKES_CONSTANTS:
            self._shared |= {id(t): t for t in tree_leaves((args[0], result)) if isinstance(t, torch.Tensor)}
        return result


class _HostReads(TorchDispatchMode):
    """Refuses to give Python the value of a captured tensor, or one computed from it: it may be another in the next call, and
    the kernel would be compiled for the first one's. make_fx knows the value of `captured[0]`, although the result is fake."""

    def __init__(self) -> None:
        super().__init__()
        self._of_captured: dict[int, Tensor] = {}  # fake results by their id, kept so that it stays theirs

    def __torch_dispatch__(
        self, function: _Operator, types: object, args: Sequence[object] = (), kwargs: Named = None
    ) -> object:
        operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        is_captured = any(not isinstance(a, FakeTensor) or id(a) in self._of_captured for a in operands)
        if is_captured and torch.Tag.data_dependent_output in function.tags:
            raise TraceError(READ_ON_THE_HOST)
        result = function(*args, **(kwargs or {}))
        if is_captured and function not in MAKES_CONSTANTS:
            self._of_captured |= {id(r): r for r in tree_leaves(result) if isinstance(r, torch.Tensor)}
        return result


class _HostCopies(TorchFunctionMode):
    """Refuses what gives Python the elements of a captured tensor without calling an operator."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named = None
    ) -> object:
        if getattr(function, "__name__", "") in COPIES_TO_THE_HOST:
            raise TraceError(READ_ON_THE_HOST)
        return function(*args, **(kwargs or {}))


class _MixedIndices(TorchFunctionMode):
    """Reads `t[h, 0, :, None, k]` in two steps: what integers of Python, slices and None select, then what numbers that are
    traced select. Python would read those on the host, and torch's mode would make tensors of the integers."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named = None
    ) -> object:
        if function is torch.Tensor.__getitem__:
            source, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if _are_mixed(items):
                assert isinstance(source, torch.Tensor)
                basic = [slice(None) if isinstance(item, torch.Tensor) else item for item in items]
                rest = [] if Ellipsis in basic else [Ellipsis]  # torch's mode leaves an Ellipsis alone
                selected = function(source, (*basic, *rest))
                indices = _left_indices(items, source.dim())
                return torch.ops.aten.index(selected, indices) if any(i is not None for i in indices) else selected
        return function(*args, **(kwargs or {}))


def _are_mixed(items: tuple[object, ...]) -> bool:
    """Whether integers of Python or traced numbers stand alone or among each other, slices, None and Ellipsis."""
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    others = {type(item) for item in items if not isinstance(item, torch.Tensor)}
    are_numbers = not any(t.dim() or t.dtype in (torch.bool, torch.uint8) for t in tensors)
    known = {int, slice, type(None), type(Ellipsis)}
    return bool(others) and bool(tensors or int in others) and others <= known and are_numbers


def _left_indices(items: tuple[object, ...], rank: int) -> list[Tensor | None]:
    """The traced numbers of `items`, or None, for each dimension of what the others select of `rank` dimensions."""
    rest = rank - sum(item is not None and item is not Ellipsis for item in items)
    indices: list[Tensor | None] = []
    for item in items:
        if item is Ellipsis:
            indices += [None] * rest
        elif not isinstance(item, int):
            indices.append(item if isinstance(item, torch.Tensor) else None)
    return indices


class _StandIns(TorchFunctionMode):
    """Puts stand-ins, by their tensors' id, in the place of tensors of a transform, which is not active here."""

    def __init__(self, stands: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._stands = stands

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Named = None
    ) -> object:
        given, named = tree_map_only(torch.Tensor, self._stand, (args, kwargs or {}))
        return function(*given, **named)

    def _stand(self, tensor: Tensor) -> Tensor:
        stand = self._stands.get(id(tensor))
        if stand is None and is_of_transform(tensor):
            raise TraceError("a tensor of a transform of torch.func is reached by another way than by names; use its name")
        return tensor if stand is None else stand


@contextmanager
def _not_recorded() -> Iterator[None]:
    """Outside of torch.jit.trace, which replaces numbers by tensors."""
    state = jit_trace()
    set_jit_trace(None)
    try:
        yield
    finally:
        set_jit_trace(state)


def graph_of(function: Function, examples: Sequence[Tensor], closure: Closure) -> torch.fx.GraphModule:
    """The ATen graph of `function` on fake numbers. Operators that expressions lack are decomposed into others."""
    device = examples[0].device.type

    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy

    def called(*numbers: Tensor) -> object:  # make_fx counts the arguments of plain functions only
        with _HostReads(), _Writes(), _MixedIndices(), _HostCopies(), _Places(closure.codes), _StandIns(closure.stands):
            return function(*numbers)

    with _LOCK, items_as_indices(), torch.no_grad(), without_autocast(device), _not_recorded(), preserve_node_meta():
        traced = make_fx(called, decompositions(), "fake", _allow_non_fake_inputs=True)
        return traced(*examples)


def numbers_on(device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Examples of b, h, q, k, after one of a score of `dtype`."""
    indices = [torch.empty((), dtype=torch.int32, device=device) for _ in range(4)]
    return indices if dtype is None else [torch.empty((), dtype=dtype, device=device), *indices]


def shown_operator(operator: _Operator) -> str:
    return f"torch.ops.{operator._schema.name.replace('::', '.')}"
