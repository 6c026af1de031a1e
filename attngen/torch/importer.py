"""Functions of torch as expressions: a mask or score is run once on fake numbers by `make_fx`, and its ATen graph is read.

What is remembered of a function is found again by what it closes over (`closures.py`), so that a call with other tensors traces
nothing, and one with another integer that is added or compared compiles nothing.
"""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attngen.diagnostics import DiagnosticError
from attngen.language.trace import place_of, title_of
from attngen.language.tracer import TraceError
from attngen.spec.attention import Input
from attngen.spec.dtypes import DTYPES, FP32, INT32, INT64, DType
from attngen.spec.expr import Expr, ExpressionError, Name, Type, constant, gather, name
from attngen.spec.names import name_mistakes
from attngen.spec.operator import maximum, minimum
from attngen.torch.aten import Call, Context, Lazy, lazy, meaning_of, type_of
from attngen.torch.aten_tensors import chosen, linear
from attngen.torch.closures import Closure
from attngen.torch.decompositions import decompositions
from attngen.torch.layout import without_autocast

Tensor = Any
Function = Callable[..., Any]
OF_TORCH = ("aten", "prims")  # namespaces of torch's own operators: decompositions consist of both
READS = ("index", "_unsafe_index", "select")  # operators that read a dimension of their first operand whatever its size is
FIRST_ALONE = ("log_sigmoid_forward", "max", "min")  # operators of several results, of which the first is read
MAX_CONSTANTS = 64  # elements of a tensor that a function makes of numbers: more of them are an input
READ_ON_THE_HOST = (
    "a number that may change from call to call is read on the host; use the tensor itself, without item(), float(), int() or "
    "`if`, and torch.minimum and torch.maximum in the place of clamp"
)
MAKES_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # by torch.tensor(NUMBER)
CALLED, LINE = "attngen.called", "attngen.line"  # what nodes of a graph are annotated with
COPIES_TO_THE_HOST = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "storage_offset", "untyped_storage")
_KNOWN = {getattr(torch, t.torch): t for t in DTYPES.values()}
# What kernels do not read is converted when the kernel is called.
_CONVERTED = {
    torch.float64: FP32,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16), INT32),
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64), INT64),
}


_LOCK = RLock()  # torch.fx traces in one thread at a time


class ImportRefusal(TraceError):
    """A function of torch that cannot be an expression; the text names the operator and its place."""


class WriteRefusal(RuntimeError):
    """A function changes a tensor that others see too. No TypeError: after one, Python would run `x += 1` as x = x + 1."""


def stand_in(buffer: Any) -> Tensor:
    """A tensor of the shape, type and device of one of a trace or a transform, with the memory of one element; a number for a
    symbol."""
    if not isinstance(buffer, torch.Tensor):
        return torch.zeros((), dtype=torch.int64)
    shape = tuple(map(hint, buffer.shape))
    device = buffer.device if buffer.device.type != "meta" else "cpu"
    one = torch.zeros((), dtype=buffer.dtype, device=device).expand(shape)
    return one.detach().requires_grad_() if buffer.requires_grad and one.is_floating_point() else one.detach()


def hint(size: Any) -> int:
    """A size of the traced call's example. Raises ImportRefusal for one that depends on data."""
    found = size if type(size) is int else size.node.hint
    if found is None:
        raise ImportRefusal("a size depends on data, which torch.compile cannot know")
    return int(found)


def element_type(tensor: Tensor) -> DType:
    """The element type with which kernels read `tensor`. Raises ImportRefusal."""
    found = _KNOWN.get(tensor.dtype) or _CONVERTED.get(tensor.dtype)
    if found is None:
        raise ImportRefusal(
            f"a captured tensor has elements of {tensor.dtype}, which no expression can read; convert it outside the function"
        )
    return found


def as_read(tensor: Tensor, dtype: DType | None, device: Any) -> Tensor:
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
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # of a trace: (position in the closure, dimension)
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
        self, wanted: str, tensor: Tensor, dims: tuple[int | str, ...] | None = None, source: int | str | Tensor = None
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

    def fix(self, operands: Iterable[Any], kept: Sequence[Expr] = ()) -> None:
        """Makes torch.compile start again if a size of `operands` changes that is not one of `kept`: the expression is that of
        the traced size."""
        for operand in operands:
            if isinstance(operand, Lazy):
                for size in operand.sizes:
                    if isinstance(size, Name) and size not in kept and size.name in self.sizes:
                        place, dim = self.sizes[size.name]
                        int(self.closure.shapes[place][dim])  # of a symbol, a guard
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
            return _number(torch.int64, name(param, Type.INT))
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


class _Places(TorchDispatchMode):  # type: ignore[misc]
    """Annotates each node of the graph with the operator that was called, and with the line of a function, one of `codes`."""

    def __init__(self, codes: set[types.CodeType]) -> None:
        super().__init__()
        self._codes = set(map(id, codes))  # of the frames below, Dynamo makes code with slices as constants, without a hash

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and id(frame.f_code) not in self._codes:
            frame = frame.f_back
        line = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        with annotate({CALLED: function, LINE: line}):
            return function(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):  # type: ignore[misc]
    """Refuses to change a captured tensor, or one that has a view or is one: in the graph the other would stay as it was."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, Tensor] = {}  # views and what they are of, by their id, kept so that it stays theirs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = function._schema
        if schema.is_mutable:
            written = args[0]
            if not isinstance(written, FakeTensor) or id(written) in self._shared:
                what = "that has a view or is one" if isinstance(written, FakeTensor) else "that the function captures"
                raise WriteRefusal(f"{_shown(function)} changes a tensor {what}: make a new one, as x = x + 1 does")
        result = function(*args, **(kwargs or {}))
        if not schema.is_mutable and any(r.alias_info for r in schema.returns) and function not in MAKES_CONSTANTS:
            self._shared |= {id(t): t for t in tree_leaves((args[0], result)) if isinstance(t, torch.Tensor)}
        return result


class _HostReads(TorchDispatchMode):  # type: ignore[misc]
    """Refuses to give Python the value of a captured tensor, or one computed from it: it may be another in the next call, and
    the kernel would be compiled for the first one's. make_fx knows the value of `captured[0]`, although the result is fake."""

    def __init__(self) -> None:
        super().__init__()
        self._of_captured: dict[int, Tensor] = {}  # fake results by their id, kept so that it stays theirs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        is_captured = any(not isinstance(a, FakeTensor) or id(a) in self._of_captured for a in operands)
        if is_captured and torch.Tag.data_dependent_output in function.tags:
            raise TraceError(READ_ON_THE_HOST)
        result = function(*args, **(kwargs or {}))
        if is_captured and function not in MAKES_CONSTANTS:
            self._of_captured |= {id(r): r for r in tree_leaves(result) if isinstance(r, torch.Tensor)}
        return result


class _HostCopies(TorchFunctionMode):  # type: ignore[misc]
    """Refuses what gives Python the elements of a captured tensor without calling an operator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in COPIES_TO_THE_HOST:
            raise TraceError(READ_ON_THE_HOST)
        return function(*args, **(kwargs or {}))


class _MixedIndices(TorchFunctionMode):  # type: ignore[misc]
    """Reads `t[h, 0, :, None, k]` in two steps: what integers of Python, slices and None select, then what numbers that are
    traced select. Python would read those on the host, and torch's mode would make tensors of the integers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            source, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if _are_mixed(items):
                basic = [slice(None) if isinstance(item, torch.Tensor) else item for item in items]
                rest = [] if Ellipsis in basic else [Ellipsis]  # that mode leaves it alone
                selected = function(source, (*basic, *rest))
                indices = _left_indices(items, source.dim())
                return torch.ops.aten.index(selected, indices) if any(i is not None for i in indices) else selected
        return function(*args, **(kwargs or {}))


def _are_mixed(items: tuple[Any, ...]) -> bool:
    """Whether integers of Python or traced numbers stand alone or among each other, slices, None and Ellipsis."""
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    others = {type(item) for item in items if not isinstance(item, torch.Tensor)}
    are_numbers = not any(t.dim() or t.dtype in (torch.bool, torch.uint8) for t in tensors)
    known = {int, slice, type(None), type(Ellipsis)}
    return bool(others) and bool(tensors or int in others) and others <= known and are_numbers


def _left_indices(items: tuple[Any, ...], rank: int) -> list[Any]:
    """The traced numbers of `items`, or None, for each dimension of what the others select of `rank` dimensions."""
    rest = rank - sum(item is not None and item is not Ellipsis for item in items)
    indices: list[Any] = []
    for item in items:
        if item is Ellipsis:
            indices += [None] * rest
        elif not isinstance(item, int):
            indices.append(item if isinstance(item, torch.Tensor) else None)
    return indices


class _StandIns(TorchFunctionMode):  # type: ignore[misc]
    """Puts stand-ins, by their tensors' id, in the place of tensors of a transform, which is not active here."""

    def __init__(self, stands: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._stands = stands

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._stand, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _stand(self, tensor: Tensor) -> Tensor:
        stand = self._stands.get(id(tensor))
        if stand is None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise TraceError("a tensor of a transform of torch.func is reached by another way than by names; use its name")
        return tensor if stand is None else stand


@contextmanager
def _not_recorded() -> Iterator[None]:
    """Outside of torch.jit.trace, which replaces numbers by tensors."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


def graph_of(function: Function, examples: Sequence[Tensor], closure: Closure) -> torch.fx.GraphModule:
    """The ATen graph of `function` on fake numbers. Operators that expressions lack are decomposed into others."""
    device = examples[0].device.type

    # These import torch._dynamo and sympy, in a second.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    def called(*numbers: Tensor) -> Any:  # make_fx counts the arguments of plain functions only
        with _HostReads(), _Writes(), _MixedIndices(), _HostCopies(), _Places(closure.codes), _StandIns(closure.stands):
            return function(*numbers)

    with _LOCK, TransformGetItemToIndex(), torch.no_grad(), without_autocast(device), _not_recorded(), preserve_node_meta():
        traced = make_fx(called, decompositions(), "fake", _allow_non_fake_inputs=True)
        graph: torch.fx.GraphModule = traced(*examples)
    return graph


def numbers_on(device: Any, dtype: Any = None) -> list[Tensor]:
    """Examples of b, h, q, k, after one of a score of `dtype`."""
    indices = [torch.empty((), dtype=torch.int32, device=device) for _ in range(4)]
    return indices if dtype is None else [torch.empty((), dtype=dtype, device=device), *indices]


def expression(function: Function, examples: Sequence[Tensor], arguments: Sequence[Expr], inputs: Inputs) -> Expr:
    """What `function` returns for `arguments`. Raises ImportRefusal."""
    title = title_of(function)
    try:
        graph = graph_of(function, examples, inputs.closure)
    except Exception as error:
        place = place_of(error, inputs.closure.codes)
        raise ImportRefusal(f"{title} cannot be traced: {_first_line(error)}{place}") from error
    return _read(graph, arguments, inputs, title)


def _first_line(error: Exception) -> str:
    if isinstance(error, (TraceError, WriteRefusal)):
        return str(error)
    if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        cure = "write torch.where(c, a, b) for `if`, a & b for `and`"
        return f"a condition of Python depends on a value that only the GPU knows: {cure}"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _read(graph: torch.fx.GraphModule, arguments: Sequence[Expr], inputs: Inputs, title: str) -> Expr:
    """The expression of a graph whose inputs are numbers."""
    values: dict[torch.fx.Node, Any] = {}
    given = iter(arguments)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = _number(node.meta["val"].dtype, next(given))
        elif node.op == "get_attr":
            values[node] = inputs.read(
                _attribute(graph, node.target), all(user.target in MAKES_CONSTANTS for user in node.users)
            )
        elif node.op == "output":
            return _returned(_operand(node.args[0], values), title)
        else:
            try:
                values[node] = _call(node, values, inputs)
            except (ExpressionError, TraceError, DiagnosticError) as error:
                message = error.message if isinstance(error, ExpressionError) else str(error)
                raise ImportRefusal(f"{title}: {message}{_place(node)}") from error
    raise AssertionError(graph)


def _number(dtype: Any, expr: Expr) -> Lazy:
    return lazy((), dtype, lambda _: expr)


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _operand(value: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return [_operand(v, values) for v in value]
    return value


def _call(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], inputs: Inputs) -> Any:
    args = tuple(_operand(a, values) for a in node.args)
    kwargs = {k: _operand(v, values) for k, v in node.kwargs.items()}
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem" and not hasattr(target, "_schema"):
        return args[0][args[1]]
    namespace, _, operator = target._schema.name.partition("::")
    if target._schema.is_mutable:  # later uses of the tensor are those of this node
        operator = operator.replace("__i", "", 1).rstrip("_")
    if operator == "_local_scalar_dense":
        raise TraceError(READ_ON_THE_HOST)
    result = node.meta["val"]
    if namespace not in OF_TORCH and (body := _body(target)) is not None:
        return _of_custom_operator(body, node, args, kwargs, inputs)
    several = isinstance(result, (list, tuple))
    meant = meaning_of(operator) if namespace in OF_TORCH and (not several or operator in FIRST_ALONE) else None
    called = _annotation(node, CALLED) or target
    if meant is None:
        shown = _shown(called)
        raise TraceError(f"{shown} is not available in an expression; compute it outside the function, or use other operators")
    first = result[0] if several else result
    context = inputs.context
    found = context.wrapped(meant(Call(operator, tuple(first.shape), first.dtype, args, kwargs, context)))
    inputs.fix(args[1:] if operator in READS and called is target else (*args, *kwargs.values()), found.sizes)
    if node.users and not first.shape:
        found.number  # noqa: B018 - made here, so that what it refuses has this operator's place
    return [found, *(_refused(operator, other) for other in result[1:])] if several else found


def _refused(operator: str, result: Tensor) -> Lazy:
    """A result that expressions lack."""

    def refuse(at: Any) -> Expr:
        raise TraceError(f"only the first result of torch.{operator} is available in an expression")

    return Lazy(tuple(result.shape), result.dtype, refuse, tuple(map(constant, result.shape)))


def _body(target: Any) -> Function | None:
    """What an operator of somebody's library does, as a Python function: that of torch.library.custom_op, or one registered for
    fake tensors if it computes the operator's numbers. None if there is neither."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    found = OPDEFS.get(target._schema.name)
    if found is not None:
        body: Function = found._init_fn
        return body
    kernel = singleton.find(target._schema.name).fake_impl.kernel
    sample = torch.linspace(-9.0, 9.0, 37)
    try:
        same = kernel is not None and torch.equal(kernel.func(sample), target(sample))
    except Exception:  # it takes something else than one number
        return None
    return kernel.func if same else None


def _of_custom_operator(
    body: Function, node: torch.fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Inputs
) -> Any:
    """A custom operator by what it consists of."""
    if kwargs or not all(isinstance(a, Lazy) and not a.shape for a in args):
        raise TraceError(f"{node.target} is supported only if its arguments are numbers that the function computes")
    examples = [torch.empty((), dtype=a.dtype) for a in args]
    found = _read(graph_of(body, examples, inputs.closure), [a.number for a in args], inputs, str(node.target))
    return lazy((), node.meta["val"].dtype, lambda _: found)


def _returned(value: Any, title: str) -> Expr:
    if isinstance(value, (bool, int, float)):
        return constant(value)
    if not isinstance(value, Lazy):
        raise ImportRefusal(f"{title} returned {'None: is a `return` missing?' if value is None else type(value).__name__}")
    if any(n != 1 for n in value.shape):
        raise ImportRefusal(f"{title} returned a tensor of shape {list(value.shape)}; expected one number for each pair")
    return value.number


def _shown(operator: Any) -> str:
    return f"torch.ops.{operator._schema.name.replace('::', '.')}"


def _annotation(node: torch.fx.Node, key: str) -> Any:
    return node.meta.get("custom", {}).get(key)


def _place(node: torch.fx.Node) -> str:
    """Where the user's source calls the operator of a node."""
    found = _annotation(node, LINE)
    if found is None:
        return ""
    file, line = found
    return f"\n  --> {file}:{line}\n  |\n  |  {linecache.getline(file, line).strip()}"
